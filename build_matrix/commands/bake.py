"""`python -m build_matrix bake`."""

from __future__ import annotations

import click

from build_matrix.commands.options import COMPILED, DIST, PATH, writable
from build_matrix.containers import bake
from build_matrix.containers import builder as builders
from build_matrix.toolchains import pythons


@click.command("bake")
@COMPILED
@click.option("--base", help="An image with a Python; default: the public one of the Python that runs this.")
@click.option("--python", default="python3", show_default=True, help="The Python of the base.")
@click.option(
    "--torch", help="Where the base has none; default: the newest that the wheel has a binding for."
)
@click.option(
    "--torch-index", help="Where that torch is; default: pip's configuration, else PyTorch's own index."
)
@click.option("--tag", help="The image's name; default: localhost/apex-ACCELERATOR:VERSION-LABEL-PYTHON.")
@click.option("--builder", type=click.Choice(["buildah", "docker"]), help="Default: the first that is here.")
@click.option("--archive", type=PATH, help="Writes the image to a file, too.")
@click.option(
    "--no-check", is_flag=True, help="Does not run python -m apex and a training step in the image."
)
@DIST
def command(accelerator, base, python, torch, torch_index, tag, builder, archive, no_check, dist) -> None:
    """Makes an OCI image: a base, torch, and apex from the index of the wheels in dist/. Needs no GPU."""
    if archive:
        writable(archive.parent, "--archive")
    chosen = builders.find(builder)
    name, contents = bake.bake(
        accelerator,
        dist,
        base=base,
        python=python,
        torch=torch,
        torch_index=torch_index,
        tag=tag,
        builder=chosen,
        base_tag=pythons.own_tag(),
    )
    if not no_check:
        for text in bake.check(chosen, name, python):
            click.echo(text, err=True)
    if archive:
        chosen.save(name, archive)
    click.echo(f"{name} (torch {contents.torch}, {contents.python})", err=True)
    click.echo(name)
