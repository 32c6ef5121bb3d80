"""The tests in rings: what runs on a change, and everything.

On a change: lint; a build of what the tests need, with a slice of the packs' units; and of the tests that belong to no
later ring (tests/rings.py) those files whole whose sources changed since the last commit with a receipt of everything,
and of the rest a slice that moves with the commit, so that a few changes run it all. What does not fit the limit, in
CPU seconds by tests/durations.json, is left to other slices and counted as not run.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from apex._loader.probe import torch_devices
from build_matrix import REPOSITORY
from build_matrix.check import affected, junit, lint, receipts, skips
from build_matrix.errors import BuildError
from build_matrix.parts import tree
from build_matrix.spec import matrix
from build_matrix.spec.registry import device_units
from build_matrix.store import files

FOLDER = REPOSITORY / "build/tests"
DURATIONS = REPOSITORY / "tests/durations.json"
LIMIT = 300.0  # CPU seconds of tests, on a machine whose figures are in tests/durations.json
SHARE_OF_REST = 0.4  # of the limit, whatever was changed
UNKNOWN = (0.0, 3.0)  # CPU seconds of a file that nobody measured
TOGETHER = 2.0  # CPU seconds of fixtures, above which a file's tests are in one slice
UNITS = 4  # of the packs, on a change: each for every arch of matrix.toml that is `tested`
ALWAYS = "multi_tensor_scale"  # small; tests look at it in packs
NOTHING_CHOSEN = 5  # pytest's exit code
# Loads a libapex.so of its own, beside which the loader rightly refuses the checkout's.
ALONE = "tests/L0/host"


@dataclass(frozen=True)
class Plan:
    """What tests/rings.py reads. `slice`: (k, n); `together`: files, each in one slice, the costly first; `durations`:
    what files take of it, in CPU seconds."""

    whole: tuple[str, ...]
    slice: tuple[int, int]
    cpu_level: int
    together: tuple[str, ...]
    durations: dict[str, float]


def number() -> int:
    """Moves with the commit, by one where the history is whole. 0 where there is no git."""
    shallow = git("rev-parse", "--is-shallow-repository")
    if shallow is None:
        return 0
    if shallow == "false":
        return int(git("rev-list", "--count", "HEAD") or 0)
    return int(git("rev-parse", "HEAD")[:8], 16)


def git(*arguments: str) -> str | None:
    """What git says; None where it fails, or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def base() -> str | None:
    """The last commit with receipts of everything on the CPU: the oldest of those that brought the newest of L0, L1
    and emulated. None where the history does not hold it."""
    found = []
    for tier in receipts.TIERS:
        names = [
            f"build_matrix/receipts/{tier}-cpu-*.json",
            f"build_matrix/receipts/{tier}-*-emulator-*.json",
        ]
        said = git("log", "-1", "--format=%ct %H", "--", *names)
        if not said:
            return None
        seconds, commit = said.split()
        found.append((int(seconds), commit))
    return min(found)[1]


def changed(since: str) -> list[str]:
    """Files that differ from a commit, those that git does not know included."""
    differing = git("diff", "--name-only", "--no-renames", since) or ""
    new = git("ls-files", "--others", "--exclude-standard") or ""
    return sorted({*differing.splitlines(), *new.splitlines()})


def durations() -> dict[str, list[float]]:
    """File of tests -> CPU seconds of fixtures that its tests share, and of its tests in the ring."""
    known = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.is_file() else {}
    found = sorted(p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "tests").rglob("test_*.py"))
    return {name: known.get(name, list(UNKNOWN)) for name in found}


def plan(
    touched: Collection[str], known: dict[str, list[float]], count: int, level: int, limit: float = LIMIT
) -> Plan:
    """Files of `touched` run whole as far as they fit beside the share of the rest, the first ones another with every
    commit; of all others the slice that fits what is left."""
    wanted = sorted(set(touched) & set(known))
    wanted = wanted[count % max(len(wanted), 1) :] + wanted[: count % max(len(wanted), 1)]
    whole, left = [], limit * (1 - SHARE_OF_REST)
    for name in wanted:
        if sum(known[name]) <= left:
            whole.append(name)
            left -= sum(known[name])
    rest = {name: fixtures + tests for name, (fixtures, tests) in known.items() if name not in whole}
    room = limit * SHARE_OF_REST + left
    together = tuple(sorted((name for name in rest if known[name][0] > TOGETHER), key=lambda n: -known[n][0]))
    # A file that is not together has its fixtures in every slice.
    always = sum(known[name][0] for name in rest if name not in together)
    parts = max(1, math.ceil((sum(rest.values()) - always) / max(room - always, room / 2)))
    takes = {name: seconds if name in together else seconds / parts for name, seconds in rest.items()}
    takes |= {name: sum(known[name]) for name in whole}
    return Plan(tuple(whole), (count % parts, parts), level, together, takes)


def units(touched: Iterable[str], count: int) -> list[str]:
    """Units whose packs are compiled: UNITS of them, changed ones first, others by the commit."""
    known = [path.stem for path in device_units()]
    mine = [unit for unit in known if unit in set(touched)]
    start = count * UNITS % len(known)
    turn = [*known[start:], *known[:start]]
    shift = count % max(len(mine), 1)
    chosen = dict.fromkeys([*mine[shift:], *mine[:shift], *turn])
    return sorted({*list(chosen)[:UNITS], ALWAYS})


def cpu_level() -> int:
    """The highest x86-64 level of this machine, 0 for another, as libapex says."""
    code = "from apex._loader import library; print(library.load().c.apex_set_cpu_level(0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"libapex of build/tree does not load:\n{done.stderr.strip()}")
    return int(done.stdout.split()[-1])


# ---- running ----------------------------------------------------------------------------------------------------


def build(tell: Callable[[str], None], chosen: Collection[str] = ()) -> None:
    """Builds what tests need: library and bindings, packs of `chosen` units for the archs that are `tested`, and the
    whole pack of a card that is here."""
    command = [sys.executable, "-m", "build_matrix", "tree", "--available"]
    cards = dict.fromkeys(d.arch for d in torch_devices() if d.arch in matrix.load().cells())
    if cards:
        command += [f"--arch={arch}" for arch in cards]
    elif chosen:
        command += [f"--arch={arch}" for arch in matrix.load().tested()] + [
            f"--unit={unit}" for unit in chosen
        ]
    _run("build", command, tell)


def given(arguments: list[str], tell: Callable[[str], None]) -> int:
    """pytest with these arguments, after what they need was built. Returns its exit code."""
    paths = [word.partition("::")[0].rstrip("/") for word in arguments]
    named = [path for path in paths if (REPOSITORY / path).exists()]
    of_wheels = [path for path in named if path == "tests" or path.startswith("tests/farm")]
    build(tell, [ALWAYS] if of_wheels or not named else [])  # tests of wheels look into a pack
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=REPOSITORY).returncode


def on_a_change(tell: Callable[[str], None], accepted: Path | None = None) -> bool:
    """Lint, build and tests of a change; whether all held. With `accepted` (skips.py), a test that did not run for
    another reason, or for one of these more often, is a fault."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    since, count = base(), number()
    what = changed(since) if since else affected.everything()
    touched = affected.tests(what)
    tell(f"changed since {since[:12] if since else 'ever'}: {len(what)} files, {len(touched)} files of tests")
    held = _run("lint", [*lint.ITSELF], tell)
    build(tell, units(affected.units(what), count))
    made = plan(touched, durations(), count, cpu_level())
    files.write(FOLDER / "plan.json", json.dumps(asdict(made)))
    k, n = made.slice
    tell(f"{len(made.whole)} files whole, of the rest slice {k + 1} of {n}")
    held &= _pytest(made, tell)
    try:
        cases = junit.whole(junit.read(FOLDER / f"{name}.xml") for name in ("host", "tests"))
    except ValueError as error:
        raise BuildError(f"pytest broke off: {error}") from None
    faults = skips.faults(cases, accepted) if accepted else []
    for line in (*faults, summary(cases)):
        tell(line)
    return held and not faults


def _pytest(made: Plan, tell: Callable[[str], None]) -> bool:
    """The tests of a plan; whether they held. Those of ALONE run beside the others, in a process of their own, with the
    library of build/tree; what they say comes at the end."""

    def command(name: str, *words: str) -> list[str]:
        options = ["-q", "-p", "no:cacheprovider", f"--ring={FOLDER}/plan.json"]
        options += [f"--cpu-level={made.cpu_level}"]
        options += [f"--junitxml={FOLDER}/{name}.xml", f"--cpu-seconds={FOLDER}/{name}.seconds.json"]
        return [sys.executable, "-m", "pytest", *options, *words]

    for name in ("host", "tests"):
        (FOLDER / f"{name}.xml").unlink(missing_ok=True)
    # A file's tests share what they built.
    spread = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    library = str(tree.DEFAULT / "apex/lib/libapex.so")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "APEX_LIBRARY": library}
    with open(FOLDER / "host.log", "w+b") as log:
        host = subprocess.Popen(
            command("host", ALONE), cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            held = _run("tests", command("tests", *spread, "tests", f"--ignore={ALONE}"), tell)
            held &= host.wait() in (0, NOTHING_CHOSEN)
        finally:
            host.kill()
    tell((FOLDER / "host.log").read_text(encoding="utf-8", errors="replace"))
    return held


def summary(cases: list[junit.Case]) -> str:
    """How many passed, failed and did not run."""
    count = {o: sum(case.outcome == o for case in cases) for o in junit.OUTCOMES}
    left_out = sum(case.left_out for case in cases)
    skipped = count[junit.SKIPPED] - left_out
    return (
        f"{count[junit.PASSED]} passed, {count[junit.FAILED]} failed; "
        f"not run: {left_out} left to other slices and rings, {skipped} skipped"
    )


def take(files_of_seconds: Iterable[Path]) -> None:
    """Takes what `pytest --cpu-seconds` wrote into tests/durations.json. The plan that it followed, plan.json beside
    it, says of which files a slice ran alone."""
    known = durations()
    for path in files_of_seconds:
        followed = path.with_name("plan.json")
        plan = json.loads(followed.read_text(encoding="utf-8")) if followed.is_file() else {}
        at_once = {*plan.get("whole", ()), *plan.get("together", ())}
        for name, spent in json.loads(path.read_text(encoding="utf-8")).items():
            of = 1 if name in at_once else plan.get("slice", (0, 1))[1]
            old = known.get(name, UNKNOWN)
            known[name] = [spent[0] or old[0], round(spent[1] * of, 1) or old[1]]
    lines = (f"{json.dumps(name)}: {json.dumps(seconds)}" for name, seconds in sorted(known.items()))
    files.write(DURATIONS, "{\n" + ",\n".join(lines) + "\n}\n")


def _run(name: str, command: list[str], tell: Callable[[str], None]) -> bool:
    """Runs a step and says how long it took. Raises BuildError for a build that fails."""
    start, before = time.monotonic(), os.times()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    code = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    after = os.times()
    spent = sum(after[2:4]) - sum(before[2:4])
    tell(f"{name}: {time.monotonic() - start:.0f} s, {spent:.0f} CPU seconds")
    if code and name == "build":
        raise BuildError("what the tests need does not build")
    return code == 0
