"""`python -m build_matrix release-check`."""

from __future__ import annotations

import click

from build_matrix.check import release_check
from build_matrix.errors import BuildError


@click.command("release-check")
@click.option("--list", "show", is_flag=True, help="Shows the list and runs nothing.")
@click.option("--only", multiple=True, help="These checks; default: all.")
@click.option("--again", is_flag=True, help="Also what passed for these very sources.")
def command(show, only, again) -> None:
    """Everything that a release must pass; goes on where it was stopped. Exit code 1 when a check failed. Receipts go
    to build/receipts, logs to build/release-check."""
    known = release_check.checks()
    chosen = [check for check in known if not only or check.name in only]
    if unknown := set(only) - {check.name for check in known}:
        raise BuildError(f"no check is called {min(unknown)}; there are {', '.join(c.name for c in known)}")
    if show:
        for check in chosen:
            click.echo(f"{check.name}: {release_check.words(check)}")
        return
    run(chosen, again)


def run(chosen, again: bool = False) -> None:
    """Runs checks of release_check and says how each went. Exit code 1 when one failed."""

    def tell(check, outcome):
        click.echo(f"{outcome.state:<8} {check.name} ({outcome.seconds:.0f} s): {outcome.says}")

    outcomes = release_check.run(only=tuple(c.name for c in chosen), again=again, tell=tell).values()
    states = [outcome.state for outcome in outcomes]
    click.echo(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    if release_check.FAILED in states:
        raise click.exceptions.Exit(1)
