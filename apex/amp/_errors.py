"""What amp raises and warns of. Every error names the line that mends it (`remedy`)."""

import sys
import warnings

from apex._loader.errors import ApexError


class AmpUsageError(ApexError):
    """amp was called in an order, or with options, that cannot work."""


class AmpTypeError(AmpUsageError, TypeError):
    """An argument of amp has a type that it does not take."""


class AmpValueError(AmpUsageError, ValueError):
    """An argument of amp has a value that it does not take."""


class AmpWarning(UserWarning):
    """amp goes on, but what was asked for may not be what was meant."""


class MovedFunctionWarning(AmpWarning):
    """This torch lacks a function of amp's lists, so that calls of it are not cast."""


# Modules between user code and a warning.
_BETWEEN = (
    "apex.amp",
    "apex.fp16_utils",
    "apex.contrib.optimizers",
    "apex.optimizers",
    "contextlib",
    "torch.",
)


def warn(message, category=AmpWarning):
    """Warns, naming the line of user code that called amp."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
