"""`python -m build_matrix transformer-engine`."""

from __future__ import annotations

import click

from build_matrix.commands.options import DIST
from build_matrix.wheels import transformer_engine


@click.command("transformer-engine")
@DIST
def command(dist) -> None:
    """Writes the wheel that gives apex.transformer_engine the name transformer_engine, and that of its records."""
    click.echo(str(transformer_engine.write(dist)))
    click.echo(str(transformer_engine.write_alias(dist)))
