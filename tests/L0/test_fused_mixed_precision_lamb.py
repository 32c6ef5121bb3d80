"""FusedMixedPrecisionLamb against the algorithm in float64: masters, scalars on the device, overflows."""

from __future__ import annotations

import copy

import lamb
import lists
import pytest
import torch
import training
from lists import BF16, F16, F32

from apex.optimizers import FusedMixedPrecisionLamb


def _pair(device, dtype=F32, reduced=None, **options):
    params = training.parameters(dtype, device)
    twins = training.twins_of(params)
    fused = FusedMixedPrecisionLamb(params, lr=0.05, reduced_precision_dtype=reduced, **options)
    return fused, lamb.Oracle([(twins, options)]), params, twins


def _masters(fused):
    return [m for group in fused.param_groups_full_precision for m in group["params"]]


def test_full_precision(variant):
    fused, oracle, params, twins = _pair(variant.device)
    training.train(fused, oracle, params, twins)
    training.assert_trained(params, twins, arithmetic=64)
    assert fused.param_groups[0]["step"].tolist() == [3]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_masters_are_trained_and_parameters_are_their_roundings(variant, dtype):
    fused, oracle, params, twins = _pair(variant.device, dtype, dtype)
    training.train(fused, oracle, params, twins)
    for master, p, twin in zip(_masters(fused), params, twins, strict=True):
        assert master.dtype == F32
        assert torch.equal(p, master.to(dtype))
        # The update waits in the gradient's dtype; a step moves a parameter by a twentieth of itself.
        allowed = 3 * (0.1 * lists.ROUNDING[dtype] + 64 * lists.ROUNDING[F32]) * 5
        lists.assert_near([master], lists.exact([twin]), smallest=allowed)


def test_the_learning_rate_is_a_tensor_of_its_own_in_each_group(variant):
    params = training.parameters(F32, variant.device)
    fused = FusedMixedPrecisionLamb([{"params": params[:2]}, {"params": params[2:]}], lr=0.05)
    rates = [group["lr"] for group in fused.param_groups]
    assert rates[0] is not rates[1] and all(r.dtype == F32 for r in rates)
    rates[0].fill_(0.0)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    fused.step()
    assert all(torch.equal(p, b) for p, b in zip(params[:2], before[:2], strict=True))
    assert not torch.equal(params[4], before[4])


def _scaler(device):
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    scaler.scale(torch.ones(1, device=device, dtype=F32))  # makes the scale's tensor
    return scaler


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_scaled_gradients(variant, dtype):
    fused, oracle, params, twins = _pair(variant.device, dtype, dtype if dtype == F16 else None)
    scaler = _scaler(variant.device)
    for step in (1, 2, 3):
        training.give_gradients(params, twins, step, scale=8.0)
        fused.step(grad_scaler=scaler)
        oracle.step()
    training.assert_trained(params, twins, arithmetic=64)


def test_an_overflow_changes_nothing(variant):
    fused, oracle, params, twins = _pair(variant.device, F16, F16)
    training.train(fused, oracle, params, twins, steps=1)
    before = copy.deepcopy(fused.state_dict())["state"]
    values = [p.detach().clone() for p in params]
    training.give_gradients(params, twins, 2)
    params[4].grad[0] = float("inf")
    fused.step(grad_scaler=_scaler(variant.device))
    lists.assert_same_bits(params, values)
    for key, state in fused.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[key][name]), name
    assert fused.param_groups[0]["step"].tolist() == [1]


def test_resumes_bit_for_bit(variant):
    fused, oracle, params, twins = _pair(variant.device, BF16, BF16)
    training.train(fused, oracle, params, twins, steps=2)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = FusedMixedPrecisionLamb(others, lr=0.05, reduced_precision_dtype=BF16)
    resumed.load_state_dict(copy.deepcopy(fused.state_dict()))
    training.give_gradients(params, twins, 3)
    for p, q in zip(params, others, strict=True):
        q.grad = p.grad.clone()
    fused.step()
    resumed.step()
    lists.assert_same_bits(others, params)
    lists.assert_same_bits(_masters(resumed), _masters(fused))


def test_refuses_a_group_of_several_dtypes(variant):
    params = [torch.nn.Parameter(torch.ones(2, device=variant.device, dtype=d)) for d in (F32, F16)]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="parameter 1"):
        FusedMixedPrecisionLamb(params).step()


@pytest.mark.gpu
def test_a_captured_step(variant):
    fused, oracle, params, twins = _pair(variant.device)
    training.train(fused, oracle, params, twins, steps=1)
    memory = [p.grad for p in params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused.step()
    for step in (2, 3, 4):
        training.give_gradients(params, twins, step)
        for m, p in zip(memory, params, strict=True):
            m.copy_(p.grad)
        graph.replay()
        oracle.step()
    assert fused.param_groups[0]["step"].tolist() == [4]
    training.assert_trained(params, twins, steps=4, arithmetic=64)
