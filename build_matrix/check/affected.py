"""Which tests look at which sources, by names alone: an op's kernel, launcher, binding, reference, Python face and test
bear its name, and a test names the modules that it imports. Of a file that no test names, those tests that name what
imports or includes it, and so on upwards; of one that nothing uses, those that speak of it, or of its folder. What this
does not see, the moving slice runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

from build_matrix import REPOSITORY

SOURCES = ("apex", "csrc", "build_matrix", "tests", "examples", "benchmarks", "ci")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
EXAMPLES = "tests/farm/test_affected.py"  # names sources as examples of what others look at
MODULES = ("apex/", "build_matrix/", "examples/", "benchmarks/", "ci/")
COMMANDS = (
    "build_matrix/commands/"  # imported by name, and run so by tests: `python -m build_matrix load-test`
)
# Tests that read every Python file of a folder for what none may say.
READ_ALL = {
    "apex/": (
        "tests/L0/parallel/test_waiting.py", "tests/L0/test_defaults.py", "tests/farm/test_rooms.py",
        "tests/farm/test_site.py",
    ),
    "apex/amp/": ("tests/L0/amp/test_amp_rooms.py",),
    "apex/_loader/": ("tests/L0/loader/test_rooms.py",),
    "build_matrix/": ("tests/farm/test_temporary.py",),
    "ci/": ("tests/farm/test_temporary.py",),
    "tests/": ("tests/L0/parallel/test_waiting.py", "tests/farm/test_selection.py"),
    "tests/L0/": ("tests/L0/test_defaults.py",),
}  # fmt: skip


def everything() -> list[str]:
    """Every source of this checkout: what has changed where no commit is known."""
    found = (path for folder in SOURCES for path in (REPOSITORY / folder).rglob("*"))
    return sorted(
        path.relative_to(REPOSITORY).as_posix()
        for path in found
        if path.suffix in (".py", ".cu", ".h", ".cpp", ".toml", ".schemas") and path.is_file()
    )


def units(changed: Iterable[str]) -> set[str]:
    """Device units of which a source, or a header that they include, was changed."""
    names = {PurePosixPath(path).name for path in changed if path.startswith("csrc/")}
    return {path.stem for path in (REPOSITORY / "csrc/device").glob("*.cu") if names & _includes(path)}


@cache
def _includes(path: Path) -> frozenset[str]:
    """Names of a file and of what it includes, directly or not."""
    found = {path.name}
    for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
        for folder in (path.parent, REPOSITORY / "csrc", REPOSITORY / "csrc/device"):
            if (folder / name).is_file():
                found |= _includes((folder / name).resolve())
                break
    return frozenset(found)


def tests(changed: Iterable[str]) -> set[str]:
    """Files of tests, relative to the checkout, that were changed or that look at what was."""
    found = set()
    for path in changed:
        readers = [names for folder, names in READ_ALL.items() if path.startswith(folder)]
        found |= of_file(path).union(*(readers if path.endswith(".py") else ()))
    return found


@cache
def of_file(path: str) -> frozenset[str]:
    """Files of tests that look at one file."""
    seen, level = {path}, {path}
    while level:
        if found := frozenset(test for one in level for test in _direct(one)):
            return found
        level = {user for one in level for user in _users().get(one, ())} - seen
        seen |= level
    readers = [one for one in _readers(path) if one != path]
    return _mentions(path).union(*map(_direct, readers))


def _readers(path: str) -> list[str]:
    """Modules that name a file of data: build_matrix/check/skips.py of ci/accepted_skips.toml."""
    if not path.endswith((".toml", ".txt", ".schemas", ".jinja", ".html")):
        return []
    name = PurePosixPath(path).name
    modules = [one for one in everything() if one.endswith(".py") and one.startswith(MODULES)]
    return [one for one in modules if f'{name}"' in (REPOSITORY / one).read_text(encoding="utf-8")]


@cache
def _test_files() -> tuple[str, ...]:
    found = (REPOSITORY / "tests").rglob("test_*.py")
    return tuple(sorted(path.relative_to(REPOSITORY).as_posix() for path in found))


@cache
def _direct(path: str) -> frozenset[str]:
    """The file itself where it is of tests; else those that name it, or its op. A conftest.py is of its folder."""
    pure, files = PurePosixPath(path), _test_files()
    if path in files:
        return frozenset([path])
    if pure.name == "conftest.py":
        return frozenset(name for name in files if name.startswith(f"{pure.parent}/"))
    own = pure.stem.strip("_").removesuffix("_cpu")
    words = {own} if own in _unit_names() else set()
    if path.startswith("csrc/"):
        words |= {pure.stem} | units([path])
        # norm_cpu.cpp is of the ops that include norm.h.
        shared = _users().get(f"{pure.parent}/{own}.h", ())
        words |= {PurePosixPath(user).stem for user in shared} & _unit_names()
    modules = _offers(path) if pure.suffix == ".py" else set()
    helpers = {pure.stem} if path.startswith("tests/") and pure.suffix == ".py" else set()
    found = set()
    for name in files:
        said = _says(REPOSITORY / name)
        if (words & said.words and name != EXAMPLES) or modules & said.imports or helpers & said.imports:
            found.add(name)
    for fixtures in _fixtures_over(path) if helpers else ():
        found |= _direct(fixtures)
    return frozenset(found | _that_run(path))


def _that_run(path: str) -> set[str]:
    """Files of tests that name a command of the farm: "load-test", or "load-test --torch 2.13"."""
    if not path.startswith(COMMANDS) or "def command(" not in (REPOSITORY / path).read_text(encoding="utf-8"):
        return set()
    command = re.compile(rf"[\"']{PurePosixPath(path).stem.replace('_', '-')}[\"' ]")
    texts = {name: _says(REPOSITORY / name).text for name in _test_files() if name != EXAMPLES}
    return {name for name, text in texts.items() if "build_matrix" in text and command.search(text)}


def _fixtures_over(helper: str) -> set[str]:
    """Every conftest.py that imports a helper of tests, directly or not."""
    seen, level = set(), {helper}
    while level:
        seen |= level
        level = {user for one in level for user in _users().get(one, ()) if user.startswith("tests/")} - seen
    return {one for one in seen if one.endswith("/conftest.py")}


@cache
def _unit_names() -> frozenset[str]:
    return frozenset(path.stem for path in (REPOSITORY / "csrc/device").glob("*.cu"))


@cache
def _users() -> dict[str, set[str]]:
    """file -> the files that import or include it."""
    found: dict[str, set[str]] = {}
    for path in [*everything(), "noxfile.py", "setup.py"]:
        for used in _uses(path):
            found.setdefault(used, set()).add(path)
    return found


def _uses(path: str) -> set[str]:
    """Files of this repository that one imports or includes by itself."""
    here = REPOSITORY / path
    if here.suffix in (".cu", ".h", ".cpp"):
        folders = (
            here.parent,
            *(REPOSITORY / "csrc" / name for name in ("", "device", "host", "bindings", "testing")),
        )
        names = INCLUDE.findall(here.read_text(encoding="utf-8"))
        places = [next((f / name for f in folders if (f / name).is_file()), None) for name in names]
        return {place.resolve().relative_to(REPOSITORY).as_posix() for place in places if place}
    if here.suffix != ".py":
        return set()
    package, found = PurePosixPath(path).parts[:-1], set()
    if path == "build_matrix/__main__.py":
        found |= {f"build_matrix.commands.{file.stem}" for file in (REPOSITORY / COMMANDS).glob("*.py")}
    for node in ast.walk(ast.parse(here.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (above, node.module)))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    # A script and a test import what lies beside them, or in tests/, by its bare name.
    folders = {"", f"{PurePosixPath(path).parent}/", *(["tests/"] if path.startswith("tests/") else [])}
    stems = [folder + name.replace(".", "/") for name in found for folder in folders]
    places = [f"{stem}{end}" for stem in stems for end in (".py", "/__init__.py")]
    return {place for place in places if place != path and (REPOSITORY / place).is_file()}


def _mentions(path: str) -> frozenset[str]:
    """Files of tests that speak of a file, else of the nearest folder above it that any speaks of, as of a path."""
    pure = PurePosixPath(path)
    for one in (pure, *list(pure.parents)[:-1]):
        whole = re.compile(rf"[\"'/ ]{re.escape(one.name)}[\"'/ :]")
        said = ((name, _says(REPOSITORY / name).text) for name in _test_files() if name != EXAMPLES)
        if found := frozenset(name for name, text in said if whole.search(text)):
            return found
    return frozenset()


def _offers(path: str) -> set[str]:
    """What one may import of a module of the sources: itself, and its public names from each package above it."""
    if not path.startswith(MODULES) or not (REPOSITORY / path).is_file():
        return set()
    parts = list(PurePosixPath(path).with_suffix("").parts)
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef)
    public = [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return {".".join(parts), *(f"{package}.{name}" for package in above for name in public)}


class _Said:
    """Words of a test's text, and what it and the helpers beside it import."""

    def __init__(self, path: Path):
        self.text = text = path.read_text(encoding="utf-8")
        self.words = frozenset({*re.findall(r"\w+", text), path.stem.removeprefix("test_")})
        self.imports = _imports(path)


@cache
def _says(path: Path) -> _Said:
    return _Said(path)


@cache
def _imports(path: Path, depth: int = 2) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
    if depth:
        for name in list(found):
            helper = path.parent / f"{name.rpartition('.')[2]}.py"
            if helper.is_file() and helper != path:
                found |= _imports(helper, depth - 1)
    return frozenset(found)
