"""Everything that a release must pass, one command after another. Each leaves a log; receipts go where the
compatibility table looks. What cannot run here is listed as not run, and why."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from apex._loader.probe import torch_devices
from build_matrix import REPOSITORY
from build_matrix.check import junit, lint, receipts
from build_matrix.spec import identity, matrix
from build_matrix.store import digest, files, foreign
from build_matrix.toolchains import pythons
from build_matrix.wheels import wheel

FOLDER = REPOSITORY / "build/release-check"
RESULT = "result.json"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
ABSENT = 3  # exit code of build_matrix where a toolchain, interpreter or card is not here
PYTHON = (sys.executable, "-m")
FARM = (*PYTHON, "build_matrix")
PYTEST = (*PYTHON, "pytest", "-q", "-p", "no:cacheprovider")
SPREAD = ("-n", "auto", "--dist", "loadfile")  # over all cores; a file's tests share what they built
# Other defaults of torch's, under which tests marked `defaults` must pass: name -> (variable, value).
DEFAULTS = {
    "bfloat16": ("APEX_TESTS_DEFAULT_DTYPE", "bfloat16"),
    "float16": ("APEX_TESTS_DEFAULT_DTYPE", "float16"),
    "float64": ("APEX_TESTS_DEFAULT_DTYPE", "float64"),
    "device meta": ("APEX_TESTS_DEFAULT_DEVICE", "meta"),
}
# Defaults are Python's: references, and one CPU variant that every machine has.
UNDER_DEFAULTS = (
    "defaults and not (gpu or executor or minutes) and not (cpu_level and not cpu_level(level=1))"
)


@dataclass(frozen=True)
class Check:
    """A command of the list. `after`: a check without which it has nothing to look at."""

    name: str
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    after: str = ""


@dataclass(frozen=True)
class Verdict:
    """How a check went: PASSED, FAILED or NOT_RUN, and its last words."""

    state: str
    seconds: float = 0.0
    says: str = ""


def checks() -> list[Check]:
    """The list, in order."""
    dist = REPOSITORY / "dist"
    found = [
        *everything(),
        Check("changelog", (*FARM, "changelog")),
        Check("docs", (*PYTHON, "build_matrix.site")),
        Check("quickstart", (*FARM, "quickstart")),
        Check("loads", (*FARM, "load-test", *(f"--python={tag}" for tag in matrix.load().python))),
        Check("release", (*FARM, "farm", "--dist", str(dist))),
    ]
    found.append(Check("verify", (*FARM, "verify", *_wheels(dist)), after="release"))
    found += _loads_elsewhere(dist)
    cards = [cell for cell in matrix.load().cells() if cell != "cpu"]
    return found + [
        Check(f"{tier}({cell})", (*FARM, "tier", tier, "--cell", cell), after="tree")
        for tier in (receipts.L0, receipts.L1)
        for cell in cards
    ]


def _wheels(dist: Path) -> list[str]:
    """The wheels of every platform, for this Python where they are of one."""
    found = []
    for a in matrix.load().accelerators:
        name = dist / f"{a.distribution.replace('-', '_')}-{identity.version()}+{a.label}"
        platforms = [p for p in matrix.load().platforms if a.name in p.accelerators]
        ends = [
            f"{wheel.ANY_PYTHON}-none-{p.name}" if p.windows else _linux(p, pythons.own_tag())
            for p in platforms
        ]
        found += [f"{name}-{end}.whl" for end in ([wheel.PURE] if a.pure else ends)]
    return found


def _linux(platform: matrix.Platform, python: str) -> str:
    return f"{python}-*_{platform.name.removeprefix('linux_')}"


def _loads_elsewhere(dist: Path) -> list[Check]:
    """What other systems and processors can be asked here: wine, and an emulated process with Debian's Python."""
    found = []
    for platform in matrix.load().platforms:
        if platform.windows:
            command = (*FARM, "load-test", f"--platform={platform.name}")
            found.append(Check(f"loads, {platform.name}", command))
        elif platform.name != matrix.NATIVE:
            stem = f"apex_cpu-{identity.version()}+cpu-{_linux(platform, 'cp311')}.whl"
            command = (sys.executable, str(REPOSITORY / "ci/aarch64_check.py"), str(dist / stem))
            found.append(Check(f"loads, {platform.name}", command, after="release"))
    return found


def everything() -> list[Check]:
    """tests-all: every test that needs no card, in order."""
    return [
        Check("lint", lint.ITSELF),
        Check("tree", (*FARM, "tree", "--available", *(f"--arch={arch}" for arch in _archs()))),
        Check(
            "tests of the farm, 50 kills",
            (*PYTEST, *SPREAD, "tests/farm", "tests/containers", "-m", "not container"),
            (("APEX_FARM_KILLS", "50"),),
        ),
        Check(
            "containers", (*PYTEST, "tests/containers", "-m", "container"), (("APEX_CONTAINER_TESTS", "all"),)
        ),
        Check("kernels on the executor", (*PYTEST, *SPREAD, "tests/simt", "-m", "not emulated")),
        Check("L0(cpu)", (*FARM, "tier", "L0"), after="tree"),
        Check("L1(cpu)", (*FARM, "tier", "L1"), after="tree"),
        Check("emulated", (*FARM, "tier", "emulated"), after="tree"),
        *(_under_default(name, variable) for name, variable in DEFAULTS.items()),
    ]


def _under_default(name: str, variable: tuple[str, str]) -> Check:
    command = (*PYTEST, *SPREAD, "tests/L0", "-m", UNDER_DEFAULTS)
    return Check(f"L0 by default {name}", command, (variable,), after="tree")


def _archs() -> list[str]:
    """Packs that the tests look at: a card that is here needs its own."""
    cells = matrix.load().cells()
    return list(
        dict.fromkeys([*matrix.load().tested(), *(d.arch for d in torch_devices() if d.arch in cells)])
    )


def words(check: Check) -> str:
    """The command as one types it, with its variables."""
    command = ["python" if word == sys.executable else word for word in check.command]
    return shlex.join([*(f"{name}={value}" for name, value in check.variables), *command])


def run(
    folder: Path = FOLDER,
    only: tuple[str, ...] = (),
    again: bool = False,
    tell: Callable[[Check, Verdict], None] = lambda check, outcome: None,
    wanted: list[Check] | None = None,
) -> dict[str, Verdict]:
    """Verdict of every check. One that passed for these very sources is not run again unless `again`; what was done is
    written after each, with what was known of the others, so that a list that was stopped goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    of, before = _state(), _before(folder)
    outcomes: dict[str, Verdict] = {}
    for check in checks() if wanted is None else wanted:
        known = before.get(check.name)
        if only and check.name not in only:
            if known:
                outcomes[check.name] = known
            continue
        if known and known.state == PASSED and not again:
            outcome = known
        elif check.after and (missing := outcomes.get(check.after)) and missing.state != PASSED:
            outcome = Verdict(NOT_RUN, says=f"{check.after}: {missing.state}")
        else:
            outcome = _run(check, folder)
        outcomes[check.name] = outcome
        tell(check, outcome)
        _write(folder, of, before | outcomes)
    return outcomes


def _run(check: Check, folder: Path) -> Verdict:
    command = list(_expanded(check.command))
    log = folder / f"{check.name.replace(' ', '-').replace(',', '')}.log"
    outcomes = log.with_suffix(".xml")
    outcomes.unlink(missing_ok=True)
    if tests := check.command[: len(PYTEST)] == PYTEST:
        command.append(f"--junitxml={outcomes}")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | dict(check.variables)
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT)
    seconds = round(time.monotonic() - start, 1)
    if tests and done.returncode == 0:
        return _of_tests(outcomes, seconds)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    says = lines[-1].strip() if lines else ""
    # pytest, too, ends with 3: when it broke.
    state = {0: PASSED, ABSENT: FAILED if tests else NOT_RUN}.get(done.returncode, FAILED)
    return Verdict(state, seconds, says)


def _of_tests(outcomes: Path, seconds: float) -> Verdict:
    """Of a pytest that found no fault: what passed and what did not run, and why; where nothing ran, nothing passed."""
    cases = junit.read(outcomes)
    passed = sum(case.outcome == junit.PASSED for case in cases)
    reasons = junit.reasons(cases)
    skipped = ", ".join(f"{count} not run: {reason}" for reason, count in reasons.items())
    says = "; ".join(filter(None, [f"{passed} passed", skipped]))
    return Verdict(PASSED if passed else NOT_RUN, seconds, says)


def _expanded(command: tuple[str, ...]) -> Iterator[str]:
    """A word with a * names the last file that it matches: there is none before the release is made."""
    for word in command:
        found = sorted(Path(word).parent.glob(Path(word).name)) if "*" in word else []
        yield str(found[-1]) if found else word


def _state() -> dict[str, str]:
    """What the outcomes are of: sources, and the tests and tools that look at them."""
    folders = ("tests", "build_matrix", "ci", ".ci", "docs", "examples", "benchmarks")
    folders += (".github", "release_notes")
    single = ("noxfile.py", "pyproject.toml", "related_commits", "version.txt")
    # Wheels hold them, tests read them.
    single += ("README.md", "LICENSE", "MANIFEST.in", "Makefile", "setup.py")
    tests = [
        path
        for name in (*folders, *single)
        for path in sorted([REPOSITORY / name, *(REPOSITORY / name).rglob("*")])
        if path.is_file() and path.suffix not in files.OUTPUTS and "receipts" not in path.parts
    ]
    named = {str(path.relative_to(REPOSITORY)): digest.of_file(path) for path in tests}
    return identity.checkout().as_json() | {"tests": digest.of_values(named)}


def _before(folder: Path) -> dict[str, Verdict]:
    """Verdicts of an earlier run over the same sources."""
    try:
        said = foreign.read(folder / RESULT)
        return {n: Verdict(**o) for n, o in said["checks"].items()} if said["of"] == _state() else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(folder: Path, of: dict[str, str], outcomes: dict[str, Verdict]) -> None:
    text = json.dumps({"of": of, "checks": {n: asdict(o) for n, o in outcomes.items()}}, indent=1)
    files.write(folder / RESULT, text)
