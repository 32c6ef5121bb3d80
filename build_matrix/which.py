"""Which apex the running interpreter wants: one pip line, or the nearest cells and why.

Asks the torch that is installed and nothing on a network, and runs wherever Python does: standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import dataclass

from build_matrix import compat, identity, matrix, pythons

INDEX = "<index>"
NOT_THERE = compat.NOT_THERE  # exit code


@dataclass(frozen=True)
class Environment:
    """`torch` is None where none is installed; `version` of CUDA or ROCm that torch was built for; `archs` in torch's
    order, without features."""

    python: str
    torch: str | None = None
    accelerator: str = "cpu"
    version: str = ""
    archs: tuple[str, ...] = ()
    platform: str = matrix.NATIVE

    def words(self) -> str:
        """Python 3.11, torch 2.13.0 for CUDA 13.0, sm_90"""
        on = "" if self.platform == matrix.NATIVE else f", {self.platform}"
        toolkit = {"cuda": f" for CUDA {self.version}", "rocm": f" for ROCm {self.version}"}.get(
            self.accelerator, ""
        )
        cards = ", ".join(dict.fromkeys(self.archs)) or "no GPU"
        torch = f"torch {self.torch}{toolkit}" if self.torch else "no torch"
        return f"Python {matrix.dotted(self.python)}, {torch}, {cards}{on}"


def here() -> Environment:
    """The running interpreter's. torch is imported: nothing else knows the cards in torch's order."""
    try:
        import torch
    except ImportError:
        return Environment(pythons.own_tag(), platform=system())
    from apex._loader.machine import torch_devices

    hip, cuda = torch.version.hip, torch.version.cuda
    accelerator = "rocm" if hip else "cuda" if cuda else "cpu"
    version = matrix.minor(hip or cuda or "")
    archs = tuple(device.arch for device in torch_devices())
    return Environment(pythons.own_tag(), torch.__version__, accelerator, version, archs, system())


def system() -> str:
    """linux_aarch64: the running interpreter's, as matrix.toml says it."""
    return f"{platform.system().lower()}_{platform.machine()}"


def answer(environment: Environment, index: str | None = None) -> dict:
    """What `which --json` prints. `found`: whether `command` is the line for this environment; `reasons` say why,
    or why not, `nearest` are the cells that exist, each with its own line."""
    root = (index or os.environ.get("APEX_INDEX") or INDEX).rstrip("/")
    base = {"environment": environment.__dict__}
    if environment.platform not in (known := [p.name for p in matrix.load().platforms]):
        reason = f"no wheel is built for {environment.platform}; there are {', '.join(known)}"
        return base | {"found": False, "reasons": [reason], "nearest": []}
    if environment.torch is None:
        reason = "no torch is installed, and which wheel is right depends on it: install torch first"
        if environment.python not in matrix.load().python:
            reason = compat.no_python(environment.python)
        return base | {
            "found": False,
            "reasons": [reason],
            "nearest": _without_torch(environment, root),
        }
    from apex._loader.fit import not_a_release

    foreign = not_a_release(environment.torch)
    questions = [
        compat.Question(
            environment.torch,
            environment.accelerator,
            environment.version,
            arch,
            environment.python,
            environment.platform,
        )
        for arch in dict.fromkeys(environment.archs) or [""]
    ]
    answers = [compat.answer(question) for question in questions]
    missing = list(dict.fromkeys(reason for found in answers for reason in found.get("missing", ())))
    if foreign:
        missing.insert(0, f"{foreign}: bindings are built for releases")
    if missing:
        cells = [cell for found in answers for cell in found.get("nearest", ())]
        near = [_near(cell, environment.accelerator, root) for cell in cells]
        return base | {
            "found": False,
            "reasons": missing,
            "nearest": list({n["command"]: n for n in near}.values()),
        }
    packs = [found["pack"] for found in answers if found["pack"]]
    reasons = [f"{pack['arch']}: {pack['reason']}" for pack in packs]
    return base | {"found": True, "command": _command(environment.accelerator, root), "reasons": reasons}


def _command(accelerator: str, root: str) -> str:
    known = matrix.load().accelerator(accelerator)
    pin = f"{known.distribution}=={identity.version()}+{known.label}"
    return f"python -m pip install {pin} --index-url {root}/whl/{known.roots[0]}/"


def _near(cell: dict, accelerator: str, root: str) -> dict:
    """A cell that exists, in words, with its line."""
    spoken = {k: compat.spoken(k, v) for k, v in cell.items() if v != "cpu" and k != "platform"}
    names = {"torch": "torch", "cuda": "CUDA", "rocm": "ROCm", "arch": "", "python": "Python"}
    words = ", ".join(f"{names[key]} {value}".strip() for key, value in spoken.items())
    return {"cell": words, "command": _command(accelerator, root)}


def _without_torch(environment: Environment, root: str) -> list[dict]:
    """The newest torch that this Python can have, for each accelerator; nothing where the Python has no wheel."""
    axes = matrix.load()
    if environment.python not in axes.python:
        return []
    minor = matrix.minor(axes.torch_for(environment.python)[-1])
    return [
        {"cell": f"torch {minor}, {a.label}", "command": _command(a.name, root)}
        for a in axes.accelerators
        if not axes.why_no_wheel(a.name, environment.platform)
    ]


def main(arguments: list[str]) -> int:
    """The command. Prints the line, and nothing else, to standard output; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m build_matrix which",
        description="The one pip line for this interpreter, its torch and its cards. Exit code 2 when no wheel fits; "
        "then the nearest are listed.",
    )
    parser.add_argument("--index", help="where the index is served; default: APEX_INDEX, else <index>")
    parser.add_argument("--json", action="store_true", help="for programs")
    asked = parser.parse_args(arguments)
    environment = here()
    found = answer(environment, asked.index)
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        print(environment.words(), *(f"  {reason}" for reason in found["reasons"]), sep="\n", file=sys.stderr)
        if found["found"]:
            print(found["command"])
        for near in found.get("nearest", ()):
            print(f"{near['cell']}: {near['command']}")
    return 0 if found["found"] else NOT_THERE
