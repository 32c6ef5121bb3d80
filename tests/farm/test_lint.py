"""Lint is one list: nox, the tests of a change and the release check run it, and commits run its versions."""

import importlib
import inspect
import re
import subprocess
import sys
import types

import pytest
import yaml

from build_matrix import REPOSITORY
from build_matrix.check import line_length, lint, release_check, rings
from build_matrix.site import api
from build_matrix.spec import toml

GROUP = toml.read(REPOSITORY / "pyproject.toml")["dependency-groups"]["lint"]
TOOLS = {"ruff check", "ruff format", "clang-format", "shellcheck", "line length", "mypy"}


def test_nox_runs_the_list(monkeypatch):
    pytest.importorskip("nox")
    import noxfile

    ran = []
    monkeypatch.setattr(noxfile, "prepare", lambda session, *groups: ran.append(groups))
    noxfile.lint(types.SimpleNamespace(run=lambda *words, **options: ran.append(words)))
    assert ran == [("lint",), ("python", *lint.ITSELF[1:])]


def test_the_tests_of_a_change_and_the_release_check_run_the_list(tmp_path, monkeypatch):
    (check,) = [check for check in release_check.checks() if check.name == "lint"]
    assert check.command == lint.ITSELF
    ran = []
    monkeypatch.setattr(
        rings, "_run", lambda name, command, tell: ran.append((name, tuple(command))) or False
    )
    monkeypatch.setattr(rings, "FOLDER", tmp_path)
    monkeypatch.setattr(rings, "cpu_level", lambda: 1)
    monkeypatch.setattr(rings, "build", lambda *arguments: None)
    monkeypatch.setattr(rings, "_pytest", lambda made, tell: True)
    monkeypatch.setattr(rings.junit, "whole", lambda read: [])
    monkeypatch.setattr(rings.junit, "read", lambda path: [])
    assert not rings.on_a_change(lambda words: None)  # which fails where lint does
    assert ran == [("lint", lint.ITSELF)]


def test_no_other_file_names_a_tool_of_the_list():
    callers = [*REPOSITORY.glob("build_matrix/**/*.py"), REPOSITORY / "noxfile.py", *REPOSITORY.glob(".ci/*")]
    found = [
        path.name
        for path in callers
        if path.name != "lint.py"
        and re.search(r"[\"'](ruff|mypy|shellcheck|clang-format)[\"']", path.read_text())
    ]
    assert not found


def test_the_list_looks_at_every_kind_of_source():
    commands = lint.commands()
    assert set(commands) == TOOLS
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, text=True, capture_output=True)
    if tracked.returncode:
        pytest.skip("this is no checkout of git: its files cannot be listed")
    names = tracked.stdout.split()
    native = {name for name in names if name.endswith((".cpp", ".h", ".cu", ".cuh", ".hpp", ".cc", ".c"))}
    assert native and native <= set(commands["clang-format"])
    shell = {
        name
        for name in names
        if (REPOSITORY / name).is_file() and re.match(rb"#!.*sh\n", (REPOSITORY / name).read_bytes()[:80])
    }
    assert ".ci/run" in shell and shell <= set(commands["shellcheck"])


@pytest.mark.parametrize("held", [True, False])
def test_one_failure_fails_it_and_the_rest_is_run(held, monkeypatch, capfd):
    python = (sys.executable, "-c")
    made = {"first": (*python, f"raise SystemExit({int(not held)})"), "second": (*python, "print('looked')")}
    monkeypatch.setattr(lint, "commands", lambda: made)
    assert lint.run() == held
    out, err = capfd.readouterr()
    assert "looked" in out and f"lint: first {'holds' if held else 'failed'}" in err


def test_a_tool_that_is_not_here_is_named_with_what_brings_it(monkeypatch, capfd):
    monkeypatch.setattr(lint, "commands", lambda: {"absent": ("no-such-linter",)})
    assert not lint.run()
    assert "no-such-linter: No such file or directory. Run: nox -s lint" in capfd.readouterr().err


def test_a_commit_runs_the_same_versions():
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in GROUP), "another version finds otherwise"
    said = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = said["repos"]
    pins = {line for hook in local["hooks"] for line in hook["additional_dependencies"]}
    assert {line for line in pins if not line.startswith("pre-commit-hooks==")} == {
        line for line in GROUP if not line.startswith("mypy")
    }
    first = {hook["entry"].split()[0] for hook in local["hooks"]}
    assert {"ruff", "clang-format", "shellcheck", "end-of-file-fixer"} <= first


def test_actions_are_pinned_and_say_their_version():
    for path in REPOSITORY.glob(".github/workflows/*.yml"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
        assert lines
        for line in lines:
            assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+(\.\d+)+$", line), (
                f"{path.name}: {line}"
            )


def test_ci_runs_lint_by_itself():
    said = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]
    assert any("nox -s lint" in step.get("run", "") for step in said["lint"]["steps"])


def functions(value):
    """A function, or the public methods and the constructor that a class has of its own."""
    if inspect.isfunction(value):
        return [value]
    if not inspect.isclass(value):
        return []
    own = [
        f for name, f in vars(value).items() if name in ("__init__", "__call__") or not name.startswith("_")
    ]
    own = [f.__func__ if isinstance(f, staticmethod | classmethod) else f for f in own]
    own = [inspect.unwrap(f) for f in own if inspect.isfunction(f)]
    return [
        f for f in own if "ctx" not in inspect.signature(f).parameters
    ]  # autograd's, which torch alone calls


def unhinted(function):
    """Parameters without a hint, and "return"."""
    parameters = list(inspect.signature(function).parameters.values())
    found = [p.name for p in parameters if p.annotation is p.empty and p.name not in ("self", "cls")]
    return found + ["return"] * (inspect.signature(function).return_annotation is inspect.Signature.empty)


PACKAGES = [name for name in api.modules() if hasattr(importlib.import_module(name), "__path__")]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_exports_has_type_hints(package):
    module = importlib.import_module(package)
    found = {
        f"{name}: {function.__qualname__}": missing
        for name in api.names(module)
        for function in functions(getattr(module, name))
        if function.__module__.startswith("apex.") and (missing := unhinted(function))
    }
    assert not found


def test_a_line_that_is_too_long_is_named_unless_it_cannot_be_broken(tmp_path):
    wide = "word " * 30
    lines = ["short", wide, f"| {wide} |", f"see https://example.org {wide}", "x" * 120, "ü" * 120, "y" * 121]
    (tmp_path / "page.md").write_text("\n".join(lines), encoding="utf-8")
    assert list(line_length.too_long(tmp_path / "page.md")) == [2, 7]


def test_pages_scripts_and_schemas_are_looked_at():
    if subprocess.run(["git", "rev-parse"], cwd=REPOSITORY, capture_output=True).returncode:
        pytest.skip("this is no checkout of git: its files cannot be listed")
    wanted = {"README.md", "docs/testing.md", "csrc/ops.schemas", ".github/workflows/tests.yml"}
    assert wanted <= set(line_length.sources())


def test_jobs_that_call_pip_as_themselves_keep_its_cache():
    """As root they cannot: the cache would be root's."""
    steps = {}
    for path in REPOSITORY.glob(".github/workflows/*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        steps |= {f"{path.stem} {name}": job["steps"] for name, job in jobs.items()}
    own = {name for name in steps if not any("sudo" in step.get("run", "") for step in steps[name])}
    kept = {name for name in steps if any(step.get("with", {}).get("cache") == "pip" for step in steps[name])}
    assert own == kept and len(own) == 6
