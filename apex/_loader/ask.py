"""`compat` and `which`: the front ends of `offers.offer` for the command line.

`python -m apex compat|which` and, in a checkout, `python -m build_matrix compat|which`. Python alone runs them.
Exit code 0: a wheel serves; 2: none does, and the nearest are listed; 64: the question makes no sense.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from apex._loader import distributions, explain, npu, offers, probe, release, remedies
from apex._loader.machine import Machine
from apex._loader.offers import Offer
from apex._loader.release import Accelerator, Release

FOUND, NOT_THERE, SENSELESS = 0, 2, 64  # exit codes; 64 is EX_USAGE of sysexits.h, which no answer has
NAMES = {"torch": "torch", "cuda": "CUDA", "rocm": "ROCm", "cann": "CANN", "python": "Python"}


class Parser(argparse.ArgumentParser):
    """Ends with SENSELESS: 1 and 2 are answers of the doctor, and 2 says that no wheel serves."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls on wrong usage."""
        self.print_usage(sys.stderr)
        self.exit(SENSELESS, f"{self.prog}: {message}\n")


def known() -> Release:
    """The release.Release here. Raises LookupError where this installation has none, ValueError where it is damaged."""
    try:
        found = release.load()
    except ValueError as error:
        if "Run: " in str(error):  # a file of a checkout
            raise
        raise ValueError(f"{error}. Run: {remedies.reinstall()}") from error
    if found is None:
        why = "this installation does not say what its release holds: release.json is missing"
        raise LookupError(f"{why}. Run: {remedies.reinstall()}")
    return found


def spoken(key: str, value: str) -> str:
    """3.11 of cp311, 13.0 of cu130, 7.2 of rocm7.2: as the options take it."""
    if key == "python":
        return f"{value[2]}.{value[3:]}"
    if key == "cuda":
        return f"{value[2:-1]}.{value[-1]}"
    return value.removeprefix("rocm") if key == "rocm" else value


# ---- compat: a machine that is written down ----------------------------------------------------------------


def answer(question: Mapping[str, Any], index: str | None = None) -> dict[str, Any]:
    """What `compat --json` prints. `question`: keywords of explain.described, `torch` and `archs` among them. Without
    `python`, of any that serves. Raises ValueError for a question that makes no sense."""
    table, asked = known(), dict(question)
    described = explain.described(**asked)
    if not asked.get("python"):
        described = dataclasses.replace(described, python=_some_python(table, described))
    found = offers.offer(described, table, index)
    said = {key: list(value) if key == "archs" else value for key, value in asked.items() if value}
    base = {"question": said, "found": found.found, "reasons": list(found.reasons)}
    if not found.found:
        cells = offers.nearest(found)
        if not asked.get("python"):
            cells = [{key: value for key, value in cell.items() if key != "python"} for cell in cells]
        return base | {"missing": list(found.missing), "mend": found.mend, "nearest": cells}
    return base | {"command": found.command} | _facts(found, asked.get("python"))


def _some_python(table: Release, described: Machine) -> str:
    """This Python, where it has a wheel with a binding for that torch; else the newest that has."""
    tags = _tags(table, described)
    return described.python if described.python in tags else tags[-1]


def _tags(table: Release, described: Machine) -> tuple[str, ...]:
    """Pythons with a wheel whose binding is for that torch, or any wheel's; of an NPU, those that torch_npu is for."""
    if described.npu:
        torch = described.torch.version if described.torch else ""
        cann = described.npu.cann
        fits = npu.fitting(table.npu, torch, cann=cann) or npu.fitting(table.npu, cann=cann) or table.npu
        found = {tag for row in fits for tag in row.python}
        return tuple(tag for tag in (*table.pythons, *table.optional) if tag in found)
    if described.system in table.portable:
        return (*table.pythons, *table.optional)
    return table.pythons_for(_minor(described)) or table.pythons


def _minor(described: Machine) -> str:
    return (described.torch.minor if described.torch else None) or ""


def _facts(found: Offer, python: str | None) -> dict[str, Any]:
    """Of an offer that serves: it has a torch, a fit, and what is taken on each device."""
    table, minor, machine = found.release, _minor(found.machine), found.machine
    runs = [(choice.device.arch, choice.taken.variant) for choice in found.choices if choice.taken]
    archs = [variant for _, variant in runs if variant in table.toolchains] or [
        pack.arch for pack in machine.packs
    ]
    toolchains = sorted({table.toolchains[arch] for arch in archs})
    binding = found.fit.kind if found.fit else ""
    known = table.torch.get(minor) if binding == "exact" else None
    pins = {f"torch-{known}": _pin_of_torch(table, minor)} if known else {}
    pins |= {name: table.pins[name] for name in toolchains if name in table.pins}
    tags = [machine.python] if python else list(_tags(table, machine))
    return {
        "apex": table.version,
        "distribution": found.accelerator.distribution,
        "platform": machine.system,
        "wheel": found.wheel,
        "pythons": tags,
        "index_roots": [f"whl/{root}/" for root in found.accelerator.roots],
        "torch": known or (machine.torch.version if machine.torch else None),
        "binding": binding,
        "pins": pins,
        "packs": [{"arch": arch, "runs": variant} for arch, variant in runs],
        "binding_grades": _binding_grades(table, minor, tags) if binding == "exact" else {},
    } | _torch_npu(found, python)


def _binding_grades(table: Release, minor: str, tags: Sequence[str]) -> dict[str, str]:
    return {tag: grade for tag in tags if (grade := table.grades.get((minor, tag)))}


def _torch_npu(found: Offer, python: str | None) -> dict[str, Any]:
    """Which torch_npu goes with the torch and CANN, of an offer for NPUs."""
    if not found.accelerator.pure or found.machine.npu is None:
        return {}
    torch = found.machine.torch.version if found.machine.torch else ""
    rows = npu.fitting(
        found.release.npu, torch, python and found.machine.python or "", found.machine.npu.cann
    )
    return {"torch_npu": [{**vars(row), "python": list(row.python)} for row in rows]}


def _pin_of_torch(table: Release, minor: str) -> str | None:
    return next((row.git_version for row in table.bindings if row.torch == minor), None)


def _spoken_grades(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How far what serves was tried: the binding of each Python, and, as a checkout knows it, each arch."""
    bindings = {
        f"binding of Python {spoken('python', t)}": grade for t, grade in found["binding_grades"].items()
    }
    return [*bindings.items(), *found.get("grades", {}).items()]


def words(found: Mapping[str, Any], prog: str) -> str:
    """The answer as a person reads it."""
    if not found["found"]:
        lines = [
            *found["missing"],
            f"to mend it: {found['mend']}",
            *(["nearest:"] if found["nearest"] else []),
        ]
        for cell in found["nearest"]:
            options = " ".join(f"--{key} {spoken(key, value)}" for key, value in cell.items() if key != "cpu")
            lines.append(f"  {prog} {options}")
        return "\n".join(lines)
    pythons = ", ".join(spoken("python", tag) for tag in found["pythons"])
    lines = [
        f"apex {found['apex']} for torch {found['torch']}, Python {pythons}, {found['platform']}",
        f"  wheel   {found['wheel']}",
        f"  install {found['command']}",
        f"  binding {found['binding']}",
        *(f"  pin     {name} {sha}" for name, sha in found["pins"].items()),
        *(f"  NPU     {_spoken_row(row)}" for row in found.get("torch_npu", ())),
        *(f"  runs    {reason}" for reason in found["reasons"]),
        *(f"  grade   {what}: {grade}" for what, grade in _spoken_grades(found)),
    ]
    return "\n".join(lines)


def _spoken_row(row: Mapping[str, Any]) -> str:
    pythons = ", ".join(spoken("python", tag) for tag in row["python"])
    return f"torch_npu {row['torch_npu']} for CANN {row['cann']}, torch {row['torch']}, Python {pythons}"


def compat_parser(prog: str) -> Parser:
    """The options of `compat`."""
    parser = Parser(
        prog=prog,
        description="Which apex serves a machine, what the loader would run there, and the line that installs it. Exit "
        "code 2 when none serves; then the nearest are listed.",
    )
    parser.add_argument("--torch", help="2.13, or as torch prints it: 2.13.0+cu128")
    parser.add_argument("--cuda", help="12.8: of torch, where its label does not say")
    parser.add_argument("--rocm", help="7.2: of torch, where its label does not say")
    parser.add_argument("--cann", help="8.5.0: of Ascend NPUs")
    parser.add_argument("--git-version", help="torch.version.git_version of a build that is no release")
    parser.add_argument("--arch", action="append", default=[], help="sm_90, gfx942, npu; may be repeated")
    parser.add_argument("--driver", help="NVIDIA driver: branch (550) or the CUDA that it serves (12.4)")
    parser.add_argument("--python", default="", help="3.11; default: any")
    parser.add_argument("--platform", help="linux_aarch64, win_amd64; default: this one")
    parser.add_argument(
        "--index", help="where the index is served; default: APEX_INDEX, else what the wheels say"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def compat(
    arguments: Sequence[str],
    prog: str,
    more: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda question, found: {},
) -> int:
    """The command. `more`(question, found): what a checkout knows besides. Returns the exit code."""
    parser = compat_parser(prog)
    asked = parser.parse_args(arguments)
    if not asked.torch:
        parser.error("--torch is required")
    question = {
        "torch": asked.torch,
        "archs": asked.arch,
        "cuda": asked.cuda,
        "rocm": asked.rocm,
        "cann": asked.cann,
        "driver": asked.driver,
        "python": asked.python,
        "system": asked.platform,
        "git_version": asked.git_version,
    }
    try:
        found = answer(question, asked.index)
    except (ValueError, LookupError) as error:
        parser.error(str(error))
    found |= more(question, found)
    print(json.dumps(found, indent=1) if asked.json else words(found, prog))
    return FOUND if found["found"] else NOT_THERE


# ---- which: this machine -----------------------------------------------------------------------------------


def of_machine(described: Machine, index: str | None = None, installed: Sequence[str] = ()) -> dict[str, Any]:
    """What `which --json` prints of a Machine. `found`: whether `command` is the line for it, in place of what is
    `installed` (distributions); `reasons` say why, or why not, `mend` what helps, `nearest` are the cells that exist,
    each with its own line."""
    table = known()
    found = offers.offer(described, table, index)
    torch, archs = described.torch, [d.arch for d in described.devices if d.platform != "cpu"]
    environment = {
        "python": described.python,
        "torch": torch.version if torch else None,
        "accelerator": found.accelerator.name,
        "version": (torch.hip or torch.cuda or "") if torch else "",
        "archs": archs,
        "platform": described.system,
    }
    base = {"environment": environment, "found": found.found}
    if found.found:
        others = [name for name in installed if name != found.accelerator.distribution]
        return base | {"command": offers.install(found, others), "reasons": list(found.reasons)}
    near = [(found.accelerator, _cell(cell)) for cell in offers.nearest(found)]
    lines: dict[str, str] = {}
    for accelerator, cell in _without_torch(described, table) if torch is None else near:
        offered = dataclasses.replace(found, accelerator=accelerator, index=table.root(accelerator, index))
        lines.setdefault(offers.install(offered), cell)
    nearest = [{"cell": cell, "command": command} for command, cell in lines.items()]
    return base | {"reasons": list(found.missing), "mend": found.mend, "nearest": nearest}


def _without_torch(described: Machine, table: Release) -> list[tuple[Accelerator, str]]:
    """The newest torch that this Python can have, for each accelerator; nothing where the Python has no wheel."""
    minors = [minor for minor in table.torch if described.python in table.pythons_for(minor)]
    rows = npu.fitting(table.npu, python=described.python)
    return [
        (accelerator, f"torch {rows[-1].torch if accelerator.pure else minors[-1]}, {accelerator.label}")
        for accelerator in table.accelerators
        if (rows if accelerator.pure else minors)
        and not table.why_no_wheel(accelerator.name, described.system)
    ]


def _cell(cell: Mapping[str, str]) -> str:
    """ "torch 2.13, CUDA 13.0, sm_90, Python 3.11" """
    of = {k: spoken(k, v) for k, v in cell.items() if k != "platform"}
    return ", ".join(f"{NAMES.get(key, '')} {value}".strip() for key, value in of.items())


def spoken_machine(described: Machine) -> str:
    """ "Python 3.11, torch 2.13.0 for CUDA 13.0, sm_90" """
    torch, native = described.torch, next(iter(known().platforms))
    named = [("CUDA", torch.cuda), ("ROCm", torch.hip)] if torch else []
    here = described.npu
    toolkit = "".join(f" for {name} {version}" for name, version in named if version)
    cards = ", ".join(dict.fromkeys(d.arch for d in described.devices if d.platform != "cpu"))
    if here:
        cards = f"torch_npu {here.torch_npu}" + (f", CANN {here.cann}" if here.cann else "")
    cards = cards or "no GPU"
    on = "" if described.system == native else f", {described.system}"
    said = f"torch {torch.version}{toolkit}" if torch else "no torch"
    return f"Python {spoken('python', described.python)}, {said}, {cards}{on}"


def which(arguments: Sequence[str], prog: str) -> int:
    """The command. Prints the line, and nothing else, to standard output; returns the exit code."""
    parser = Parser(
        prog=prog,
        description="The one pip line for this interpreter, its torch and its cards. Exit code 2 when no wheel serves; "
        "then the nearest are listed.",
    )
    parser.add_argument(
        "--index", help="where the index is served; default: APEX_INDEX, else what the wheels say"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    asked = parser.parse_args(arguments)
    described = probe.describe()
    installed = [each.name for each in distributions.describe().distributions if each.ours]
    try:
        found = of_machine(described, asked.index, installed)
    except (ValueError, LookupError) as error:
        parser.error(str(error))
    if asked.json:
        print(json.dumps(found, indent=1))
        return FOUND if found["found"] else NOT_THERE
    said = [f"  {reason}" for reason in found["reasons"]]
    if not found["found"]:
        said.append(f"to mend it: {found['mend']}")
    print(spoken_machine(described), *said, sep="\n", file=sys.stderr)
    if found["found"]:
        print(found["command"])
    for near in found.get("nearest", ()):
        print(f"{near['cell']}: {near['command']}")
    return FOUND if found["found"] else NOT_THERE
