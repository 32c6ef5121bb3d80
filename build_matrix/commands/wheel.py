"""`python -m build_matrix wheel`."""

from __future__ import annotations

import time

import click

from build_matrix.commands.options import ACCELERATOR, DIST, JOBS, tags_of, writable
from build_matrix.containers import engine as engines
from build_matrix.containers import wheels as containers
from build_matrix.errors import Incomplete
from build_matrix.farm import plan, progress, report
from build_matrix.serve import publish
from build_matrix.spec import matrix
from build_matrix.store import Store
from build_matrix.store.engine import Engine
from build_matrix.toolchains import manage, pythons
from build_matrix.wheels import build, signing


@click.command("wheel")
@ACCELERATOR
@click.option(
    "--arch", "archs", multiple=True, help="Packs to put in; default: every arch of the accelerator."
)
@click.option(
    "--python", "tags", multiple=True, help="One wheel a Python; default: the Python that runs this."
)
@click.option("--torch", "torches", multiple=True, help="Bindings to put in; default: all of the matrix.")
@JOBS
@DIST
@click.option(
    "--platform",
    default=matrix.NATIVE,
    show_default=True,
    help="linux_aarch64, win_amd64: by a cross compiler.",
)
@click.option(
    "--no-toolchain", is_flag=True, help="Stops where a compiler is missing. Default: it is brought here."
)
@click.option("--container", is_flag=True, help="Builds in a container, with cibuildwheel.")
@click.option(
    "--engine", type=click.Choice(["podman", "docker"]), help="With --container; default: what is here."
)
@click.option("--image", help="With --container; default: manylinux_2_28, or CIBW_MANYLINUX_X86_64_IMAGE.")
def command(
    accelerator, archs, tags, torches, jobs, dist, platform, no_toolchain, container, engine, image
) -> None:
    """Builds installable wheels into dist/. A device compiler that is missing is brought first, where that can be done:
    it is said which, and how large."""
    if container and platform != matrix.NATIVE:
        raise click.UsageError(f"--container builds for {matrix.NATIVE} only")

    if not container and (engine or image):
        raise click.UsageError("--engine and --image belong to --container")
    writable(dist, "--dist")
    if matrix.load().accelerator(accelerator).pure:
        if archs or tags or torches or container or platform != matrix.NATIVE:
            raise click.UsageError(
                f"apex-{accelerator} is Python alone, one wheel for all: only --dist belongs to it"
            )
        _pure(accelerator, jobs, dist)
        return
    start = time.monotonic()
    if matrix.load().platform(platform).windows:
        if tags or torches:
            raise click.UsageError(
                f"a wheel for {platform} is for every Python and torch: it holds no binding of one"
            )
        chosen: list[pythons.Python | None] = [None]
    else:
        tags = tags_of(tags)
        chosen = []
    of = plan.Selection((accelerator,), archs, torches, tuple(tags), platforms=(platform,))
    packs = plan.resolve(of).archs
    if container:
        how = {"engine_name": engine, "image": image, "jobs": jobs, "no_toolchain": no_toolchain}
        _wheels_in_container(accelerator, archs, torches, tags, dist, packs=packs, **how)
        return
    _look(packs, no_toolchain, build.lacking(tags, platform))
    signer = signing.asked()
    chosen = chosen or list(map(pythons.find, tags))
    requests = [build.request(accelerator, tuple(archs), tuple(torches), p, platform) for p in chosen]
    _bring(packs, no_toolchain)
    engine = Engine(Store(), jobs)
    made = plan.make(of, check=False)
    for words in publish.replaced(made.steps, dist):
        click.echo(words, err=True)
    wheels = []
    with progress.of_wheels(made, engine.store, engine.jobs) as engine.tell:
        for python, request in zip(chosen, requests, strict=True):
            wheels.append(build.one_wheel(request, python, engine, dist))
            if signer:
                signer.sign(wheels[-1])
    report.units_table(engine.finished, time.monotonic() - start)
    for path in wheels:
        report.wheel_table(path)
        click.echo(str(path))


def _pure(accelerator, jobs, dist) -> None:
    """The wheel of Python alone: nothing is compiled or fetched for it."""
    signer, engine = signing.asked(), Engine(Store(), jobs, report.tell)
    path = build.pure_wheel(accelerator, engine, dist)
    if signer:
        signer.sign(path)
    report.wheel_table(path)
    click.echo(str(path))


def _look(archs, no_toolchain, faults) -> None:
    """Names all that a wheel wants and that nobody brings here, before anything large comes."""
    if found := [*faults, *([] if no_toolchain else manage.lacking(archs))]:
        raise Incomplete(found, build.LACKING)


def _bring(archs, no_toolchain) -> None:

    if not no_toolchain:
        manage.bring_missing(archs)


def _wheels_in_container(*wanted, packs, engine_name, no_toolchain, **how) -> None:

    signer, name = signing.asked(), engines.find(engine_name)
    _look(packs, no_toolchain, [])
    _bring(packs, no_toolchain)
    for path in containers.build(*wanted, engine_name=name, **how):
        if signer:
            signer.sign(path)
        report.wheel_table(path)
        click.echo(str(path))
