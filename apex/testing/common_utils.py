"""Decorators that skip a test on ROCm, or a flaky one, where the environment asks for it.

APEX_TEST_WITH_ROCM=1: the tests run on ROCm. APEX_SKIP_FLAKY_TEST=1: leave out what is marked as flaky. Both are read
when this module is imported, as in public apex.
"""

from __future__ import annotations

import functools
import inspect
import os
import unittest
from collections.abc import Callable
from typing import TypeVar

_Test = TypeVar("_Test", bound=Callable)

TEST_WITH_ROCM = os.environ.get("APEX_TEST_WITH_ROCM", "0") == "1"
SKIP_FLAKY_TEST = os.environ.get("APEX_SKIP_FLAKY_TEST", "0") == "1"


def skipIfRocm(fn: _Test) -> _Test:
    """fn, a test or a class of tests, which is skipped (unittest.SkipTest) when tests run on ROCm."""
    return _skipped(fn, lambda: TEST_WITH_ROCM, "does not run on ROCm")


def skipFlakyTest(fn: _Test) -> _Test:
    """fn, a test or a class of tests, which is skipped (unittest.SkipTest) when flaky tests are left out."""
    return _skipped(fn, lambda: SKIP_FLAKY_TEST, "flaky, and APEX_SKIP_FLAKY_TEST=1")


def _skipped(fn, condition, reason):
    if isinstance(fn, type):
        return _skipped_class(fn, condition, reason)

    def look():
        if condition():
            raise unittest.SkipTest(f"{fn.__name__}: {reason}")

    if inspect.iscoroutinefunction(fn):  # which runs where its caller sees that it is one

        @functools.wraps(fn)
        async def wrapper(*args, **kwargs):
            look()
            return await fn(*args, **kwargs)

    else:

        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            look()
            return fn(*args, **kwargs)

    return wrapper


def _skipped_class(kind, condition, reason):
    """A class that stays one, so that its tests are found."""
    if issubclass(kind, unittest.TestCase):
        return unittest.skipIf(condition(), f"{kind.__name__}: {reason}")(kind)
    for name in dir(kind):
        if name.startswith("test") and inspect.isfunction(getattr(kind, name)):
            setattr(kind, name, _skipped(getattr(kind, name), condition, reason))
    return kind
