"""Changes one place of the sources at a time and sees whether some test notices.

    python scripts/mutate.py kernels                        # csrc/device, on the SIMT executor
    python scripts/mutate.py optimizers --only fused_adam   # Python of optimizers, with their L0 tests
    python scripts/mutate.py kernels --list                 # the places, without running anything

Each target (a device unit, a Python module) gets up to --per-kind changes of every kind of KINDS, chosen by the hash of
the line, so that a run can be repeated. A change that does not compile, or compiles to the same, is none, and the next
place is taken. The tests run on a copy of the tree. A change that no test notices is a survivor: it is in
mutants_accepted.toml, with the reason why results cannot tell it, or the exit code is 1. --out writes the rows as
JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import marshal
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
ACCEPTED = Path(__file__).with_name("mutants_accepted.toml")
CAUGHT, SURVIVED, INVALID = "caught", "survived", "invalid"
FEW = 6  # units
TRIES = 12  # places for each change that is wanted: many do not compile, or are no part of the unit
PATIENCE = 900  # seconds for one run of tests; a change that makes them hang is noticed, too

# kind: (pattern, replacement) of what is changed, of which one match is taken at a time.
KINDS = {
    "kernels": {
        "sign": [
            (r"(?<=[\w)\]]) \+ (?=[\w(*-])", " - "),
            (r"(?<=[\w)\]]) - (?=[\w(*])", " + "),
            (r"(?<=[(,=] )-(?=[a-z(])|(?<=[(])-(?=[a-z(])", ""),
            (r" \+= ", " -= "),
        ],
        "term": [
            (r"\bfma\([^,()]+, [^,()]+, ([^,()]+)\)", r"(\1)"),
            (r"(?<=[\w)\]]) \* [a-z_][\w.\[\]]*(?![\w(<*&])", ""),
            (r"(?<=[\w)\]]) \+ [a-z_][\w.\[\]]*(?![\w(<*&.])", ""),
        ],
        "eps": [(r"(?<![\w.])((?:\w+\.)*eps)(?= ?[),;+])", r"(\1 * 8)")],
        "mask": [
            (r"\bif \(((?:[^()]|\([^()]*\))+)\)", r"if (!(\1))"),
            (r"(?<=[\w)\]]) < (?=[\w(])", " <= "),
            (r"(?<=[\w)\]]) >= (?=[\w(])", " > "),
            (r" && ", " || "),
            (r" \? ([^?:]+) : ([^?:;,]+)(?=[;,)])", r" ? \2 : \1"),
        ],
        "dtype": [
            (r"\(double\)|\bdouble(?= \w+ =)", lambda m: m[0].replace("double", "float")),
            (r"\((float|Math)\)", r"(\1)(short)"),
        ],
        "barrier": [(r"\bsync_threads\(\);", ";")],
    },
    "optimizers": {
        "sign": [(r"(?<=[\w)\]]) \+ (?=[\w(])", " - "), (r"(?<=[\w)\]]) - (?=[\w(])", " + ")],
        "term": [(r"(?<=[\w)\]]) \* [\w.]+(?![\w.(])", ""), (r"(?<=[\w)\]]) [+-] [a-z][\w.]*(?![\w.(\[])", "")],
        "eps": [(r"(?<=[\[(, ])(group\[\"eps\"\]|(?:self\.)?eps)(?=[),\]])", r"(\1 * 8)")],
        "mask": [
            (r"\bif (?!not )([^:]+):$", r"if not (\1):"),
            (r"\bif not ([^:]+):$", r"if \1:"),
            (r" and ", " or "),
            (r" is None", " is not None"),
            (r"\bTrue\b", "False"),
            (r"\bFalse\b", "True"),
        ],
        "dtype": [(r"torch\.float32", "torch.float16"), (r"torch\.int32", "torch.int64")],
    },
}


@dataclass(frozen=True)
class Mutant:
    """One change. `line` counts from 1; `before` and `after` are that line, stripped."""

    target: str
    kind: str
    file: str
    line: int
    column: int
    before: str
    after: str
    replaced: str

    @property
    def key(self) -> str:
        """What mutants_accepted.toml names it by: it stays when lines move."""
        return f"{self.file}: {self.before} => {self.after}"


@dataclass(frozen=True)
class Target:
    """What is changed, and the test files that must notice, in the order in which they are tried."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[tuple[str, ...], ...]


def device_targets() -> list[Target]:
    """Every unit with the headers that it shares with few others; what many include goes to the smallest unit."""
    device = ROOT / "csrc/device"
    closures = {unit.stem: _closure(unit) for unit in sorted(device.glob("*.cu"))}
    units_of: dict[Path, list[str]] = {}
    for unit in sorted(closures, key=lambda name: len(closures[name])):
        for path in closures[unit]:
            units_of.setdefault(path, []).append(unit)
    targets = []
    for unit in closures:
        test = f"tests/simt/test_{re.sub('_stage[12]$', '', unit)}.py"
        if not (ROOT / test).is_file():
            test = "tests/simt/test_multi_tensor_scale.py"  # of multi_tensor_table
        own = [path for path, units in units_of.items() if unit in units[: FEW if len(units) <= FEW else 1]]
        sources = sorted(str(path.relative_to(ROOT)) for path in own)
        runs = [("-k", "plain-32-ascending"), ("-k", "race-64-shuffled or asan-32-descending"), ("-k", "plain or race")]
        targets.append(Target(unit, tuple(sources), tuple((test, *run) for run in runs)))
    return targets


def optimizer_targets() -> list[Target]:
    """Every module of apex/optimizers and every reference of a multi-tensor op that has a test of its name."""
    targets = []
    for path in sorted([*(ROOT / "apex/optimizers").glob("*.py"), *(ROOT / "apex/reference").glob("*.py")]):
        tests = [t for t in (f"tests/L0/test_{path.stem}.py", *EXTRA_TESTS.get(path.stem, ())) if (ROOT / t).is_file()]
        if tests:
            targets.append(Target(path.stem, (str(path.relative_to(ROOT)),), tuple((t,) for t in tests)))
    return targets


UNTOUCHED = ("#", "import ", "from ", "template", "using ", "static_assert", "raise ", "struct ", "class ", '"', 'f"')

# Where the test of a module does not bear its name.
EXTRA_TESTS = {
    "_fused_optimizer": ("tests/L0/test_fused_sgd.py", "tests/L0/test_fused_adam.py"),
    "_capturable": ("tests/L0/test_fused_adam.py",),
    "_gradient_norm": ("tests/L0/test_fused_lamb.py",),
    "_scaling": ("tests/L0/test_fused_sgd.py",),
    "_combined_optimizer": ("tests/L0/amp/test_combined_optimizers.py",),
    **{f"combined_{n}": ("tests/L0/amp/test_combined_optimizers.py",) for n in
       ("adadelta", "adam", "adamp", "bert_adam", "lamb", "rmsprop", "sgd")},
    "multi_tensor_lamb": ("tests/L0/test_fused_lamb.py",),
    "multi_tensor_lamb_stage1": ("tests/L0/test_multi_tensor_lamb_stages.py",),
    "multi_tensor_lamb_stage2": ("tests/L0/test_multi_tensor_lamb_stages.py",),
}  # fmt: skip


def _closure(source: Path) -> set[Path]:
    found, todo = set(), [source]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
        todo += [file for name in names if (file := source.parent / name).is_file()]
    return found


def places(target: Target, language: str) -> dict[str, list[Mutant]]:
    """Every change that could be made, by kind, in an order that only the text decides."""
    found: dict[str, list[Mutant]] = {}
    for file in target.sources:
        for number, line, code in _code_lines(ROOT / file):
            for kind, rules in KINDS[language].items():
                for mutant in _changes(target, kind, rules, file, number, line, code):
                    found.setdefault(kind, []).append(mutant)
    for mutants in found.values():
        mutants.sort(key=lambda m: hashlib.sha256(f"{m.target}{m.key}{m.column}".encode()).hexdigest())
    return found


def _code_lines(path: Path) -> Iterator[tuple[int, str, int]]:
    """Number, text and how many of its characters are code, of each line that may be changed."""
    comment, quoted = ("#", '"""') if path.suffix == ".py" else ("//", None)
    inside = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if quoted and line.count(quoted) % 2:
            inside = not inside
            continue
        bare = line.strip()
        if inside or not bare or bare.startswith((comment, *UNTOUCHED)) or (quoted and quoted in line):
            continue
        yield number, line, line.find(comment) if comment in line else len(line)


def _changes(target, kind, rules, file, number, line, code) -> Iterator[Mutant]:
    for pattern, replacement in rules:
        for match in re.finditer(pattern, line[:code]):
            new = replacement(match) if callable(replacement) else match.expand(replacement)
            after = line[: match.start()] + new + line[match.end() :]
            yield Mutant(target.name, kind, file, number, match.start(), line.strip(), after.strip(), after)


class Workspace:
    """A copy of the tree in which one place is changed."""

    def __init__(self, language: str, target: Target):
        self.folder = Path(tempfile.mkdtemp(prefix="apex-mutant-"))
        for name in ("apex", "csrc", "tests", "build_matrix", "pyproject.toml", "version.txt", "related_commits"):
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, self.folder / name, **({"symlinks": True} if source.is_dir() else {}))
        build = ROOT / "build"
        (build / "simt/objects").mkdir(parents=True, exist_ok=True)
        (self.folder / "build").symlink_to(build)
        if language == "kernels":
            for unit in (self.folder / "csrc/device").glob("*.cu"):
                if unit.stem not in (target.name, "multi_tensor_table"):
                    unit.unlink()

    def run(self, tests: tuple[str, ...]) -> tuple[bool, str]:
        """Whether the tests passed, and their last lines."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            return False, "hangs"
        return done.returncode == 0, "\n".join((done.stdout + done.stderr).splitlines()[-40:])

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
        shutil.rmtree(self.folder, ignore_errors=True)


def examine(language: str, target: Target, per_kind: int) -> list[dict]:
    """The rows of one target. Raises RuntimeError where its tests fail without a change."""
    space, rows = Workspace(language, target), []
    try:
        codes = {file: space.code(target.name, file) for file in target.sources}
        passed, said = space.run(target.tests[0])
        if not passed:
            raise RuntimeError(f"{target.name}: {' '.join(target.tests[0])} fails without a change:\n{said}")
        for mutants in places(target, language).values():
            left = per_kind
            for mutant in mutants[: TRIES * per_kind]:
                row = _try(space, target, mutant, codes[mutant.file])
                left -= row["outcome"] != INVALID
                rows.append(row)
                if not left:
                    break
    finally:
        space.close()
    return rows


def _try(space: Workspace, target: Target, mutant: Mutant, whole: str) -> dict:
    path, start = space.folder / mutant.file, time.monotonic()
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.replaced + "\n"
    path.write_text("".join(lines))
    outcome, by = SURVIVED, ""
    try:
        if space.code(target.name, mutant.file) in ("", whole):
            outcome = INVALID  # or no part of this target
        else:
            for tests in target.tests:
                if not space.run(tests)[0]:
                    outcome, by = CAUGHT, " ".join(tests)
                    break
    finally:
        path.write_text(original)
    return asdict(mutant) | {"outcome": outcome, "by": by, "seconds": round(time.monotonic() - start, 1)}


def accepted() -> dict[str, str]:
    """Survivors that results cannot tell, and why."""
    if not ACCEPTED.is_file():
        return {}
    return {row["mutant"]: row["reason"] for row in tomllib.loads(ACCEPTED.read_text()).get("accepted", [])}


def table(rows: list[dict]) -> str:
    """Caught of all, for each target and kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = ["| target | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for target in dict.fromkeys(row["target"] for row in rows):
        cells = []
        for kind in kinds:
            of = [r["outcome"] for r in rows if (r["target"], r["kind"]) == (target, kind) and r["outcome"] != INVALID]
            cells.append(f"{of.count(CAUGHT)}/{len(of)}" if of else "")
        lines.append(f"| {target} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("language", choices=list(KINDS))
    parser.add_argument("--only", action="append", default=[], metavar="TARGET")
    parser.add_argument("--per-kind", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="rows, as JSON")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    targets = device_targets() if options.language == "kernels" else optimizer_targets()
    targets = [target for target in targets if not options.only or target.name in options.only]
    if options.list:
        for target in targets:
            for kind, mutants in places(target, options.language).items():
                print(f"{target.name}: {kind}: {len(mutants)} places, first {mutants[0].key}")
        return 0
    rows, known, failed = [], accepted(), False
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(examine, options.language, t, options.per_kind): t for t in targets}
        for done in concurrent.futures.as_completed(waiting):
            try:
                of_target = done.result()
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                failed = True
                continue
            rows += of_target
            for row in of_target:
                if row["outcome"] == SURVIVED:
                    key = f"{row['file']}: {row['before']} => {row['after']}"
                    print(f"survived ({known.get(key, 'nobody knows why')}): {row['target']}: {key}", flush=True)
                    failed |= key not in known
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1))
    print(table(sorted(rows, key=lambda row: row["target"])))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
