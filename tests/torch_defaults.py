"""Tests under another default dtype and device of torch's: APEX_TESTS_DEFAULT_DTYPE=bfloat16,
APEX_TESTS_DEFAULT_DEVICE=meta. What depends on neither passes all the same; tensors of the tests name both."""

import os

import pytest

DTYPE, DEVICE = (os.environ.get(f"APEX_TESTS_DEFAULT_{name}") for name in ("DTYPE", "DEVICE"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Around each test with its fixtures."""
    if not (DTYPE or DEVICE):
        return (yield)
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, DTYPE or "float32"))
    try:
        with torch.device(DEVICE or "cpu"):
            return (yield)
    finally:
        torch.set_default_dtype(before)
