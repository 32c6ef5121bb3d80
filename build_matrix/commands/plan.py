"""`python -m build_matrix plan`."""

from __future__ import annotations

import json

import click

from build_matrix.commands.options import COUNT, selected, selection, tell_left_out
from build_matrix.store import Store


@click.command("plan")
@selection
@click.option(
    "--workers", "workers", type=COUNT, multiple=True, help="Predict the time for that many workers."
)
@click.option(
    "--measure",
    type=COUNT,
    multiple=True,
    help="Also run it from nothing on that many workers of this machine.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "github"]),
    default="table",
    help="github: the matrix of its jobs.",
)
def command(accelerators, archs, torches, tags, platforms, only, available, workers, measure, form) -> None:
    """Shows the steps of a release, what is stored, and how long the rest would take; or the jobs that GitHub
    Actions runs it in."""
    from build_matrix.farm import cluster, costs, plan, report, workflow

    chosen = selected(accelerators, archs, torches, tags, platforms, only)
    if form == "github" and (only or available or workers or measure):
        raise click.UsageError("--only, --available, --workers and --measure do not go with --format github")
    if form == "github":
        click.echo(json.dumps(workflow.jobs(plan.resolve(chosen))))
        return
    if available or measure:
        made, missing = plan.make(chosen, available), None
    else:
        made, missing = plan.whole(chosen)
    tell_left_out(made)
    store = Store()
    cluster.measure(made, store, measure)
    report.plan_table(made, costs.Costs(store), store, workers or (1, 2, 8, 32))
    if missing:  # after the prediction, which is of the whole
        raise missing
