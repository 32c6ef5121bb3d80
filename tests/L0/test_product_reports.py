"""What users of public apex reported of dense layers, attention and convolutions: their inputs, and what is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from torch_defaults import float32_on_cpu

from apex._legacy import fused_conv_bias_relu
from apex.contrib.multihead_attn import fast_mask_softmax_dropout_func
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.mlp import MLP

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UNIT = {F32: 2e-5, BF16: 2e-2, F16: 4e-3}


@pytest.fixture(autouse=True)
def exact_products():
    """The reports' tolerances are of float32 products."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        yield
        torch.backends.cuda.matmul.allow_tf32 = before


def random(*shape, dtype=F32, device="cpu", seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F32, device="cpu").to(device, dtype)


def near(found, wanted, dtype):
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.double(), wanted.double(), rtol=UNIT[dtype], atol=UNIT[dtype] * scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("shape", ((10, 500, 128), (37, 128)))
def test_gelu_between_two_layers(shape, dtype, device):
    """NVIDIA/apex 1605, 1394: the module was not Linear, GELU, Linear. It is, with GELU's tanh form."""
    module = float32_on_cpu()(FusedDenseGeluDense)(128, 666, 128).to(device, dtype)
    x = random(*shape, dtype=dtype, device=device).requires_grad_()
    wide = [p.detach().double().requires_grad_() for p in (x, *module.parameters())]
    names = ["x", *(name for name, _ in module.named_parameters())]
    given = dict(zip(names, wide, strict=True))
    hidden = F.linear(given["x"], given["weight1"], given["bias1"])
    wanted = F.linear(F.gelu(hidden, approximate="tanh"), given["weight2"], given["bias2"])
    y, g = module(x), random(*shape, dtype=dtype, device=device, seed=1)
    near(y, wanted, dtype)
    found = torch.autograd.grad(y, [x, *module.parameters()], g)
    for a, b in zip(found, torch.autograd.grad(wanted, wide, g.double()), strict=True):
        near(a, b, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_one_output(device):
    """NVIDIA/apex 1392: the bias's gradient beside the next product was read past its end."""
    t = random(13824, 400, device=device).requires_grad_()
    dense = float32_on_cpu()(FusedDense)(400, 1).to(device, F32)
    dense(t - 0.5).sum().backward()
    torch.testing.assert_close(t.grad, dense.weight.detach().expand(13824, 400))
    torch.testing.assert_close(dense.bias.grad, torch.full_like(dense.bias, 13824.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", (3072, 4096))
def test_wide_perceptrons(width, device):
    """NVIDIA/apex PR 1088: a wide layer with sigmoid could not be launched."""
    module = float32_on_cpu()(MLP)([8, width, 8], activation="sigmoid").to(device, F32)
    x = random(3, 8, device=device).requires_grad_()
    w1, b1, w2, b2 = (p.detach().double() for p in module.parameters())
    wanted = F.linear(F.linear(x.double(), w1, b1).sigmoid(), w2, b2).sigmoid()
    y = module(x)
    near(y, wanted, F32)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isfinite().all() and dx.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("additive", (True, False))
def test_softmax_without_mask_in_inference(additive, device):
    """NVIDIA/apex 1020: nan, and dropout although is_training is False."""
    x = random(4, 4, 4, dtype=F16, device=device).requires_grad_()
    y = fast_mask_softmax_dropout_func(False, 1, x, None, additive, 0.1)
    near(y, torch.softmax(x.double(), -1), F16)
    assert torch.autograd.grad(y, x, y)[0].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_is_scaled_by_what_is_kept(device):
    """NVIDIA/apex PR 816, PR 860: values that are kept, and their gradient, were multiplied by p."""
    torch.manual_seed(0)
    x = torch.zeros(64, 16, 16, dtype=F32, device=device).requires_grad_()
    y = fast_mask_softmax_dropout_func(True, 1, x, None, False, 0.25)
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 16 / 0.75))
    (dx,) = torch.autograd.grad(y[:, :, 0].sum(), x)
    of = torch.zeros_like(y)
    of[:, :, 0] = kept[:, :, 0] / 0.75
    torch.testing.assert_close(dx, (of - of.sum(-1, keepdim=True) / 16) / 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", (torch.contiguous_format, torch.channels_last), ids=("first", "last"))
def test_convolution_of_either_format(format, device):
    """ROCm/apex 309: channels first beside a weight in channels last had no workspace."""
    x = random(2, 256, 7, 7, dtype=F16, device=device).contiguous(memory_format=format)
    w = (random(256, 256, 3, 3, device=device) / 48).half().contiguous(memory_format=torch.channels_last)
    b = random(1, 256, 1, 1, dtype=F16, device=device, seed=2)
    wanted = F.conv2d(x.to(F64), w.to(F64), b.flatten().to(F64), padding=1)
    near(fused_conv_bias_relu.forward([x, w, b], 1, 1)[0], wanted.relu(), F16)
    near(fused_conv_bias_relu.forward_no_relu([x, w, b], 1, 1)[0], wanted, F16)
