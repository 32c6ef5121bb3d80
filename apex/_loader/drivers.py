"""Versions of the vendors' drivers, asked from the libraries themselves."""

from __future__ import annotations

import ctypes

from apex._loader import system, vendor


def _ask(library: ctypes.CDLL, function: str) -> int | None:
    number = ctypes.c_int()
    try:
        status = getattr(library, function)(ctypes.byref(number))
    except AttributeError:
        return None
    return number.value if status == 0 else None


def cuda_version() -> tuple[int, int] | None:
    """Newest CUDA that the NVIDIA driver serves, as (12, 4), or None. Opens its library but no device."""
    try:
        number = _ask(ctypes.CDLL(system.cuda_driver()), "cuDriverGetVersion")
    except OSError:
        return None
    return (number // 1000, number % 1000 // 10) if number else None


def hip_version() -> tuple[int, int] | None:
    """Version of the HIP runtime that torch uses, as (7, 2), or None."""
    found = vendor.find("libamdhip64.so")
    if found.path is None:
        return None
    number = _ask(vendor.open_library(found), "hipRuntimeGetVersion")
    return (number // 10_000_000, number // 100_000 % 100) if number else None
