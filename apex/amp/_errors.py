"""What amp raises and warns of. Every error names the line that mends it (`remedy`)."""

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
