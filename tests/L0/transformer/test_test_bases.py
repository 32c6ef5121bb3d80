"""The base classes of tests on several ranks, in a process that runs a tiny file of tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

TINY = """
import unittest
import torch, torch.distributed as dist
from apex.distributed_testing import NcclDistributedTestBase, UccDistributedTestBase
from apex.transformer import parallel_state
from apex.transformer.testing import distributed_test_base

class Cases:
    world_size = 2

    def test_sum(self):
        parallel_state.initialize_model_parallel(2)
        tensor = torch.full((1,), self.rank + 1.0, dtype=torch.float32, device="cpu")
        tensor = tensor.cuda() if dist.get_backend() == "nccl" else tensor
        dist.all_reduce(tensor, group=parallel_state.get_tensor_model_parallel_group())
        self.assertEqual(tensor.item(), 3.0)
        parallel_state.destroy_model_parallel()

    def test_that_fails_on_one_rank(self):
        self.assertEqual(self.rank, 0, "said on rank 1")

class NcclTest(Cases, NcclDistributedTestBase): pass
class UccTest(Cases, distributed_test_base.UccDistributedTestBase): pass

if __name__ == "__main__":
    unittest.main(verbosity=2)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_tests_on_several_ranks(tmp_path):
    """A test passes where it does on all ranks; a failure is told in the words of its rank."""
    file = tmp_path / "tiny.py"
    file.write_text(TINY)
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=150, env=os.environ
    )
    pattern = r"^(test_\w+) \(__main__\.Nccl[^)]*\).*?(?:\.\.\. |\n)(ok|FAIL|ERROR|skipped)\b"
    told = dict(re.findall(pattern, done.stderr, re.M | re.S))
    assert told == {
        "test_sum": "ok",
        "test_that_fails_on_one_rank": "ERROR",
    }, done.stderr
    assert "said on rank 1" in done.stderr and done.returncode == 1


def test_without_expecttest():
    """torch's own test classes need it; who lacks it is told."""
    code = "import sys; sys.modules['expecttest'] = None; import apex.distributed_testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "ModuleNotFoundError" in done.stderr and "pip install expecttest" in done.stderr
