"""python -m build_matrix: the farm's command line."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from build_matrix import matrix, pythons
from build_matrix.errors import BuildError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Builds apex: device packs, host library, bindings, wheels, and the index that serves them."""


@main.command()
@click.option(
    "--arch", "archs", multiple=True, help="sm_90, gfx942, ...; several may be given. Default: none."
)
@click.option("--python", "tags", multiple=True, help="3.11, ...; default: the Python that runs this.")
@click.option("--torch", "torches", multiple=True, help="2.13.0, ...; default: the torch that is installed.")
@click.option("--jobs", type=int, help="Compilers at once; default: the number of cores.")
@click.option("--target", type=click.Path(path_type=Path), help="Default: build/tree.")
def tree(archs, tags, torches, jobs, target) -> None:
    """Fills build/tree/apex with libraries and packs, for use in a checkout."""
    from build_matrix import headers, report, tree
    from build_matrix.engine import Engine
    from build_matrix.store import Store

    start = time.monotonic()
    vendors = {matrix.load().pack(arch).arch.vendor for arch in archs}
    torch = torches or tuple(filter(None, [headers.installed_version()]))
    if not torch:
        raise BuildError("no torch is installed here: name one with --torch 2.13.0")
    request = tree.Request(
        accelerator=vendors.pop() if len(vendors) == 1 else "cpu",
        archs=tuple(archs),
        torch=torch,
        pythons=tuple(pythons.find(f"cp{tag.replace('.', '')}") for tag in tags or [pythons.own_tag()[2:]]),
    )
    engine = Engine(Store(), jobs, report.tell)
    tree.fill(request, target or tree.DEFAULT, engine)
    report.units_table(engine.finished, time.monotonic() - start)


def run() -> None:
    """The entry point: faults that have a name are printed in words, never as a traceback."""
    try:
        main(standalone_mode=False)
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BuildError as error:
        click.echo(f"build_matrix: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    run()
