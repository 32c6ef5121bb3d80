"""The benchmark of mixed precision runs on a CPU, and its rows are of trainings that go the same way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "mixed_precision.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300)


def test_small_models_on_a_cpu(tmp_path):
    done = run("--quick", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    losses = {}
    for row in rows:
        assert 0 < row["tail"] < row["host"], row
        losses.setdefault(row["case"], {})[row["implementation"]] = row["loss"]
    assert {case: len(found) for case, found in losses.items()} == {
        "resnet50 SGD": 4,
        "resnet50 AdamW": 4,
        "gpt2 AdamW": 6,
    }
    # So small a ResNet makes much of a rounding in one step; which ones there are differs by processor.
    for case, half, brain in (
        ("resnet50 SGD", 0.1, 0.2),
        ("resnet50 AdamW", 0.1, 0.2),
        ("gpt2 AdamW", 1e-3, 1e-3),
    ):
        found = losses[case]
        assert found["apex O2"] == pytest.approx(found["torch.amp fp16"], rel=half)
        assert found["apex O5"] == pytest.approx(found["torch.amp bf16"], rel=brain)


def test_full_size_is_refused_on_a_cpu():
    done = run()
    assert done.returncode == 2 and "--quick runs on a CPU" in done.stderr
