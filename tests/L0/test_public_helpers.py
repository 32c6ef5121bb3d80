"""Small functions that public apex has outside its packages: casts, decorators of tests, what torch was built for."""

from __future__ import annotations

import asyncio
import collections
import subprocess
import sys
import unittest

import pytest
import torch

import apex
from apex._autocast_utils import _cast_if_autocast_enabled, _get_autocast_dtypes
from apex.testing import common_utils
from apex.transformer.pipeline_parallel import utils

Pair = collections.namedtuple("Pair", "a b")


def test_casts_follow_autocast():
    one, double = (
        torch.ones(2, dtype=torch.float32, device="cpu"),
        torch.ones(2, dtype=torch.float64, device="cpu"),
    )
    index = torch.zeros(2, dtype=torch.int64, device="cpu")
    arguments = (one, double, index, [one, None], {"x": one}, Pair(one, 3), "text")
    assert all(a is b for a, b in zip(_cast_if_autocast_enabled(*arguments)[:3], arguments, strict=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b, c, d, e, f, g = _cast_if_autocast_enabled(*arguments)
        with torch.autocast("cpu", enabled=False):
            (off,) = _cast_if_autocast_enabled(one)
    assert a.dtype == d[0].dtype == e["x"].dtype == f.a.dtype == torch.bfloat16
    assert b is double and c is index and d[1] is None and f.b == 3 and g == "text" and off is one
    assert type(f) is Pair


def test_casts_leave_other_devices_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (tensor,) = _cast_if_autocast_enabled(torch.ones(2, dtype=torch.float32, device="meta"))
    assert tensor.dtype == torch.float32


def test_microbatches_of_a_batch():
    batch = [
        torch.arange(8, dtype=torch.int64, device="cpu"),
        torch.zeros(8, 2, dtype=torch.bool, device="cpu"),
    ]
    found = list(utils._split_batch_into_microbatch(batch, _micro_batch_size=2, _global_batch_size=8))
    assert [[x.shape for x in each] for each in found] == [[(2,), (2, 2)]] * 4
    assert torch.equal(torch.cat([first for first, _ in found]), batch[0])


@pytest.mark.parametrize(
    ("name", "flag"), [("skipIfRocm", "TEST_WITH_ROCM"), ("skipFlakyTest", "SKIP_FLAKY_TEST")]
)
def test_decorators_skip_where_asked(monkeypatch, name, flag):
    def returns(value):
        return value

    decorated = getattr(common_utils, name)(returns)

    @getattr(common_utils, name)
    async def waits(value):
        return value

    @getattr(common_utils, name)
    class plain:
        def test(self, value):
            return value

    assert decorated.__name__ == "returns"
    monkeypatch.setattr(common_utils, flag, False)
    assert decorated(3) == 3
    assert asyncio.run(waits(5)) == 5
    assert plain().test(5) == 5
    monkeypatch.setattr(common_utils, flag, True)
    with pytest.raises(unittest.SkipTest):
        asyncio.run(waits(5))
    with pytest.raises(unittest.SkipTest):
        plain().test(5)
    with pytest.raises(unittest.SkipTest, match="returns"):
        decorated(3)


@pytest.mark.parametrize(
    ("name", "flag"), [("skipIfRocm", "TEST_WITH_ROCM"), ("skipFlakyTest", "SKIP_FLAKY_TEST")]
)
@pytest.mark.parametrize("skips", [False, True])
def test_decorated_classes_and_coroutines_are_tests(monkeypatch, name, flag, skips):
    """They run, or are skipped: none of them passes without a run."""
    monkeypatch.setattr(common_utils, flag, skips)
    decorate = getattr(common_utils, name)
    ran = []

    class Waiting(unittest.IsolatedAsyncioTestCase):
        @decorate
        async def test_waits(self):
            ran.append("waits")

    @decorate
    class Whole(unittest.TestCase):
        def test_of_a_class(self):
            ran.append("of a class")

    load = unittest.defaultTestLoader.loadTestsFromTestCase
    result = unittest.TestResult()
    unittest.TestSuite([load(Waiting), load(Whole)]).run(result)
    assert result.wasSuccessful() and result.testsRun == 2
    assert (ran, len(result.skipped)) == (([], 2) if skips else (["waits", "of a class"], 0))


def test_what_torch_was_built_for(monkeypatch):
    assert apex.check_if_rocm_pytorch() == apex.IS_ROCM_PYTORCH == (torch.version.hip is not None)
    if apex.IS_ROCM_PYTORCH:
        assert apex.check_cudnn_version_and_warn("--x", 10**9)
        return
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="--x needs cuDNN 8500 or later, which is not here"):
        assert not apex.check_cudnn_version_and_warn("--x", 8500)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8500)
    assert apex.check_cudnn_version_and_warn("--x", 8500)
    with pytest.warns(UserWarning, match="is 8500"):
        assert not apex.check_cudnn_version_and_warn("--x", 9000)


def test_import_brings_neither_torch_nor_the_list_of_names():
    code = "import sys, apex; assert not {'torch', 'apex._torch_build', 'apex._legacy.public_names'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_dtypes_of_autocast(monkeypatch):
    for there, supported, wanted in ((False, False, 2), (True, True, 2), (True, False, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported: supported)
        assert _get_autocast_dtypes() == [torch.float16, torch.bfloat16][:wanted]
