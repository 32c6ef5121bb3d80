"""The fixture `device`: a test that takes it runs on every SIMT build and on the emulated AMD targets."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from simt.targets import Target, emulated_targets, executor_targets


def _parameters(targets: list[Target]) -> list:
    return [pytest.param(t, id=t.name, marks=[getattr(pytest.mark, m) for m in t.marks]) for t in targets]


def _open(request, selftest: bool):
    target = request.param
    reason = target.why_not()
    if reason:
        pytest.skip(reason)
    device = target.device(selftest)
    yield device
    device.close()


@pytest.fixture(params=_parameters(executor_targets() + emulated_targets()))
def device(request):
    """A Device with the product's kernels."""
    yield from _open(request, selftest=False)


@pytest.fixture(params=_parameters(executor_targets() + emulated_targets()))
def selftest_device(request):
    """A Device with the kernels of csrc/testing/selftest.cu."""
    yield from _open(request, selftest=True)
