"""`python -m build_matrix changelog`."""

from __future__ import annotations

import click

from build_matrix.spec import changes, identity


@click.command("changelog")
@click.argument("text", required=False)
def command(text) -> None:
    """Tells whether the registry or the matrix changed without an entry in release_notes/changes.toml (exit code 5);
    with TEXT, which says what a user gets, writes the entry."""
    if text is None:
        changes.check()
        return
    change = changes.add(text, identity.version())
    for what, items in (("added", change.added), ("removed", change.removed)):
        for item in items:
            click.echo(f"{what} {item}")
