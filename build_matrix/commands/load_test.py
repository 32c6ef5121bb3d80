"""`python -m build_matrix load-test`."""

from __future__ import annotations

import click

from build_matrix import REPOSITORY
from build_matrix.commands.options import tags_of, torches_of
from build_matrix.errors import LoadError
from build_matrix.farm import report
from build_matrix.parts import bindings, host_library, interface, loads, tree
from build_matrix.spec import matrix
from build_matrix.store import Store
from build_matrix.store.engine import Engine
from build_matrix.toolchains import host_compiler, pythons, slim_torch, wine


@click.command("load-test")
@click.option("--torch", "torches", multiple=True, callback=torches_of, help="Default: all of the matrix.")
@click.option("--python", "tags", multiple=True, help="Default: the Python that runs this.")
@click.option(
    "--portable", is_flag=True, help="The portable binding alone: every op, beside the torch that is here."
)
@click.option("--platform", default=matrix.NATIVE, help="win_amd64: the host library alone, under wine.")
def command(torches, tags, portable, platform) -> None:
    """Loads bindings under slim torches (130 MB each) and writes down those that ran. Exit code 5 where one does not
    load, or gives other bits."""
    store = Store()
    if matrix.load().platform(platform).windows:
        _load_under_wine(platform, store)
        return
    if platform != matrix.NATIVE:
        raise click.UsageError(f"nothing here loads libraries for {platform}")
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


def _load_under_wine(platform, store) -> None:
    built = Engine(store, tell=report.tell).one(host_library.build(store, platform=platform))
    library = built.folder / matrix.load().platform(platform).library
    digest = interface.digest(interface.description())
    click.echo(wine.load(library, host_compiler.find(platform), digest))
    click.echo(str(loads.write_library(platform, host_library.source_identity(platform))))


def _load_portable(torches, tags, store) -> None:
    """A tree with the host library and no binding, under each torch: every op must give the bits that it gives under
    the torch of this Python."""
    target = REPOSITORY / "build/load/portable"
    tree.fill(tree.Request(torch=(), pythons=()), target, Engine(store, tell=report.tell))
    expected = slim_torch.own_values(target)
    for python in map(pythons.find, tags_of(tags)):
        for version in torches or matrix.load().torch_for(python.tag):
            found = slim_torch.portable_values(version, python, target, store)
            if different := [key for key, digests in expected.items() if found.get(key) != digests]:
                raise LoadError(f"torch {version}: other bits of {', '.join(different)}")
            click.echo(f"{python.tag} torch {version}: {len(found)} calls of every op give the same bits")
