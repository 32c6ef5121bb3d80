"""Switches of the environment that the public engine has: what they do here, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
from te_common import RECIPES, clean, random, train  # noqa: F401  a fixture

import apex.transformer_engine.pytorch as te
from apex.transformer_engine.pytorch import _switches

pytestmark = pytest.mark.usefixtures("clean")

RANGES = """
import torch
import apex.transformer_engine.pytorch as te

said = []
torch.cuda.is_available = lambda: True
torch.cuda.nvtx.range_push = said.append
torch.cuda.nvtx.range_pop = lambda: said.append("end")
torch.manual_seed(0)
layer = te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
x = torch.randn(4, 2, 32, dtype=torch.float32, device="cpu", requires_grad=True)
with te.fp8_autocast():
    y = layer(x)
y.sum().backward()
print(" ".join(said))
"""


def run(**environment):
    done = subprocess.run(
        [sys.executable, "-c", RANGES],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_ranges_of_a_profiler():
    names = ["Linear.forward", "attention", "Linear.forward", "MLP.forward"]
    names += ["MLP.backward", "Linear.backward", "Linear.backward"]
    expected = [word for name in names for word in (f"apex.transformer_engine.{name}", "end")]
    assert run(NVTE_NVTX_ENABLED="1") == expected
    assert run(NVTE_NVTX_ENABLED="0") == []


def test_a_range_ends_with_an_exception(monkeypatch):
    said = []
    monkeypatch.setattr(_switches, "_RANGES", True)
    monkeypatch.setattr(_switches.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_switches.torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(_switches.torch.cuda.nvtx, "range_pop", lambda: said.append("end"))

    @_switches.ranged("a")
    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert said == ["a", "end"]


def test_reductions_that_are_not_made_every_step_are_refused_in_words():
    with pytest.warns(UserWarning, match="NVTE_DP_AMAX_REDUCE_INTERVAL=4 has no effect"):
        _switches.warn_of_refused({"NVTE_DP_AMAX_REDUCE_INTERVAL": "4"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _switches.warn_of_refused({"NVTE_DP_AMAX_REDUCE_INTERVAL": "1", "NVTE_ASYNC_AMAX_REDUCTION": "1"})


def test_attention_whose_bits_repeat(monkeypatch):
    assert not _switches.is_unfused()
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert _switches.is_unfused()
    made, x = te.MultiheadAttention(32, 4, attention_dropout=0.0, device="cpu"), random(5, 2, 32, grad=True)
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", None)
    assert train(made, RECIPES["current"], x).shape == (5, 2, 32)
