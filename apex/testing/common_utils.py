"""Decorators that skip a test on ROCm, or a flaky one, where the environment asks for it.

APEX_TEST_WITH_ROCM=1: the tests run on ROCm. APEX_SKIP_FLAKY_TEST=1: leave out what is marked as flaky. Both are read
when this module is imported, as in public apex.
"""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable

TEST_WITH_ROCM = os.environ.get("APEX_TEST_WITH_ROCM", "0") == "1"
SKIP_FLAKY_TEST = os.environ.get("APEX_SKIP_FLAKY_TEST", "0") == "1"


def skipIfRocm(fn: Callable) -> Callable:
    """fn, which is skipped (unittest.SkipTest) when tests run on ROCm."""
    return _skipped(fn, lambda: TEST_WITH_ROCM, "does not run on ROCm")


def skipFlakyTest(fn: Callable) -> Callable:
    """fn, which is skipped (unittest.SkipTest) when flaky tests are left out."""
    return _skipped(fn, lambda: SKIP_FLAKY_TEST, "flaky, and APEX_SKIP_FLAKY_TEST=1")


def _skipped(fn, condition, reason):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        if condition():
            raise unittest.SkipTest(f"{fn.__name__}: {reason}")
        return fn(*args, **kwargs)

    return wrapper
