"""python -m build_matrix: the farm's command line."""

from __future__ import annotations

import errno
import json
import re
import signal
import sys
import time
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError, StoreError
from build_matrix.spec import identity, matrix
from build_matrix.toolchains import pythons

try:
    import click
except ModuleNotFoundError as error:
    from build_matrix.commands import alone

    sys.exit(alone.run(sys.argv[1:], error))

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
INTERRUPTED = 128 + signal.SIGINT  # exit code, as shells have it
PYTHON = re.compile(r"(?:cp)?3\.?(\d+)")


def tag_of(text: str) -> str:
    """cp311 of 3.11, 311 or cp311."""
    match = PYTHON.fullmatch(text)
    if not match:
        raise click.BadParameter(f"{text!r} is no Python; say 3.11")
    return f"cp3{match[1]}"


def tags_of(texts: tuple[str, ...]) -> list[str]:
    """cp311 of 3.11; of nothing, the Python that runs this. Raises BuildError for one that has no wheel."""
    axes, tags = matrix.load(), [tag_of(text) for text in texts] or [pythons.own_tag()]
    known = (*axes.python, *axes.optional_python)
    for tag in tags:
        if tag not in known:
            raise BuildError(f"Python {tag} is not in matrix.toml; there are {', '.join(known)}")
    return tags


def ours_of(paths: list[Path]) -> list[Path]:
    """The wheels of this project among files; others are named."""
    from build_matrix.wheels import wheel

    found, others = wheel.ours(paths)
    for words in others:
        click.echo(words, err=True)
    return found


def wheels_of(dist: Path) -> list[Path]:
    """The wheels of this project in a folder; others are named. Raises BuildError where there is none."""
    found = ours_of(list(dist.iterdir()) if dist.is_dir() else [])
    if not found:
        raise BuildError(f"there is no wheel in {dist}. Run: nox -s build-cpu, or any other build")
    return found


COUNT = click.IntRange(min=1)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(identity.version(), message="%(version)s")
def main() -> None:
    """Builds apex: device packs, host library, bindings, wheels, and the index that serves them."""


@main.command()
@click.option(
    "--arch", "archs", multiple=True, help="sm_90, gfx942, ...; several may be given. Default: none."
)
@click.option("--python", "tags", multiple=True, help="3.11, ...; default: the Python that runs this.")
@click.option("--torch", "torches", multiple=True, help="2.13.0, ...; default: the torch that is installed.")
@click.option("--jobs", type=COUNT, help="Compilers at once; default: the number of cores.")
@click.option("--target", type=click.Path(path_type=Path), help="Default: build/tree.")
@click.option("--available", is_flag=True, help="Leaves out packs whose toolchain is not here, and says so.")
@click.option(
    "--unit", "units", multiple=True, help="Units of the packs; several may be given. Default: all."
)
def tree(archs, tags, torches, jobs, target, available, units) -> None:
    """Fills build/tree/apex with libraries and packs, for use in a checkout."""
    from build_matrix.farm import report
    from build_matrix.parts import tree
    from build_matrix.store import Store
    from build_matrix.store.engine import Engine
    from build_matrix.toolchains import by_arch, headers

    start = time.monotonic()
    if available:
        archs = by_arch.available(archs, lambda why: click.echo(f"left out: {why}", err=True))
    vendors = {matrix.load().pack(arch).arch.vendor for arch in archs}
    torch = torches or tuple(filter(None, [headers.installed_version()]))
    if not torch:
        raise BuildError("no torch is installed here: name one with --torch 2.13.0")
    request = tree.Request(
        accelerator=vendors.pop() if len(vendors) == 1 else "cpu",
        archs=tuple(archs),
        torch=torch,
        pythons=tuple(map(pythons.find, tags_of(tags))),
        units=_units(units),
    )
    engine = Engine(Store(), jobs, report.tell)
    tree.fill(request, target or tree.DEFAULT, engine)
    report.units_table(engine.finished, time.monotonic() - start)


@main.command()
@click.argument("accelerator", type=click.Choice(["cpu", "cuda", "rocm"]))
@click.option(
    "--arch", "archs", multiple=True, help="Packs to put in; default: every arch of the accelerator."
)
@click.option(
    "--python", "tags", multiple=True, help="One wheel a Python; default: the Python that runs this."
)
@click.option("--torch", "torches", multiple=True, help="Bindings to put in; default: all of the matrix.")
@click.option("--jobs", type=COUNT, help="Compilers at once; default: the number of cores.")
@click.option("--dist", type=click.Path(path_type=Path), default=REPOSITORY / "dist", help="Default: dist/.")
@click.option(
    "--platform", default=matrix.NATIVE, show_default=True, help="linux_aarch64: by a cross compiler."
)
@click.option(
    "--no-toolchain", is_flag=True, help="Stops where a compiler is missing. Default: it is brought here."
)
@click.option("--container", is_flag=True, help="Builds in a container, with cibuildwheel.")
@click.option(
    "--engine", type=click.Choice(["podman", "docker"]), help="With --container; default: what is here."
)
@click.option("--image", help="With --container; default: manylinux_2_28, or CIBW_MANYLINUX_X86_64_IMAGE.")
def wheel(
    accelerator, archs, tags, torches, jobs, dist, platform, no_toolchain, container, engine, image
) -> None:
    """Builds installable wheels into dist/. A device compiler that is missing is brought first, where that can be done:
    it is said which, and how large."""
    if container and platform != matrix.NATIVE:
        raise click.UsageError(f"--container builds for {matrix.NATIVE} only")
    from build_matrix.farm import plan, progress, report
    from build_matrix.serve import publish
    from build_matrix.store import Store
    from build_matrix.store.engine import Engine
    from build_matrix.wheels import build, signing

    if not container and (engine or image):
        raise click.UsageError("--engine and --image belong to --container")
    start, tags = time.monotonic(), tags_of(tags)
    of = plan.Selection((accelerator,), archs, torches, tuple(tags), platforms=(platform,))
    packs = plan.resolve(of).archs
    if container:
        how = {"engine_name": engine, "image": image, "jobs": jobs, "no_toolchain": no_toolchain}
        _wheels_in_container(accelerator, archs, torches, tags, dist, packs=packs, **how)
        return
    _look(packs, no_toolchain, build.lacking(tags, platform))
    signer = signing.asked()
    chosen = list(map(pythons.find, tags))
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


def _look(archs, no_toolchain, faults) -> None:
    """Names all that a wheel wants and that nobody brings here, before anything large comes."""
    from build_matrix.errors import Incomplete
    from build_matrix.toolchains import manage
    from build_matrix.wheels import build

    if found := [*faults, *([] if no_toolchain else manage.lacking(archs))]:
        raise Incomplete(found, build.LACKING)


def _bring(archs, no_toolchain) -> None:
    from build_matrix.toolchains import manage

    if not no_toolchain:
        manage.bring_missing(archs)


def _wheels_in_container(*wanted, packs, engine_name, no_toolchain, **how) -> None:
    from build_matrix.containers import engine, wheels
    from build_matrix.farm import report
    from build_matrix.wheels import signing

    signer, name = signing.asked(), engine.find(engine_name)
    _look(packs, no_toolchain, [])
    _bring(packs, no_toolchain)
    for path in wheels.build(*wanted, engine_name=name, **how):
        if signer:
            signer.sign(path)
        report.wheel_table(path)
        click.echo(str(path))


@main.command()
@click.option("--dist", type=click.Path(path_type=Path), default=REPOSITORY / "dist", help="Default: dist/.")
@click.option(
    "--target", type=click.Path(path_type=Path), default=REPOSITORY / ".whl", help="Default: .whl/."
)
def index(dist, target) -> None:
    """Writes the static package index of the wheels in dist/, and the page that says what they serve."""
    from build_matrix.serve import index, page, publish

    found = wheels_of(dist)
    try:
        text = page.render(page.of_wheels(publish.cells(found)))
    except BuildError as error:
        click.echo(f"no page: {error}", err=True)
        text = ""
    for root, wheels in index.write(found, target, text).items():
        click.echo(f"whl/{root}/: {', '.join(w.name for w in wheels) or 'nothing'}")


@main.command()
@click.option("--dist", type=click.Path(path_type=Path), default=REPOSITORY / "dist", help="Default: dist/.")
@click.option(
    "--target", type=click.Path(path_type=Path), default=REPOSITORY / ".whl", help="Default: .whl/."
)
def publish(dist, target) -> None:
    """Writes what a farm writes at its end, of the wheels in dist/, whoever laid them there: SHA256SUMS, the
    compatibility table, the index."""
    from build_matrix.serve import publish

    wheels_of(dist)
    built = publish.finish(dist, target)
    for name in (publish.SUMS, publish.TABLE, publish.CELLS, publish.PAGE):
        click.echo(str(dist / name))
    for root, wheels in built.items():
        click.echo(f"whl/{root}/: {len(wheels)} wheels")


@main.command()
@click.option("--dist", type=click.Path(path_type=Path), default=REPOSITORY / "dist", help="Default: dist/.")
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    default=REPOSITORY / "dist/variants",
    help="Default: dist/variants/.",
)
def variants(dist, target) -> None:
    """Writes the wheels of dist/ as variants of one project (PEP 817), with the metadata of an index."""
    from build_matrix.wheels import variants

    for path in variants.write(wheels_of(dist), target):
        click.echo(str(path))


@main.command()
@click.argument("accelerator", type=click.Choice(["cpu", "cuda", "rocm"]))
@click.option("--base", help="An image with a Python; default: the public one of the Python that runs this.")
@click.option("--python", default="python3", show_default=True, help="The Python of the base.")
@click.option(
    "--torch", help="Where the base has none; default: the newest that the wheel has a binding for."
)
@click.option(
    "--torch-index", help="Where that torch is; default: pip's configuration, else PyTorch's own index."
)
@click.option("--tag", help="The image's name; default: localhost/apex-ACCELERATOR:VERSION-LABEL-PYTHON.")
@click.option("--builder", type=click.Choice(["buildah", "docker"]), help="Default: the first that is here.")
@click.option("--archive", type=click.Path(path_type=Path), help="Writes the image to a file, too.")
@click.option(
    "--no-check", is_flag=True, help="Does not run python -m apex and a training step in the image."
)
@click.option("--dist", type=click.Path(path_type=Path), default=REPOSITORY / "dist", help="Default: dist/.")
def bake(accelerator, base, python, torch, torch_index, tag, builder, archive, no_check, dist) -> None:
    """Makes an OCI image: a base, torch, and apex from the index of the wheels in dist/. Needs no GPU."""
    from build_matrix.containers import bake
    from build_matrix.containers import builder as builders

    chosen = builders.find(builder)
    name, contents = bake.bake(
        accelerator,
        dist,
        base=base,
        python=python,
        torch=torch,
        torch_index=torch_index,
        tag=tag,
        builder=chosen,
        base_tag=pythons.own_tag(),
    )
    if not no_check:
        for text in bake.check(chosen, name, python):
            click.echo(text, err=True)
    if archive:
        chosen.save(name, archive)
    click.echo(f"{name} (torch {contents.torch}, {contents.python})", err=True)
    click.echo(name)


@main.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--target", type=click.Path(path_type=Path), default=REPOSITORY / ".whl", help="Default: .whl/."
)
def serve(port, target) -> None:
    """Serves the index on loopback until interrupted."""
    from build_matrix.serve import server

    if not (target / "whl").is_dir():
        raise BuildError(f"there is no index in {target}. Run: python -m build_matrix index")
    running = server.make(target, port)
    address = f"http://{server.HOST}:{running.server_address[1]}"
    click.echo(f"<index> is {address}; where torch is installed:")
    for line in server.lines(target, address):
        click.echo(line)
    try:
        running.serve_forever()
    except KeyboardInterrupt:
        running.server_close()


@main.command()
@click.argument("names", nargs=-1)
@click.option("--update", is_flag=True, help="Moves the pins to what is here, or to what the index holds.")
def toolchain(names, update) -> None:
    """Shows every toolchain of the matrix; with NAMES, brings them here."""
    from build_matrix.toolchains import manage

    if update:
        manage.update()
    for name in names:
        manage.bring(name)
    manage.show()


@main.command()
@click.option("--jobs", type=COUNT, help="Compilers at once; default: the number of cores.")
def quickstart(jobs) -> None:
    """Wheel, index, clean environment, pip, probe and training, on the CPU of this machine."""
    from build_matrix.commands import quickstart

    quickstart.run(jobs)


@main.command()
def ensure_torch() -> None:
    """Installs a CPU build of torch when none is there, and says first which and how large."""
    from build_matrix.commands import quickstart

    quickstart.ensure_torch()


PASSED_ON = {"add_help_option": False, "context_settings": {"ignore_unknown_options": True}}


@main.command(**PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def compat(arguments) -> None:
    """Which apex serves a machine. Exit code 2 when none does; then the nearest cells are listed."""
    from build_matrix.serve import compat

    raise click.exceptions.Exit(compat.main(list(arguments)))


@main.command()
@click.option("--torch", "torches", multiple=True, help="Default: all of the matrix.")
@click.option("--python", "tags", multiple=True, help="Default: the Python that runs this.")
@click.option(
    "--portable", is_flag=True, help="The portable binding alone: every op, beside the torch that is here."
)
def load_test(torches, tags, portable) -> None:
    """Loads bindings under slim torches (130 MB each) and writes down those that ran."""
    from build_matrix.farm import report
    from build_matrix.parts import bindings, loads, tree
    from build_matrix.store import Store
    from build_matrix.store.engine import Engine
    from build_matrix.toolchains import slim_torch

    store = Store()
    if portable:
        _load_portable(torches, tags, store)
        return
    for python in map(pythons.find, tags_of(tags)):
        for version in torches or matrix.load().torch_for(python.tag):
            target = REPOSITORY / "build/load" / f"{version}-{python.tag}"
            request = tree.Request(torch=(version,), pythons=(python,))
            tree.fill(request, target, Engine(store, tell=report.tell))
            click.echo(f"{python.tag} {slim_torch.load(version, python, target, store)}")
            loads.write(version, python.tag, bindings.source_identity())


def _load_portable(torches, tags, store) -> None:
    """A tree with the host library and no binding, under each torch: every op must give the bits that it gives under
    the torch of this Python."""
    from build_matrix.errors import BuildError
    from build_matrix.farm import report
    from build_matrix.parts import tree
    from build_matrix.store.engine import Engine
    from build_matrix.toolchains import slim_torch

    target = REPOSITORY / "build/load/portable"
    tree.fill(tree.Request(torch=(), pythons=()), target, Engine(store, tell=report.tell))
    expected = slim_torch.own_values(target)
    for python in map(pythons.find, tags_of(tags)):
        for version in torches or matrix.load().torch_for(python.tag):
            found = slim_torch.portable_values(version, python, target, store)
            if different := [key for key, digests in expected.items() if found.get(key) != digests]:
                raise BuildError(f"torch {version}: other bits of {', '.join(different)}")
            click.echo(f"{python.tag} torch {version}: {len(found)} calls of every op give the same bits")


def selection(command):
    """The options that choose a part of the matrix; without them it is the whole."""
    options = [
        click.option("--accelerator", "accelerators", multiple=True, help="cpu, cuda, rocm. Default: all."),
        click.option("--arch", "archs", multiple=True, help="sm_90, gfx942, ... Default: all."),
        click.option("--torch", "torches", multiple=True, help="2.13.0, ... Default: all of the matrix."),
        click.option("--python", "tags", multiple=True, help="3.11, ... Default: all of the matrix."),
        click.option(
            "--platform", "platforms", multiple=True, help="linux_x86_64, linux_aarch64. Default: all."
        ),
        click.option("--only", multiple=True, help="library, bindings, packs: no wheels. Default: all."),
        click.option("--available", is_flag=True, help="Leaves out what cannot be built here, and says so."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _selected(accelerators, archs, torches, tags, platforms, only, tests=()):
    from build_matrix.farm import plan

    tags = tuple(tag_of(tag) for tag in tags)
    return plan.Selection(accelerators, archs, torches, tags, only, tests, platforms)


def _tell(made) -> None:
    """Says what a plan leaves out. Raises BuildError where nothing is left."""
    for why in made.left_out:
        click.echo(f"left out: {why}", err=True)
    if not made.steps:
        raise BuildError("nothing is left to be made: the matrix has no cell of what was chosen")


@main.command()
@selection
@click.option("--scheduler", help="tcp://...: an existing Dask cluster. Default: this machine.")
@click.option(
    "--store", "place", help="A folder or s3://bucket/prefix. Default: APEX_STORE, else build/store."
)
@click.option("--test", "tests", multiple=True, help="sm_90, gfx942, ...: tries the wheel on such a card.")
@click.option("--jobs", type=COUNT, help="Workers of this machine; default: the number of cores.")
@click.option("--dist", type=click.Path(path_type=Path), default=REPOSITORY / "dist", help="Default: dist/.")
@click.option(
    "--target", type=click.Path(path_type=Path), default=REPOSITORY / ".whl", help="Default: .whl/."
)
def farm(
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
    from build_matrix.check import receipts, tiers
    from build_matrix.farm import cluster, costs, plan, progress, report
    from build_matrix.serve import publish
    from build_matrix.store import Store
    from build_matrix.wheels import signing

    if scheduler and jobs:
        raise click.UsageError("--jobs counts workers of this machine, and --scheduler names other ones")
    start, signer = time.monotonic(), signing.asked()
    chosen = _selected(accelerators, archs, torches, tags, platforms, only, tests)
    for arch in () if scheduler else tests:
        tiers.here(receipts.L0, arch)
    made = plan.make(chosen, available, check=not scheduler)
    _tell(made)
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


@main.command()
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
def plan(accelerators, archs, torches, tags, platforms, only, available, workers, measure, form) -> None:
    """Shows the steps of a release, what is stored, and how long the rest would take; or the jobs that GitHub
    Actions runs it in."""
    from build_matrix.farm import cluster, costs, plan, report, workflow
    from build_matrix.store import Store

    chosen = _selected(accelerators, archs, torches, tags, platforms, only)
    if form == "github" and (only or available or workers or measure):
        raise click.UsageError("--only, --available, --workers and --measure do not go with --format github")
    if form == "github":
        click.echo(json.dumps(workflow.jobs(plan.resolve(chosen))))
        return
    if available or measure:
        made, missing = plan.make(chosen, available), None
    else:
        made, missing = plan.whole(chosen)
    _tell(made)
    store = Store()
    cluster.measure(made, store, measure)
    report.plan_table(made, costs.Costs(store), store, workers or (1, 2, 8, 32))
    if missing:  # after the prediction, which is of the whole
        raise missing


@main.command(**PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def which(arguments) -> None:
    """The one pip line for this interpreter, its torch and its cards."""
    from build_matrix.serve import which

    raise click.exceptions.Exit(which.main(list(arguments)))


WHEEL = FILE = click.Path(path_type=Path, dir_okay=False)
PUBLIC_KEY = click.option(
    "--key",
    type=FILE,
    help="A public key (PEM) by which it must be signed. Default: APEX_TRUSTED_KEY, else any or none will do.",
)


@main.command()
@click.argument("wheel", type=WHEEL)
@click.option("--arch", help="Also every kernel of that pack.")
@PUBLIC_KEY
@click.option("--json", "as_json", is_flag=True, help="For programs: everything.")
def explain(wheel, arch, key, as_json) -> None:
    """What is inside a wheel: source, compilers, pins, bindings, packs, kernels, sizes; and who signed it. Exit code 13
    when it is not signed by the key that was named."""
    from build_matrix.farm import report
    from build_matrix.wheels import signing
    from build_matrix.wheels.wheel_file import WheelFile

    about = WheelFile(wheel).about()
    key = signing.trusted(key)
    verified = signing.verify(wheel, key) if key else None
    about["signed"] = {keyid: keyid == verified for keyid in signing.signers(wheel)}
    if arch and arch not in about["packs"]:
        raise BuildError(f"{wheel.name} has no pack for {arch}; it has {', '.join(about['packs']) or 'none'}")
    if as_json:
        packs = {name: pack for name, pack in about["packs"].items() if arch in (None, name)}
        click.echo(json.dumps(about | {"packs": packs}, indent=1))
        return
    report.explain(about, arch)


@main.command()
@click.argument("old", type=WHEEL)
@click.argument("new", type=WHEEL)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def diff(old, new, as_json) -> None:
    """How two wheels differ: facts, files, code objects, kernels. Exit code 1 when they do."""
    from build_matrix.farm import report
    from build_matrix.wheels.wheel_file import WheelFile, difference

    found = difference(WheelFile(old), WheelFile(new))
    click.echo(json.dumps(found, indent=1)) if as_json else report.difference(found)
    if found["facts"] or any(found["files"].values()):
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("wheels", type=WHEEL, nargs=-1, required=True)
@click.option("--key", type=FILE, help="A private key (PEM). Default: APEX_SIGNING_KEY.")
def sign(wheels, key) -> None:
    """Signs wheels: a DSSE envelope of the statement of provenance, beside each."""
    from build_matrix.wheels import signing

    signer = signing.Signer(key) if key else signing.asked()
    if signer is None:
        raise click.UsageError(
            "--key names a private key; openssl genpkey -algorithm ed25519 -out FILE makes one"
        )
    for path in ours_of(wheels):
        click.echo(str(signer.sign(path)))


@main.command()
@click.argument("wheels", type=WHEEL, nargs=-1, required=True)
@click.option("--arch", help="Compiles the code objects of that pack again, and nothing else.")
@PUBLIC_KEY
@click.option("--jobs", type=COUNT, help="Compilers at once; default: the number of cores.")
def verify(wheels, arch, key, jobs) -> None:
    """Builds wheels again from this checkout and the pins, and compares byte for byte. Exit code 5 when one
    differs, 6 when a compiler here is another than made it, 3 when there is none, or no such Python, 13 when it is not
    signed by the key that was named."""
    from build_matrix.check import verify
    from build_matrix.farm import report
    from build_matrix.wheels import signing

    key = signing.trusted(key)
    with verify.nothing_made() as store:
        for wheel in wheels:
            if key:
                click.echo(f"signature: of key {signing.verify(wheel, key)[:12]}")
            for line in verify.run(wheel, store, arch, jobs, report.tell):
                click.echo(line)


def _units(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Units that were named, each of them known; None for all."""
    from build_matrix.spec.registry import device_units

    if unknown := sorted(set(names) - {path.stem for path in device_units()}):
        raise click.BadParameter(f"{unknown[0]} is no unit of csrc/device", param_hint="--unit")
    return names or None


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--all", "everything", is_flag=True, help="Everything, in hours; goes on where it was stopped.")
@click.option("--ci", is_flag=True, help="A skip that ci/accepted_skips.toml does not accept is a fault.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tests(everything, ci, arguments) -> None:
    """Builds what the tests need, and runs what a change asks for; ARGUMENTS go to pytest. Exit code 1 where one
    failed."""
    from build_matrix.check import release_check, rings, skips

    if everything:
        _checks(release_check.everything())
    elif arguments:
        raise click.exceptions.Exit(rings.given(list(arguments), click.echo))
    elif not rings.on_a_change(click.echo, skips.ACCEPTED if ci else None):
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("tier", type=click.Choice(["L0", "L1", "emulated"]))
@click.option("--cell", default="cpu", show_default=True, help="cpu, or an arch whose card is here.")
@click.option("--wheel", type=WHEEL, help="As installed from it. Default: this checkout, as `tree` built it.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=REPOSITORY / "build/receipts",
    help="Where JUnit files and receipts go. Default: build/receipts, where the compatibility table looks.",
)
@click.option("--tests", "expression", default="", help="Narrows them as pytest's -k; then nothing counts.")
@click.option("--jobs", type=COUNT, help="Tests at once; default: the number of cores.")
@click.option("--check", is_flag=True, help="Only tells whether the cell's card is here.")
def tier(tier, cell, wheel, out, expression, jobs, check) -> None:
    """Runs a tier of the tests in a cell, and writes its receipt. Exit code 3 where the cell's card is not here,
    1 where a test failed."""
    from build_matrix.check import receipts, tiers

    if check:
        tiers.here(tier, cell)
        return
    made = [receipts.read(path) for path in tiers.run(tier, cell, out, wheel, jobs, expression)]
    for receipt in made:
        click.echo(receipts.words(receipt))
    if any(receipts.totals(receipt)["failed"] for receipt in made):
        raise click.exceptions.Exit(1)


@main.command()
@click.option("--list", "show", is_flag=True, help="Shows the list and runs nothing.")
@click.option("--only", multiple=True, help="These checks; default: all.")
@click.option("--again", is_flag=True, help="Also what passed for these very sources.")
def release_check(show, only, again) -> None:
    """Everything that a release must pass; goes on where it was stopped. Exit code 1 when a check failed. Receipts go
    to build/receipts, logs to build/release-check."""
    from build_matrix.check import release_check

    known = release_check.checks()
    chosen = [check for check in known if not only or check.name in only]
    if unknown := set(only) - {check.name for check in known}:
        raise BuildError(f"no check is called {min(unknown)}; there are {', '.join(c.name for c in known)}")
    if show:
        for check in chosen:
            click.echo(f"{check.name}: {release_check.words(check)}")
        return

    _checks(chosen, again)


def _checks(chosen, again: bool = False) -> None:
    """Runs checks of release_check and says how each went. Exit code 1 when one failed."""
    from build_matrix.check import release_check

    def tell(check, outcome):
        click.echo(f"{outcome.state:<8} {check.name} ({outcome.seconds:.0f} s): {outcome.says}")

    outcomes = release_check.run(only=tuple(c.name for c in chosen), again=again, tell=tell).values()
    states = [outcome.state for outcome in outcomes]
    click.echo(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    if release_check.FAILED in states:
        raise click.exceptions.Exit(1)


@main.group()
def receipts() -> None:
    """What runs of the tests saw, and which of it counts."""


@receipts.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), help="Default: build_matrix/receipts.")
def merge(files, into) -> None:
    """Takes receipts of other machines: files, or folders of them. Exit code 12 when any is cut, was changed, is a
    duplicate or none; the others are taken all the same."""
    from build_matrix.check import receipts
    from build_matrix.errors import ReceiptError
    from build_matrix.spec import identity

    paths = [path for file in files for path in (sorted(file.glob("*.json")) if file.is_dir() else [file])]
    if not paths:
        raise ReceiptError(", ".join(map(str, files)), "there is no receipt in it")
    taken, refused = receipts.merge(paths, into or receipts.FOLDER)
    for receipt in taken:
        why = receipts.why_not(receipt, identity.checkout())
        click.echo(f"{receipts.words(receipt)}: {f'does not count here: {why}' if why else 'counts'}")
    for error in refused:
        click.echo(f"not taken: {error}", err=True)
    if refused:
        raise click.exceptions.Exit(ReceiptError.exit_code)


@receipts.command(name="list")
def list_receipts() -> None:
    """Every receipt here, and whether it counts for this checkout."""
    from build_matrix.check import receipts
    from build_matrix.spec import identity

    found = receipts.load()
    if not found:
        click.echo("there are no receipts here. Run: nox -s 'L0(cpu)'", err=True)
    for receipt in found:
        why = receipts.why_not(receipt, identity.checkout())
        click.echo(f"{receipts.words(receipt)}: {f'does not count here: {why}' if why else 'counts'}")


@main.command()
@click.argument("text", required=False)
def changelog(text) -> None:
    """Tells whether the registry or the matrix changed without an entry in release_notes/changes.toml (exit code 5);
    with TEXT, which says what a user gets, writes the entry."""
    from build_matrix.spec import changes, identity

    if text is None:
        changes.check()
        return
    change = changes.add(text, identity.version())
    for what, items in (("added", change.added), ("removed", change.removed)):
        for item in items:
            click.echo(f"{what} {item}")


def run() -> None:
    """The entry point: faults that have a name are printed in words, never as a traceback."""
    try:
        sys.exit(main(standalone_mode=False) or 0)  # click returns the code of an Exit
    except click.Abort:  # what click makes of Ctrl-C
        click.echo("build_matrix: interrupted; the same command goes on from what is stored", err=True)
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BuildError as error:
        click.echo(f"build_matrix: {error}", err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        from build_matrix.commands import alone

        sys.exit(alone.words(sys.argv[1] if sys.argv[1:] else "", error))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            click.echo(f"build_matrix: no space is left: {error}", err=True)
            sys.exit(StoreError.exit_code)
        if error.filename is None or error.errno not in UNWRITABLE:
            raise
        click.echo(
            f"build_matrix: {error.filename}: {error.strerror}; an option names another place", err=True
        )
        sys.exit(1)


if __name__ == "__main__":
    run()
