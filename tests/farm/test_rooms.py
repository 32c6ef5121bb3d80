"""The rooms of build_matrix: which may import from which, and that no circle is left between rooms or modules."""

import ast
import graphlib
from functools import cache
from pathlib import Path

from build_matrix import REPOSITORY, commands

# A room may import from those that stand here for it; `errors` and the package itself all may. Imports within functions
# count.
MAY_IMPORT = {
    "store": "",
    "spec": "store",
    "toolchains": "spec store",
    "generator": "",
    "parts": "generator spec store toolchains",
    "wheels": "parts spec store toolchains",
    "farm": "parts spec store toolchains wheels",
    "check": "farm parts spec store toolchains wheels",
    "serve": "check farm parts spec store wheels",
    "containers": "serve spec store toolchains wheels",
    "site": "check serve spec store toolchains",
    "commands": "check containers farm parts serve site spec store toolchains wheels",
}
# What is run by these names: each is of the command line, and nothing imports it.
ENTRIES = {"build_matrix.backend", "build_matrix.rings", "build_matrix.__main__"}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything in build_matrix."""
    paths = REPOSITORY.glob("build_matrix/**/*.py")
    names = {path: ".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@cache
def imports(name: str) -> frozenset[str]:
    """The modules of build_matrix that one imports anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {full if full in modules() else node.module for full in whole}
    return frozenset(found & set(modules()) - {name})


def room(name: str) -> str:
    """`store` of build_matrix.store.digest; "" for what all may import; the command line is a room of its own."""
    if name in ENTRIES or name.endswith(".__main__"):
        return "commands"
    top = name.split(".")[1] if "." in name else "errors"
    return "" if top == "errors" else top


def test_each_room_imports_from_rooms_below_it():
    seen = {name: set() for name in MAY_IMPORT}
    for name in modules():
        for other in imports(name):
            own, its = room(name), room(other)
            if its and own != its:
                assert own in MAY_IMPORT, f"{name} is in no room"
                assert its in MAY_IMPORT[own].split(), (
                    f"{name} imports {other}: {own} may not import from {its}"
                )
                seen[own].add(its)
    assert {name: " ".join(sorted(rooms)) for name, rooms in seen.items()} == MAY_IMPORT


def test_the_table_has_no_circle():
    above = list(MAY_IMPORT)
    for number, name in enumerate(above):
        assert set(MAY_IMPORT[name].split()) <= set(above[:number]), (
            f"{name} imports from a room that stands below it"
        )


def test_no_modules_import_each_other():
    graph = {name: imports(name) for name in modules()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_everything_lies_in_a_room():
    top = {path.name for path in (REPOSITORY / "build_matrix").glob("*.py")}
    assert top == {"__init__.py", "errors.py"} | {f"{name.rpartition('.')[2]}.py" for name in ENTRIES}
    folders = {path.parent.name for path in REPOSITORY.glob("build_matrix/*/*.py")}
    assert folders == set(MAY_IMPORT)


def test_nothing_imports_an_entry():
    users = {(name, other) for name in modules() for other in imports(name) if other in ENTRIES}
    assert not users


def test_the_loader_asks_the_checkout_for_its_release_alone():
    """The installed package knows nothing of build_matrix."""
    named = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "apex").rglob("*.py")}
    assert [
        name for name, text in named.items() if "from build_matrix" in text or "import build_matrix" in text
    ] == ["release.py"]


def test_every_command_has_its_file():
    files = {path.stem for path in (REPOSITORY / "build_matrix/commands").glob("*.py")}
    assert files - {"__init__", "alone", "options"} == {name.replace("-", "_") for name in commands.NAMES}
