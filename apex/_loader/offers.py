"""Which apex serves a machine: one pure function of a described machine and a release.

`which`, `compat`, `explain`, the doctor and the loader all ask `offer`. It puts the machine in front of the wheel
that the release has for it, lets the loader's own rules (fit.py for bindings, choose.py for kernels) say what would
run, and names the one command that brings it, or mends what stands in its way.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from apex._loader import choose, compatibility, npu, release, remedies
from apex._loader import fit as fitting
from apex._loader.choose import Candidate, Choice
from apex._loader.machine import Device, Machine
from apex._loader.release import EVERY, Accelerator, Release
from apex._loader.remedies import PIP

SOURCE = (
    "build apex against this torch, from its source tree: "
    f"APEX_BUILD_CPP_OPS=1 {PIP} install --no-build-isolation ."
)
DRIVER = "install a newer NVIDIA driver"
_CARD = {"cuda": "NVIDIA", "rocm": "AMD"}
_TOOLKIT = {"cuda": "CUDA", "rocm": "ROCm"}


@dataclass(frozen=True)
class Offer:
    """What a release has for a machine.

    machine:  as its wheel would leave it
    fit:      of the wheel's bindings, or None without torch
    choices:  what every op would run, one a device; of a machine without a GPU none
    missing:  why the wheel does not serve as it should; empty where it does
    mend:     the command for what is missing; empty where nothing is
    index:    the address of the wheel's index root
    """

    machine: Machine
    release: Release
    accelerator: Accelerator
    fit: fitting.Fit | None
    choices: tuple[Choice, ...]
    missing: tuple[str, ...]
    mend: str
    index: str

    @property
    def found(self) -> bool:
        """Whether a wheel serves: its binding fits this torch and Python, and every card has native code."""
        return not self.missing

    @property
    def version(self) -> str:
        """1.10.0+cu130"""
        return f"{self.release.version}+{self.accelerator.label}"

    @property
    def wheel(self) -> str:
        """apex_cuda-1.10.0+cu130: what the wheel's name begins with."""
        return f"{self.accelerator.distribution.replace('-', '_')}-{self.version}"

    @property
    def command(self) -> str:
        """The one line: what installs the wheel, or mends what keeps it from serving."""
        return self.mend or install(self)

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each device: what would run there, and why."""
        if self.accelerator.pure:
            return tuple(npu.reasons(self.machine, self.release.npu))
        portable = self.fit if self.fit and self.fit.kind == "portable" else None
        said = [portable_words(self.machine, portable, self.release)] if portable else []
        return tuple(dict.fromkeys((*said, *(_words(self.machine, choice) for choice in self.choices))))


def is_alone(machine: Machine, table: Release | None) -> bool:
    """Whether no wheel of a release for the machine's platform has a compiled binding."""
    return table is not None and machine.system in table.portable


def portable_words(machine: Machine, fit: fitting.Fit, table: Release | None) -> str:
    """That the portable binding serves a machine, and why."""
    return ALONE.format(machine.system) if is_alone(machine, table) else PORTABLE.format(fit.reason)


_SAME = "kernels and results are the same, a call takes the host some microseconds more"
PORTABLE = f"the portable binding serves, as none was compiled for this torch ({{}}): {_SAME}"
ALONE = (
    f"the portable binding serves every torch and Python, as wheels for {{}} hold no compiled one: {_SAME}"
)


def install(offer: Offer, others: Collection[str] = (), force: bool = False) -> str:
    """The line that installs the wheel: in place of `others` (distributions); with `force`, over a damaged one."""
    away = f"{PIP} uninstall -y {' '.join(sorted(others))} && " if others else ""
    how = remedies.ANEW if force else ""
    return away + remedies.install(offer.accelerator.distribution, offer.version, offer.index, how)


def swap(found: Offer, installed: Sequence[tuple[str, str]] = ()) -> str:
    """The line that puts the wheel of an Offer in the place of what is installed, [(distribution, version)]. The same
    wheel is laid anew: pip would leave one of that version as it is."""
    wheel = (found.accelerator.distribution, found.version)
    return install(found, [name for name, _ in installed if name != wheel[0]], force=wheel in installed)


def line(machine: Machine, installed: Sequence[tuple[str, str]] = ()) -> str:
    """The one line for a Machine, of the release here."""
    known = release.known()
    if known is None:
        return f"{PIP} install --upgrade --no-deps apex-{wanted(machine)}"
    found = offer(machine, known)
    return found.mend or swap(found, installed)


def offer(machine: Machine, table: Release, index: str | None = None) -> Offer:
    """The Offer for a Machine. `index`: where the release is served (Release.root). Pure but for APEX_INDEX."""
    accelerator = table.accelerator(wanted(machine))
    gpus = dict.fromkeys(dataclasses.replace(gpu, index=0, name="") for gpu in machine.gpus)
    found = choose.outcome(_with_wheel(machine, table, accelerator), (EVERY,), devices=gpus)
    root = table.root(accelerator, index)
    missing, mend = [], ""
    # Which wheel is here is the machine's own, not the offered one's: what brings a torch depends on it.
    for reason, command in _faults(found, machine.vendor, table, accelerator, root):
        missing.append(reason)
        mend = mend or command
    unique = tuple(dict.fromkeys(missing))
    return Offer(found.machine, table, accelerator, found.fit, found.choices, unique, mend, root)


def wanted(machine: Machine) -> str:
    """cuda, rocm, npu or cpu: the accelerator of the machine's torch; of one that is for none, that of its cards."""
    torch = machine.torch
    if torch and (torch.hip or torch.cuda):
        return "rocm" if torch.hip else "cuda"
    if machine.npu:
        return npu.NAME
    found = [{"hip": "rocm"}.get(d.platform, d.platform) for d in machine.devices]
    return next((vendor for vendor in (*found, *machine.cards) if vendor in _CARD), "cpu")


def _with_wheel(machine: Machine, table: Release, accelerator: Accelerator) -> Machine:
    """The machine as the wheel leaves it."""
    reason = table.why_no_wheel(accelerator.name, machine.system)
    without = reason or accelerator.pure
    alone = is_alone(machine, table)
    bindings = () if without or alone else tuple(b for b in table.bindings if b.python == machine.python)
    serves = bindings or (alone and not without)
    return dataclasses.replace(
        machine,
        bindings=bindings,
        packs=tuple(pack for pack in table.packs if pack.vendor == accelerator.name),
        vendor=accelerator.name,
        library=None,
        portable=None if serves else reason or _no_binding(accelerator),
        stale=None,
        cpu_units=() if accelerator.pure else (EVERY,),
        sources=(EVERY,),
        env={},
        failures={},
    )


def _no_binding(accelerator: Accelerator) -> str:
    return (
        f"{accelerator.distribution} is Python alone" if accelerator.pure else "no wheel is for this Python"
    )


# ---- what stands in the way: (why, the command) ------------------------------------------------------------

Fault = tuple[str, str]


def _faults(
    found: choose.Outcome, vendor: str, table: Release, accelerator: Accelerator, root: str
) -> list[Fault]:
    """Of the machine as a whole, the first that holds; else those of its devices. vendor: of the wheel that is here."""
    machine, fit = found.machine, found.fit
    here = dataclasses.replace(machine, vendor=vendor)
    if fault := _no_wheel(machine, table, accelerator):
        return [fault]
    if machine.torch is None or fit is None:
        why = "no torch is installed for this Python, and which wheel is right depends on it"
        return [(why, bring_torch(here, table))]
    if text := blindness(machine):
        return [(text, torch_for(accelerator))]
    if fault := too_old(here, table):
        return [fault]
    if accelerator.pure:
        unknown = npu.fault(machine, table.npu)
        return [unknown] if unknown else []
    if not fit.portable and (reason := table.ruled_out.get((machine.torch.minor or "", machine.python))):
        return [(reason, SOURCE)]
    upgrade = (
        f"{PIP} install --upgrade --no-deps {accelerator.distribution} --index-url {remedies.quoted(root)}"
    )
    if not fit.module and not fit.portable:
        foreign = fitting.not_a_release(machine.torch.version)
        return [(fit.reason, SOURCE if foreign else upgrade)]
    faults = [_of_device(machine, choice, upgrade) for choice in found.choices]
    return [fault for fault in faults if fault]


def blindness(machine: Machine) -> str | None:
    """In words, that the torch of a machine is not built for the cards that are there; None where all is well."""
    torch = machine.torch
    vendor = wanted(machine)
    if torch is None or torch.cuda or torch.hip or vendor not in _CARD:
        return None
    return (
        f"torch {torch.version} is built without {_TOOLKIT[vendor]}: it cannot use the {_CARD[vendor]} card that is "
        f"here, and no pack for {vendor} ever runs under it"
    )


def torch_for(accelerator: Accelerator) -> str:
    """The line that brings a torch for the cards of an accelerator, from PyTorch's own index."""
    return remedies.torch(accelerator.label, "--force-reinstall ")


def for_npu(machine: Machine) -> bool:
    """Whether NPUs are what a machine is for: torch_npu, or the wheel for it, is here, and no card that
    another wheel has kernels for."""
    return (machine.npu is not None or machine.vendor == npu.NAME) and wanted(machine) in (npu.NAME, "cpu")


def bring_torch(machine: Machine, table: Release | None, pin: str = "torch") -> str:
    """The line that brings a torch: `pin` from pip's own index, to an NPU the one that torch_npu takes."""
    return npu.mend(machine, table.npu if table else ()) if for_npu(machine) else f"{PIP} install {pin}"


def too_old(machine: Machine, table: Release | None) -> Fault | None:
    """(why, the command) for a torch older than any that apex supports, else None."""
    torch = machine.torch
    if torch is None or not fitting.is_older(torch.version, fitting.OLDEST_TORCH):
        return None
    oldest = ".".join(map(str, fitting.OLDEST_TORCH))
    text = f"torch {torch.version} is older than {oldest}, the oldest that apex supports"
    return text, bring_torch(machine, table, f"'torch>={oldest}'")


def _no_wheel(machine: Machine, table: Release, accelerator: Accelerator) -> Fault | None:
    """A platform or a Python without a wheel: a build from source may serve there."""
    reason = table.why_no_wheel(accelerator.name, machine.system)
    if reason and (machine.system not in table.platforms or machine.system in table.portable):
        served = [name for name in table.platforms if not table.why_no_wheel(accelerator.name, name)]
        return reason, f"use one of {', '.join(served)}"
    no_python, oldest = table.why_no_python(machine.python), min(table.pythons, key=_age)
    if not reason and no_python and _age(machine.python) < _age(oldest):
        return no_python, f"use Python {oldest[2]}.{oldest[3:]} or newer"
    reason = reason or ("" if accelerator.pure or machine.system in table.portable else no_python)
    return (reason, SOURCE) if reason else None


def _age(tag: str) -> int:
    return int(re.sub(r"\D", "", tag[3:]) or 0)


def _of_device(machine: Machine, choice: Choice, upgrade: str) -> Fault | None:
    """Why a device would run the reference, or nothing."""
    device = choice.device
    if device.platform == "cuda":
        unknown = compatibility.driver_knows(device.capability, machine.cuda_driver)
        if unknown:
            return f"{device.arch}: {unknown}; torch cannot use it either", DRIVER
    if choice.taken and choice.taken.variant != "reference":
        return None
    said = "; ".join(
        dict.fromkeys(f"{c.variant}: {c.reason}" for c in choice.passed_over if _near(c, device))
    )
    old = any("this driver serves" in c.reason or "this one serves" in c.reason for c in choice.passed_over)
    return f"no kernel for {device.arch}: {said}", DRIVER if old else upgrade


def _near(candidate: Candidate, device: Device) -> bool:
    """Whether a candidate is worth a word: packs of other families are not."""
    return (
        candidate.variant in ("jit", device.arch)
        or "driver" in candidate.reason
        or "runtime" in candidate.reason
    )


_HOW = {
    choose.EXACT: "a pack of exactly this arch",
    choose.FAMILY: "code of its family",
    choose.PTX: "PTX, compiled by the driver at first use",
}


def _words(machine: Machine, choice: Choice) -> str:
    """ "sm_90: a pack of exactly this arch"; with what a driver no newer than torch's CUDA would run instead."""
    taken = choice.taken
    if taken is None:
        return f"{choice.device.arch}: {choice.refusal}"
    name = taken.variant if taken.rank in _HOW else choice.device.arch
    text = f"{name}: {_HOW.get(taken.rank, taken.reason)}"
    cuda = re.findall(r"\d+", machine.torch.cuda or "") if machine.torch else []
    if machine.cuda_driver is None and len(cuda) > 1:
        driver = (int(cuda[0]), int(cuda[1]))
        older = dataclasses.replace(machine, cuda_driver=driver)
        other = choose.choose(older, EVERY, choice.device).taken
        if other and other.variant != taken.variant:
            served = ".".join(map(str, driver))
            text += f"; with a driver for CUDA {served} {other.variant}: {_HOW.get(other.rank, other.reason)}"
    return text


# ---- what there is near a machine that no wheel serves -----------------------------------------------------

FAR = 1000  # between majors of torch: 2.15 is nearer to 3.0 than 2.8 is


def nearest(found: Offer) -> list[dict[str, str]]:
    """Cells that exist, nearest first, at most three: [{"torch": "2.15", "cuda": "cu130", "python": "cp312"}, ...].
    Empty where the machine's platform has no wheel of its accelerator: other platforms are other machines."""
    table, machine, accelerator = found.release, found.machine, found.accelerator
    if table.why_no_wheel(accelerator.name, machine.system):
        return []
    if accelerator.pure:
        return [_npu_cell(row, machine.python) for row in npu.nearest(machine, table.npu)[:3]]
    cells = []
    for minor in _near_torches(table, machine):
        tags = table.pythons_for(minor)
        tag = machine.python if machine.python in tags else tags[-1]
        for arch in _near_archs(found):
            cell = {"torch": minor, accelerator.name: accelerator.label, "arch": arch, "python": tag}
            if machine.system != next(iter(table.platforms)):
                cell["platform"] = machine.system
            cells.append({key: value for key, value in cell.items() if value})
    return cells[:3]


def _npu_cell(row: release.NpuRow, python: str) -> dict[str, str]:
    tag = python if python in row.python else row.python[-1]
    return {"torch": ".".join(row.torch.split(".")[:2]), "cann": row.cann, "python": tag}


def _near_torches(table: Release, machine: Machine) -> list[str]:
    if machine.torch is None:
        fitting_here = [minor for minor in table.torch if machine.python in table.pythons_for(minor)]
        return fitting_here[-1:]
    minor = machine.torch.minor or "0.0"
    if minor in table.torch:
        return [minor]
    at = _place(minor)
    return sorted(table.torch, key=lambda known: (abs(_place(known) - at), -_place(known)))[:2]


def _place(minor: str) -> int:
    major, number = (int(part) for part in minor.split("."))
    return major * FAR + number


def _near_archs(found: Offer) -> list[str]:
    """The arch that is asked about, where a wheel serves it; else those whose names begin alike."""
    if not found.choices:
        return [""]
    bound = dataclasses.replace(found.machine, binding=None)
    again = [choose.choose(bound, EVERY, choice.device) for choice in found.choices]
    unserved = [c.device.arch for c in again if c.taken and c.taken.variant == "reference"]
    if not unserved:
        return [found.choices[0].device.arch]
    packs = [pack.arch for pack in bound.packs if pack.kind != "ptx"]
    return sorted(packs, key=lambda arch: -len(os.path.commonprefix([arch, unserved[0]])))[:2]
