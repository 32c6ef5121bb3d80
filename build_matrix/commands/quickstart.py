"""`python -m build_matrix quickstart`: from a checkout to a trained model on the CPU: wheel, index, clean environment,
pip, the probe, training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click

from build_matrix import REPOSITORY
from build_matrix.commands.options import JOBS
from build_matrix.errors import BuildError
from build_matrix.farm import report
from build_matrix.parts import tree
from build_matrix.serve import index, install_line, server
from build_matrix.store import Store
from build_matrix.store.engine import Engine
from build_matrix.toolchains import borrow, headers, pythons, torch_supply
from build_matrix.wheels import build

PLACE = REPOSITORY / "build/quickstart"
EXAMPLE = REPOSITORY / "examples/digits/train.py"
BROKEN = 2  # exit code of `python -m apex`


@click.command("quickstart")
@JOBS
def command(jobs) -> None:
    """Wheel, index, clean environment, pip, probe and training, on the CPU of this machine."""
    run(jobs)


def run(jobs: int | None = None) -> None:
    """Raises BuildError when a step fails; its own output has said why."""
    start = time.monotonic()
    torch = ensure_torch()
    _step("building the wheel apex-cpu")
    python = pythons.find(pythons.own_tag())
    engine = Engine(Store(), jobs, report.tell)
    request = tree.Request(accelerator="cpu", torch=(torch,), pythons=(python,))
    wheel = build.one_wheel(request, python, engine, PLACE / "dist")
    report.units_table(engine.finished, time.monotonic() - start)
    report.wheel_table(wheel)

    _step("publishing it in a local index")
    index.write([wheel], PLACE / "index")
    environment, wanted = _environment(), install_line.pin("cpu")  # as a user types it
    with server.background(PLACE / "index") as address:
        _step(f"installing {wanted} from {address}/whl/cpu/")
        # --isolated: pip sees neither its configuration nor its variables, so this index is all it has.
        options = [
            "--isolated",
            "--no-cache-dir",
            "--disable-pip-version-check",
            "--index-url",
            f"{address}/whl/cpu/",
        ]
        _call(environment, "-m", "pip", "install", *options, wanted)
    _step("installing what the example needs, by pip's own configuration: scikit-learn, rich")
    _call(environment, "-m", "pip", "install", "--quiet", "scikit-learn", "rich")
    _step("what would run here: python -m apex")
    _call(environment, "-m", "apex", allowed=range(BROKEN))
    _step("training on scikit-learn's handwritten digits")
    _call(environment, str(EXAMPLE))


def ensure_torch() -> str:
    """The version of the torch that is used: the installed one, else a CPU build is fetched. Raises Incomplete, and
    fetches nothing, where what is built for it could not be."""
    build.require([pythons.own_tag()])
    have = headers.installed_version()
    if have is None:
        supply = torch_supply.find()
        _step(f"no torch is installed: downloading {supply.filename} ({report.size(supply.size)})")
        print(f"from {supply.url}", flush=True)
        if not supply.cpu:
            print("it is a CUDA build: pip fetches NVIDIA's libraries for it too, about 2.5 GB", flush=True)
        torch_supply.install(supply)
        have = headers.installed_version()
    else:
        _step(f"using the torch that is installed: {have}")
    return have


def _environment() -> Path:
    """A clean virtual environment that sees torch and what torch requires, and nothing else."""
    place = PLACE / "venv"
    shutil.rmtree(place, ignore_errors=True)
    _step("creating a clean virtual environment")
    if subprocess.run([sys.executable, "-m", "venv", str(place)]).returncode:
        raise BuildError(
            "`python -m venv` failed, as it says above. On Debian run: apt-get install python3-venv"
        )
    # ensurepip of Python 3.11 and older brings a setuptools that is older than what torch asks for.
    _call(place, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
    lent = borrow.lend(["torch"], place)
    print(f"it sees {', '.join(lent)}", flush=True)
    return place


def _step(text: str) -> None:
    report.console.print(f"\n[bold]{text}[/bold]", highlight=False, soft_wrap=True)


def _call(environment: Path, *arguments: str, allowed=(0,)) -> None:
    """Runs the environment's Python, away from the checkout: there `import apex` would take its sources."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "APEX_TREE")}
    result = subprocess.run([str(environment / "bin/python"), *arguments], cwd=PLACE, env=clean)
    if result.returncode not in allowed:
        raise BuildError(f"`python {' '.join(arguments)}` ended with {result.returncode}")
