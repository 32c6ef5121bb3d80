"""cudnn_gbn_lib: public apex's raw functions of group batch norm, of one rank; of groups: test_groupbn_ranks.py."""

from __future__ import annotations

import inspect

import lists
import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64

from apex._legacy import cudnn_gbn_lib as raw

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAST, FIRST = torch.channels_last, torch.contiguous_format
EPS, MOMENTUM = 1e-3, 0.1
GROUP = (1, 0, [0])  # bn_group, rank_id, peer_buffers


def statistics(device, dtype=F32, channels=8):
    return [torch.full((channels,), value, dtype=dtype, device=device) for value in (0.0, 1.0, 7.0, 7.0)]


def tensors(dtype, device, format, affine=F32):
    x, g = (t.contiguous(memory_format=format) for t in lists.random(dtype, device, ((3, 8, 5, 4),) * 2))
    return x, g, *lists.random(affine, device, ((8,), (8,)), seed=3)


def test_argument_orders():
    """Facts of apex/contrib/csrc/cudnn_gbn/cudnn_gbn.cpp."""
    end = "epsilon bn_group rank_id peer_buffers"
    state = "scale bias running_mean running_var minibatch_mean minibatch_inv_var"
    assert " ".join(inspect.signature(raw.forward).parameters) == f"x {state} momentum {end}"
    assert (
        " ".join(inspect.signature(raw.backward).parameters)
        == f"x dy scale minibatch_mean minibatch_inv_var {end}"
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", [LAST, FIRST], ids=["last", "first"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
def test_values(device, dtype, format):
    """As torch's batch norm in float64: output, gradients, running and batch statistics."""
    math = F64 if dtype == F64 else F32
    x, g, scale, bias = tensors(dtype, device, format, math)
    running_mean, running_var, mean, inv_std = made = statistics(device, math)
    y = raw.forward(x, scale, bias, *made, MOMENTUM, EPS, *GROUP)
    found = raw.backward(x, g, scale, mean, inv_std, EPS, *GROUP)
    wide = [t.double().requires_grad_() for t in (x, scale, bias)]
    state = [torch.zeros(8, dtype=F64, device=device), torch.ones(8, dtype=F64, device=device)]
    wanted = F.batch_norm(wide[0], *state, wide[1], wide[2], True, MOMENTUM, EPS)
    gradients = torch.autograd.grad(wanted, wide, g.double())
    assert not y.requires_grad and y.dtype == dtype and found[1].dtype == scale.dtype
    pairs = [
        (y, wanted),
        (running_mean, state[0]),
        (running_var, state[1]),
        *zip(found, gradients, strict=True),
    ]
    pairs += [(mean, wide[0].mean((0, 2, 3)))]
    pairs += [(inv_std, (wide[0].var((0, 2, 3), unbiased=False) + EPS).rsqrt())]
    for a, b in pairs:
        unit = 8 * max(lists.ROUNDING[a.dtype], lists.ROUNDING[math])
        torch.testing.assert_close(
            a.double(), b.detach(), rtol=unit, atol=unit * max(1.0, b.abs().max().item())
        )


def test_refused():
    """Nothing is written then, and nobody waits for ranks that are not there."""
    x, g, scale, bias = tensors(F32, "cpu", LAST)
    made = statistics("cpu")
    kept = [t.clone() for t in made]

    def forward(**changed):
        names = inspect.signature(raw.forward).parameters
        given = dict(zip(names, (x, scale, bias, *made, MOMENTUM, EPS, *GROUP), strict=True))
        return lambda: raw.forward(**given | changed)

    for error, text, call in [
        (ValueError, "2 peer_buffers, and bn_group is 1", forward(peer_buffers=[0, 0])),
        (ValueError, "rank_id is 1", forward(rank_id=1)),
        (RuntimeError, "torch.distributed", forward(bn_group=2, peer_buffers=[0, 0])),
        (ValueError, "at least 1 rank", forward(bn_group=0, peer_buffers=[])),
        (ValueError, r"\[N, C, H, W\]", forward(x=x[0])),
        (ValueError, "8 numbers", forward(scale=scale[:4])),
        (ValueError, "8 numbers", forward(minibatch_mean=made[2][:4])),
        (TypeError, "must be torch.float32", forward(minibatch_mean=made[2].half())),
        (TypeError, "float64 alone", forward(scale=scale.double())),
        (ValueError, "dy must be as x", lambda: raw.backward(x, g[:1], scale, *made[2:], EPS, *GROUP)),
        (
            TypeError,
            "dy has dtype torch.float16",
            lambda: raw.backward(x, g.half(), scale, *made[2:], EPS, *GROUP),
        ),
    ]:
        with pytest.raises(error, match=text):
            call()
    lists.assert_same_bits(made, kept)
