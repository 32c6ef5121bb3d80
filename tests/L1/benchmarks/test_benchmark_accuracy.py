"""Benchmarks without a GPU: they run, and what they compare computes the same, ours no less accurately than torch's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LINE = re.compile(r"  (.+) (float32|bfloat16|float16) (.+): max / rms error of (.+)")
# Of torch's; the largest is the luck of one number.
LARGEST, ROOT_MEAN_SQUARE = 2.5, 1.05


@pytest.mark.parametrize(
    "name",
    [
        "bias_swiglu", "focal_loss", "group_norm", "groupbn", "index_mul_2d", "norms", "rotary", "softmax",
        "transducer", "xentropy",
    ],
)  # fmt: skip
def test_errors_against_float64(name):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--accuracy"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    cases = {}
    for line in done.stdout.splitlines():
        case, dtype, implementation, errors = LINE.fullmatch(line).groups()
        found = [tuple(map(float, text.split()[-3::2])) for text in errors.split(", ")]
        cases.setdefault((case, dtype), {})[implementation] = found
    assert {dtype for _, dtype in cases} == {"float32", "bfloat16", "float16"}
    for (case, dtype), implementations in cases.items():
        if case.startswith("loss "):
            continue  # torch has no such op, and its sums of logarithms keep more digits than a lattice of floats
        (torchs,) = (found for name, found in implementations.items() if name.startswith("torch"))
        ours = {name: found for name, found in implementations.items() if name.startswith("apex")}
        assert ours
        if dtype == "float32":
            assert all(rms < 1e-3 for _, rms in torchs), (case, implementations)
        for found in ours.values():
            for (largest, rms), (torch_largest, torch_rms) in zip(found, torchs, strict=True):
                if largest == rms:
                    continue  # one number, all of it luck
                assert largest <= LARGEST * torch_largest and rms <= ROOT_MEAN_SQUARE * torch_rms, (
                    case, dtype, implementations,
                )  # fmt: skip
