"""`python -m apex`: what is here, what every op would run, what is wrong and how to mend it."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass
from typing import Any

from apex._loader import (
    bindings,
    blas,
    choose,
    distributions,
    installed,
    layout,
    library,
    mapped,
    offers,
    probe,
    problems,
    registry,
    release,
)
from apex._loader.choose import Choice
from apex._loader.errors import InstallationError
from apex._loader.facts import BROKEN, DEGRADED, NOTE, Facts, Problem
from apex._loader.jit import cache
from apex._loader.machine import Machine
from apex._loader.offers import Offer

EXIT = {"fine": 0, DEGRADED: 1, BROKEN: 2}


@dataclass(frozen=True)
class Report:
    """The facts, and the problems found in them."""

    facts: Facts
    problems: tuple[Problem, ...]

    @property
    def state(self) -> str:
        """ "fine", "degraded" or "broken": the worst of the problems."""
        worst = [problem.severity for problem in self.problems if problem.severity != NOTE]
        return worst[0] if worst else "fine"

    @property
    def exit_code(self) -> int:
        return EXIT[self.state]


def examine() -> Report:
    """The Report of this machine. Loads the binding, to know that it loads."""
    facts = _facts(probe.describe())
    stems = ("libamdhip64.so", "libcudart.so")
    error = _try_to_load() if facts.fit else None
    facts = dataclasses.replace(
        facts,
        load_error=error,
        unserved=_unserved() if facts.fit and not error else (),
        installation=distributions.describe(),
        damage=installed.damage(),
        mapped={stem: tuple(mapped.find(stem)) for stem in stems},
        cache_writable=cache.usable(),
        cache_refused=cache.refusal(),
        products=_products(facts.machine) if facts.fit else {},
        threads=cpu_threads() if facts.fit else None,
    )
    return Report(facts, problems.find(facts))


def assume(described: Machine) -> Report:
    """The Report of a machine that is written down and is not this one."""
    facts = dataclasses.replace(_facts(described), assumed=True)
    return Report(facts, problems.find(facts))


def _facts(described: Machine) -> Facts:
    """What any machine's description tells, this one's or another's."""
    ops = registry.kernel_ops()
    helpers = tuple(unit for unit in registry.units() if unit not in ops)
    found, known = choose.outcome(described, ops, helpers), release.known()
    offer = (
        offers.offer(described, known) if known else None
    )  # None: this installation does not know its release
    return Facts(machine=found.machine, choices=found.choices, fit=found.fit, offer=offer)


def _unserved() -> tuple[str, ...]:
    """The ops that the portable binding, if it is the one that was loaded, leaves to their reference."""
    if bindings.load().kind != "portable":
        return ()
    from apex._portable import module

    return module.without_kernel()


def _products(described: Machine) -> dict[str, str]:
    """Which BLAS multiplies on each kind of GPU that is here. Nothing where there is no libapex to ask."""
    platforms = {device.platform for device in described.devices} - {"cpu"}
    try:
        return {p: blas.describe(library.load(), library.PLATFORMS.index(p)) for p in sorted(platforms)}
    except (InstallationError, AttributeError):
        return {}


def cpu_threads() -> str:
    """How many of torch's threads work on CPU tensors, in words."""
    import torch

    pool = torch.__config__.parallel_info().rpartition("backend:")[2].strip()
    if not pool or "no parallel" in pool.lower():
        return "1: this torch was built without threads for its operators"
    return f"{torch.get_num_threads()} of torch's own ({pool})"


def _try_to_load() -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bindings.load()
    except Exception as error:  # whatever it is, it is what the user would meet
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


# ---- for programs -----------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """The report as JSON text; keys are stable."""
    facts, described = report.facts, report.facts.machine
    installation = facts.installation
    value = {
        "apex": layout.version(),
        "state": report.state,
        "exit_code": report.exit_code,
        "machine": {
            "torch": vars(described.torch) if described.torch else None,
            "python": described.python,
            "system": described.system,
            "cuda_driver": _dotted(described.cuda_driver),
            "hip_runtime": _dotted(described.hip_runtime),
            "cpu_level": described.cpu_level,
            "cpu_threads": facts.threads,
            "products": dict(facts.products),
            "npu": vars(described.npu) if described.npu else None,
            "devices": [vars(device) for device in described.devices],
            "packs": [{"arch": p.arch, "vendor": p.vendor, "kind": p.kind} for p in described.packs],
            "bindings": [vars(binding) for binding in described.bindings],
            "env": dict(described.env),
        },
        "binding": {
            "kind": facts.fit.kind if facts.fit else "reference",
            "fits": bool(facts.fit and facts.fit.library),
            "reason": facts.fit.reason if facts.fit else "no torch",
        },
        "offer": _offered(facts.offer),
        "distributions": [vars(d) for d in installation.distributions] if installation else [],
        "choices": [_choice(choice) for choice in facts.choices],
        "problems": [vars(problem) for problem in report.problems],
    }
    return json.dumps(value, indent=2)


def _offered(offer: Offer | None) -> dict[str, Any] | None:
    """The verdict of `which` and `compat` on this machine."""
    if offer is None:
        return None
    said = {"found": offer.found, "wheel": offer.wheel, "command": offer.command}
    return said | {"reasons": list(offer.reasons if offer.found else offer.missing)}


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "unit": choice.unit,
        "device": f"{choice.device.platform}:{choice.device.index}",
        "arch": choice.device.arch,
        "taken": choice.taken.variant if choice.taken else None,
        "candidates": [
            {"variant": c.variant, "rank": c.rank, "taken": c.taken, "reason": c.reason}
            for c in choice.candidates
        ],
    }


def _dotted(version: tuple[int, ...] | None) -> str | None:
    return ".".join(map(str, version)) if version else None


# ---- for people -------------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """The report as one screen of plain text."""
    return "\n".join((*_heading(report), "", *_table(report), *_trouble(report)))


def _heading(report: Report) -> list[str]:
    facts, described = report.facts, report.facts.machine
    torch = described.torch
    commit = f" (git {torch.git_version[:10]})" if torch and torch.git_version else ""
    packs = " ".join(sorted(pack.arch for pack in described.packs)) or "none"
    rows = [
        ("torch", f"{torch.version}{commit}" if torch else "not installed"),
        ("python", f"{described.python}, {described.system}"),
        ("binding", facts.fit.words if facts.fit else "none"),
        ("library", described.library or installed.LIBRARY),
        ("packs", packs),
    ]
    if facts.assumed and facts.offer:
        found = facts.offer.found
        rows.append(("wheel", facts.offer.wheel if found else f"none serves: {facts.offer.missing[0]}"))
    for compiler in described.compilers:
        name = "NVRTC" if compiler.vendor == "cuda" else "hipRTC, ROCm"
        rows.append(("jit", f"{name} {_dotted(compiler.version)}"))
    if described.cuda_driver:
        rows.append(("driver", f"serves CUDA {_dotted(described.cuda_driver)}"))
    if described.hip_runtime:
        rows.append(("HIP", f"{_dotted(described.hip_runtime)}"))
    for device in described.devices:
        name = f"  {device.name}" if device.name else ""
        rows.append((f"{device.platform}:{device.index}", f"{device.arch}{name}"))
    if described.npu:
        rows.append(("npu", f"torch_npu {described.npu.torch_npu or '?'}, CANN {described.npu.cann or '?'}"))
    rows += [("products", f"{platform}: {words}") for platform, words in facts.products.items()]
    if facts.threads:
        rows.append(("threads", facts.threads))
    title = f"apex {layout.version()}: {report.state}"
    return [title, *(f"  {key:<9} {value}" for key, value in rows)]


def _table(report: Report) -> list[str]:
    """What runs, with ops of one outcome on one line, and below why better variants were passed over."""
    groups: dict[tuple[Any, ...], dict[str, None]] = {}
    for choice in report.facts.choices:
        taken = (choice.taken.variant, choice.taken.reason) if choice.taken else ("nothing", choice.refusal)
        why = tuple((c.variant, c.reason) for c in choice.passed_over)
        device = f"{choice.device.platform} {choice.device.arch}"
        groups.setdefault((device, taken, why), {})[choice.unit] = None
    lines = ["what would run"]
    for (device, (variant, reason), why), units in groups.items():
        lines.append(f"  {device}: {variant} ({reason})")
        lines.append(f"    {', '.join(units)}")
        lines += [f"    not {other}: {because}" for other, because in why]
    return lines


def _trouble(report: Report) -> list[str]:
    lines = []
    for problem in report.problems:
        lines += ["", f"{problem.severity}: {problem.name}", f"  {problem.text}"]
    mend = next((problem.remedy for problem in report.problems if problem.remedy and _counts(problem)), None)
    return [*lines, "", f"to mend it: {mend}"] if mend else lines


def _counts(problem: Problem) -> bool:
    return problem.severity != NOTE


def show(report: Report) -> None:
    """Prints the screen, in colour where rich is installed and the output is a terminal."""
    text = as_text(report)
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(text)
        return
    coloured = Text(text)
    coloured.highlight_words(["fine"], "bold green")
    coloured.highlight_words(["degraded"], "bold yellow")
    coloured.highlight_words(["broken"], "bold red")
    coloured.highlight_regex(r"(?m)^to mend it: .*$", "bold")
    Console(highlight=False, soft_wrap=True).print(coloured)
