"""Public apex's Python names (public_names.txt), and what is said of those that this build does not have."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("public_names.txt")


@dataclass(frozen=True)
class PublicName:
    """A line of the list. parameters: "(params, lr=0.001)", or "" where it says none."""

    is_module: bool
    parameters: str
    successor: str


@functools.cache
def listed():
    """name -> PublicName, in the list's order."""
    found = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        text, _, successor = line.partition(" -> ")
        is_module = text.startswith("module ")
        name, bracket, rest = text.removeprefix("module ").partition("(")
        found[name] = PublicName(is_module, bracket + rest, successor)
    return found


def find(name):
    """The object of a dotted name whose first parts are modules. Raises ImportError, AttributeError."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name != ".".join(parts[: len(error.name.split("."))]):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def successor(name):
    """What serves in the place of a listed name: its own successor, or that of what it lies in; "" if none does."""
    while name:
        entry = listed().get(name)
        if entry and entry.successor:
            return entry.successor
        name = name.rpartition(".")[0]
    return ""


def message(name):
    """What is said where the name is asked for and not there, or None if the list does not hold it."""
    if name not in listed():
        return None
    owner, _, last = name.rpartition(".")
    is_module = listed()[name].is_module
    what = f"No module named {name!r}" if is_module else f"module {owner!r} has no attribute {last!r}"
    return not_in_this_build(what, successor(name))


def not_in_this_build(what, successor):
    """`what`, the reason, and what to use."""
    from apex._loader import layout

    use = f"; use {successor}" if successor else ""
    return f"{what}: it is not in this build (apex {layout.version()}){use}"
