"""TorchScript under O1 and O4: scripts are torch's own, without casts, and so are derivatives that torch scripts."""

from __future__ import annotations

import gc
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from amp_runs import forget, network
from torch import nn
from torch.jit import _builtins
from torch_defaults import float32_on_cpu

from apex import amp

F32 = torch.float32


class Net(nn.Module):
    """Functions of every kind that amp patches: of torch, of torch.nn.functional in C and in Python, recurrent ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.conv, self.gru = nn.Linear(6, 8), nn.Conv1d(1, 2, 3), nn.GRU(8, 4, batch_first=True)
        self.norm, self.batch, self.cell = nn.LayerNorm(8), nn.BatchNorm1d(8), nn.LSTMCell(8, 4)

    def forward(self, x):
        y = F.gelu(self.batch(self.norm(self.linear(x))))
        z, _ = self.gru(y[:, None])
        h, _ = self.cell(y)
        v = torch.cat([y, F.max_pool1d(self.conv(y[:, None]), 2).flatten(1), z[:, 0], h], 1)
        losses = F.mse_loss(v, v * 2) + F.cross_entropy(
            v, torch.arange(v.shape[0], dtype=torch.int64, device="cpu")
        )
        return F.softmax(torch.matmul(v, v.t()), -1) + losses + torch.prod(v) + torch.cumsum(v, 0).sum()


def under(level):
    model = network()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O4"])
@float32_on_cpu()  # which the script takes for constants
def test_a_scripted_model(level):
    model = Net().eval()
    x = torch.randn(5, 6, dtype=F32, device="cpu")
    expected = model(x)
    under(level)
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), expected)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x), expected)


def test_nothing_is_left_in_torchs_table():
    forget()
    gc.collect()
    before = dict(_builtins._get_builtin_table())
    under("O1")
    assert len(_builtins._get_builtin_table()) > len(before) + 50
    forget()
    gc.collect()
    assert dict(_builtins._get_builtin_table()) == before


DERIVATIVES = """
import torch
from apex import amp
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
weights = {name: p.detach() for name, p in model.named_parameters()}
x = torch.randn(5, 6)
loss = lambda weights: torch.func.functional_call(model, weights, (x,)).float().square().sum()
exact = torch.func.grad(loss)(weights)
amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O4", verbosity=0)
_, found = torch.func.jvp(loss, (weights,), (weights,))
expected = sum((exact[name] * weights[name]).sum() for name in weights)
torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
bias = lambda b: loss(weights | {"2.bias": b})
torch.testing.assert_close(torch.func.hessian(bias)(weights["2.bias"]), torch.tensor([[10.0]]), rtol=0.05, atol=0)
"""


def test_the_first_forward_mode_derivative_of_a_process():
    """torch scripts its decompositions then."""
    run = subprocess.run([sys.executable, "-c", DERIVATIVES], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
