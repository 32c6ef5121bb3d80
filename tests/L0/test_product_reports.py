"""What users of public apex reported of dense layers, attention and convolutions: their inputs, and what is right."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from lists import BF16, F16, F32, F64
from torch_defaults import float32_on_cpu

from apex._legacy import fused_conv_bias_relu
from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.fmha.fmha import FMHA, FMHAFun
from apex.contrib.multihead_attn import (
    EncdecMultiheadAttn,
    SelfMultiheadAttn,
    fast_mask_softmax_dropout_func,
)
from apex.fused_dense import FusedDense, FusedDenseGeluDense, accumulate_weight_gradient
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


def reference():
    """An environment in which nothing compiled is taken."""
    return {**os.environ, "APEX_BINDING": "reference"}


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (F16, BF16), ids=str)
def test_products_of_halves_are_summed_in_float32(dtype, device):
    """ROCm/apex PR 133: summed in float16, 5,000 ones are 2,048. NVIDIA/apex 1670, PR 1627: no bfloat16."""
    x, w = (torch.ones(n, 5000, dtype=dtype, device=device).requires_grad_() for n in (3, 2))
    wanted = torch.tensor(5000.0, dtype=dtype, device=device)
    dense, layers = float32_on_cpu()(FusedDense)(5000, 2, bias=False), float32_on_cpu()(MLP)([5000, 2], False)
    for module, weight in ((dense, "weight"), (layers, "weight_0")):
        y = torch.func.functional_call(module.to(device, dtype), {weight: w}, (x,))
        assert y.eq(wanted).all()
    # The same of gradients: of the input, over outputs; of the weight and the bias, over rows.
    turned = float32_on_cpu()(FusedDense)(2, 5000).to(device, dtype)
    with torch.no_grad():
        turned.weight.fill_(1)
    small = torch.ones(5000, 2, dtype=dtype, device=device).requires_grad_()
    y = turned(small)
    of_x, of_w, of_b = torch.autograd.grad(y, [small, turned.weight, turned.bias], torch.ones_like(y))
    assert of_x.eq(wanted).all() and of_w.eq(wanted).all() and of_b.eq(wanted).all()
    main_grad = torch.zeros(2, 3, dtype=dtype, device=device)
    ones = torch.ones(5000, 5, dtype=dtype, device=device)
    accumulate_weight_gradient(ones[:, :3], ones[:, :2], main_grad)
    assert main_grad.eq(wanted).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", (False, True), ids=("plain", "norm"))
def test_more_than_1024_keys(norm, device):
    """NVIDIA/apex 916: a softmax of more than 1,024 numbers ended the process."""
    module = float32_on_cpu()(SelfMultiheadAttn)(16, 2, include_norm_add=norm).to(device, F32)
    x = random(1088, 1, 16, device=device).requires_grad_()
    y, _ = module(x, x, x, is_training=False)
    given = x.double()
    if norm:
        given = F.layer_norm(
            given, (16,), *(p.double() for p in (module.lyr_nrm_gamma_weights, module.lyr_nrm_beta_weights))
        )
    packed = F.linear(given, module.in_proj_weight.double()).view(1088, 2, 3, 8)
    q, k, v = (part.transpose(0, 1) for part in packed.unbind(2))
    context = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(1088, 1, 16)
    wanted = F.linear(context, module.out_proj_weight.double()) + (x.double() if norm else 0)
    near(y, wanted, F32)
    g = random(1088, 1, 16, device=device, seed=1)
    near(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(wanted, x, g.double())[0], F32)


@pytest.mark.parametrize("device", DEVICES)
def test_more_than_65535_heads(device):
    """NVIDIA/apex PR 728: products of a batch were limited to 65,535, the size of a grid in y and z."""
    module = float32_on_cpu()(EncdecMultiheadAttn)(16, 16).to(device, F32)
    query, key = (
        random(1, 4100, 16, device=device).requires_grad_(),
        random(2, 4100, 16, device=device, seed=1),
    )
    y, _ = module(query, key, key, is_training=False)
    (found,) = torch.autograd.grad(y[:, -1].sum(), query)
    few, _ = module(query[:, -4:], key[:, -4:], key[:, -4:], is_training=False)
    near(y[:, -4:], few, F32)
    near(found[:, -4:], torch.autograd.grad(few[:, -1].sum(), query)[0][:, -4:], F32)
    assert not found[:, :-1].any() and found[:, -1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", ([3], [513, 2], [640]), ids=str)
def test_packed_attention_of_any_length_width_and_batch(lengths, device):
    """NVIDIA/apex 1201, 1395, PR 1126 and a benchmark's: only S to 512, d 64, four sequences and more, one card."""
    total, heads, d = sum(lengths), 2, 24
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    qkv = random(total, 3, heads, d, device=device).requires_grad_()
    y = FMHAFun.apply(qkv, cu_seqlens, 0.0, max(lengths), True, False)
    parts = []
    for sequence in qkv.double().split(lengths):
        q, k, v = (part.transpose(0, 1) for part in sequence.unbind(1))
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1))
    near(y, torch.cat(parts), F32)
    config = types.SimpleNamespace(
        attention_probs_dropout_prob=0.0, num_attention_heads=heads, hidden_size=heads * d
    )
    near(FMHA(config)(qkv.flatten(1), cu_seqlens, max(lengths)), y.flatten(1), F32)


def test_no_module_but_apex_is_needed():
    """NVIDIA/apex 958, 1314, 1898: a module of public apex's was not built, and importing attention raised."""
    code = """
import torch
from apex.contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn
from apex.contrib.fmha import FMHAFun
from apex.contrib.bottleneck import Bottleneck
from apex.fused_dense import FusedDense
from apex.mlp import MLP

x = torch.ones(3, 2, 8)
print(SelfMultiheadAttn(8, 2)(x, x, x)[0].shape, MLP([8, 4])(x).shape, FusedDense(8, 4)(x).shape)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=reference()
    )
    assert found.stdout.count("torch.Size([3, 2, 8])") == 1 and found.returncode == 0, found.stderr[-2000:]


def test_nothing_is_deprecated():
    """NVIDIA/apex PR 1932, PR 2016: fmha and multihead_attn warned, and were removed. They are here to stay."""
    x = random(3, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for impl in ("fast", "default"):
            module = float32_on_cpu()(SelfMultiheadAttn)(8, 2, impl=impl)
            module(x, x, x)[0].sum().backward()
        qkv = random(5, 3, 2, 4).requires_grad_()
        cu_seqlens = torch.tensor([0, 5], dtype=torch.int32, device="cpu")
        FMHAFun.apply(qkv, cu_seqlens, 0.0, 5, True, False).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_batch_norm_of_channels_first(device):
    """NVIDIA/apex 1556: an input with channels first was refused. 1689: tensors of a constructor without a device."""
    x = random(4, 6, 3, 5, device=device)
    module = float32_on_cpu()(GroupBatchNorm2d)(6, 1).to(device, F32)
    near(module(x), F.batch_norm(x.double(), None, None, training=True), F32)
    module.eval()
    near(module(x), F.batch_norm(x.double(), module.running_mean.double(), module.running_var.double()), F32)
