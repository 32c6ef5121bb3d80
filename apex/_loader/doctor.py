"""`python -m apex`: what is here, what every op would run, what is wrong and how to mend it."""

from __future__ import annotations

import dataclasses
import json
import warnings
from dataclasses import dataclass

from apex._loader import (
    bindings,
    choose,
    distributions,
    machine,
    mapped,
    offers,
    problems,
    registry,
    release,
    tree,
)
from apex._loader.facts import BROKEN, DEGRADED, NOTE, Facts, Problem
from apex._loader.jit import cache

EXIT = {"fine": 0, DEGRADED: 1, BROKEN: 2}


@dataclass(frozen=True)
class Report:
    """The facts, and the problems found in them."""

    facts: Facts
    problems: tuple[Problem, ...]

    @property
    def state(self):
        """ "fine", "degraded" or "broken": the worst of the problems."""
        worst = [problem.severity for problem in self.problems if problem.severity != NOTE]
        return worst[0] if worst else "fine"

    @property
    def exit_code(self):
        return EXIT[self.state]


def examine():
    """The Report of this machine. Loads the binding, to know that it loads."""
    described = machine.describe()
    described, fit = _fitted(described)
    error = _try_to_load() if fit else None
    stems = ("libamdhip64.so", "libcudart.so")
    facts = Facts(
        machine=described,
        choices=choices(described),
        fit=fit,
        load_error=error,
        installation=distributions.describe(),
        mapped={stem: tuple(mapped.find(stem)) for stem in stems},
        cache_writable=cache.usable(),
        cache_refused=cache.refusal(),
        threads=cpu_threads() if fit else None,
        offer=_offer(described),
    )
    return Report(facts, problems.find(facts))


def cpu_threads():
    """How many of torch's threads work on CPU tensors, in words."""
    import torch

    pool = torch.__config__.parallel_info().rpartition("backend:")[2].strip()
    if not pool or "no parallel" in pool.lower():
        return "1: this torch was built without threads for its operators"
    return f"{torch.get_num_threads()} of torch's own ({pool})"


def assume(described):
    """The Report of a machine that is written down and is not this one."""
    described, fit = _fitted(described)
    facts = Facts(
        machine=described, choices=choices(described), fit=fit, assumed=True, offer=_offer(described)
    )
    return Report(facts, problems.find(facts))


def _offer(described):
    """What the release has for a machine; None where this installation does not know its release."""
    known = release.load()
    return offers.offer(described, known) if known else None


def _fitted(described):
    """(machine with the reason why no binding serves, Fit); the Fit is None without torch."""
    if described.torch is None:
        return described, None
    portable = bool(described.bindings) and described.library is None
    fit = bindings.choose(described.torch, described.python, described.bindings, portable)
    return dataclasses.replace(described, binding=fit.reason if fit.kind == "reference" else None), fit


def choices(described):
    """The Choice of every op on every device, and on GPUs of the helper units too."""
    ops = registry.ops()
    helpers = tuple(unit for unit in registry.units() if unit not in ops)
    found = []
    for device in described.devices:
        for unit in ops + (helpers if device.platform != "cpu" else ()):
            found.append(choose.choose(described, described.packs, unit, device))
    return tuple(found)


def _try_to_load():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bindings.load()
    except Exception as error:  # whatever it is, it is what the user would meet
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


# ---- for programs -----------------------------------------------------------------------------------------


def as_json(report):
    """The report as JSON text; keys are stable."""
    facts, described = report.facts, report.facts.machine
    installation = facts.installation
    value = {
        "apex": tree.version(),
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


def _offered(offer):
    """The verdict of `which` and `compat` on this machine."""
    if offer is None:
        return None
    said = {"found": offer.found, "wheel": offer.wheel, "command": offer.command}
    return said | {"reasons": list(offer.reasons if offer.found else offer.missing)}


def _choice(choice):
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


def _dotted(version):
    return ".".join(map(str, version)) if version else None


# ---- for people -------------------------------------------------------------------------------------------


def as_text(report):
    """The report as one screen of plain text."""
    return "\n".join((*_heading(report), "", *_table(report), *_trouble(report)))


def _heading(report):
    facts, described = report.facts, report.facts.machine
    torch = described.torch
    commit = f" (git {torch.git_version[:10]})" if torch and torch.git_version else ""
    packs = " ".join(sorted(pack.arch for pack in described.packs)) or "none"
    rows = [
        ("torch", f"{torch.version}{commit}" if torch else "not installed"),
        ("python", f"{described.python}, {described.system}"),
        ("binding", facts.fit.words if facts.fit else "none"),
        ("library", described.library or "libapex.so"),
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
        rows.append(("HIP", _dotted(described.hip_runtime)))
    for device in described.devices:
        name = f"  {device.name}" if device.name else ""
        rows.append((f"{device.platform}:{device.index}", f"{device.arch}{name}"))
    if facts.threads:
        rows.append(("threads", facts.threads))
    title = f"apex {tree.version()}: {report.state}"
    return [title, *(f"  {key:<9} {value}" for key, value in rows)]


def _table(report):
    """What runs, with ops of one outcome on one line, and below why better variants were passed over."""
    groups = {}
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


def _trouble(report):
    lines = []
    for problem in report.problems:
        lines += ["", f"{problem.severity}: {problem.name}", f"  {problem.text}"]
    mend = next((problem.remedy for problem in report.problems if problem.remedy and _counts(problem)), None)
    return [*lines, "", f"to mend it: {mend}"] if mend else lines


def _counts(problem):
    return problem.severity != NOTE


def show(report):
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
