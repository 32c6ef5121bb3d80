"""Wrong states, each recognised by one function and named in words, with the one command that mends it.

Every function takes the facts (`Facts`) and yields `Problem`s. They are pure: a test writes the facts down.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from apex._loader import compatibility, offers
from apex._loader.facts import BROKEN, DEGRADED, NOTE, Problem
from apex._loader.machine import SWITCHES, capability

BUILD_AGAIN = "python -m build_matrix tree"


def find(facts):
    """All problems, the worst first."""
    found = [problem for check in CHECKS for problem in check(facts)]
    return tuple(sorted(found, key=lambda problem: (BROKEN, DEGRADED, NOTE).index(problem.severity)))


def _ours(facts):
    """This project's distributions that are installed."""
    installed = facts.installation.distributions if facts.installation else ()
    return [distribution for distribution in installed if distribution.ours]


def _reinstall(facts):
    """The line that lays the installed distribution anew, or the one that would suit."""
    ours = _ours(facts)
    if ours:
        return offers.reinstall(ours[0].name, ours[0].version)
    return offers.install(facts.offer, force=True) if facts.offer else offers.reinstall()


def _mend(facts):
    """The line that brings the wheel for this machine, in place of what is installed; or that mends what keeps any
    wheel from serving it. The same that `which`, `compat` and `explain` name."""
    installed = [(distribution.name, distribution.version) for distribution in _ours(facts)]
    if facts.offer is None:
        return offers.line(facts.machine, installed)
    return facts.offer.mend or offers.swap(facts.offer, installed)


# ---- who owns the package ---------------------------------------------------------------------------------


def foreign_package(facts):
    """The unrelated `apex` of PyPI, or a build of the public apex, which own the same package."""
    for distribution in facts.installation.distributions if facts.installation else ():
        if distribution.ours or distribution.stands_for:
            continue
        what = "another distribution owns the package apex"
        if distribution.version.startswith("0.9"):
            what = "the unrelated PyPI package `apex` (a Pyramid web toolkit) owns the same package"
        harm = BROKEN if not facts.installation.intact else DEGRADED
        yield Problem(
            harm,
            "foreign apex",
            f"{what}: {distribution.name} {distribution.version} in {distribution.location}",
            f"{offers.PIP} uninstall -y {distribution.name} && {_reinstall(facts)}",
        )


def alias_of_another(facts):
    """The alias `apex`, whose version programs read, stands for a distribution or version that is not here."""
    distributions = facts.installation.distributions if facts.installation else ()
    here = {d.name: d.version for d in distributions if d.ours}
    for alias in distributions:
        if alias.stands_for and here.get(alias.stands_for) != alias.version:
            has = ", ".join(f"{name} {version}" for name, version in here.items()) or "none of apex"
            yield Problem(
                NOTE,
                "alias of another apex",
                f"the distribution apex {alias.version} stands for {alias.stands_for}; installed: {has}",
                f"{offers.PIP} uninstall -y apex",
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
            offers.reinstall(distribution.name, distribution.version),
        )
    if not installation.intact and not gone:
        yield Problem(
            BROKEN,
            "half-deleted apex",
            f"{Path(installation.package) / '__init__.py'} is not this project's",
            _reinstall(facts),
        )


def two_distributions(facts):
    """apex-cuda, apex-rocm and apex-cpu are one package; two of them overwrite each other's files, and uninstalling
    one takes the other's away."""
    names = sorted(distribution.name for distribution in _ours(facts))
    if len(names) > 1:
        keep = offers.install(facts.offer, names) if facts.offer else offers.reinstall(names[0])
        text = f"{' and '.join(names)} are installed; they hold the same files, and who uninstalls one breaks the other"
        yield Problem(DEGRADED, "two apex distributions", text, keep)


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
        yield Problem(
            BROKEN, "no torch", "PyTorch is not installed for this Python", f"{offers.PIP} install torch"
        )


def torch_unsupported(facts):
    torch = facts.machine.torch
    if torch is None or facts.fit is None or facts.fit.library:
        return
    if facts.fit.portable:
        yield Problem(NOTE, "portable binding", offers.PORTABLE.format(facts.fit.reason), _mend(facts))
        return
    old = offers.too_old(torch)
    if old:
        yield Problem(DEGRADED, "unsupported torch", *old)
    elif not facts.machine.bindings:
        text, named = "this installation has no compiled parts", facts.machine.env.get("APEX_TREE")
        if named:
            text = f"APEX_TREE names {named}, which holds no compiled parts"
        text += ": everything runs on the PyTorch reference"
        yield Problem(DEGRADED, "Python only", text, "unset APEX_TREE" if named else _mend(facts))
    else:
        text = f"no binding fits: {facts.fit.reason}; everything runs on the PyTorch reference"
        name = "old build" if facts.fit.stale else "unsupported torch"
        yield Problem(DEGRADED, name, text, BUILD_AGAIN if facts.fit.stale else _mend(facts))


def binding_half(facts):
    if facts.fit and facts.fit.library and not facts.fit.module:
        yield Problem(DEGRADED, "wrong Python", facts.fit.reason, _mend(facts))


def unused_card(facts):
    """A card, and a torch that cannot use it."""
    vendor = offers.blind(facts.machine)
    if vendor:
        yield Problem(DEGRADED, "unused card", offers.blindness(facts.machine), _mend(facts))


def wrong_vendor(facts):
    """Packs that never run under this torch, whatever device is here."""
    torch, vendors = facts.machine.torch, sorted({pack.vendor for pack in facts.machine.packs})
    if not _foreign_packs(facts):
        return
    of = next((d.platform for d in facts.machine.devices if d.platform in _VENDOR), None)
    needs = (
        f"the device needs {_VENDOR[of]}"
        if of
        else f"torch {torch.version} is built for neither CUDA nor ROCm"
    )
    if of is None and (torch.cuda or torch.hip):
        needs = f"torch {torch.version} is built for {'ROCm' if torch.hip else 'CUDA'}"
    text = f"the installed kernel packs are for {vendors[0]}, {needs}: they can never run here"
    yield Problem(DEGRADED, "wrong vendor", text, _mend(facts))


_VENDOR = {"cuda": "cuda", "hip": "rocm"}


def _foreign_packs(facts):
    torch, vendors = facts.machine.torch, {pack.vendor for pack in facts.machine.packs}
    if (
        torch is None
        or len(vendors) != 1  # of both vendors in a checkout alone, for tests; no wheel is made so
        or (facts.assumed and not (torch.cuda or torch.hip or "+" in torch.version))
    ):
        return False  # a build that nobody named
    return ("rocm" if torch.hip else "cuda" if torch.cuda else None) not in vendors


def packs_elsewhere(facts):
    """A wheel without packs on a machine for whose cards there are some: compilation at run time stands in."""
    gpus = [device.arch for device in facts.machine.devices if device.platform in _VENDOR]
    if gpus and facts.machine.bindings and not facts.machine.packs and facts.offer and facts.offer.found:
        text = f"{facts.offer.accelerator.distribution} holds compiled kernels for {', '.join(dict.fromkeys(gpus))}"
        yield Problem(NOTE, "packs elsewhere", text, _mend(facts))


def loading_failed(facts):
    if facts.load_error:
        yield Problem(BROKEN, "cannot load", facts.load_error, _reinstall(facts))


def host_library(facts):
    fault = facts.machine.library
    if fault and facts.machine.bindings:
        yield Problem(BROKEN, "host library", fault, _reinstall(facts))


# ---- devices ----------------------------------------------------------------------------------------------


def unknown_device(facts):
    """A GPU that the driver does not know: torch cannot use it either."""
    for device in dict.fromkeys(choice.device for choice in facts.choices):
        if device.platform == "cuda":
            fault = compatibility.driver_knows(device.capability, facts.machine.cuda_driver)
            if fault:
                text = f"{device.arch}: {fault}; torch cannot use it either"
                yield Problem(BROKEN, "old driver", text, offers.DRIVER)


def slow_devices(facts):
    """GPUs on which the reference would run, one problem an arch."""
    machine, by_arch = facts.machine, {}
    if machine.binding or _foreign_packs(facts) or machine.env.get("APEX_VARIANT"):
        return  # said by torch_unsupported or wrong_vendor, or asked for
    for choice in facts.choices:
        if choice.device.platform in ("cuda", "hip") and choice.taken and choice.taken.variant == "reference":
            by_arch.setdefault(choice.device.arch, []).append(choice)
    for arch, choices in by_arch.items():
        device = choices[0].device
        if device.platform == "hip" or not compatibility.driver_knows(device.capability, machine.cuda_driver):
            name, reason, remedy = _why_slow(facts, choices[0])
            units = ", ".join(choice.unit for choice in choices)
            yield Problem(DEGRADED, name, f"{arch}: {reason} (no native code for {units})", remedy)


def _why_slow(facts, choice):
    """(name, reason, remedy) of a choice that ended at the reference on a GPU."""
    reasons = [f"{candidate.variant}: {candidate.reason}" for candidate in choice.passed_over]
    said = "; ".join(dict.fromkeys(reasons))
    if any("this driver serves" in reason or "this one serves" in reason for reason in reasons):
        return "old driver", said, offers.DRIVER
    name = "no compiler" if any(reason.startswith("jit: torch brings") for reason in reasons) else "no pack"
    return name, said, _mend(facts)


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
            yield Problem(DEGRADED, "damaged pack", f"pack {pack.arch}: {faults[0]}{more}", _reinstall(facts))


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


def mistyped_switch(facts):
    """A variable that is no switch of apex and reads like one, and a variant that no device here could be."""
    for name in facts.machine.env:
        if name not in SWITCHES:
            (meant,) = difflib.get_close_matches(name, SWITCHES, 1, cutoff=0)
            text = f"{name} is set, which apex does not read; it reads {meant}"
            yield Problem(NOTE, "mistyped switch", text, f"unset {name}")
    name = facts.machine.env.get("APEX_VARIANT", "").strip()
    if capability(name) or name.startswith("gfx"):
        of = "hip" if name.startswith("gfx") else "cuda"
        if all(choice.device.platform != of for choice in facts.choices):
            text = f"APEX_VARIANT={name} has no say: no device here is of that vendor"
            yield Problem(NOTE, "mistyped switch", text, "unset APEX_VARIANT")


CHECKS = (
    foreign_package,
    alias_of_another,
    half_deleted,
    two_distributions,
    shadowed,
    torch_missing,
    torch_unsupported,
    binding_half,
    unused_card,
    wrong_vendor,
    packs_elsewhere,
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
    mistyped_switch,
)
