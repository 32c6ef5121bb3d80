"""`python -m build_matrix farm`."""

from __future__ import annotations

import time

import click

from build_matrix.check import receipts, tiers
from build_matrix.commands.options import (
    COUNT,
    DIST,
    INDEX,
    PLACE,
    selected,
    selection,
    tell_left_out,
    writable,
)
from build_matrix.serve import index, publish
from build_matrix.store import Store
from build_matrix.wheels import signing


@click.command("farm")
@selection
@click.option("--scheduler", help="tcp://...: an existing Dask cluster. Default: this machine.")
@click.option(
    "--store",
    "place",
    type=PLACE,
    help="A folder or s3://bucket/prefix. Default: APEX_STORE, else build/store.",
)
@click.option("--test", "tests", multiple=True, help="sm_90, gfx942, ...: tries the wheel on such a card.")
@click.option("--jobs", type=COUNT, help="Workers of this machine; default: the number of cores.")
@DIST
@INDEX
def command(
    accelerators,
    archs,
    torches,
    tags,
    platforms,
    only,
    available,
    scheduler,
    place,
    tests,
    jobs,
    dist,
    target,
) -> None:
    """Builds the whole release: packs, bindings, wheels, index, compatibility table. Goes on where it was
    stopped."""
    from build_matrix.farm import cluster, costs, plan, progress, report

    if scheduler and jobs:
        raise click.UsageError("--jobs counts workers of this machine, and --scheduler names other ones")
    if not only:
        writable(dist, "--dist")  # before hours of work
        writable(index.place(target, dist).parent, "--target")
    start, signer = time.monotonic(), signing.asked()
    chosen = selected(accelerators, archs, torches, tags, platforms, only, tests)
    for arch in () if scheduler else tests:
        tiers.here(receipts.L0, arch)
    made = plan.make(chosen, available, check=not scheduler)
    tell_left_out(made)
    for words in () if only else publish.replaced(made.steps, dist):
        click.echo(words, err=True)
    store = Store.at(place) if place else Store()
    with cluster.existing(scheduler) if scheduler else cluster.local(jobs, offers=tests) as client:
        workers = cluster.slots(client)
        steps = ", ".join(f"{count} {kind}" for kind, count in made.count().items())
        click.echo(f"{len(made.steps)} steps on {workers} workers: {steps}", err=True)
        if not workers:
            click.echo(f"no worker is there yet, and this waits for one: dask worker {scheduler}", err=True)
        expected = costs.Costs(store).expected(made.steps, costs.stored(made.steps, store))
        with progress.Live(progress.Farm(made, expected, workers)) as live:
            begun = time.monotonic()
            done = cluster.run(made, client, store, live)
            took = time.monotonic() - begun
        workers = max(workers, cluster.slots(client))  # others may have come
    report.units_table(done, time.monotonic() - start)
    predicted = costs.simulate(made.steps, expected, workers)
    costs.note(store, made.steps, done, workers, took)
    report.shares_table(made, costs.Costs(store).expected(made.steps))
    click.echo(f"steps took {took:.0f} s on {workers} workers, predicted {predicted:.0f} s", err=True)
    if only:
        return
    built = publish.publish(done, store, dist, target, signer)
    for path in built.wheels:
        click.echo(str(path))
    for root, wheels in built.index.items():
        click.echo(f"{target}/whl/{root}/: {len(wheels)} wheels", err=True)
    for words in built.passed_over:
        click.echo(words, err=True)
