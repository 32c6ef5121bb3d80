"""`python -m build_matrix publish`."""

from __future__ import annotations

import click

from build_matrix.commands.options import DIST, INDEX, wheels_of, writable
from build_matrix.serve import index, publish


@click.command("publish")
@DIST
@INDEX
def command(dist, target) -> None:
    """Writes what a farm writes at its end, of the wheels in dist/, whoever laid them there: SHA256SUMS, the
    compatibility table, the index."""
    writable(index.place(target, dist).parent, "--target")
    wheels_of(dist)
    writable(dist, "--dist")
    built = publish.finish(dist, target)
    for name in (publish.SUMS, publish.TABLE, publish.CELLS, publish.PAGE):
        click.echo(str(dist / name))
    for root, wheels in built.items():
        click.echo(f"whl/{root}/: {len(wheels)} wheels")
