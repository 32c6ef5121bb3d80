"""What may serve the ops in this process, how a test switches between them, and the proof that it worked.

A variant is switched on by the same means that a user has (APEX_VARIANT) or, for what only tests do, by the
C interface of libapex: a lower x86-64 level, or the SIMT executor in the place of a GPU. Calls are counted
where each variant begins, so that a test cannot pass on another variant than its own.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import pathlib
import platform
import sys
from dataclasses import dataclass, field

import pytest
import torch
from rings import NO_GPU

from apex._loader import bindings, library
from apex._loader import reference as references

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

CPU_LEVELS = (1, 2, 3, 4)
EXECUTORS = {  # name -> warp size, order of the threads (see csrc/testing)
    "simt32": (32, 0),
    "simt64": (64, 0),
    "simt32-descending": (32, 1),
    "simt64-descending": (64, 1),
}
NAMES = ("reference", *(f"cpu-v{level}" for level in CPU_LEVELS), *EXECUTORS, "cuda")


def _marks(name: str) -> list:
    """What a test is that runs on a variant: by these marks it is chosen, never by its name."""
    if name == "cuda":
        return [pytest.mark.gpu]
    if name in EXECUTORS:
        return [pytest.mark.executor, *([pytest.mark.warp64] if EXECUTORS[name][0] == 64 else [])]
    return [pytest.mark.cpu_level(level=int(name[-1]))] if name.startswith("cpu-v") else []


PARAMETERS = [pytest.param(name, id=name, marks=_marks(name)) for name in NAMES]

_kernels = collections.Counter()  # launches on the executor, by kernel
_references = collections.Counter()  # calls of reference implementations, by op


@dataclass
class Variant:
    """What serves the ops while a test runs.

    Attributes:
        name: one of NAMES.
        device: where its tensors go.
        kernels: launches on the SIMT executor since the test began, by kernel.
        references: reference calls since the test began, by op.
        mixed: set by a test that means to run the reference beside the variant (other devices, say).
    """

    name: str
    device: torch.device
    kernels: collections.Counter = field(default_factory=lambda: _kernels)
    references: collections.Counter = field(default_factory=lambda: _references)
    mixed: bool = False

    @property
    def simt(self) -> bool:
        """Whether kernels run, on the executor."""
        return self.name in EXECUTORS

    @property
    def runs_kernels(self) -> bool:
        """Whether device code runs: chunks, blocks, and states that only a kernel advances."""
        return self.simt or self.name == "cuda"

    def serves(self, op: str) -> str:
        """Which kind of variant libapex has in force for an op: "reference", "cpu" or "kernel"."""
        if not bindings.load().native:
            return "reference"
        platform = "cpu" if self.device.type == "cpu" else "hip" if torch.version.hip else "cuda"
        answer = library.load().resolve(platform, self.device.index or 0, op)
        return {library.KERNEL: "kernel", library.CPU: "cpu", library.REFERENCE: "reference"}[answer]

    @property
    def wanted(self) -> str:
        """What `serves` must answer."""
        return "kernel" if self.runs_kernels else "cpu" if self.name.startswith("cpu") else "reference"

    def strangers(self) -> str:
        """What ran although it should not; "" if only the variant did."""
        if self.mixed:
            return ""
        found = []
        if self.references and self.name != "reference":
            found.append(f"the reference ({dict(self.references)})")
        if self.kernels and not self.simt:
            found.append(f"the SIMT executor ({dict(self.kernels)})")
        return " and ".join(found)


def why_not(name: str) -> str:
    """Why a variant cannot be used on this machine; "" if it can."""
    if name == "cuda":
        return "" if torch.cuda.is_available() else NO_GPU
    loaded = bindings.load()
    if name != "reference" and not (loaded.native and loaded.module):
        return f"no bindings for this torch and Python ({loaded.reason}): build_matrix tree makes them"
    if name.startswith("cpu-v"):
        level = int(name[-1])
        most = library.load().c.apex_set_cpu_level(0)
        if level > most:
            return f"this machine has {'x86-64-v' if platform.machine() == 'x86_64' else 'level '}{most}"
    if name in EXECUTORS:
        return _executor_fault(EXECUTORS[name][0])
    return ""


@contextlib.contextmanager
def served_by(name: str):
    """Makes a variant serve every op of this process; gives the Variant, and restores what was before.

    Raises:
        AssertionError: at the end, if anything but this variant ran.
    """
    before = os.environ.get("APEX_VARIANT")
    native = bindings.load().native
    lib = library.load() if native else None
    try:
        os.environ.pop("APEX_VARIANT", None)
        if name == "reference" or name.startswith("cpu"):
            os.environ["APEX_VARIANT"] = name.partition("-")[0]
        if name.startswith("cpu-v"):
            level = int(name[-1])
            assert lib.c.apex_set_cpu_level(level) == level
        if name in EXECUTORS:
            _set_executor(lib, *EXECUTORS[name])
        library.forget()
        _kernels.clear()
        _references.clear()
        variant = Variant(name, torch.device("cuda", 0) if name == "cuda" else torch.device("cpu"))
        yield variant
        assert not variant.strangers(), f"{name} was to serve, but {variant.strangers()} ran"
    finally:
        os.environ.pop("APEX_VARIANT", None)
        if before is not None:
            os.environ["APEX_VARIANT"] = before
        if lib:
            lib.c.apex_set_cpu_level(0)
            lib.c.apex_set_executor(_Executor(), 0)
        library.forget()


# ---- counting ----------------------------------------------------------------------------------------------


def count_references() -> None:
    """Counts every call of a reference implementation, if called before the first op is used."""
    implementation = references.implementation

    def counted(name):
        function = implementation(name)

        def reference(*arguments, **keywords):
            _references[name] += 1
            return function(*arguments, **keywords)

        return reference

    references.implementation = counted


_UINT = ctypes.c_uint32
# The text that it returns belongs to the executor, so it passes as an address.
_Executor = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_char_p, *(_UINT,) * 6, ctypes.c_size_t, _UINT, ctypes.c_void_p
)


@functools.cache
def _executor(warp_size: int):
    """The executor's entry, counting. Kept for ever: libapex may hold it."""
    from simt.executor import Executor

    executor = Executor("plain", warp_size)
    if executor.library.failures:
        raise RuntimeError(f"units that do not compile for the executor: {executor.library.failures}")
    entry = ctypes.cast(executor.entry, _Executor)

    def launch(kernel, *arguments):
        _kernels[kernel.decode()] += 1
        return entry(kernel, *arguments)

    return _Executor(launch)


@functools.cache
def _executor_fault(warp_size: int) -> str:
    try:
        _executor(warp_size)
    except FileNotFoundError as error:
        return f"the SIMT executor cannot be built here: {error}"
    return ""


def _set_executor(lib, warp_size: int, order: int) -> None:
    lib.c.apex_set_executor.argtypes = [_Executor, _UINT]
    lib.c.apex_set_executor.restype = None
    lib.c.apex_set_executor(_executor(warp_size), order)
