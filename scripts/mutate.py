"""Changes one place of the sources at a time and sees whether some test notices.

    python scripts/mutate.py kernels                        # csrc/device, on the SIMT executor
    python scripts/mutate.py optimizers --only fused_adam   # Python of optimizers, with their L0 tests
    python scripts/mutate.py kernels --list                 # the places, without running anything
    python scripts/mutate.py kernels --again rows.json      # those that survived an earlier run, alone

Each target (a device unit, a Python module) gets up to --per-kind changes of every kind of KINDS, chosen by the hash of
the line, so that a run can be repeated. A change that does not compile, or compiles to the same, is none, and the next
place is taken. The tests run on a copy of the tree. A change that no test notices is a survivor: mutants_accepted.toml
says why results cannot tell it, or the exit code is 1. --out writes the rows as JSON. More in docs/testing.md.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import marshal
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from mutants import KINDS, ROOT, Mutant, Target, device_targets, family, key_of, optimizer_targets, places

sys.path.insert(0, str(ROOT))
from build_matrix.store import files

ACCEPTED = Path(__file__).with_name("mutants_accepted.toml")
CAUGHT, SURVIVED, INVALID = "caught", "survived", "invalid"
TRIES = 12  # places for each change that is wanted: many do not compile, or are no part of the unit
PATIENCE = 900  # seconds for one run of tests; a change that makes them hang is noticed, too
NONE_RAN = 5  # pytest's exit code


class Workspace:
    """A copy of the tree in which one place is changed."""

    def __init__(self, language: str, target: Target):
        self.held = contextlib.ExitStack()
        self.folder = self.held.enter_context(files.temporary("mutant"))
        for name in (
            "apex",
            "csrc",
            "tests",
            "build_matrix",
            "pyproject.toml",
            "version.txt",
            "related_commits",
        ):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, self.folder / name, **({"symlinks": True} if source.is_dir() else {}))
        (ROOT / "build").mkdir(exist_ok=True)
        (self.folder / "build").symlink_to(ROOT / "build")
        if language == "kernels":
            for unit in (self.folder / "csrc/device").glob("*.cu"):
                if not unit.stem.startswith(family(target.name)):
                    unit.unlink()

    def run(self, tests: tuple[str, ...]) -> tuple[bool, str]:
        """Whether the tests passed, and their last lines."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--no-header",
            *tests,
        ]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            return False, "hangs"
        return done.returncode in (0, NONE_RAN), "\n".join((done.stdout + done.stderr).splitlines()[-40:])

    def code(self, target: str, file: str) -> str:
        """A digest of what the file, or the target's unit that includes it, compiles to; "" where it does not."""
        if file.endswith(".py"):
            try:
                made = compile((self.folder / file).read_text(), file, "exec")
            except SyntaxError:
                return ""
            return hashlib.sha256(marshal.dumps(made)).hexdigest()
        script = (
            "import sys, pathlib; sys.path.insert(0, 'tests'); from simt import build; flags = build.FLAVOURS['plain']"
            f"; unit = build.DEVICE / '{target}.cu'"
            "; made = build._compilation(unit, (*flags.kernel_flags, '-DGPU_WARP_SIZE=32')); build._run_once(*made)"
            "; print(made[1])"
        )
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            return ""
        bare = self.folder / "bare.o"  # debug information names folders and columns
        subprocess.run(["objcopy", "--strip-debug", done.stdout.strip(), bare], check=True)
        return hashlib.sha256(bare.read_bytes()).hexdigest()

    def close(self) -> None:
        self.held.close()


def examine(language: str, target: Target, per_kind: int, again: set[str]) -> list[dict]:
    """The rows of one target; of the keys `again` alone, if there are any.

    Raises RuntimeError where its tests fail without a change.
    """
    per_kind = len(again) or per_kind
    space, rows = Workspace(language, target), []
    try:
        codes = {file: space.code(target.name, file) for file in target.sources}
        sound = Sound(space, target)
        sound.check(target.tests[0])
        for mutants in places(target, language).values():
            left, wanted = per_kind, [m for m in mutants if not again or m.key in again]
            for mutant in wanted[: TRIES * per_kind]:
                row = _try(space, target, mutant, codes[mutant.file])
                if row["outcome"] == CAUGHT:
                    sound.check(row["by"])
                left -= row["outcome"] != INVALID
                rows.append(row)
                if not left:
                    break
    finally:
        space.close()
    return rows


class Sound:
    """Which runs of a target's tests pass without a change: only they can notice one."""

    def __init__(self, space: Workspace, target: Target):
        self.space, self.target, self.known = space, target, set()

    def check(self, tests: tuple[str, ...]) -> None:
        """Raises RuntimeError where they fail."""
        if tests in self.known:
            return
        passed, said = self.space.run(tests)
        if not passed:
            raise RuntimeError(f"{self.target.name}: {' '.join(tests)} fails without a change:\n{said}")
        self.known.add(tests)


def _try(space: Workspace, target: Target, mutant: Mutant, whole: str) -> dict:
    path, start = space.folder / mutant.file, time.monotonic()
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.replaced + "\n"
    path.write_text("".join(lines))
    outcome, by = SURVIVED, ()
    try:
        if space.code(target.name, mutant.file) in ("", whole):
            outcome = INVALID  # or no part of this target
        else:
            for tests in target.tests:
                if not space.run(tests)[0]:
                    outcome, by = CAUGHT, tests
                    break
    finally:
        path.write_text(original)
    return asdict(mutant) | {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - start, 1)}


def why_accepted(row: dict) -> str:
    """Why results cannot tell this survivor, or those of its target alone cannot; "" if nobody says so."""
    known = {entry["mutant"]: entry["reason"] for entry in tomllib.loads(ACCEPTED.read_text())["accepted"]}
    return known.get(key_of(row)) or known.get(f"{row['target']}: {key_of(row)}", "")


def survivors(rows: Path | None) -> dict[str, set[str]]:
    """By target, the keys of those that survived an earlier run and that nobody accepted since."""
    found: dict[str, set[str]] = {}
    for row in json.loads(rows.read_text()) if rows else []:
        if row["outcome"] == SURVIVED and not why_accepted(row):
            found.setdefault(row["target"], set()).add(key_of(row))
    return found


def table(rows: list[dict]) -> str:
    """Caught of all, for each target and kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = ["| target | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for target in dict.fromkeys(row["target"] for row in rows):
        cells = []
        for kind in kinds:
            of = [
                r["outcome"]
                for r in rows
                if (r["target"], r["kind"]) == (target, kind) and r["outcome"] != INVALID
            ]
            cells.append(f"{of.count(CAUGHT)}/{len(of)}" if of else "")
        lines.append(f"| {target} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("language", choices=list(KINDS))
    parser.add_argument("--only", action="append", default=[], metavar="TARGET")
    parser.add_argument("--per-kind", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument(
        "--again", type=Path, metavar="ROWS", help="what --out wrote: its survivors are tried again"
    )
    parser.add_argument("--out", type=Path, help="rows, as JSON")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    targets = device_targets() if options.language == "kernels" else optimizer_targets()
    targets = [target for target in targets if not options.only or target.name in options.only]
    again = survivors(options.again)
    if again:
        targets = [target for target in targets if target.name in again]
    if options.list:
        for target in targets:
            for kind, mutants in places(target, options.language).items():
                print(f"{target.name}: {kind}: {len(mutants)} places, first {mutants[0].key}")
        return 0
    rows, failed = [], False
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(examine, options.language, t, options.per_kind, again.get(t.name, set()))
            for t in targets
        ]
        for done in concurrent.futures.as_completed(waiting):
            try:
                of_target = done.result()
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                failed = True
                continue
            rows += of_target
            for row in (row for row in of_target if row["outcome"] == SURVIVED):
                why = why_accepted(row)
                print(f"survived ({why or 'nobody knows why'}): {row['target']}: {key_of(row)}", flush=True)
                failed |= not why
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1))
    print(table(sorted(rows, key=lambda row: row["target"])))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
