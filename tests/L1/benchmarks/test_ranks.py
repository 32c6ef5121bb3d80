"""Benchmarks of several ranks run to their end, on gloo, with small sizes; their times say nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
RANKS = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")


def run(folder, options, *command):
    """What a benchmark printed, and wrote, with options that are words of one string."""
    figures = folder / "figures.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *map(str, command), *options.split(), "--device", "cpu", "--json", figures],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(figures.read_text())


def test_tensor_parallel(tmp_path):
    """Both models have the same losses and gradients, else the program fails."""
    options = "--layers 2 --width 64 --heads 4 --batch 2 --sequence 16 --words 64 --rounds 1 --count 1 --dtype float32"
    command = *RANKS, ROOT / "benchmarks/tensor_parallel.py", "--trace", tmp_path / "trace.json"
    said, found = run(tmp_path, options, *command)
    assert [row["implementation"] for row in found["rows"]] == ["apex", "torch DTensor"]
    assert "13 gradients: at most " in said
    assert [line.split(":")[0] for line in said.splitlines() if "backward's" in line] == [
        "apex, sequence parallel", "apex, without it", "torch DTensor, sequence parallel",
    ]  # fmt: skip
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_sharded_optimizers(tmp_path):
    options = "--layers 2 --width 64 --rows 8 --gpt 1 64 128 --tokens 1 8 --repeats 1 --only GPT-2 --kernels"
    said, found = run(tmp_path, options, *RANKS, ROOT / "benchmarks/distributed_optimizers.py")
    names = [row["case"] for row in found["rows"]]
    assert names[0] == "GPT-2, LAMB, bfloat16" and not any("public" in name for name in names)
    assert len(names) == 5 and all(row["kernels"] is None and row["iteration"] > 0 for row in found["rows"])
    assert all(name in said for name in names)


def test_bytes_of_a_shard():
    import distributed_optimizers as benchmark

    assert (benchmark.adam_bytes(), benchmark.lamb_bytes(torch.float16)) == (28, 40)
    assert (
        benchmark.lamb_bytes(torch.float32) == 44
    )  # as benchmarks/optimizers.py, with a copy and without a norm


def test_pipeline_bubble(tmp_path):
    options = "--chunks 1 2 --microbatches 4 --forward 4 --backward 4 --steps 1"
    said, found = run(tmp_path, options, ROOT / "benchmarks/pipeline_bubble.py")
    for parts in 1, 2:
        (_, least), (_, must) = found[str(parts)]["step"], found[str(parts)]["waiting"]
        assert least - must == pytest.approx(4 * parts * must, rel=1e-6)  # the work of 4 microbatches
        assert f"2 stages x {parts}, 4 microbatches" in said
