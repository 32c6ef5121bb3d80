"""Wrong states, each recognised by one function and named in words, with the one command that mends it.

Every function takes the facts (`Facts`) and yields `Problem`s. They are pure: a test writes the facts down.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from apex._loader import bindings, compatibility
from apex._loader import fit as fitting
from apex._loader.choose import Choice
from apex._loader.distributions import Installation
from apex._loader.machine import Machine

NOTE, DEGRADED, BROKEN = "note", "degraded", "broken"
OLDEST_TORCH = (2, 8)
_PIP = "python -m pip"


@dataclass(frozen=True)
class Problem:
    """A wrong state. A note changes nothing; degraded: slower code runs; broken: something cannot run."""

    severity: str
    name: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What the checks look at.

    choices:  the Choice of every unit on every device
    fit:      the fitting.Fit of the bindings, or None without torch
    load_error: what loading the binding raised, as text, or None
    mapped:   stem -> paths of that vendor library in this process
    threads:  how many threads of torch work on CPU tensors, in words; None without torch
    assumed:  the machine is described, not this one
    """

    machine: Machine
    choices: tuple[Choice, ...] = ()
    fit: fitting.Fit | None = None
    load_error: str | None = None
    installation: Installation | None = None
    mapped: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cache_writable: bool = True
    cache_refused: str = ""  #: why the cache's folder is not trusted
    threads: str | None = None
    assumed: bool = False


def find(facts):
    """All problems, the worst first."""
    found = [problem for check in CHECKS for problem in check(facts)]
    return tuple(sorted(found, key=lambda problem: (BROKEN, DEGRADED, NOTE).index(problem.severity)))


def _ours(facts):
    """Name of this project's installed distribution, or of the one that would suit."""
    installed = facts.installation.distributions if facts.installation else ()
    for distribution in installed:
        if distribution.ours:
            return distribution.name
    torch = facts.machine.torch
    return bindings.distribution_for(torch) if torch else "apex-cpu"


def _reinstall(name):
    return f"{_PIP} install --force-reinstall --no-deps {name}"


# ---- who owns the package ---------------------------------------------------------------------------------


def foreign_package(facts):
    """The unrelated `apex` of PyPI, or a build of the public apex, which own the same package."""
    for distribution in facts.installation.distributions if facts.installation else ():
        if distribution.ours:
            continue
        what = "another distribution owns the package apex"
        if distribution.version.startswith("0.9"):
            what = "the unrelated PyPI package `apex` (a Pyramid web toolkit) owns the same package"
        harm = BROKEN if not facts.installation.intact else DEGRADED
        yield Problem(
            harm,
            "foreign apex",
            f"{what}: {distribution.name} {distribution.version} in {distribution.location}",
            f"{_PIP} uninstall -y {distribution.name} && {_reinstall(_ours(facts))}",
        )


def half_deleted(facts):
    """Files of our distribution are gone, as after uninstalling a distribution that shares the package."""
    installation = facts.installation
    if installation is None:
        return
    gone = [
        distribution
        for distribution in installation.distributions
        if distribution.ours and distribution.missing
    ]
    for distribution in gone:
        yield Problem(
            BROKEN,
            "half-deleted apex",
            f"{len(distribution.missing)} files of {distribution.name} {distribution.version} are gone, "
            f"{distribution.missing[0]} among them",
            _reinstall(distribution.name),
        )
    if not installation.intact and not gone:
        yield Problem(
            BROKEN,
            "half-deleted apex",
            f"{Path(installation.package) / '__init__.py'} is not this project's",
            _reinstall(_ours(facts)),
        )


def two_distributions(facts):
    """apex-cuda, apex-rocm and apex-cpu are one package; two of them overwrite each other's files."""
    names = [d.name for d in facts.installation.distributions if d.ours] if facts.installation else []
    if len(names) > 1:
        torch = facts.machine.torch
        keep = bindings.distribution_for(torch) if torch else names[0]
        yield Problem(
            DEGRADED,
            "two apex distributions",
            f"{' and '.join(sorted(names))} are installed; they hold the same files",
            f"{_PIP} uninstall -y {' '.join(sorted(names))} && {_PIP} install --no-deps {keep}",
        )


def shadowed(facts):
    """An installed wheel, and a package that is imported from elsewhere."""
    installation = facts.installation
    for distribution in installation.distributions if installation else ():
        here = Path(installation.package).resolve().parent
        if distribution.ours and here != Path(distribution.location):
            yield Problem(
                NOTE,
                "shadowed wheel",
                f"{distribution.name} is installed in {distribution.location}, apex is imported from {here}",
            )


# ---- torch and the bindings -------------------------------------------------------------------------------


def torch_missing(facts):
    if facts.machine.torch is None:
        yield Problem(BROKEN, "no torch", "PyTorch is not installed for this Python", f"{_PIP} install torch")


def torch_unsupported(facts):
    torch = facts.machine.torch
    if torch is None or facts.fit is None or facts.fit.library:
        return
    numbers = re.findall(r"\d+", torch.version)
    if numbers and (int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        text = f"torch {torch.version} is older than {oldest}, the oldest that apex supports"
        yield Problem(DEGRADED, "unsupported torch", text, f"{_PIP} install 'torch>={oldest}'")
    elif not facts.machine.bindings:
        yield Problem(
            DEGRADED,
            "Python only",
            "this installation has no compiled parts: everything runs on the PyTorch reference",
            f"{_PIP} install {bindings.distribution_for(torch)}",
        )
    else:
        text = f"no binding fits: {facts.fit.reason}; everything runs on the PyTorch reference"
        name = "old build" if facts.fit.stale else "unsupported torch"
        yield Problem(DEGRADED, name, text, bindings.mismatch_remedy(torch, facts.fit))


def binding_half(facts):
    if facts.fit and facts.fit.library and not facts.fit.module:
        yield Problem(DEGRADED, "wrong Python", facts.fit.reason, _reinstall(_ours(facts)))


def loading_failed(facts):
    if facts.load_error:
        yield Problem(BROKEN, "cannot load", facts.load_error, _reinstall(_ours(facts)))


def host_library(facts):
    fault = facts.machine.library
    if fault and facts.machine.bindings:
        yield Problem(BROKEN, "host library", fault, _reinstall(_ours(facts)))


# ---- devices ----------------------------------------------------------------------------------------------


def unknown_device(facts):
    """A GPU that the driver does not know: torch cannot use it either."""
    for device in dict.fromkeys(choice.device for choice in facts.choices):
        if device.platform == "cuda":
            fault = compatibility.driver_knows(device.capability, facts.machine.cuda_driver)
            if fault:
                text = f"{device.arch}: {fault}; torch cannot use it either"
                yield Problem(BROKEN, "old driver", text, "install a newer NVIDIA driver")


def slow_devices(facts):
    """GPUs on which the reference would run, one problem an arch."""
    machine, by_arch = facts.machine, {}
    if machine.binding or machine.env.get("APEX_VARIANT"):
        return  # said by torch_unsupported, or asked for
    for choice in facts.choices:
        if choice.device.platform in ("cuda", "hip") and choice.taken and choice.taken.variant == "reference":
            by_arch.setdefault(choice.device.arch, []).append(choice)
    for arch, choices in by_arch.items():
        device = choices[0].device
        if device.platform == "hip" or not compatibility.driver_knows(device.capability, machine.cuda_driver):
            name, reason, remedy = _why_slow(machine, choices[0])
            units = ", ".join(choice.unit for choice in choices)
            yield Problem(DEGRADED, name, f"{arch}: {reason} (no native code for {units})", remedy)


def _why_slow(machine, choice):
    """(name, reason, remedy) of a choice that ended at the reference on a GPU."""
    vendor = "rocm" if choice.device.platform == "hip" else "cuda"
    reasons = [f"{candidate.variant}: {candidate.reason}" for candidate in choice.passed_over]
    said = "; ".join(dict.fromkeys(reasons))
    others = sorted({pack.vendor for pack in machine.packs})
    if others and vendor not in others:
        reason = f"the installed kernel packs are for {others[0]}, the device needs {vendor}; {said}"
        swap = f"{_PIP} uninstall -y apex-{others[0]} && {_PIP} install --no-deps apex-{vendor}"
        return "wrong vendor", reason, swap
    if any("this driver serves" in reason or "this one serves" in reason for reason in reasons):
        return "old driver", said, "install a newer NVIDIA driver"
    name = "no compiler" if any(reason.startswith("jit: torch brings") for reason in reasons) else "no pack"
    return name, said, f"{_PIP} install --upgrade --no-deps apex-{vendor}"


def refused(facts):
    for text in dict.fromkeys(choice.refusal for choice in facts.choices if choice.refusal):
        yield Problem(BROKEN, "forbidden", text, "unset APEX_VARIANT APEX_STRICT")


def damaged_packs(facts):
    """Code objects that could serve a device but are damaged, even where another variant stands in."""
    archs = {candidate.variant for choice in facts.choices for candidate in choice.candidates}
    for pack in facts.machine.packs:
        if pack.arch not in archs:
            continue
        faults = [pack.fault] if pack.fault else []
        faults += [code.fault for code in pack.units.values() if code.fault]
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            yield Problem(
                DEGRADED, "damaged pack", f"pack {pack.arch}: {faults[0]}{more}", _reinstall(_ours(facts))
            )


def overridden_arch(facts):
    override = facts.machine.env.get("HSA_OVERRIDE_GFX_VERSION")
    if override:
        yield Problem(
            NOTE,
            "HSA_OVERRIDE_GFX_VERSION",
            f"it is set to {override}: the driver reports another chip than is there. Code for that chip "
            "may run, fault, or compute wrongly; apex does not rely on it",
            "unset HSA_OVERRIDE_GFX_VERSION",
        )


def no_gpu(facts):
    torch = facts.machine.torch
    gpus = [device for device in facts.machine.devices if device.platform != "cpu"]
    if torch and (torch.cuda or torch.hip) and not gpus:
        kind = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}"
        yield Problem(NOTE, "no GPU", f"torch is built for {kind} but sees no GPU here; CPU tensors work")


# ---- libraries in this process ----------------------------------------------------------------------------


def two_hip_runtimes(facts):
    copies = facts.mapped.get("libamdhip64.so", ())
    if len(copies) > 1:
        text = (
            f"two HIP runtimes are mapped, and streams of one are unknown to the other: {', '.join(copies)}"
        )
        yield Problem(BROKEN, "two HIP runtimes", text, "unset LD_LIBRARY_PATH LD_PRELOAD")


def cudart_mismatch(facts):
    torch = facts.machine.torch
    majors = {}
    for path in facts.mapped.get("libcudart.so", ()):
        found = re.search(r"libcudart\.so\.(\d+)", path)
        if found:
            majors[found[1]] = path
    wanted = torch.cuda.split(".")[0] if torch and torch.cuda else None
    for major, path in sorted(majors.items()):
        if wanted and major != wanted:
            text = f"torch uses the CUDA {wanted} runtime, this process holds one of CUDA {major} too: {path}"
            yield Problem(DEGRADED, "CUDA runtime mismatch", text, "unset LD_LIBRARY_PATH LD_PRELOAD")


def read_only_cache(facts):
    jitted = any(choice.taken and choice.taken.variant == "jit" for choice in facts.choices)
    if jitted and not facts.cache_writable:
        why = facts.cache_refused or "the cache folder cannot be written"
        text = f"code is compiled anew in every process: {why}"
        yield Problem(NOTE, "no cache", text, "export APEX_CACHE_DIR=<a folder that only you can write>")


def switches(facts):
    set_here = [
        f"{k}={v}" for k, v in facts.machine.env.items() if k in ("APEX_VARIANT", "APEX_STRICT", "APEX_JIT")
    ]
    if set_here:
        yield Problem(NOTE, "switches", f"set in the environment: {', '.join(set_here)}")


CHECKS = (
    foreign_package,
    half_deleted,
    two_distributions,
    shadowed,
    torch_missing,
    torch_unsupported,
    binding_half,
    host_library,
    loading_failed,
    unknown_device,
    slow_devices,
    refused,
    damaged_packs,
    overridden_arch,
    no_gpu,
    two_hip_runtimes,
    cudart_mismatch,
    read_only_cache,
    switches,
)
