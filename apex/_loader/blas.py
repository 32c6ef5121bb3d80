"""Which library multiplies matrices for the dense layers: the vendor's BLAS beside torch, or torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from apex._loader import system
from apex._loader.errors import InstallationError

if TYPE_CHECKING:
    from apex._loader.library import Library

SWITCH = "APEX_BLAS"
WORDS = {"": 0, "lt": 1, "torch": 2}  # apex_blas of csrc/host/blas.h


def wanted(environment: Mapping[str, str] = os.environ) -> int:
    """What APEX_BLAS asks for, as libapex numbers it; APEX_VARIANT=reference asks for torch.

    Raises InstallationError for a word that is none.
    """
    word = environment.get(SWITCH, "").lower()
    if word not in WORDS:
        raise InstallationError(
            f"{SWITCH}={word} names no library", available=("lt", "torch"), remedy=system.unset(SWITCH)
        )
    if not word and environment.get("APEX_VARIANT", "").lower() == "reference":
        return WORDS["torch"]
    return WORDS[word]


def describe(library: Library, platform: int) -> str:
    """Which serves on a platform, and why no better one does: "cublasLt 13.1 beside torch", "torch: ..."."""
    name = ctypes.create_string_buffer(64)
    if library.c.apex_blas_name(ctypes.c_int32(platform), name, ctypes.c_size_t(len(name))) == 0:
        return f"{name.value.decode()} beside torch"
    return f"torch: {library.last_error()}"
