"""Answers libapex's question which variant serves a unit on a device, from any thread, possibly with a launch waiting.

The answer comes from `choose`, over the machine that the probe found. A code object that was chosen is registered
before the answer is given.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

from apex._loader import jit, pack_files, probe
from apex._loader.choose import Candidate, Choice, choose
from apex._loader.errors import ApexError, ResolverError, SlowPathWarning, VariantUnavailableError
from apex._loader.machine import Device, Machine

PLATFORMS = ("cpu", "cuda", "hip")  # enum apex_platform of csrc/host/apex.h
UNKNOWN, KERNEL, CPU, REFERENCE = 0, 1, 2, 3  # enum apex_variant


class Resolver:
    """The answers of this process.

    register: (platform, device, unit, image) gives the library a code object.
    choices:  what was chosen so far, {(platform, device, unit): Choice}.
    failures: {(platform, device, unit, variant): reason}, of what was tried and did not work.
    """

    def __init__(self, register: Callable[[str, int, str, bytes], None]) -> None:
        self._register = register
        self.choices: dict[tuple[str, int, str], Choice] = {}
        self.failures: dict[tuple[str, int, str, str], str] = {}
        self._warned: set[tuple[str, str]] = set()

    def forget(self) -> None:
        """Drops every answer."""
        self.choices.clear()
        self.failures.clear()

    def answer(self, platform: str, device: int, unit: str) -> int:
        """The enum apex_variant for a unit on a device, with its code object registered. Raises ApexError."""
        while True:
            choice = self._decide(platform, device, unit)
            taken = choice.taken
            if taken is None:
                raise _refusal(choice, platform, device)
            if taken.code is None and taken.target is None:
                break
            try:
                image = _image(unit, taken, probe.here())
            except (
                ApexError
            ) as error:  # the next variant may serve: a compiler that fails is no reason to stop
                self.failures[platform, device, unit, taken.variant] = error.what
                continue
            self._register(platform, device, unit, image)
            break
        self.choices[platform, device, unit] = choice
        if taken.variant == "reference":
            self._warn(choice)
            return REFERENCE
        return CPU if taken.variant == "cpu" else KERNEL

    def _decide(self, platform: str, index: int, unit: str) -> Choice:
        machine = dataclasses.replace(probe.here(), failures=dict(self.failures))
        return choose(machine, unit, _device(machine, platform, index))

    def _warn(self, choice: Choice) -> None:
        """Once an arch and unit: on a GPU the reference is slower than what people installed apex for."""
        key = (choice.device.arch, choice.unit)
        asked_for = "APEX_VARIANT=reference" in choice.candidates[0].reason
        if choice.device.platform == "cpu" or key in self._warned or asked_for:
            return
        self._warned.add(key)
        why = "; ".join(f"{c.variant}: {c.reason}" for c in choice.passed_over)
        warnings.warn(
            f"{choice.unit} runs on its PyTorch reference on {choice.device.arch} ({why}); see `python -m apex`",
            SlowPathWarning,
            stacklevel=2,
        )


def _device(machine: Machine, platform: str, index: int) -> Device:
    for device in machine.devices:
        if device.platform == platform and (platform == "cpu" or device.index == index):
            return device  # torch's index of the CPU is -1
    raise ResolverError(
        f"torch has no device {platform}:{index}",
        available=[f"{d.platform}:{d.index}" for d in machine.devices],
    )


def _refusal(choice: Choice, platform: str, device: int) -> VariantUnavailableError:
    return VariantUnavailableError(
        choice.refusal or "",
        wanted=choice.unit,
        found=f"{platform}:{device} {choice.device.arch}",
        available=[f"{c.variant} ({c.reason})" for c in choice.candidates],
        remedy="run `python -m apex`, or unset APEX_VARIANT and APEX_STRICT",
    )


def _image(unit: str, taken: Candidate, machine: Machine) -> bytes:
    if taken.code is not None:
        return pack_files.image(taken.code)
    assert taken.target is not None
    return jit.build(unit, taken.target, machine.cuda_driver)
