"""Tensors of another kind of device, as torch_npu's: every op takes its reference. Without one: torch's own errors."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import npu_cases
import pytest
import torch
from torch.utils import backend_registration

import apex
from apex.normalization import FusedLayerNorm

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a kind of device in Python",
)
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """How each case ended, in a process where the device is."""
    file = tmp_path_factory.mktemp("npu") / "results.json"
    kept = {name: value for name, value in os.environ.items() if name != "APEX_VARIANT"}
    environment = {**kept, "PYTHONPATH": str(pathlib.Path(apex.__file__).parents[1])}
    command = [sys.executable, str(HERE / "npu_cases.py"), str(file)]
    subprocess.run(command, check=True, env=environment)
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", npu_cases.CASES)
def test_with_the_device(results, case):
    assert not results[case], results[case]


def test_without_the_device():
    """torch's own words, from a tensor and from a module of ours."""
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'npu'"):
        torch.ones(3, dtype=torch.float32, device="cpu").npu()
    with pytest.raises(AttributeError, match="'FusedLayerNorm' object has no attribute 'npu'"):
        FusedLayerNorm(3).npu()
    with pytest.raises(RuntimeError, match="device type at start of device string: npu"):
        FusedLayerNorm(3).to("npu")
