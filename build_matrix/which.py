"""Which apex the running interpreter wants: one pip line, or the nearest cells and why.

Asks the torch that is installed and nothing on a network, and runs wherever Python does: standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass

from build_matrix import compat, matrix, pythons

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

    def words(self) -> str:
        python = f"{self.python[2]}.{self.python[3:]}"
        toolkit = {"cuda": f" for CUDA {self.version}", "rocm": f" for ROCm {self.version}"}.get(
            self.accelerator, ""
        )
        cards = ", ".join(dict.fromkeys(self.archs)) or "no GPU"
        return f"Python {python}, {f'torch {self.torch}{toolkit}' if self.torch else 'no torch'}, {cards}"


def here() -> Environment:
    """The running interpreter's. torch is imported: nothing else knows the cards in torch's order."""
    try:
        import torch
    except ImportError:
        return Environment(pythons.own_tag())
    from apex._loader.machine import torch_devices

    hip, cuda = torch.version.hip, torch.version.cuda
    accelerator = "rocm" if hip else "cuda" if cuda else "cpu"
    version = ".".join((hip or cuda or "").split(".")[:2])
    archs = tuple(device.arch for device in torch_devices())
    return Environment(pythons.own_tag(), torch.__version__, accelerator, version, archs)


def answer(environment: Environment, index: str | None = None) -> dict:
    """What `which --json` prints. `found`: whether `command` is the line for this environment; `reasons` say why,
    or why not, `nearest` are the cells that exist, each with its own line."""
    root = (index or os.environ.get("APEX_INDEX") or INDEX).rstrip("/")
    base = {"environment": environment.__dict__}
    if environment.torch is None:
        reason = "no torch is installed, and which wheel is right depends on it: install torch first"
        return base | {
            "found": False,
            "reasons": [reason],
            "nearest": _without_torch(environment.python, root),
        }
    from apex._loader.fit import not_a_release

    foreign = not_a_release(environment.torch)
    questions = [
        compat.Question(
            environment.torch, environment.accelerator, environment.version, arch, environment.python
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
    version = (compat.REPOSITORY / "version.txt").read_text().strip()
    pin = f"{known.distribution}=={version}+{known.label}"
    return f"python -m pip install {pin} --index-url {root}/whl/{known.roots[0]}/"


def _near(cell: dict, accelerator: str, root: str) -> dict:
    """A cell that exists, in words, with its line."""
    spoken = {key: compat._spoken(key, value) for key, value in cell.items() if value != "cpu"}
    names = {"torch": "torch", "cuda": "CUDA", "rocm": "ROCm", "arch": "", "python": "Python"}
    words = ", ".join(f"{names[key]} {value}".strip() for key, value in spoken.items())
    return {"cell": words, "command": _command(accelerator, root)}


def _without_torch(python: str, root: str) -> list[dict]:
    """The newest torch that this Python can have, for each accelerator; nothing where the Python has no wheel."""
    axes = matrix.load()
    if python not in axes.python:
        return []
    minor = ".".join(axes.torch_for(python)[-1].split(".")[:2])
    return [
        {"cell": f"torch {minor}, {a.label}", "command": _command(a.name, root)} for a in axes.accelerators
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
