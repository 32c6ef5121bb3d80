"""Which apex serves a machine: version, wheel, index root, pins, grades. The same data makes the tables of
the docs.

Reads three small files and imports nothing heavy: an answer takes a fraction of a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from build_matrix import identity, matrix, pins, receipts
from build_matrix.archs import Arch
from build_matrix.errors import BuildError

NOT_THERE = 2  # exit code

# The beginnings of the names of the chips that run a generic pack.
GENERIC = {"gfx9-4-generic": ("gfx94", "gfx95"), "gfx11-generic": ("gfx11",), "gfx12-generic": ("gfx12",)}


@dataclass(frozen=True)
class Question:
    """What a user knows. Empty means: any."""

    torch: str
    accelerator: str  #: cpu, cuda or rocm
    version: str = ""  #: 13.0 of CUDA, 7.2 of ROCm
    arch: str = ""
    python: str = ""  #: cp311
    platform: str = matrix.NATIVE


def label(accelerator: str, version: str) -> str:
    """cu130 of CUDA 13.0, rocm7.2 of ROCm 7.2, cpu."""
    if accelerator == "cuda":
        return f"cu{''.join(version.split('.')[:2])}"
    return f"rocm{'.'.join(version.split('.')[:2])}" if accelerator == "rocm" else "cpu"


def pack_for(arch: str, archs: list[str]) -> tuple[str, str] | None:
    """(pack, why) that would run on a chip, of the packs that are made; None when only JIT is left."""
    if arch in archs:
        return arch, "a pack of exactly this arch"
    wanted = Arch(arch)
    if wanted.vendor == "rocm":
        for generic, families in GENERIC.items():
            if generic in archs and arch.startswith(families):
                return generic, "the generic pack of its family"
        return None
    # A cubin serves later chips of its own major: an sm_80 one runs on sm_86, sm_87 and sm_89.
    same = [a for a in archs if Arch(a).kind == "cubin" and Arch(a).number // 10 == wanted.number // 10]
    older = [a for a in same if Arch(a).number <= wanted.number]
    if older:
        return max(older, key=lambda a: Arch(a).number), "machine code of its family"
    ptx = [a for a in archs if Arch(a).kind == "ptx" and Arch(a).number <= wanted.number]
    if ptx:
        return max(ptx, key=lambda a: Arch(a).number), "PTX, compiled by the driver at first use"
    return None


def answer(question: Question) -> dict:
    """What `compat --json` prints. `found` tells whether the cell exists; if not, `missing` says what does
    not and `nearest` what does. Raises BuildError when the question itself makes no sense."""
    if len(matrix.numbers(question.torch)) < 2:
        raise BuildError(f"{question.torch!r} is no version of torch; say 2.13")
    if question.arch and not re.fullmatch(
        r"(sm|compute)_\d+|gfx[0-9a-f]+|gfx[0-9]+(-\d+)?-generic", question.arch
    ):
        raise BuildError(f"{question.arch!r} is no arch; say sm_90 or gfx942")
    axes = matrix.load()
    accelerator = axes.accelerator(question.accelerator)
    releases = {matrix.minor(v): v for v in axes.torch}
    minor = matrix.minor(question.torch)
    wanted = label(question.accelerator, question.version) if question.version else accelerator.label
    archs = axes.archs(question.accelerator)
    if question.arch and question.accelerator != "cpu" and Arch(question.arch).vendor != question.accelerator:
        raise BuildError(f"{question.arch} is no arch of {question.accelerator}")
    tags = [question.python] if question.python else list(axes.python)
    allowed = [
        t for t in tags if t in axes.python and minor in releases and not axes.why_not(releases[minor], t)
    ]

    missing = []
    if reason := axes.why_no_wheel(question.accelerator, question.platform):
        missing.append(reason)
    if minor not in releases:
        missing.append(f"no binding is built for torch {minor}: apex runs there on its PyTorch reference")
    elif not allowed:
        reason = axes.why_not(releases[minor], tags[0]) or no_python(tags[0])
        missing.append(reason)
    if wanted != accelerator.label:
        missing.append(f"no wheel is built for {wanted}")
    pack = pack_for(question.arch, archs) if question.arch and archs else None
    if question.arch and archs and pack is None:
        missing.append(f"no pack runs on {question.arch}: kernels are compiled there at first use")

    base = {"question": {k: v for k, v in question.__dict__.items() if v}, "found": not missing}
    if missing:
        return base | {"missing": missing, "nearest": nearest(question, minor, releases, archs, accelerator)}
    return base | _found(question, minor, releases[minor], accelerator, allowed, pack)


def _found(question, minor, release, accelerator, tags, pack) -> dict:
    axes = matrix.load()
    version = identity.version()
    pin = pins.torch(release)
    archs = [pack[0]] if pack else axes.archs(question.accelerator)
    toolchains = {name for arch in archs for name in axes.pack(arch).toolchains[:1]}
    return {
        "apex": version,
        "distribution": accelerator.distribution,
        "platform": question.platform,
        "wheel": f"{accelerator.distribution.replace('-', '_')}-{version}+{accelerator.label}",
        "pythons": tags,
        "index_roots": [f"whl/{root}/" for root in accelerator.roots],
        "torch": release,
        "pins": {
            f"torch-{release}": pin.sha if pin else None,
            **{name: p.sha for name in sorted(toolchains) if (p := pins.toolchain(name))},
        },
        "pack": {"arch": pack[0], "reason": pack[1]} if pack else None,
        "grades": grades(archs or [receipts.CPU], release, tags, question.platform),
    }


def grades(cells: list[str], release: str, tags: list[str], platform: str = matrix.NATIVE) -> dict[str, str]:
    """The best that receipts which count for this checkout say of archs (or the CPU) with a release of torch."""
    known = receipts.counting(identity.checkout())
    minor = matrix.minor(release)
    return {
        cell: receipts.best(
            {
                tag: receipts.grade(cell, minor, tag, known, _base(cell, release, tag, platform), platform)
                for tag in tags
            }
        )
        for cell in cells
    }


def _base(cell: str, release: str, tag: str, platform: str) -> str:
    """What is known without a run of the tests."""
    if cell != receipts.CPU:
        return "built"
    if platform != matrix.NATIVE:
        return "linked, never loaded"
    if not (receipts.LOADS / f"torch-{release}-{tag}.json").is_file():
        return "linked"
    from build_matrix import bindings  # reads every source of the bindings

    return receipts.load_grade(release, tag, bindings.source_identity()) or "linked"


def nearest(question: Question, minor: str, releases: dict, archs: list[str], accelerator) -> list[dict]:
    """Cells that exist, nearest first, each as a question that `compat` answers with yes; at most three."""
    wanted = matrix.numbers(minor)
    # 2.15 is nearer to 3.0 than 2.8 is.
    far = 1000
    at = wanted[0] * far + wanted[1]
    places = {m: matrix.numbers(m)[0] * far + matrix.numbers(m)[1] for m in releases}
    by_distance = sorted(releases, key=lambda m: (abs(places[m] - at), -places[m]))
    torches = [minor] if minor in releases else by_distance[:2]
    choices = (
        [question.arch] if question.arch and pack_for(question.arch, archs) else _near_archs(question, archs)
    )
    cells = []
    for torch in torches:
        tags = [t for t in matrix.load().python if not matrix.load().why_not(releases[torch], t)]
        python = question.python if question.python in tags else tags[-1] if question.python else ""
        for arch in choices:
            cell = {"torch": torch, question.accelerator: accelerator.label, "arch": arch, "python": python}
            if question.platform != matrix.NATIVE:
                cell["platform"] = question.platform
            cells.append({key: value for key, value in cell.items() if value})
    return cells[:3] if _has_wheel(question) else []


def _has_wheel(question: Question) -> bool:
    """Nothing is near where a platform has no wheel of an accelerator: the other platforms are other machines."""
    return not matrix.load().why_no_wheel(question.accelerator, question.platform)


def _near_archs(question: Question, archs: list[str]) -> list[str]:
    """Archs that share the longest beginning of their name with the one that was asked for."""
    if not question.arch or not archs:
        return [question.arch]

    def shared(arch: str) -> int:
        pairs = zip(arch, question.arch, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(arch), len(question.arch)))

    return sorted((a for a in archs if Arch(a).kind != "ptx"), key=lambda a: -shared(a))[:2]


def words(answer: dict) -> str:
    """The answer as a person reads it."""
    if not answer["found"]:
        lines = [*answer["missing"], *(["nearest:"] if answer["nearest"] else [])]
        for cell in answer["nearest"]:
            options = " ".join(
                f"--{key} {spoken(key, value)}" for key, value in cell.items() if value != "cpu"
            )
            lines.append(f"  python -m build_matrix compat {options}")
        return "\n".join(lines)
    root = answer["index_roots"][0]
    pythons = ", ".join(map(matrix.dotted, answer["pythons"]))
    lines = [
        f"apex {answer['apex']} for torch {answer['torch']}, Python {pythons}, {answer['platform']}",
        f"  wheel   {answer['wheel']}",
        f"  install pip install {answer['distribution']} --index-url <index>/{root}",
        *(f"  pin     {name} {sha}" for name, sha in answer["pins"].items()),
    ]
    if answer["pack"]:
        lines.append(f"  pack    {answer['pack']['arch']}: {answer['pack']['reason']}")
    lines += [f"  grade   {arch}: {grade}" for arch, grade in answer["grades"].items()]
    return "\n".join(lines)


def spoken(key: str, value: str) -> str:
    """3.11 of cp311, 13.0 of cu130, 7.2 of rocm7.2: as the options take it."""
    if key == "python":
        return matrix.dotted(value)
    if key == "cuda":
        return f"{value[2:-1]}.{value[-1]}"
    return value.removeprefix("rocm") if key == "rocm" else value


def no_python(tag: str) -> str:
    """Why no wheel for that Python can be counted on."""
    axes = matrix.load()
    if tag in axes.optional_python:
        return f"no wheel is built for {tag}, but where such an interpreter is found"
    return f"no wheel is built for {tag}; there are {', '.join(axes.python)}"


def table() -> str:
    """The support table of README and release notes, as Markdown: one row an arch, one column a torch. On platforms of
    a cross compiler the archs of which the same is known share a row."""
    axes = matrix.load()
    minors = [matrix.minor(v) for v in axes.torch]
    rows = {receipts.CPU: "every wheel"} | {p.arch.name: f"apex-{p.arch.vendor}" for p in axes.packs}
    found = [grades(list(rows), release, axes.python_for(release)) for release in axes.torch]
    lines = [
        "| pack | wheel | " + " | ".join(f"torch {m}" for m in minors) + " |",
        "|---" * (2 + len(minors)) + "|",
    ]
    for cell, wheel in rows.items():
        lines.append(f"| {cell} | {wheel} | " + " | ".join(column[cell] for column in found) + " |")
    for platform in axes.platforms:
        if platform.name != matrix.NATIVE:
            lines += _foreign_rows(platform)
    return "\n".join(lines) + "\n"


def _foreign_rows(platform: matrix.Platform) -> list[str]:
    axes = matrix.load()
    wheels = {receipts.CPU: "every wheel"} | {
        p.arch.name: f"apex-{p.arch.vendor}" for p in axes.packs if p.arch.vendor in platform.accelerators
    }
    found = [grades(list(wheels), t, axes.python_for(t), platform.name) for t in axes.torch]
    rows: dict[tuple, list[str]] = {}
    for cell, wheel in wheels.items():
        rows.setdefault((wheel, *(column[cell] for column in found)), []).append(cell)
    return [
        f"| {', '.join(cells)} on {platform.name} | " + " | ".join(texts) + " |"
        for texts, cells in rows.items()
    ]
