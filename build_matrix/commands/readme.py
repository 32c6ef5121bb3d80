"""`python -m build_matrix readme`."""

from __future__ import annotations

import click

from build_matrix.site import readme


@click.command("readme")
def command() -> None:
    """Writes the tables of README, of the support and speed pages and of this version's release notes anew."""
    for page in readme.SECTIONS:
        readme.write(page)
