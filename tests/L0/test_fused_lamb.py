"""FusedLAMB against the algorithm in float64, on everything that can serve it.

Tolerance: as for every fused optimizer, a rounding to the parameter's dtype a step; more of the arithmetic's,
because the update is a quotient, waits for the second launch in the gradient's dtype, and is scaled by norms.
"""

from __future__ import annotations

import copy
import pickle

import lamb
import lists
import pytest
import torch
import training
from lists import BF16, F16, F32, F64
from torch_defaults import float32_on_cpu

from apex.optimizers import FusedLAMB

OPTIONS = [
    {},
    dict(adam_w_mode=False),
    dict(weight_decay=0.0),
    dict(weight_decay=0.0, use_nvlamb=True),
    dict(bias_correction=False, grad_averaging=False),
    dict(max_grad_norm=0.0),
    dict(max_grad_norm=None),
    dict(max_grad_norm=1e4),
]


def _pair(device, dtype=F32, shapes=training.SHAPES, **options):
    params = training.parameters(dtype, device, shapes)
    twins = training.twins_of(params)
    return FusedLAMB(params, **(dict(lr=0.05) | options)), lamb.Oracle([(twins, options)]), params, twins


def _assert_trained(params, twins, steps=3):
    # The update was rounded to the gradient's dtype too; a step moves a parameter by a twentieth of itself.
    training.assert_trained(params, twins, steps, arithmetic=64)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_is_lamb(variant, dtype, options):
    fused, oracle, params, twins = _pair(variant.device, dtype, **options)
    training.train(fused, oracle, params, twins)
    _assert_trained(params, twins)


def test_float64(variant):
    """The global norm is float32 for every dtype: gradients that are clipped are exact to that."""
    fused, oracle, params, twins = _pair(variant.device, F64, max_grad_norm=0.0)
    training.train(fused, oracle, params, twins)
    _assert_trained(params, twins)


def test_large_tensors(variant):
    fused, oracle, params, twins = _pair(variant.device, F32, lists.SHAPES)
    training.train(fused, oracle, params, twins, steps=2)
    _assert_trained(params, twins, steps=2)


def test_three_launches(variant):
    fused, oracle, params, twins = _pair(variant.device)
    training.train(fused, oracle, params, twins, steps=1)
    if variant.simt:
        kernels = {name: n for name, n in variant.kernels.items() if "table" not in name}
        assert sum(kernels.values()) == 3, kernels


def test_clips_by_one_norm_of_all_groups_and_dtypes(variant):
    """Norms 3 and 4 make 5, whatever group and dtype they are in."""
    params = [torch.nn.Parameter(torch.ones(4, device=variant.device, dtype=d)) for d in (F32, BF16)]
    twins = training.twins_of(params)
    options = dict(max_grad_norm=1.0, weight_decay=0.0)
    fused = FusedLAMB([{"params": params[:1]}, {"params": params[1:]}], lr=0.05, **options)
    oracle = lamb.Oracle([(twins[:1], options), (twins[1:], options)])
    for p, twin, value in zip(params, twins, (1.5, 2.0), strict=True):
        p.grad, twin.grad = torch.full_like(p, value), torch.full_like(twin, value)
    fused.step()
    oracle.step()
    moments = [fused.state[p]["exp_avg"] for p in params]
    lists.assert_near(
        moments, [torch.full((4,), 0.1 * v / 5, dtype=F64, device="cpu") for v in (1.5, 2.0)], arithmetic=8
    )
    _assert_trained(params, twins, steps=1)


def test_gradients_now_and_then(variant):
    """The group's step count holds for every parameter; one without a gradient stays as it is."""
    fused, oracle, params, twins = _pair(variant.device, max_grad_norm=0.0)
    for step, without in enumerate([(1, 3), (), (2,)], start=1):
        before = [p.detach().clone() for p in params]
        training.give_gradients(params, twins, step, without=without)
        fused.step()
        oracle.step()
        for i in without:
            assert torch.equal(params[i], before[i])
    assert fused.param_groups[0]["step"] == 3
    _assert_trained(params, twins)


def test_no_parameters_and_no_gradients(variant):
    p = torch.nn.Parameter(torch.ones(3, device=variant.device, dtype=F32))
    fused = FusedLAMB([{"params": []}, {"params": [p]}])
    fused.step()
    assert torch.equal(p, torch.ones_like(p))


def test_resumes_bit_for_bit(variant):
    fused, oracle, params, twins = _pair(variant.device)
    training.train(fused, oracle, params, twins, steps=2)
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = FusedLAMB(resumed_params, lr=0.05)
    resumed.load_state_dict(copy.deepcopy(fused.state_dict()))
    for step in (3, 4):
        training.give_gradients(params, twins, step)
        for p, q in zip(params, resumed_params, strict=True):
            q.grad = p.grad.clone()
        fused.step()
        resumed.step()
    lists.assert_same_bits(resumed_params, params)


def test_copies_and_pickles_keep_their_options():
    params = training.parameters(F32, "cpu")
    fused = FusedLAMB(params, use_nvlamb=True, adam_w_mode=False)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert other.use_nvlamb and other.adam_w_mode == 0
        other.step()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(amsgrad=True), RuntimeError),
        (dict(lr=-1.0), ValueError),
        (dict(betas=(1.0, 0.9)), ValueError),
        (dict(eps=-1.0), ValueError),
        (dict(weight_decay=-0.1), ValueError),
        (dict(max_grad_norm=float("nan")), ValueError),
    ],
    ids=str,
)
def test_refuses(options, error):
    with pytest.raises(error):
        FusedLAMB([torch.nn.Parameter(torch.ones(1, dtype=F32, device="cpu"))], **options)


def test_refuses_other_dtypes_and_sparse_gradients(variant):
    p = torch.nn.Parameter(torch.ones(3, device=variant.device, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(TypeError):
        FusedLAMB([p]).step()
    table = torch.nn.Embedding(5, 3, sparse=True, device=variant.device, dtype=F32)
    table(torch.tensor([1], device=variant.device, dtype=torch.int64)).sum().backward()
    with pytest.raises((RuntimeError, TypeError), match="sparse"):
        FusedLAMB(table.parameters()).step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad], ids=lambda kind: kind.__name__)
def test_refuses_another_optimizers_checkpoint(kind):
    params = training.parameters(F32, "cpu")
    other = float32_on_cpu()(kind)(params, lr=0.1, **(dict(momentum=0.9) if kind is torch.optim.SGD else {}))
    training.give_gradients(params, training.twins_of(params), 1)
    other.step()
    fused = FusedLAMB(params)
    with pytest.raises(ValueError, match="but not exp_avg"):
        fused.load_state_dict(other.state_dict())


def test_refuses_a_cut_checkpoint():
    fused, oracle, params, twins = _pair("cpu")
    training.train(fused, oracle, params, twins, steps=1)
    checkpoint = copy.deepcopy(fused.state_dict())
    del checkpoint["state"][2]["exp_avg_sq"]
    with pytest.raises(ValueError, match="parameter 2 in group 0"):
        fused.load_state_dict(checkpoint)
