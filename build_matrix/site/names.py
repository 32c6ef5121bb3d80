"""The page of public apex's Python names: which are here, and what serves in the place of the others."""

from __future__ import annotations

from apex._legacy import public_names

HEADING = """# Names of public apex

Every module of ROCm's and NVIDIA's trees and of the Ascend patch that scripts import from, and how many of the names
listed for it are here; all of them since 1.10.0. Names of the compiled modules (`amp_C`, ...) stand in
[what is supported](support.md), and why something is not here in [decisions](decisions.md).

| module | names here | not here, and what serves in their place |
|---|---|---|
"""


def is_here(name: str) -> bool:
    """Whether a dotted name can be imported, or got from a module that can."""
    try:
        public_names.find(name)
    except (ImportError, AttributeError):
        return False
    return True


def rows() -> dict[str, tuple[int, list[str]]]:
    """module -> (names that are here, those that are not), as the list has them; a module is a name of itself."""
    found: dict[str, tuple[int, list[str]]] = {}
    for name, entry in public_names.listed().items():
        module = name if entry.is_module else _module_of(name)
        here, absent = found.get(module, (0, []))
        found[module] = (here + 1, absent) if is_here(name) else (here, [*absent, name])
    return found


def _module_of(name: str) -> str:
    listed = public_names.listed()
    while name := name.rpartition(".")[0]:
        if name in listed and listed[name].is_module:
            return name
    return "apex"


def markdown() -> str:
    """The page."""
    lines = []
    for module, (here, absent) in rows().items():
        said = "; ".join(_absent(module, name) for name in absent)
        lines.append(f"| `{module}` | {here} | {said} |\n")
    return HEADING + "".join(lines)


def _absent(module: str, name: str) -> str:
    shown = "the module" if name == module else f"`{name.removeprefix(f'{module}.')}`"
    successor = public_names.successor(name)
    return f"{shown}: {successor}" if successor else shown
