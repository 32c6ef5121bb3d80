"""apex.fp16_utils: models in half precision, master lists, loss scalers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apex import fp16_utils
from apex.amp import _convert
from apex.fp16_utils import fp16util

HALVES = [torch.float16, torch.bfloat16]


def network(affine=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, dtype=torch.float32, device="cpu"),
        nn.BatchNorm1d(8, affine=affine, dtype=torch.float32, device="cpu"),
        nn.ReLU(),
        nn.Linear(8, 3, dtype=torch.float32, device="cpu"),
    )


def layer_dtypes(model):
    linear, norm = (
        next(m for m in model.modules() if isinstance(m, kind)) for kind in (nn.Linear, nn.BatchNorm1d)
    )
    return linear.weight.dtype, norm.running_mean.dtype


def test_one_conversion():
    """amp's and this package's are the same functions."""
    assert fp16_utils.convert_network is _convert.convert_network
    assert fp16_utils.convert_module is _convert.convert_module
    from apex.contrib.clip_grad import clip_grad_norm_

    assert fp16_utils.clip_grad_norm is clip_grad_norm_


@pytest.mark.parametrize("wrap", [fp16_utils.network_to_half, fp16_utils.FP16Model])
def test_half_networks(wrap):
    """float16 but for batch norms, whose statistics are not rounded on the way; inputs are cast."""
    exact = network()
    exact[1].running_mean.fill_(1 / 3)
    exact[1].running_var.fill_(1e-9)  # 0 in float16
    model = network()
    model.load_state_dict(exact.state_dict())
    wrapped = wrap(model)
    assert layer_dtypes(wrapped) == (torch.float16, torch.float32)
    assert model[1].running_mean[0] == exact[1].running_mean[0] and model[1].running_var[0] > 0
    x = torch.randn(4, 6, dtype=torch.float32, device="cpu")
    found = wrapped(x)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), exact(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("wrap", [fp16_utils.network_to_half, fp16_utils.FP16Model])
def test_batch_norms_without_weights_are_halves(wrap):
    """As in public apex, whose own test says so."""
    wrapped = wrap(network(affine=False))
    assert layer_dtypes(wrapped) == (torch.float16, torch.float16)
    assert wrapped(torch.randn(4, 6, dtype=torch.float32, device="cpu")).dtype == torch.float16


def test_inputs_of_other_kinds():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 3, dtype=torch.float32, device="cpu")

        def forward(self, index, factor):
            return self.table(index) * factor

    found = fp16_utils.FP16Model(Picks())(
        torch.tensor([1, 2], device="cpu", dtype=torch.int64),
        torch.tensor(2.0, dtype=torch.float32, device="cpu"),
    )
    assert found.dtype == torch.float16 and found.shape == (2, 3)


def test_tofp16_and_batch_norms():
    assert fp16_utils.tofp16()(torch.ones(2, dtype=torch.float32, device="cpu")).dtype == torch.float16
    model = network().half()
    assert fp16_utils.BN_convert_float(model) is model
    assert layer_dtypes(model) == (torch.float16, torch.float32)
    assert (
        fp16_utils.BN_convert_float(nn.BatchNorm1d(2, dtype=torch.float32, device="cpu").half()).weight.dtype
        == torch.float32
    )
    lstm = fp16_utils.convert_network(nn.LSTM(2, 2, dtype=torch.float32, device="cpu"), torch.bfloat16)
    assert lstm(torch.randn(1, 1, 2, dtype=torch.float32, device="cpu").bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("flat", [False, True])
def test_master_lists(flat, dtype):
    model = nn.Sequential(
        nn.Linear(3, 4, dtype=torch.float32, device="cpu"), nn.Linear(4, 2, dtype=torch.float32, device="cpu")
    ).to(dtype)
    model[0].bias.requires_grad_(False)
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    assert [id(p) for p in params] == [id(p) for p in (model[0].weight, *model[1].parameters())]
    assert len(masters) == (1 if flat else 3)
    assert all(m.dtype == torch.float32 and m.is_leaf and m.requires_grad for m in masters)
    whole = torch.cat([p.detach().float().reshape(-1) for p in params])
    assert torch.equal(torch.cat([m.detach().reshape(-1) for m in masters]), whole)

    for step in range(2):  # the second time over gradients that are there
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, i + step + 0.5)
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        found = torch.cat([m.grad.reshape(-1) for m in masters])
        assert torch.equal(found, torch.cat([p.grad.float().reshape(-1) for p in params]))

    torch.optim.SGD(masters, lr=1.0).step()
    fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
    exact = torch.cat([m.detach().reshape(-1) for m in masters])
    found = torch.cat([p.detach().reshape(-1) for p in params])
    assert found.dtype == dtype and torch.equal(found, exact.to(dtype))


@pytest.mark.parametrize("flat", [False, True])
def test_a_parameter_without_gradient(flat):
    model = nn.Sequential(
        nn.Linear(2, 2, dtype=torch.float32, device="cpu"), nn.Linear(2, 2, dtype=torch.float32, device="cpu")
    ).half()
    params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
    for p in params:
        p.grad = torch.ones_like(p)
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
    params[1].grad = None
    fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
    if flat:
        assert masters[0].grad.tolist() == [1] * 4 + [0] * 2 + [1] * 6
    else:
        assert [m.grad is None for m in masters] == [False, True, False, False]


def test_lists_that_do_not_belong_together():
    """Copying none of them would leave the model as it was, without a word."""
    params, masters = fp16_utils.prep_param_lists(nn.Linear(3, 2, dtype=torch.float32, device="cpu").half())
    for wrong in ([], masters[:1]):
        with pytest.raises(ValueError):
            fp16_utils.master_params_to_model_params(params, wrong)
        with pytest.raises(ValueError):
            fp16_utils.model_grads_to_master_grads(params, wrong)


def test_a_flat_master_of_several_dtypes():
    model = fp16_utils.convert_network(network(), torch.float16)
    with pytest.raises(TypeError, match=r"torch.float16, torch.float32.*flat_master=False"):
        fp16_utils.prep_param_lists(model, flat_master=True)
    with pytest.raises(TypeError, match="none that requires"):
        fp16_utils.prep_param_lists(nn.ReLU(), flat_master=True)


def test_small_helpers():
    assert fp16_utils.to_python_float(torch.tensor([2.5], dtype=torch.float32, device="cpu")) == 2.5
    assert fp16_utils.to_python_float([2.5, 1]) == 2.5
    with pytest.raises(RuntimeError, match="master parameter"):
        fp16util.backwards_debug_hook(torch.ones(1, dtype=torch.float32, device="cpu"))


def test_static_loss_scaler():
    scaler = fp16_utils.LossScaler(8.0)
    p = nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
    scaler.backward((p * 3).sum())
    assert p.grad.item() == 24 and scaler.loss_scale == 8.0
    p.grad.fill_(float("inf"))
    assert scaler.has_overflow([p]) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 8.0
    assert scaler.scale_gradient(None, (torch.ones(1, dtype=torch.float32, device="cpu"), None), None) == (
        torch.tensor([8.0], dtype=torch.float32, device="cpu"),
        None,
    )


def test_dynamic_loss_scaler():
    scaler = fp16_utils.DynamicLossScaler(init_scale=4.0, scale_factor=2.0, scale_window=3)
    scales = []
    for overflow in (False, False, False, True, False, False, False, True, True, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [4, 4, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1]
    assert fp16_utils.DynamicLossScaler().loss_scale == 2**32

    params = [nn.Parameter(torch.ones(3, dtype=torch.float32, device="cpu")) for _ in range(3)]
    params[0].grad, params[1].grad = (
        torch.ones(3, dtype=torch.float32, device="cpu"),
        torch.full((3,), 3e38, dtype=torch.float32, device="cpu"),
    )  # the sum of these is not finite
    assert not scaler.has_overflow(params) and not scaler.has_overflow([])
    for bad in (float("inf"), -float("inf"), float("nan")):
        params[1].grad[2] = bad
        assert scaler.has_overflow(p for p in params)
        assert scaler._has_inf_or_nan(params[1].grad)
    embedding = nn.Embedding(3, 2, sparse=True, dtype=torch.float32, device="cpu")
    (embedding(torch.tensor([0, 0], device="cpu", dtype=torch.int64)) * float("inf")).sum().backward()
    assert scaler.has_overflow(embedding.parameters())
