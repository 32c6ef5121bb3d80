"""What scripts/mutate.py changes: kinds of changes, targets with the tests that must notice, and places."""

from __future__ import annotations

import collections
import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FEW = 6  # units
# Most changes are noticed by the first run of a target's tests.
DEVICE_RUNS = "plain-32-ascending", "race-64-shuffled or asan-32-descending", "not (asan or emulated)"
PYTHON_RUNS = "not (executor or cpu_level or gpu)", "cpu_level", "executor and not warp64"

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
            (r"\((float|Math)\)", r"(\1)(long long)"),  # the same for counts: numbers lose their fraction
        ],
        "barrier": [(r"\bsync_threads\(\);", ";")],
    },
    "optimizers": {
        "sign": [(r"(?<=[\w)\]]) \+ (?=[\w(])", " - "), (r"(?<=[\w)\]]) - (?=[\w(])", " + ")],
        "term": [
            (r"(?<=[\w)\]]) \* [\w.]+(?![\w.(])", ""),
            (r"(?<=[\w)\]]) [+-] [a-z][\w.]*(?![\w.(\[])", ""),
        ],
        "eps": [(r"(?<=[\[(, ])(group\[\"eps\"\]|(?:self\.)?eps)(?=[),\]])", r"(\1 * 8)")],
        "mask": [
            (r"\bif (?!not )([^:]+):$", r"if not (\1):"),
            (r"\bif not ([^:]+):$", r"if \1:"),
            (r" and ", " or "),
            (r" is None", " is not None"),
            (r"(?<!strict=)\bTrue\b", "False"),
            (r"(?<!strict=)\bFalse\b", "True"),
        ],
        "dtype": [(r"torch\.float32", "torch.float16"), (r"torch\.int32", "torch.int64")],
    },
}


@dataclass(frozen=True)
class Mutant:
    """One change. `line` counts from 1, `nth` the equal lines of its file; `before` and `after` are it, stripped."""

    target: str
    kind: str
    file: str
    line: int
    nth: int
    column: int
    before: str
    after: str
    replaced: str

    @property
    def key(self) -> str:
        """What mutants_accepted.toml names it by: it stays when lines move."""
        return key_of(asdict(self))


def key_of(row: dict) -> str:
    return f"{row['file']}: {row['before']} => {row['after']}" + (
        f" [{row['nth']}]" if row["nth"] > 1 else ""
    )


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
        test = f"tests/simt/test_{family(unit)}.py"
        own = [path for path, units in units_of.items() if unit in units[: FEW if len(units) <= FEW else 1]]
        sources = sorted(str(path.relative_to(ROOT)) for path in own)
        targets.append(Target(unit, tuple(sources), tuple((test, "-k", run) for run in DEVICE_RUNS)))
    return targets


def family(unit: str) -> str:
    """Units that one file tests: the stages of LAMB with LAMB."""
    return re.sub("_stage[12]$", "", unit)


def optimizer_targets() -> list[Target]:
    """Every module of apex/optimizers and apex/reference. Raises FileNotFoundError where one has no test."""
    targets = []
    for path in sorted([*(ROOT / "apex/optimizers").glob("*.py"), *(ROOT / "apex/reference").glob("*.py")]):
        if path.stem == "__init__":
            continue
        names = OTHER_TESTS.get(path.stem, (f"test_{path.stem}",))
        if path.parent.name == "reference":
            names = (*names, "test_schemas")  # signatures are the ops'
        tests = [f"tests/L0/{name}.py" for name in names]
        for test in tests:
            if not (ROOT / test).is_file():
                raise FileNotFoundError(
                    f"no {test} to test {path.stem}: name others in OTHER_TESTS of mutants.py"
                )
        runs = tuple((*tests, "-m", run) for run in PYTHON_RUNS)
        targets.append(Target(path.stem, (str(path.relative_to(ROOT)),), runs))
    return targets


UNTOUCHED = (
    "#",
    "import ",
    "from ",
    "if TYPE_CHECKING",
    "template",
    "using ",
    "static_assert",
    "raise ",
    "struct ",
    "class ",
    '"',
    'f"',
)

# Tests of what does not bear their name.
COMBINED = ("amp/test_combined_optimizers",)
OTHER_TESTS = {
    "_fp8_norm": ("test_fp8_layer_norm", "test_fp8_rms_norm"),
    "_amp_c": ("test_optimizer_subclasses", "test_amp_C"),
    "_arguments": ("test_defaults", "test_fused_adam", "test_fused_sgd"),
    "_capturable": ("test_empty_groups", "test_fused_adam", "test_fused_novograd"),
    "_combined_optimizer": COMBINED,
    "_fused_optimizer": ("test_fused_sgd", "test_fused_adam", "test_optimizer_checkpoints"),
    "_gradient_norm": ("test_fused_lamb", "test_fused_mixed_precision_lamb", "test_fused_sharded"),
    "_kept_options": ("test_fused_adam", "test_contrib_first_optimizers"),
    "_model_copies": ("amp/test_amp_model_copies", "test_fused_sgd"),
    "_own_steps": ("test_optimizer_checkpoints",),
    "_plan": ("test_fused_sgd", "test_fused_adam", "amp/test_amp_model_copies"),
    "_scalars": ("test_fused_sgd", "test_fused_lars"),
    "_scaling": ("test_fused_sgd", "test_unscaled_gradients"),
    "_tensor_norms": ("test_fused_novograd", "test_fused_lars", "test_fused_sharded"),
    **{f"combined_{n}": COMBINED for n in ("adadelta", "adam", "adamp", "bert_adam", "lamb", "rmsprop", "sgd")},
    "dense_gelu_dense": ("test_dense",),
    "fused_novograd": ("test_fused_novograd", "test_fused_sharded"),
    "lamb": ("test_fused_lamb", *COMBINED),
    "npu_fused": ("test_npu",),
    "_leaves": ("test_layer_norm", "test_dense", "test_xentropy"),
    "_channels": ("test_reduce_bn", "test_batchnorm", "test_welford_mean_var", "test_groupbn"),
    "_masks": ("test_transducer_joint", "test_groupbn"),
    "_multi_tensor": ("test_multi_tensor_sgd", "test_multi_tensor_adam", "test_multi_tensor_scale"),
    "_norm": ("test_layer_norm", "test_rms_norm", "test_without_bindings"),
    "_philox": ("test_transducer_joint",),
    "_rope": ("test_rope",),
    **{
        name: (f"test_{name}", "test_without_bindings")
        for name in (
            *("xentropy", "focal_loss", "index_mul_2d", "transducer_joint", "transducer_loss"),
            *("group_norm", "layer_norm"),
        )
    },
    "rms_norm": ("test_rms_norm", "test_layer_norm"),  # the reference of add_rms_norm
    "multi_tensor_lamb": ("test_fused_lamb",),
    "multi_tensor_lamb_stage1": ("test_multi_tensor_lamb_stages",),
    "multi_tensor_lamb_stage2": ("test_multi_tensor_lamb_stages",),
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
        equal: collections.Counter[str] = collections.Counter()
        for number, line, code in _code_lines(ROOT / file):
            equal[line.strip()] += 1
            for kind, rules in KINDS[language].items():
                where = dict(target=target.name, kind=kind, file=file, line=number, nth=equal[line.strip()])
                for mutant in _changes(where, rules, line, code):
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


def _changes(where: dict, rules: list[tuple], line: str, code: int) -> Iterator[Mutant]:
    for pattern, replacement in rules:
        for match in re.finditer(pattern, line[:code]):
            new = replacement(match) if callable(replacement) else match.expand(replacement)
            after = line[: match.start()] + new + line[match.end() :]
            yield Mutant(
                **where, column=match.start(), before=line.strip(), after=after.strip(), replaced=after
            )
