"""`python -m build_matrix verify`."""

from __future__ import annotations

import click

from build_matrix.check import verify
from build_matrix.commands.options import FILE, JOBS, PUBLIC_KEY
from build_matrix.farm import report
from build_matrix.wheels import signing


@click.command("verify")
@click.argument("wheels", type=FILE, nargs=-1, required=True)
@click.option("--arch", help="Compiles the code objects of that pack again, and nothing else.")
@PUBLIC_KEY
@JOBS
def command(wheels, arch, key, jobs) -> None:
    """Builds wheels again from this checkout and the pins, and compares byte for byte. Exit code 5 when one
    differs, 6 when a compiler here is another than made it, 3 when there is none, or no such Python, 13 when it is not
    signed by the key that was named."""
    key = signing.trusted(key)
    with verify.nothing_made() as store:
        for wheel in wheels:
            if key:
                click.echo(f"signature: of key {signing.verify(wheel, key)[:12]}")
            for line in verify.run(wheel, store, arch, jobs, report.tell):
                click.echo(line)
