"""Which variant serves a unit on a device, and what runs on a machine: pure functions of a described machine.

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

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from apex._loader import compatibility
from apex._loader.elf import CodeObject
from apex._loader.environment import is_on
from apex._loader.fit import Fit, fit
from apex._loader.machine import Code, Compiler, Device, JitTarget, Machine, Pack, capability

# Ranks of a variant; a choice with a higher one costs more at the first call or at every call.
EXACT, FAMILY, PTX, JIT, CPU, REFERENCE = "exact pack", "family pack", "PTX", "JIT", "CPU", "reference"
_VENDOR = {"cuda": "cuda", "hip": "rocm"}
# sm_90, sm_90a, compute_80, gfx942, gfx9-4-generic
_ARCH = re.compile(r"(?:sm|compute)_\d{2,}[af]?|gfx(?:\d{1,2}(?:-\d+)?-generic|[0-9a-f]{3,})")


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
class Outcome:
    """What runs on a machine: `machine`, which knows why no binding serves it if none does; the Fit of its bindings, or
    None without torch; a Choice for each unit on each device."""

    machine: Machine
    fit: Fit | None
    choices: tuple[Choice, ...]


class _Answer(NamedTuple):
    """Whether a variant can run, and why or why not; with what it would run."""

    able: bool
    reason: str
    code: Code | None = None
    target: JitTarget | None = None


@dataclass(frozen=True)
class _Option:
    """A candidate before it is known whether a better one serves."""

    variant: str
    rank: str
    check: Callable[[], _Answer]


def outcome(
    machine: Machine,
    units: Sequence[str],
    helpers: Sequence[str] = (),
    devices: Iterable[Device] | None = None,
) -> Outcome:
    """The Outcome of a described machine. The loader, the doctor, `which`, `compat` and `explain` all ask this.

    units: what is asked about on every device; `helpers` on GPUs alone. devices: by default the machine's.
    """
    found = fit(machine)
    if found:
        machine = dataclasses.replace(machine, binding=found.reason if found.kind == "reference" else None)
    choices = [
        choose(machine, unit, device)
        for device in (machine.devices if devices is None else devices)
        for unit in (*units, *(helpers if device.platform != "cpu" else ()))
    ]
    return Outcome(machine, found, tuple(choices))


def choose(machine: Machine, unit: str, device: Device) -> Choice:
    """The Choice for `unit` (a device source's name) on `device`, which need not be among machine.devices."""
    packs = machine.packs
    options = [*_pack_options(machine, unit, device), *_jit_options(machine, unit, device)]
    if device.platform == "cpu":
        options.append(_Option("cpu", CPU, lambda: _check_cpu(machine, unit)))
    options.append(_Option("reference", REFERENCE, lambda: _able("it runs on any device")))

    forced = _forced(machine, device)
    strict = is_on(machine.env, "APEX_STRICT")
    candidates: list[Candidate] = []
    taken: Candidate | None = None
    for option in options:
        candidate = _judge(machine, unit, device, option, taken, forced, strict)
        taken = taken or (candidate if candidate.taken else None)
        candidates.append(candidate)
    if forced and forced not in {option.variant for option in options}:
        candidates.insert(0, Candidate(forced, EXACT, False, _no_such(packs, forced)))
    return Choice(
        unit, device, tuple(candidates), None if taken else _refusal(candidates, forced, unit, device)
    )


def _judge(
    machine: Machine,
    unit: str,
    device: Device,
    option: _Option,
    taken: Candidate | None,
    forced: str | None,
    strict: bool,
) -> Candidate:
    def passed(reason: str) -> Candidate:
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
    answer = option.check()
    return Candidate(option.variant, option.rank, *answer) if answer.able else passed(answer.reason)


def _able(reason: str, code: Code | None = None, target: JitTarget | None = None) -> _Answer:
    return _Answer(True, reason, code, target)


def _unable(reason: str) -> _Answer:
    return _Answer(False, reason)


# ---- packs -------------------------------------------------------------------------------------------------


def _pack_options(machine: Machine, unit: str, device: Device) -> list[_Option]:
    """Exact pack, family packs, PTX, and packs that cannot serve, each once, in this order."""
    if device.platform not in _VENDOR:
        return []
    packs = machine.packs
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


def _nearest(device: Device) -> Callable[[Pack], Any]:
    """Sorts packs that can serve before those that cannot, the highest arch first."""

    def key(pack: Pack) -> Any:
        built = capability(pack.arch)
        serves = _arch_serves(pack, device) is None
        return (not serves, [-part for part in built] if built else [], pack.arch)

    return key


def _pack_option(machine: Machine, unit: str, device: Device, pack: Pack, rank: str) -> _Option:
    return _Option(pack.arch, rank, lambda: _check_pack(machine, unit, device, pack))


def _check_pack(machine: Machine, unit: str, device: Device, pack: Pack) -> _Answer:
    fault = _arch_serves(pack, device) or pack.fault or _driver_fault(machine, device)
    if fault:
        return _unable(fault)
    code = pack.units.get(unit)
    if code is None:
        return _unable(f"the pack has no code for {unit}")
    if code.fault or code.contents is None:
        return _unable(code.fault or "nothing is known of its code")
    fault = _object_fits(machine, device, pack, code.contents)
    if fault:
        return _unable(fault)
    how = (
        "compiled by the driver at first use"
        if pack.kind == "ptx"
        else f"{len(code.contents.kernels)} kernels"
    )
    return _able(how, code=code)


def _arch_serves(pack: Pack, device: Device) -> str | None:
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


def _driver_fault(machine: Machine, device: Device) -> str | None:
    if device.platform != "cuda":
        return None
    return compatibility.driver_knows(device.capability, machine.cuda_driver)


def _object_fits(machine: Machine, device: Device, pack: Pack, contents: CodeObject) -> str | None:
    """Why this machine's driver or runtime cannot load the object; None if it can."""
    if contents.kind == "cubin":
        toolkit = contents.toolkit or _toolkit(pack)  # cubins of older toolkits do not name theirs
        return compatibility.toolkit_fits_driver(toolkit, machine.cuda_driver)
    version = contents.version
    if isinstance(version, tuple):
        return compatibility.ptx_fits_driver(version, machine.cuda_driver)
    fault = compatibility.code_object_fits_runtime(version, machine.hip_runtime)
    return fault or compatibility.features_fit(contents.features, device.features)


def _toolkit(pack: Pack) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", pack.compiler[1])
    return (int(found[1]), int(found[2])) if found else None


# ---- JIT ---------------------------------------------------------------------------------------------------


def _jit_options(machine: Machine, unit: str, device: Device) -> list[_Option]:
    if device.platform not in _VENDOR:
        return []
    return [_Option("jit", JIT, lambda: _check_jit(machine, unit, device))]


def _check_jit(machine: Machine, unit: str, device: Device) -> _Answer:
    if not is_on(machine.env, "APEX_JIT", "1"):
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


def jit_target(machine: Machine, device: Device, compiler: Compiler) -> tuple[JitTarget | None, str]:
    """(JitTarget, how) that `compiler` can make for `device`, or (None, why not)."""
    version = ".".join(map(str, compiler.version))
    if device.platform == "hip":
        return JitTarget(compiler, "hsaco", device.arch), f"hipRTC of ROCm {version}".rstrip()
    known = {built for arch in compiler.archs or () if (built := capability(arch))}
    wanted = device.capability
    unloadable = compatibility.toolkit_fits_driver(compiler.version, machine.cuda_driver)
    if unloadable:
        return None, f"NVRTC {version}: code {unloadable}"
    for built in sorted(known, reverse=True):
        if wanted and compatibility.cubin_serves(built, wanted) is None:
            arch = f"sm_{built[0]}{built[1]}"
            return JitTarget(compiler, "cubin", arch), f"NVRTC {version} compiles for {arch}"
    lower = [built for built in known if wanted and built < wanted and built not in compatibility.TEGRA]
    if lower:  # an arch newer than the compiler: PTX, if the driver knows how to go on
        built = max(lower)
        arch = f"compute_{built[0]}{built[1]}"
        how = f"NVRTC {version} does not know {device.arch} but makes PTX {arch}"
        return JitTarget(compiler, "ptx", arch), how
    return None, f"NVRTC {version} knows no arch that serves {device.arch}"


# ---- the others --------------------------------------------------------------------------------------------


def _check_cpu(machine: Machine, unit: str) -> _Answer:
    if machine.library:
        return _unable(machine.library)
    if unit not in machine.cpu_units:
        return _unable(f"libapex.so has no CPU variant of {unit}")
    return _able(_of_level(machine))


def _of_level(machine: Machine) -> str:
    """What the CPU variant is compiled for: NEON is in the baseline of aarch64."""
    if machine.system.endswith("aarch64"):
        return "SVE" if machine.cpu_level > 1 else "NEON"
    return f"x86-64-v{machine.cpu_level}" if machine.system.endswith(("x86_64", "amd64")) else "portable"


def _forced(machine: Machine, device: Device) -> str | None:
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


def _no_such(packs: Iterable[Pack], name: str) -> str:
    have = ", ".join(sorted(pack.arch for pack in packs)) or "none"
    return f"there is no variant of this name (reference, cpu, jit, or a pack: {have})"


def _refusal(candidates: Sequence[Candidate], forced: str | None, unit: str, device: Device) -> str:
    if forced:
        reason = next(candidate.reason for candidate in candidates if candidate.variant == forced)
        return f"APEX_VARIANT={forced} cannot serve {unit} on {device.arch}: {reason}"
    return f"APEX_STRICT is set and only the reference could serve {unit} on {device.arch}"
