"""`python -m build_matrix sign`."""

from __future__ import annotations

import click

from build_matrix.commands.options import FILE, ours_of
from build_matrix.wheels import signing


@click.command("sign")
@click.argument("wheels", type=FILE, nargs=-1, required=True)
@click.option("--key", type=FILE, help="A private key (PEM). Default: APEX_SIGNING_KEY.")
def command(wheels, key) -> None:
    """Signs wheels: a DSSE envelope of the statement of provenance, beside each."""
    signer = signing.Signer(key) if key else signing.asked()
    if signer is None:
        raise click.UsageError(
            "--key names a private key; openssl genpkey -algorithm ed25519 -out FILE makes one"
        )
    for path in ours_of(wheels):
        click.echo(str(signer.sign(path)))
