"""libapex.so: loading it, and answering its question which variant serves a unit.

The library asks through a callback, from any thread, possibly with a launch waiting. The answer comes from
`choose`; a code object that was chosen is registered before it is given. An exception cannot cross C code: it
is kept (`raise_stored`), its text is handed to the library, and the answer is "unknown", which the library
turns into a failing status.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import os
import threading
import warnings

from apex._loader import elf, packs, tree
from apex._loader.errors import (
    ApexError,
    InstallationError,
    ResolverError,
    SlowPathWarning,
    VariantUnavailableError,
    from_status,
)

NAME = "libapex.so"
UNKNOWN, KERNEL, CPU, REFERENCE = 0, 1, 2, 3  # enum apex_variant of csrc/host/apex.h
PLATFORMS = ("cpu", "cuda", "hip")  # enum apex_platform
_Resolver = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p)


def path():
    """Where libapex.so should be."""
    return tree.libraries() / NAME


@functools.cache
def fault():
    """Why libapex.so cannot be used on this machine, or None. Opens nothing."""
    return elf.library_fault(path())


@functools.cache
def cpu_units():
    """Units that libapex.so has a CPU variant of, by its exported names: apex_<unit>, apex_<unit>_forward."""
    if fault():
        return ()
    from apex._loader import registry

    exported = {
        symbol.name for symbol in elf.Elf(path().read_bytes()).symbols(dynamic=True) if symbol.defined
    }
    return tuple(unit for unit in registry.units() if exported & {f"apex_{unit}", f"apex_{unit}_forward"})


class Library:
    """The loaded library. `c` is the ctypes library with its signatures set."""

    def __init__(self, file):
        self.c = ctypes.CDLL(str(file))
        self._declare()
        self._callback = _Resolver(_resolve)  # must outlive every call
        self.c.apex_set_resolver(self._callback)
        if hasattr(self.c, "apex_set_vendor_hint"):
            self._hint()
        atexit.register(self._forget_resolver)

    def _declare(self):
        c, i32, text = self.c, ctypes.c_int32, ctypes.c_char_p
        signatures = {
            "apex_last_error": (text, []),
            "apex_set_resolver": (None, [_Resolver]),
            "apex_resolve": (i32, [i32, i32, text]),
            "apex_forget_choices": (None, []),
            "apex_register_code_object": (i32, [i32, i32, text, text, ctypes.c_size_t]),
            "apex_cpu_level": (i32, []),
            "apex_set_cpu_level": (i32, [i32]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(c, name)
            function.restype, function.argtypes = result, arguments

    def _hint(self):
        from apex._loader import vendor

        folder = vendor.torch_folder()
        if folder:
            self.c.apex_set_vendor_hint(os.fsencode(folder))

    def _forget_resolver(self):
        self.c.apex_set_resolver(_Resolver())  # a late thread must not call into a finished interpreter

    def last_error(self):
        """Text of the last failure on this thread."""
        return (self.c.apex_last_error() or b"").decode("utf-8", "replace")

    def check(self, status):
        """Raises the exception of a status that is neither OK nor "use the reference"; returns the status."""
        if status not in (0, 1):
            raise_stored()
            raise from_status(status, self.last_error())
        return status

    def resolve(self, platform, device, unit):
        """The variant the library has for a unit (KERNEL, CPU, REFERENCE), asking the resolver if it is new.

        platform: "cpu", "cuda" or "hip". Raises what the choice raised.
        """
        answer = self.c.apex_resolve(PLATFORMS.index(platform), device, unit.encode())
        if answer == UNKNOWN:
            raise_stored()
            raise ResolverError(f"no variant was chosen for {unit}: {self.last_error()}")
        return answer


_lock = threading.RLock()
_library = None


def load():
    """The Library of this process, loaded and with its resolver set. Thread-safe.

    Raises InstallationError when it is missing, damaged or for another processor.
    """
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                reason = fault()
                if reason:
                    raise InstallationError(
                        f"apex's host library cannot be used: {reason}", wanted=str(path())
                    )
                try:
                    _library = Library(path())
                except OSError as error:
                    raise InstallationError(
                        f"apex's host library cannot be opened: {error}", wanted=str(path())
                    ) from error
    return _library


# ---- the resolver ------------------------------------------------------------------------------------------

_choices: dict = {}  # (platform, device, unit) -> Choice
_failures: dict = {}  # (platform, device, unit, variant) -> reason, for what was tried and did not work
_warned: set = set()
_stored = threading.local()


def choices():
    """What was chosen so far: {(platform, device, unit): Choice}."""
    return dict(_choices)


def forget():
    """Drops every choice, so that a changed environment (APEX_VARIANT) is read again. For tests and tools."""
    from apex._loader import machine

    with _lock:
        _choices.clear()
        _failures.clear()
        machine.here.cache_clear()
        if _library is not None:
            _library.c.apex_forget_choices()


def raise_stored():
    """Raises the exception that the last choice on this thread ended in, if there is one, and forgets it."""
    error, _stored.error = getattr(_stored, "error", None), None
    if error is None:
        return
    if isinstance(error, ApexError):
        raise error
    raise ResolverError(f"choosing a variant failed: {error!r}") from error


def _resolve(platform, device, unit):
    try:
        _stored.error = None
        return answer(PLATFORMS[platform], device, unit.decode())
    except BaseException as error:  # whatever it is, ctypes would print and swallow it
        _stored.error = error
        _tell(error)
        return UNKNOWN


def _tell(error):
    """Hands the text to the library, whose caller may be C++ that knows nothing of this module."""
    tell = getattr(_library.c, "apex_set_last_error", None) if _library else None
    if tell is not None:
        tell(str(error).encode(errors="backslashreplace"))


def answer(platform, device, unit):
    """The enum apex_variant for a unit on a device, with its code object registered. Raises ApexError."""
    while True:
        choice = _decide(platform, device, unit)
        taken = choice.taken
        if taken is None:
            raise VariantUnavailableError(
                choice.refusal,
                wanted=unit,
                found=f"{choice.device.platform}:{device} {choice.device.arch}",
                available=[f"{c.variant} ({c.reason})" for c in choice.candidates],
                remedy="run `python -m apex`, or unset APEX_VARIANT and APEX_STRICT",
            )
        if taken.code is None and taken.target is None:
            break
        try:
            image = _image(choice)
        except ApexError as error:  # the next variant may serve: a compiler that fails is no reason to stop
            _failures[platform, device, unit, taken.variant] = error.what
            continue
        _register(platform, device, unit, image)
        break
    _choices[platform, device, unit] = choice
    if taken.variant == "reference":
        _warn(choice)
        return REFERENCE
    return CPU if taken.variant == "cpu" else KERNEL


def _decide(platform, index, unit):
    from apex._loader import machine as machines
    from apex._loader.choose import choose

    machine = machines.here()
    device = next((d for d in machine.devices if (d.platform, d.index) == (platform, index)), None)
    if device is None and platform == "cpu":
        device = next(d for d in machine.devices if d.platform == "cpu")
    if device is None:
        raise ResolverError(
            f"torch has no device {platform}:{index}",
            available=[f"{d.platform}:{d.index}" for d in machine.devices],
        )
    return choose(dataclasses.replace(machine, failures=dict(_failures)), machine.packs, unit, device)


def _image(choice):
    taken = choice.taken
    if taken.code is not None:
        return packs.image(taken.code)
    from apex._loader import jit

    return jit.build(choice.unit, taken.target)


def _register(platform, device, unit, image):
    lib = load()
    lib.check(
        lib.c.apex_register_code_object(PLATFORMS.index(platform), device, unit.encode(), image, len(image))
    )


def _warn(choice):
    """Once an arch and unit: on a GPU the reference is slower than what people installed apex for."""
    key = (choice.device.arch, choice.unit)
    if (
        choice.device.platform == "cpu"
        or key in _warned
        or "APEX_VARIANT=reference" in choice.candidates[0].reason
    ):
        return
    _warned.add(key)
    why = "; ".join(f"{c.variant}: {c.reason}" for c in choice.passed_over)
    warnings.warn(
        f"{choice.unit} runs on its PyTorch reference on {choice.device.arch} ({why}); see `python -m apex`",
        SlowPathWarning,
        stacklevel=2,
    )


def _fresh_locks():
    global _lock
    _lock = threading.RLock()  # a thread that held it does not exist in the child


os.register_at_fork(after_in_child=_fresh_locks)
