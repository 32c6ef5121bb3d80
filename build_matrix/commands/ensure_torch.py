"""`python -m build_matrix ensure-torch`."""

from __future__ import annotations

import click

from build_matrix.commands import quickstart


@click.command("ensure-torch")
def command() -> None:
    """Installs a CPU build of torch when none is there, and says first which and how large."""
    quickstart.ensure_torch()
