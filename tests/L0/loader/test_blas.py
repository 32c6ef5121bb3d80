"""Which BLAS multiplies: what APEX_BLAS says, and what the doctor shows."""

from __future__ import annotations

import types

import pytest

from apex._loader import blas
from apex._loader.errors import InstallationError


@pytest.mark.parametrize(
    "environment, number",
    [
        ({}, 0),
        ({"APEX_BLAS": "lt"}, 1),
        ({"APEX_BLAS": "Torch"}, 2),
        ({"APEX_VARIANT": "reference"}, 2),
        ({"APEX_VARIANT": "reference", "APEX_BLAS": "lt"}, 1),
        ({"APEX_VARIANT": "sm_90"}, 0),
    ],
)
def test_words(environment, number):
    assert blas.wanted(environment) == number


def test_another_word():
    with pytest.raises(InstallationError, match="APEX_BLAS=cublas names no library"):
        blas.wanted({"APEX_BLAS": "cublas"})


def test_described():
    def named(platform, text, room):
        if platform.value == 1:
            text.value = b"cublasLt 13.1"
            return 0
        return 1

    library = types.SimpleNamespace(
        c=types.SimpleNamespace(apex_blas_name=named), last_error=lambda: "no libhipblaslt.so is mapped"
    )
    assert blas.describe(library, 1) == "cublasLt 13.1 beside torch"
    assert blas.describe(library, 2) == "torch: no libhipblaslt.so is mapped"
