"""Which variant serves a unit on a device: one pure function of a described machine.

The order, best first:
1. the kernel pack of exactly this arch;
2. a pack of the family that runs here (sm_80 for sm_86, gfx9-4-generic for gfx942), then PTX that this driver
   takes;
3. compilation at run time (JIT) by the NVRTC or hipRTC that belongs to torch;
4. for CPU tensors, the CPU variant in libapex.so;
5. the PyTorch reference, which runs anywhere.

Every variant is listed with the reason why it was taken or passed over. APEX_VARIANT names one of them and
passes over the others; APEX_JIT=0 takes JIT away; APEX_STRICT=1 refuses to end at the reference unless it was
named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from apex._loader import compatibility
from apex._loader.machine import Compiler, Device, Machine, capability
from apex._loader.packs import Code

# Ranks of a variant; a choice with a higher one costs more at the first call or at every call.
EXACT, FAMILY, PTX, JIT, CPU, REFERENCE = "exact pack", "family pack", "PTX", "JIT", "CPU", "reference"
_VENDOR = {"cuda": "cuda", "hip": "rocm"}
# sm_90, sm_90a, compute_80, gfx942, gfx9-4-generic
_ARCH = re.compile(r"(?:sm|compute)_\d{2,}[af]?|gfx(?:\d{1,2}(?:-\d+)?-generic|[0-9a-f]{3,})")
_OFF = ("0", "false", "no", "off")


@dataclass(frozen=True)
class JitTarget:
    """What to ask a run-time compiler for: `kind` "cubin", "ptx" or "hsaco" of `arch`."""

    compiler: Compiler
    kind: str
    arch: str


@dataclass(frozen=True)
class Candidate:
    """A variant and whether it is taken. `code` or `target` is set where it was found to be able to run."""

    variant: str
    rank: str
    taken: bool
    reason: str
    code: Code | None = None
    target: JitTarget | None = None


@dataclass(frozen=True)
class Choice:
    """All candidates, best first. `taken` is None only where APEX_VARIANT or APEX_STRICT forbade the rest;
    `refusal` then says so."""

    unit: str
    device: Device
    candidates: tuple[Candidate, ...]
    refusal: str | None = None

    @property
    def taken(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.taken), None)

    @property
    def passed_over(self) -> tuple[Candidate, ...]:
        """Better candidates than the taken one."""
        found = []
        for candidate in self.candidates:
            if candidate.taken:
                break
            found.append(candidate)
        return tuple(found)


@dataclass(frozen=True)
class _Option:
    """A candidate before it is known whether a better one serves: `check` -> (able, reason, code, target)."""

    variant: str
    rank: str
    check: Callable


def choose(machine: Machine, packs: Iterable, unit: str, device: Device) -> Choice:
    """The Choice for `unit` (a device source's name) on `device`, which need not be among machine.devices.

    packs: iterable of Pack; machine.packs for what is installed.
    """
    options = [*_pack_options(machine, packs, unit, device), *_jit_options(machine, unit, device)]
    if device.platform == "cpu":
        options.append(_Option("cpu", CPU, lambda: _check_cpu(machine, unit)))
    options.append(_Option("reference", REFERENCE, lambda: _able("it runs on any device")))

    forced = _forced(machine, packs, device)
    strict = machine.env.get("APEX_STRICT", "0").lower() not in ("", *_OFF)
    candidates, taken = [], None
    for option in options:
        candidate = _judge(machine, unit, device, option, taken, forced, strict)
        taken = taken or (candidate if candidate.taken else None)
        candidates.append(candidate)
    if forced and forced not in {option.variant for option in options}:
        candidates.insert(0, Candidate(forced, EXACT, False, _no_such(packs, forced)))
    return Choice(
        unit, device, tuple(candidates), None if taken else _refusal(candidates, forced, unit, device)
    )


def _judge(machine, unit, device, option, taken, forced, strict):
    def passed(reason):
        return Candidate(option.variant, option.rank, False, reason)

    if taken:
        return passed(f"not needed, {taken.variant} was taken")
    if forced and option.variant != forced:
        return passed(f"APEX_VARIANT={forced}")
    if option.rank == REFERENCE and strict and not forced:
        return passed("APEX_STRICT is set")
    if machine.binding and option.rank != REFERENCE:
        return passed(f"no binding: {machine.binding}")
    failed = machine.failures.get((device.platform, device.index, unit, option.variant))
    if failed:
        return passed(failed)
    able, reason, code, target = option.check()
    return Candidate(option.variant, option.rank, able, reason, code, target) if able else passed(reason)


def _able(reason, code=None, target=None):
    return True, reason, code, target


def _unable(reason):
    return False, reason, None, None


# ---- packs -------------------------------------------------------------------------------------------------


def _pack_options(machine, packs, unit, device):
    """Exact pack, family packs, PTX, and packs that cannot serve, each once, in this order."""
    if device.platform not in _VENDOR:
        return []
    mine = [pack for pack in packs if pack.vendor == _VENDOR[device.platform]]
    others = sorted({pack.vendor for pack in packs} - {_VENDOR[device.platform]})
    exact = [pack for pack in mine if pack.arch == device.arch]
    rest = [pack for pack in mine if pack.arch != device.arch]
    options = []
    if not exact:
        have = ", ".join(sorted(pack.arch for pack in mine)) or (
            f"packs for {others[0]} only" if others else "none"
        )
        options.append(
            _Option(
                device.arch, EXACT, lambda: _unable(f"no pack of this arch is installed (installed: {have})")
            )
        )
    for pack in exact:
        options.append(_pack_option(machine, unit, device, pack, EXACT))
    for pack in sorted((pack for pack in rest if pack.kind != "ptx"), key=_nearest(device)):
        options.append(_pack_option(machine, unit, device, pack, FAMILY))
    for pack in sorted((pack for pack in rest if pack.kind == "ptx"), key=_nearest(device)):
        options.append(_pack_option(machine, unit, device, pack, PTX))
    return options


def _nearest(device):
    """Sorts packs that can serve before those that cannot, the highest arch first."""

    def key(pack):
        built = capability(pack.arch)
        serves = _arch_serves(pack, device) is None
        return (not serves, [-part for part in built] if built else [], pack.arch)

    return key


def _pack_option(machine, unit, device, pack, rank):
    return _Option(pack.arch, rank, lambda: _check_pack(machine, unit, device, pack))


def _check_pack(machine, unit, device, pack):
    fault = _arch_serves(pack, device) or pack.fault or _driver_fault(machine, device)
    if fault:
        return _unable(fault)
    code = pack.units.get(unit)
    if code is None:
        return _unable(f"the pack has no code for {unit}")
    fault = code.fault or _object_fits(machine, device, pack, code.contents)
    if fault:
        return _unable(fault)
    how = (
        "compiled by the driver at first use"
        if pack.kind == "ptx"
        else f"{len(code.contents.kernels)} kernels"
    )
    return _able(how, code=code)


def _arch_serves(pack, device):
    """Why code of the pack's arch cannot run on the device's; None if it can."""
    if pack.arch == device.arch:
        return None
    if device.platform == "hip":
        if device.arch in compatibility.GENERIC.get(pack.arch, ()):
            return None
        return f"code for {pack.arch} does not run on {device.arch}"
    built = capability(pack.arch)
    if built is None or device.capability is None:
        return f"code for {pack.arch} does not run on {device.arch}"
    if pack.arch[-1] in "af":
        return f"{pack.arch} code runs on that very arch only"
    if pack.arch.startswith("compute_"):
        if built <= device.capability:
            return None
        return (
            f"PTX for {built[0]}.{built[1]} cannot go down to {device.capability[0]}.{device.capability[1]}"
        )
    return compatibility.cubin_serves(built, device.capability)


def _driver_fault(machine, device):
    if device.platform != "cuda":
        return None
    return compatibility.driver_knows(device.capability, machine.cuda_driver)


def _object_fits(machine, device, pack, contents):
    """Why this machine's driver or runtime cannot load the object; None if it can."""
    if contents.kind == "cubin":
        toolkit = contents.toolkit or _toolkit(pack)  # cubins of older toolkits do not name theirs
        return compatibility.toolkit_fits_driver(toolkit, machine.cuda_driver)
    if contents.kind == "ptx":
        return compatibility.ptx_fits_driver(contents.version, machine.cuda_driver)
    return compatibility.code_object_fits_runtime(
        contents.version, machine.hip_runtime
    ) or compatibility.features_fit(contents.features, device.features)


def _toolkit(pack):
    numbers = pack.compiler[1].split(".")
    return (int(numbers[0]), int(numbers[1])) if len(numbers) > 1 and numbers[0].isdigit() else None


# ---- JIT ---------------------------------------------------------------------------------------------------


def _jit_options(machine, unit, device):
    if device.platform not in _VENDOR:
        return []
    return [_Option("jit", JIT, lambda: _check_jit(machine, unit, device))]


def _check_jit(machine, unit, device):
    if machine.env.get("APEX_JIT", "1").lower() in _OFF:
        return _unable("APEX_JIT=0")
    if unit not in machine.sources:
        return _unable(f"the device source {unit}.cu is not installed")
    fault = _driver_fault(machine, device)
    if fault:
        return _unable(fault)
    vendor = _VENDOR[device.platform]
    reasons = []
    for compiler in machine.compilers:
        if compiler.vendor != vendor:
            continue
        target, reason = jit_target(machine, device, compiler)
        if target:
            return _able(f"{reason}; compiled at first use, then cached", target=target)
        reasons.append(reason)
    name = "NVRTC" if vendor == "cuda" else "hipRTC"
    return _unable("; ".join(reasons) or machine.no_compiler.get(vendor) or f"torch brings no {name} here")


def jit_target(machine, device, compiler):
    """(JitTarget, how) that `compiler` can make for `device`, or (None, why not)."""
    version = ".".join(map(str, compiler.version))
    if device.platform == "hip":
        return JitTarget(compiler, "hsaco", device.arch), f"hipRTC of ROCm {version}".rstrip()
    known = {capability(arch) for arch in compiler.archs or ()} - {None}
    unloadable = compatibility.toolkit_fits_driver(compiler.version, machine.cuda_driver)
    if unloadable:
        return None, f"NVRTC {version}: code {unloadable}"
    for built in sorted(known, reverse=True):
        if compatibility.cubin_serves(built, device.capability) is None:
            arch = f"sm_{built[0]}{built[1]}"
            return JitTarget(compiler, "cubin", arch), f"NVRTC {version} compiles for {arch}"
    lower = [built for built in known if built < device.capability and built not in compatibility.TEGRA]
    if lower:  # an arch newer than the compiler: PTX, if the driver knows how to go on
        built = max(lower)
        arch = f"compute_{built[0]}{built[1]}"
        return JitTarget(
            compiler, "ptx", arch
        ), f"NVRTC {version} does not know {device.arch} but makes PTX {arch}"
    return None, f"NVRTC {version} knows no arch that serves {device.arch}"


# ---- the others --------------------------------------------------------------------------------------------


def _check_cpu(machine, unit):
    if machine.library:
        return _unable(machine.library)
    if unit not in machine.cpu_units:
        return _unable(f"libapex.so has no CPU variant of {unit}")
    return _able(f"x86-64-v{machine.cpu_level}" if "x86_64" in machine.system else "portable")


def _forced(machine, packs, device):
    """The variant that APEX_VARIANT asks for on this device, or None.

    A name that belongs to another kind of device ("sm_80" for a CPU tensor, "cpu" for a GPU's) has no say
    here, so that a program with tensors on both can be forced at all. One that names nothing on any device is refused
    on all of them: who mistyped it would take what runs for what was asked.
    """
    name = machine.env.get("APEX_VARIANT", "").strip()
    if not name or name == "reference":
        return name or None
    if not names_a_variant(name):
        return name
    if device.platform == "cpu":
        return name if name == "cpu" else None
    if device.platform not in _VENDOR or name == "cpu":
        return None
    gpu_of_other_vendor = name.startswith("gfx") != (device.platform == "hip") and name != "jit"
    return None if gpu_of_other_vendor else name


def names_a_variant(name: str) -> bool:
    """Whether APEX_VARIANT could mean something by `name`, on some device."""
    return name in ("reference", "cpu", "jit") or bool(_ARCH.fullmatch(name))


def _no_such(packs, name):
    have = ", ".join(sorted(pack.arch for pack in packs)) or "none"
    return f"there is no variant of this name (reference, cpu, jit, or a pack: {have})"


def _refusal(candidates, forced, unit, device):
    if forced:
        reason = next(candidate.reason for candidate in candidates if candidate.variant == forced)
        return f"APEX_VARIANT={forced} cannot serve {unit} on {device.arch}: {reason}"
    return f"APEX_STRICT is set and only the reference could serve {unit} on {device.arch}"
