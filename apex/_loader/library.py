"""libapex.so: loading it, and handing its question which variant serves a unit to the resolver.

The library asks through a callback. An exception cannot cross C code: it is kept (`raise_stored`), its text is handed
to the library, and the answer is "unknown", which the library turns into a failing status.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from pathlib import Path

from apex._loader import blas, installed, probe, vendor
from apex._loader.choose import Choice
from apex._loader.errors import ApexError, InstallationError, ResolverError, from_status
from apex._loader.once import Once
from apex._loader.resolver import CPU, KERNEL, PLATFORMS, REFERENCE, UNKNOWN, Resolver

__all__ = [
    "CPU",
    "KERNEL",
    "PLATFORMS",
    "REFERENCE",
    "UNKNOWN",
    "Library",
    "choices",
    "forget",
    "load",
    "raise_stored",
    "torch_came",
]

_Callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p)
_stored = threading.local()


class Library:
    """The loaded library. `c` is the ctypes library with its signatures set."""

    def __init__(self, file: Path) -> None:
        self.c = ctypes.CDLL(str(file))
        self._declare()
        self.resolver = Resolver(self.register)
        self._callback = _Callback(self._resolve)  # must outlive every call
        self.c.apex_set_resolver(self._callback)
        if hasattr(self.c, "apex_set_vendor_hint"):
            self._hint()
        self.choose_blas()
        atexit.register(self._forget_resolver)

    def _declare(self) -> None:
        i32, text = ctypes.c_int32, ctypes.c_char_p
        signatures = {
            "apex_last_error": (text, []),
            "apex_set_resolver": (None, [_Callback]),
            "apex_resolve": (i32, [i32, i32, text]),
            "apex_forget_choices": (None, []),
            "apex_register_code_object": (i32, [i32, i32, text, text, ctypes.c_size_t]),
            "apex_cpu_level": (i32, []),
            "apex_set_cpu_level": (i32, [i32]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments

    def _hint(self) -> None:
        folder = vendor.torch_folder()
        if folder:
            self.c.apex_set_vendor_hint(os.fsencode(folder))

    def choose_blas(self) -> None:
        """Tells the library which BLAS the environment asks for. Raises InstallationError for a word that is none."""
        if hasattr(self.c, "apex_set_blas"):
            self.c.apex_set_blas(blas.wanted())

    def _forget_resolver(self) -> None:
        self.c.apex_set_resolver(_Callback())  # a late thread must not call into a finished interpreter

    def last_error(self) -> str:
        """Text of the last failure on this thread."""
        return (self.c.apex_last_error() or b"").decode("utf-8", "replace")

    def check(self, status: int) -> int:
        """Raises the exception of a status that is neither OK nor "use the reference"; returns the status."""
        if status not in (0, 1):
            raise_stored(self.last_error())
            raise from_status(status, self.last_error())
        return status

    def register(self, platform: str, device: int, unit: str, image: bytes) -> None:
        """Gives the library the code object of a unit on a device. Raises ApexError."""
        place = PLATFORMS.index(platform)
        self.check(self.c.apex_register_code_object(place, device, unit.encode(), image, len(image)))

    def resolve(self, platform: str, device: int, unit: str) -> int:
        """The variant the library has for a unit (KERNEL, CPU, REFERENCE), asking the resolver if it is new.

        platform: "cpu", "cuda" or "hip". Raises what the choice raised.
        """
        answer = self.c.apex_resolve(PLATFORMS.index(platform), device, unit.encode())
        if answer == UNKNOWN:
            raise_stored()
            raise ResolverError(f"no variant was chosen for {unit}: {self.last_error()}")
        return answer

    def _resolve(self, platform: int, device: int, unit: bytes) -> int:
        try:
            _stored.error = None
            return self.resolver.answer(PLATFORMS[platform], device, unit.decode())
        except BaseException as error:  # whatever it is, ctypes would print and swallow it
            _stored.error = error
            self._tell(error)
            return UNKNOWN

    def _tell(self, error: BaseException) -> None:
        """Hands the text to the library, whose caller may be C++ that knows nothing of this module."""
        if hasattr(self.c, "apex_set_last_error"):
            self.c.apex_set_last_error(str(error).encode(errors="backslashreplace"))


def raise_stored(said: object = None) -> None:
    """Raises the exception that the last choice on this thread ended in, if there is one, and forgets it.

    said: what C++ raised, or the text of its failure. An exception that this does not speak of is of an earlier call,
    whose caller never came here, and does not take its place.
    """
    error, _stored.error = getattr(_stored, "error", None), None
    if error is None or (said is not None and (str(error).splitlines() or [""])[0][:200] not in str(said)):
        return
    if isinstance(error, ApexError) or not isinstance(
        error, Exception
    ):  # the user's Ctrl-C is no fault of a choice
        raise error
    raise ResolverError(f"choosing a variant failed: {error!r}") from error


@Once
def load() -> Library:
    """The Library of this process, loaded and with its resolver set. Thread-safe.

    Raises InstallationError when it is missing, damaged or for another processor.
    """
    path = installed.library()
    reason = installed.library_fault()
    if reason:
        raise InstallationError(f"apex's host library cannot be used: {reason}", wanted=str(path))
    try:
        return Library(path)
    except OSError as error:
        raise InstallationError(f"apex's host library cannot be opened: {error}", wanted=str(path)) from error


def choices() -> dict[tuple[str, int, str], Choice]:
    """What was chosen so far: {(platform, device, unit): Choice}."""
    loaded = load.made()
    return dict(loaded.resolver.choices) if loaded else {}


def torch_came() -> None:
    """torch is there now: what was chosen without it, for another framework, is chosen anew."""
    described = probe.here.made()
    if described and described.torch is None:
        forget()


def forget() -> None:
    """Drops every choice, so that a changed environment (APEX_VARIANT) is read again. For tests and tools."""
    probe.here.forget()
    if loaded := load.made():
        loaded.resolver.forget()
        loaded.c.apex_forget_choices()
        loaded.choose_blas()
