"""`python -m build_matrix index`."""

from __future__ import annotations

import click

from build_matrix.commands.options import DIST, INDEX, wheels_of, writable
from build_matrix.errors import BuildError
from build_matrix.serve import index, page, publish


@click.command("index")
@DIST
@INDEX
def command(dist, target) -> None:
    """Writes the static package index of the wheels in dist/, and the page that says what they serve."""
    writable(index.place(target, dist).parent, "--target")
    found = wheels_of(dist)
    try:
        text = page.render(page.of_wheels(publish.cells(found)))
    except BuildError as error:
        click.echo(f"no page: {error}", err=True)
        text = ""
    for root, wheels in index.write(found, target, text).items():
        click.echo(f"whl/{root}/: {', '.join(w.name for w in wheels) or 'nothing'}")
