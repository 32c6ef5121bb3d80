"""Options and arguments that several commands take, and what they stand for."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import click
from packaging.version import InvalidVersion, Version

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.farm import plan
from build_matrix.spec import matrix
from build_matrix.toolchains import pythons
from build_matrix.wheels import wheel

PYTHON = re.compile(r"(?:cp)?3\.?(\d+)")


class Named(click.Path):
    """A path that is not empty: '' is what a shell makes of a variable that is not set, and would be the folder that
    this runs in."""

    def convert(self, value, param, ctx):
        """As click.Path's; refuses ''."""
        if value == "":
            self.fail(
                "it is empty: say a path, or leave the option out (a variable that is not set?)", param, ctx
            )
        return super().convert(value, param, ctx)


PATH = Named(path_type=Path)
FILE = Named(path_type=Path, dir_okay=False)
PLACE = Named()  # a folder, or a URL
COUNT = click.IntRange(min=1)
ACCELERATOR = click.argument(
    "accelerator", type=click.Choice([accelerator.name for accelerator in matrix.load().accelerators])
)
COMPILED = click.argument("accelerator", type=click.Choice(["cpu", "cuda", "rocm"]))
JOBS = click.option("--jobs", type=COUNT, help="Compilers at once; default: the number of cores.")
DIST = click.option("--dist", type=PATH, default=REPOSITORY / "dist", help="Default: dist/.")
INDEX = click.option("--target", type=PATH, default=REPOSITORY / ".whl", help="Default: .whl/.")
PUBLIC_KEY = click.option(
    "--key",
    type=FILE,
    help="A public key (PEM) by which it must be signed. Default: APEX_TRUSTED_KEY, else any or none will do.",
)
PASSED_ON = {"add_help_option": False, "context_settings": {"ignore_unknown_options": True}}


def writable(folder: Path, option: str) -> None:
    """Raises BuildError where files cannot be made in `folder`, or it cannot be made: before the work whose outcome
    goes there. Nothing is left behind."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise BuildError(
            f"{option} names {folder}, and nothing can be written to {there}: {error.strerror}; name another folder"
        ) from None


def tag_of(text: str) -> str:
    """cp311 of 3.11, 311 or cp311."""
    match = PYTHON.fullmatch(text)
    if not match:
        raise click.BadParameter(f"{text!r} is no Python; say 3.11")
    return f"cp3{match[1]}"


def tags_of(texts: tuple[str, ...]) -> list[str]:
    """cp311 of 3.11; of nothing, the Python that runs this. Raises BuildError for one that has no wheel."""
    axes, tags = matrix.load(), [tag_of(text) for text in texts] or [pythons.own_tag()]
    known = (*axes.python, *axes.optional_python)
    for tag in tags:
        if tag not in known:
            raise BuildError(f"Python {tag} is not in matrix.toml; there are {', '.join(known)}")
    return tags


def torches_of(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """The callback of an option that takes any release of torch, of the matrix or not."""
    for text in texts:
        try:
            Version(text)
        except InvalidVersion:
            raise click.BadParameter(f"{text!r} is no version of torch; say 2.13.0") from None
    return texts


def ours_of(paths: list[Path]) -> list[Path]:
    """The wheels of this project among files; others are named."""
    found, others = wheel.ours(paths)
    for words in others:
        click.echo(words, err=True)
    return found


def wheels_of(dist: Path) -> list[Path]:
    """The wheels of this project in a folder; others are named. Raises BuildError where there is none."""
    found = ours_of(list(dist.iterdir()) if dist.is_dir() else [])
    if not found:
        raise BuildError(f"there is no wheel in {dist}. Run: nox -s build-cpu, or any other build")
    return found


def selection(command):
    """The options that choose a part of the matrix; without them it is the whole."""
    options = [
        click.option(
            "--accelerator", "accelerators", multiple=True, help="cpu, cuda, rocm, npu. Default: all."
        ),
        click.option("--arch", "archs", multiple=True, help="sm_90, gfx942, ... Default: all."),
        click.option("--torch", "torches", multiple=True, help="2.13.0, ... Default: all of the matrix."),
        click.option("--python", "tags", multiple=True, help="3.11, ... Default: all of the matrix."),
        click.option(
            "--platform",
            "platforms",
            multiple=True,
            help="linux_x86_64, linux_aarch64, win_amd64. Default: all.",
        ),
        click.option("--only", multiple=True, help="library, bindings, packs: no wheels. Default: all."),
        click.option("--available", is_flag=True, help="Leaves out what cannot be built here, and says so."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def selected(accelerators, archs, torches, tags, platforms, only, tests=()) -> plan.Selection:
    """What the options of `selection` choose."""
    tags = tuple(tag_of(tag) for tag in tags)
    return plan.Selection(accelerators, archs, torches, tags, only, tests, platforms)


def tell_left_out(made: plan.Plan) -> None:
    """Says what a plan leaves out. Raises BuildError where nothing is left."""
    for why in made.left_out:
        click.echo(f"left out: {why}", err=True)
    if not made.steps:
        raise BuildError("nothing is left to be made: the matrix has no cell of what was chosen")
