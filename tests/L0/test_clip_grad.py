"""clip_grad_norm_ against torch's in float64, on everything that can serve it."""

from __future__ import annotations

import math

import lists
import pytest
import torch
import training
from lists import BF16, F16, F32, F64

from apex.contrib.clip_grad import clip_grad_norm_

MIXES = [(F32,), (F16,), (BF16,), (F32, F16, BF16), (F64, F32)]


def _with_gradients(device, dtypes, shapes=lists.FEW, without=(2,), scale=1.0):
    """Parameters of these dtypes in turn, with gradients but for `without`; their float64 twins."""
    params = []
    for i, shape in enumerate(shapes):
        params += training.parameters(dtypes[i % len(dtypes)], device, [shape], seed=i)
    twins = training.twins_of(params)
    training.give_gradients(params, twins, 1, without=without)
    for p, twin in zip(params, twins, strict=True):
        if p.grad is not None:
            p.grad.mul_(scale)
            (twin.grad,) = lists.exact([p.grad])
    return params, twins


def _gradients(params):
    return [p.grad for p in params if p.grad is not None]


@pytest.mark.parametrize("limit", [0.5, 1e4])
@pytest.mark.parametrize("order", [2, 3, math.inf, 1])
@pytest.mark.parametrize("dtypes", MIXES, ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_is_torchs(variant, dtypes, order, limit):
    shapes = [s for s in lists.FEW if math.prod(s)]  # torch has no maximum of nothing
    params, twins = _with_gradients(variant.device, dtypes, shapes)
    wanted = torch.nn.utils.clip_grad_norm_(twins, limit, order)
    norm = clip_grad_norm_(params, limit, order)
    fused = order in (2, math.inf) and F64 not in dtypes
    if fused:
        assert norm.dtype == F32 and norm.dim() == 0
    working = F32 if fused else max(dtypes, key=lists.ROUNDING.get)  # what is left to torch has its precision
    assert norm.item() == pytest.approx(wanted.item(), rel=64 * lists.ROUNDING[working])
    lists.assert_near(
        _gradients(params), lists.exact(_gradients(twins)), units=1 if fused else 2, arithmetic=64,
        smallest=0 if fused else 64 * lists.ROUNDING[working],
    )  # fmt: skip


def test_two_launches(variant):
    params, _ = _with_gradients(variant.device, (F32,))
    clip_grad_norm_(params, 0.5)
    if variant.simt:
        kernels = {name: n for name, n in variant.kernels.items() if "table" not in name}
        assert sum(kernels.values()) == 2, kernels


def test_within_the_limit_nothing_changes(variant):
    params, _ = _with_gradients(variant.device, (F32, F16))
    before = lists.clones(_gradients(params))
    clip_grad_norm_(params, 1e6)
    lists.assert_same_bits(_gradients(params), before)


def test_half_gradients_whose_squares_pass_the_largest_half(variant):
    params, twins = _with_gradients(variant.device, (F16,), [(3000,)], without=(), scale=300.0)
    wanted = lists.norm([twins[0].grad])
    assert wanted > 300 and clip_grad_norm_(params, 1.0).item() == pytest.approx(wanted, rel=1e-6)
    assert lists.norm(lists.exact(_gradients(params))) == pytest.approx(1.0, rel=1e-3)


def test_nothing_to_clip(variant):
    p = torch.nn.Parameter(torch.ones(3, device=variant.device, dtype=F32))
    for parameters in ([], [p], iter([p])):
        norm = clip_grad_norm_(parameters, 1.0)
        assert norm.item() == 0 and norm.dim() == 0


def test_empty_gradients(variant):
    p = torch.nn.Parameter(torch.ones(0, device=variant.device, dtype=F32))
    p.grad = torch.ones_like(p)
    assert clip_grad_norm_([p], 1.0).item() == 0


def test_one_tensor_and_a_generator(variant):
    params, twins = _with_gradients(variant.device, (F32,), [(33, 5)], without=())
    wanted = lists.norm([twins[0].grad])
    assert clip_grad_norm_(params[0], 1e4).item() == pytest.approx(wanted, rel=1e-6)
    assert clip_grad_norm_((p for p in params), 1e4).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite(variant, bad):
    params, _ = _with_gradients(variant.device, (F32,), [(7,), (33, 5)], without=())
    params[1].grad[3, 2] = bad
    before = lists.clones(_gradients(params))
    with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    lists.assert_same_bits(_gradients(params), before)
    norm = clip_grad_norm_(params, 1.0)
    assert not math.isfinite(norm.item())
    expected = 0.0 if math.isinf(bad) else math.nan
    assert params[0].grad.tolist() == pytest.approx([expected] * 7, nan_ok=True)


def test_gradients_that_are_not_contiguous(variant):
    params, twins = _with_gradients(variant.device, (F32,), [(33, 5)], without=())
    params[0].grad = params[0].grad.t().contiguous().t()
    wanted = torch.nn.utils.clip_grad_norm_(twins, 0.5)
    assert clip_grad_norm_(params, 0.5).item() == pytest.approx(wanted.item(), rel=1e-6)
    lists.assert_near(_gradients(params), lists.exact(_gradients(twins)), arithmetic=64)
