"""`python -m build_matrix tier`."""

from __future__ import annotations

import click

from build_matrix import REPOSITORY
from build_matrix.check import receipts, tiers
from build_matrix.commands.options import COUNT, FILE, PATH, writable


@click.command("tier")
@click.argument("tier", type=click.Choice(["L0", "L1", "emulated"]))
@click.option("--cell", default="cpu", show_default=True, help="cpu, or an arch whose card is here.")
@click.option("--wheel", type=FILE, help="As installed from it. Default: this checkout, as `tree` built it.")
@click.option(
    "--out",
    type=PATH,
    default=REPOSITORY / "build/receipts",
    help="Where JUnit files and receipts go. Default: build/receipts, where the compatibility table looks.",
)
@click.option("--tests", "expression", default="", help="Narrows them as pytest's -k; then nothing counts.")
@click.option("--jobs", type=COUNT, help="Tests at once; default: the number of cores.")
@click.option("--check", is_flag=True, help="Only tells whether the cell's card is here.")
def command(tier, cell, wheel, out, expression, jobs, check) -> None:
    """Runs a tier of the tests in a cell, and writes its receipt. Exit code 3 where the cell's card is not here,
    1 where a test failed."""
    if check:
        tiers.here(tier, cell)
        return
    writable(out, "--out")
    made = [receipts.read(path) for path in tiers.run(tier, cell, out, wheel, jobs, expression)]
    for receipt in made:
        click.echo(receipts.words(receipt))
    if any(receipts.totals(receipt)["failed"] for receipt in made):
        raise click.exceptions.Exit(1)
