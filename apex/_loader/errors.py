"""The catalogue of errors that apex raises.

Every error carries fields (`wanted`, `found`, `available`, `remedy`); its text is made from them only when it
is shown, so a program reads the fields and never parses the text. All derive from `ApexError`, which is a
RuntimeError; errors that are the caller's own are a ValueError, a TypeError or an IndexError too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ApexError(RuntimeError):
    """Something that apex cannot do here.

    what:      one sentence, without advice
    wanted:    what was asked for
    found:     what is here instead
    available: what could be had
    remedy:    one command or one step that mends it
    """

    def __init__(
        self,
        what: str,
        *,
        wanted: object = None,
        found: object = None,
        available: Iterable[object] = (),
        remedy: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.wanted = wanted
        self.found = found
        self.available = tuple(available)
        self.remedy = remedy

    def fields(self) -> dict[str, Any]:
        """The error as plain values, for JSON."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "wanted": self.wanted,
            "found": self.found,
            "available": list(self.available),
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        lines = [self.what]
        if self.wanted:
            lines.append(f"  wanted:    {self.wanted}")
        if self.found:
            lines.append(f"  found:     {self.found}")
        if self.available:
            lines.append(f"  available: {', '.join(map(str, self.available))}")
        if self.remedy:
            lines.append(f"  remedy:    {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:  # else the fields were lost on the way from a worker process
        return _rebuild, (type(self), self.what, self.wanted, self.found, self.available, self.remedy)


def _rebuild(
    kind: type[ApexError],
    what: str,
    wanted: object,
    found: object,
    available: Iterable[object],
    remedy: str | None,
) -> ApexError:
    return kind(what, wanted=wanted, found=found, available=available, remedy=remedy)


class ArgumentError(ApexError, ValueError):
    """A value that the caller passed does not fit."""


class ArgumentTypeError(ApexError, TypeError):
    """An argument's type or dtype does not fit."""


class ArgumentIndexError(ApexError, IndexError):
    """An index or a label lies outside of what it counts."""


class InstallationError(ApexError):
    """What is installed cannot work: a file is missing, damaged, or belongs to somebody else."""


class TwoCopiesError(InstallationError):
    """A second apex is loaded in this process."""


class BindingMismatchError(ApexError):
    """No binding of this installation was built for the torch that runs."""


class VariantUnavailableError(ApexError):
    """The variant that APEX_VARIANT or APEX_STRICT asks for cannot run here."""


class CompileError(ApexError):
    """A run-time compiler refused a source; `found` ends with its log."""


class ResolverError(ApexError):
    """Choosing a variant failed; the first cause is `__cause__`."""


class DriverError(ApexError):
    """The vendor's driver refused; the text holds its code and name."""


class NoDriverError(DriverError):
    """The vendor's driver library is not on this machine."""


class NoKernelError(ApexError):
    """A code object was registered but lacks the kernel that was to be launched."""


class ForkedError(DriverError):
    """The driver was opened before fork(); it does not work in the child."""


class ExecutorError(ApexError):
    """The SIMT executor, a test tool, reported a fault."""


class PeerMemoryError(ApexError):
    """Memory of another rank cannot be reached, or its owner does not answer."""


class HostMemoryError(ApexError, MemoryError):
    """Out of host memory."""


class WorkspaceError(ApexError, MemoryError):
    """A call of the C interface was lent no memory, or too little."""


class SlowPathWarning(RuntimeWarning):
    """A slower variant serves an op; said once, with the reason."""


# Values of apex_status in csrc/host/apex.h (tests/L0/loader/test_errors.py compares them with the header).
OK = 0
USE_REFERENCE = 1
BY_STATUS = {
    2: ArgumentError,
    3: DriverError,
    4: NoDriverError,
    5: NoKernelError,
    6: ForkedError,
    7: ExecutorError,
    8: HostMemoryError,
    9: ResolverError,
    10: ArgumentError,
    11: WorkspaceError,
    12: ArgumentIndexError,
}

_REMEDIES = {
    NoDriverError: "install the GPU driver, or pass CPU tensors",
    NoKernelError: "run `python -m apex`; it names the damaged pack",
    ForkedError: 'start worker processes with multiprocessing.get_context("spawn")',
}


def from_status(status: int, text: str) -> ApexError:
    """The exception for a status of the C interface other than OK and USE_REFERENCE.

    text: what apex_last_error() said, str.
    """
    kind = BY_STATUS.get(status)
    if kind is None:
        return ApexError(f"libapex answered with the unknown status {status}: {text}")
    return kind(text or kind.__doc__ or "", remedy=_REMEDIES.get(kind))
