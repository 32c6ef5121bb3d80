"""benchmarks/cpu.py: both sides of a case come to the same numbers, and the table says where apex is slower."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import _cpu_cases
import cpu

# The smallest of each kind.
CASES: dict = {}
for name, make in _cpu_cases.cases():
    CASES.setdefault(name.rpartition(" ")[0], make)


def results(case, function):
    """The output, and the gradients that there are."""
    torch.manual_seed(0)
    y = function()
    found = torch.autograd.grad(y, case.inputs, torch.randn_like(y), allow_unused=True)
    return [y, *(g for g in found if g is not None)]


# Layers and optimizers have parameters of their own on each side.
OWN = ("batch norm", *_cpu_cases.OPTIMIZERS, "clip of gradients")


@pytest.mark.parametrize("kind", [kind for kind in CASES if not kind.startswith(OWN)])
def test_both_sides_do_the_same_work(kind):
    torch.manual_seed(1)
    case = CASES[kind](torch.float32)
    for ours, torchs in zip(results(case, case.ours), results(case, case.torchs), strict=True):
        torch.testing.assert_close(ours, torchs.to(ours.dtype), rtol=2e-4, atol=2e-4)


def test_the_table_says_where_apex_is_slower(monkeypatch, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    small = [("layer norm 2x8", lambda dtype: _cpu_cases.norm("layer norm", 2, 8, dtype))]
    monkeypatch.setattr(cpu, "cases", lambda: iter(small))

    def in_turns(functions, seconds, clock):
        assert clock is time.thread_time  # of one thread: without what others take
        return [f() for f in functions] and [3e-6, 2e-6]

    monkeypatch.setattr(cpu, "in_turns", in_turns)
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--threads", "1", "--dtypes", "float32", "--json", str(path)])
    try:
        cpu.main()
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "2 of 2 above 1.02" in said and "worst: layer norm 2x8 float32 forward 1 3.0 2.0 1.50" in said
    rows = json.loads(path.read_text())["rows"]
    assert [row["passes"] for row in rows] == ["forward", "both"] and rows[0]["apex"] == 3e-6
