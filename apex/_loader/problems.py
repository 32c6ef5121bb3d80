"""Wrong states, each recognised by one function and named in words, with the one command that mends it.

Every function takes the facts (`Facts`) and yields `Problem`s. They are pure: a test writes the facts down.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator

from apex._loader import compatibility, npu, offers, owners, system
from apex._loader.choose import Choice
from apex._loader.environment import BINDING, SWITCHES
from apex._loader.facts import BROKEN, DEGRADED, NOTE, Facts, Problem
from apex._loader.machine import Npu, Torch, capability
from apex._loader.release import Release

BUILD_AGAIN = "python -m build_matrix tree"


def find(facts: Facts) -> tuple[Problem, ...]:
    """All problems, the worst first."""
    found = [problem for check in CHECKS for problem in check(facts)]
    return tuple(sorted(found, key=lambda problem: (BROKEN, DEGRADED, NOTE).index(problem.severity)))


def _mend(facts: Facts) -> str:
    """The line that brings the wheel for this machine, in place of what is installed; or that mends what keeps any
    wheel from serving it. The same that `which`, `compat` and `explain` name."""
    installed = [(distribution.name, distribution.version) for distribution in owners.ours(facts)]
    if facts.offer is None:
        return offers.line(facts.machine, installed)
    return facts.offer.mend or offers.swap(facts.offer, installed)


# ---- torch and the bindings -------------------------------------------------------------------------------


def torch_missing(facts: Facts) -> Iterator[Problem]:
    if facts.machine.torch is None:
        remedy = offers.bring_torch(facts.machine, _table(facts))
        yield Problem(BROKEN, "no torch", "PyTorch is not installed for this Python", remedy)


def _table(facts: Facts) -> Release | None:
    return facts.offer.release if facts.offer else None


def torch_unsupported(facts: Facts) -> Iterator[Problem]:
    torch = facts.machine.torch
    if torch is None or facts.fit is None or facts.fit.library or facts.machine.env.get(BINDING):
        return  # what APEX_BINDING asks for is a note (switches), or cannot be had (loading_failed)
    if facts.fit.portable:
        table = _table(facts)
        alone = offers.is_alone(facts.machine, table)  # another wheel has no more
        text = offers.portable_words(facts.machine, facts.fit, table)
        yield Problem(NOTE, "portable binding", text, "" if alone else _mend(facts))
        return
    old = offers.too_old(facts.machine, _table(facts))
    if old:
        yield Problem(DEGRADED, "unsupported torch", *old)
    elif for_npu(facts):
        return
    elif not facts.machine.bindings:
        text, named = "this installation has no compiled parts", facts.machine.env.get("APEX_TREE")
        if named:
            text = f"APEX_TREE names {named}, which holds no compiled parts"
        text += ": everything runs on the PyTorch reference"
        yield Problem(DEGRADED, "Python only", text, system.unset("APEX_TREE") if named else _mend(facts))
    else:
        text = f"no binding fits: {facts.fit.reason}; everything runs on the PyTorch reference"
        name = "old build" if facts.fit.stale else "unsupported torch"
        yield Problem(DEGRADED, name, text, BUILD_AGAIN if facts.fit.stale else _mend(facts))


def for_npu(facts: Facts) -> bool:
    """Whether this is the wheel for NPUs, and no card is here that another one has kernels for."""
    machine = facts.machine
    return machine.vendor == npu.NAME and not machine.bindings and offers.wanted(machine) in (npu.NAME, "cpu")


def reference_for_npu(facts: Facts) -> Iterator[Problem]:
    """What the wheel for NPUs serves, and which torch_npu goes with the torch that is here."""
    table = facts.offer.release.npu if facts.offer else ()
    if not for_npu(facts) or facts.machine.torch is None or not table:
        return
    described = facts.machine.npu or Npu()
    machine = dataclasses.replace(facts.machine, npu=described)
    found = npu.fault(machine, table)
    said = [*npu.reasons(machine, table), *([found[0]] if found else [])]
    if not described.torch_npu:
        said.append("torch_npu is not installed: npu tensors need it, and CANN")
    yield Problem(NOTE, "Ascend NPU", "; ".join(said), found[1] if found else "")


def unserved(facts: Facts) -> Iterator[Problem]:
    """What the choices cannot know: they are libapex's, which the portable binding calls for the other ops."""
    if facts.unserved:
        named = ", ".join(facts.unserved)
        text = f"the portable binding has no form of {named}: {len(facts.unserved)} of its ops run on the reference"
        yield Problem(DEGRADED, "no portable form", text, _mend(facts))


def binding_half(facts: Facts) -> Iterator[Problem]:
    if facts.fit and facts.fit.library and not facts.fit.module:
        yield Problem(DEGRADED, "wrong Python", facts.fit.reason, _mend(facts))


def unused_card(facts: Facts) -> Iterator[Problem]:
    """A card, and a torch that cannot use it."""
    if text := offers.blindness(facts.machine):
        yield Problem(DEGRADED, "unused card", text, _mend(facts))


def wrong_vendor(facts: Facts) -> Iterator[Problem]:
    """Kernels that never run under this torch, whatever device is here."""
    torch, vendor = facts.machine.torch, _foreign_vendor(facts)
    if torch is None or vendor is None:
        return
    of = next((gpu.platform for gpu in facts.machine.gpus if gpu.platform in _VENDOR), None)
    needs = f"torch {torch.version} is built for {_BUILT_FOR[torch_vendor(torch)]}"
    if of:
        needs = f"the device needs {_VENDOR[of]}"
    text = f"the installed kernel packs are for {vendor}, {needs}: they can never run here"
    yield Problem(DEGRADED, "wrong vendor", text, _mend(facts))


_VENDOR = {"cuda": "cuda", "hip": "rocm"}
_BUILT_FOR = {"cuda": "CUDA", "rocm": "ROCm", None: "neither CUDA nor ROCm"}


def torch_vendor(torch: Torch) -> str | None:
    """Whose cards a torch can use."""
    return "rocm" if torch.hip else "cuda" if torch.cuda else None


def _foreign_vendor(facts: Facts) -> str | None:
    """The vendor of the wheel (build.json) and of its packs, where this torch is for another; else None."""
    machine = facts.machine
    vendors = {pack.vendor for pack in machine.packs} or {machine.vendor} & set(_VENDOR.values())
    if (
        machine.torch is None or len(vendors) != 1
    ):  # of both in a checkout alone, for tests; no wheel is made so
        return None
    if facts.assumed and not (torch_vendor(machine.torch) or "+" in machine.torch.version):
        return None  # a build that nobody named
    (vendor,) = vendors
    return None if vendor == torch_vendor(machine.torch) else vendor


def packs_elsewhere(facts: Facts) -> Iterator[Problem]:
    """A wheel without packs on a machine for whose cards there are some: compilation at run time stands in."""
    gpus = [device.arch for device in facts.machine.devices if device.platform in _VENDOR]
    if gpus and facts.machine.bindings and not facts.machine.packs and facts.offer and facts.offer.found:
        text = f"{facts.offer.accelerator.distribution} holds compiled kernels for {', '.join(dict.fromkeys(gpus))}"
        yield Problem(NOTE, "packs elsewhere", text, _mend(facts))


def loading_failed(facts: Facts) -> Iterator[Problem]:
    if facts.load_error:
        asked = facts.machine.env.get(BINDING)
        remedy = system.unset(BINDING) if asked and BINDING in facts.load_error else owners.reinstall(facts)
        yield Problem(BROKEN, "cannot load", facts.load_error, remedy)


def host_library(facts: Facts) -> Iterator[Problem]:
    fault = facts.machine.library
    if fault and facts.machine.bindings:
        yield Problem(BROKEN, "host library", fault, owners.reinstall(facts))


# ---- devices ----------------------------------------------------------------------------------------------


def unknown_device(facts: Facts) -> Iterator[Problem]:
    """A GPU that the driver does not know: torch cannot use it either."""
    for device in dict.fromkeys(choice.device for choice in facts.choices):
        if device.platform == "cuda":
            fault = compatibility.driver_knows(device.capability, facts.machine.cuda_driver)
            if fault:
                text = f"{device.arch}: {fault}; torch cannot use it either"
                yield Problem(BROKEN, "old driver", text, offers.DRIVER)


def slow_devices(facts: Facts) -> Iterator[Problem]:
    """GPUs on which the reference would run, one problem an arch."""
    machine = facts.machine
    by_arch: dict[str, list[Choice]] = {}
    if machine.binding or _foreign_vendor(facts) or machine.env.get("APEX_VARIANT"):
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


def _why_slow(facts: Facts, choice: Choice) -> tuple[str, str, str]:
    """(name, reason, remedy) of a choice that ended at the reference on a GPU."""
    reasons = [f"{candidate.variant}: {candidate.reason}" for candidate in choice.passed_over]
    said = "; ".join(dict.fromkeys(reasons))
    if any("this driver serves" in reason or "this one serves" in reason for reason in reasons):
        return "old driver", said, offers.DRIVER
    name = "no compiler" if any(reason.startswith("jit: torch brings") for reason in reasons) else "no pack"
    return name, said, _mend(facts)


def refused(facts: Facts) -> Iterator[Problem]:
    for text in dict.fromkeys(choice.refusal for choice in facts.choices if choice.refusal):
        yield Problem(BROKEN, "forbidden", text, system.unset("APEX_VARIANT", "APEX_STRICT"))


def damaged_packs(facts: Facts) -> Iterator[Problem]:
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
                DEGRADED, "damaged pack", f"pack {pack.arch}: {faults[0]}{more}", owners.reinstall(facts)
            )


def damaged_files(facts: Facts) -> Iterator[Problem]:
    """Data files of the installation. apex goes on without them; whoever damaged these may have damaged more."""
    if facts.damage:
        yield Problem(DEGRADED, "damaged files", "; ".join(facts.damage), owners.reinstall(facts))


def overridden_arch(facts: Facts) -> Iterator[Problem]:
    override = facts.machine.env.get("HSA_OVERRIDE_GFX_VERSION")
    if override:
        yield Problem(
            NOTE,
            "HSA_OVERRIDE_GFX_VERSION",
            f"it is set to {override}: the driver reports another chip than is there. Code for that chip "
            "may run, fault, or compute wrongly; apex does not rely on it",
            system.unset("HSA_OVERRIDE_GFX_VERSION"),
        )


def no_gpu(facts: Facts) -> Iterator[Problem]:
    torch = facts.machine.torch
    gpus = [device for device in facts.machine.devices if device.platform != "cpu"]
    if torch and (torch.cuda or torch.hip) and not gpus:
        kind = f"ROCm {torch.hip}" if torch.hip else f"CUDA {torch.cuda}"
        yield Problem(NOTE, "no GPU", f"torch is built for {kind} but sees no GPU here; CPU tensors work")


# ---- libraries in this process ----------------------------------------------------------------------------


def two_hip_runtimes(facts: Facts) -> Iterator[Problem]:
    copies = facts.mapped.get("libamdhip64.so", ())
    if len(copies) > 1:
        text = (
            f"two HIP runtimes are mapped, and streams of one are unknown to the other: {', '.join(copies)}"
        )
        yield Problem(BROKEN, "two HIP runtimes", text, system.without_other_copies())


def cudart_mismatch(facts: Facts) -> Iterator[Problem]:
    torch = facts.machine.torch
    majors = {}
    for path in facts.mapped.get("libcudart.so", ()):
        found = re.search(r"(?:libcudart\.so\.|cudart64_)(\d+)", path)
        if found:
            majors[found[1]] = path
    wanted = torch.cuda.split(".")[0] if torch and torch.cuda else None
    for major, path in sorted(majors.items()):
        if wanted and major != wanted:
            text = f"torch uses the CUDA {wanted} runtime, this process holds one of CUDA {major} too: {path}"
            yield Problem(DEGRADED, "CUDA runtime mismatch", text, system.without_other_copies())


def read_only_cache(facts: Facts) -> Iterator[Problem]:
    jitted = any(choice.taken and choice.taken.variant == "jit" for choice in facts.choices)
    if jitted and not facts.cache_writable:
        why = facts.cache_refused or "the cache folder cannot be written"
        text = f"code is compiled anew in every process: {why}"
        remedy = "export APEX_CACHE_DIR=<a folder that only you can write>"
        yield Problem(NOTE, "no cache", text, "" if facts.cache_refused == system.OWNERLESS else remedy)


def switches(facts: Facts) -> Iterator[Problem]:
    set_here = [
        f"{k}={v}"
        for k, v in facts.machine.env.items()
        if k in ("APEX_VARIANT", BINDING, "APEX_STRICT", "APEX_JIT")
    ]
    if set_here:
        yield Problem(NOTE, "switches", f"set in the environment: {', '.join(set_here)}")


def mistyped_switch(facts: Facts) -> Iterator[Problem]:
    """A variable that is no switch of apex and reads like one, and a variant that no device here could be."""
    for name in facts.machine.env:
        if name not in SWITCHES:
            (meant,) = difflib.get_close_matches(name, SWITCHES, 1, cutoff=0)
            text = f"{name} is set, which apex does not read; it reads {meant}"
            yield Problem(NOTE, "mistyped switch", text, system.unset(name))
    name = facts.machine.env.get("APEX_VARIANT", "").strip()
    if capability(name) or name.startswith("gfx"):
        of = "hip" if name.startswith("gfx") else "cuda"
        if all(choice.device.platform != of for choice in facts.choices):
            text = f"APEX_VARIANT={name} has no say: no device here is of that vendor"
            yield Problem(NOTE, "mistyped switch", text, system.unset("APEX_VARIANT"))


CHECKS = (
    *owners.CHECKS,
    torch_missing,
    torch_unsupported,
    reference_for_npu,
    unserved,
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
    damaged_files,
    overridden_arch,
    no_gpu,
    two_hip_runtimes,
    cudart_mismatch,
    read_only_cache,
    switches,
    mistyped_switch,
)
