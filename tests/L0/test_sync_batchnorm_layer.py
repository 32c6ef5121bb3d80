"""SyncBatchNorm of one rank runs in C++: the same as its function in Python, bit for bit."""

from __future__ import annotations

import copy

import lists
import pytest
import torch
from lists import BF16, F32, F64

from apex.parallel import SyncBatchNorm, optimized_sync_batchnorm_kernel

COMPILED = optimized_sync_batchnorm_kernel._layer  # None: no compiled bindings are here


def random(shape, dtype, device, seed=1):
    return lists.random(dtype, device, (shape,), seed=seed)[0]


def made(channels, device, **options):
    layer = SyncBatchNorm(channels, **options).to(device, F32)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(random(p.shape, F32, device, seed=i) + 1)
    return layer


def results(layer, inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = layer(*leaves)
    gradients = torch.autograd.grad(y, [*leaves, *layer.parameters()], torch.ones_like(y) * y.detach())
    return y, [y.detach(), *gradients, *layer.buffers()]


OF_TORCH = "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"  # its nodes, by who computes


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("with_z", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fuse_relu": True},
        {"channel_last": True, "fuse_relu": True},
        {"affine": False, "momentum": None},
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_as_in_python(variant, monkeypatch, options, with_z, dtype):
    ours = made(6, variant.device, **options)
    theirs = copy.deepcopy(ours)
    inputs = [random((4, 6, 5, 6), dtype, variant.device, seed=i) for i in range(1 + with_z)]
    for training in (True, True, False):
        y, found = results(ours.train(training), inputs)
        in_cpp = y.grad_fn.name() == "ApexSyncBatchNormBackward"
        of_torch = y.grad_fn.name().startswith(OF_TORCH) and not training
        assert in_cpp or of_torch or COMPILED is None
        with monkeypatch.context() as patch:
            patch.setattr(optimized_sync_batchnorm_kernel, "_layer", None)
            y, wanted = results(theirs.train(training), inputs)
        assert of_torch or y.grad_fn.name() == "SyncBatchnormFunctionBackward"
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


def test_gradients_that_nobody_wants(variant):
    layer = made(3, variant.device)
    x = random((4, 3, 6), F32, variant.device).requires_grad_()
    y = layer(x)
    leaves = [x, layer.weight, layer.bias]
    everything = torch.autograd.grad(y, leaves, torch.ones_like(y) * x.detach(), retain_graph=True)
    for leaf, wanted in zip(leaves, everything, strict=True):
        assert torch.equal(
            torch.autograd.grad(y, leaf, torch.ones_like(y) * x.detach(), retain_graph=True)[0], wanted
        )


def test_what_it_does_not_have_is_refused(variant):
    layer = made(3, variant.device)
    x = random((4, 3, 6), F32, variant.device).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of its gradient|once_differentiable"):
        gradient.sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward"):
        layer(torch.autograd.forward_ad.make_dual(x.detach(), x.detach()))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(random((1, 3, 1), F32, variant.device))
    with pytest.raises(TypeError, match="float64 goes with float64 alone"):
        layer(random((4, 3, 6), F64, variant.device))
    assert torch.func.grad(lambda t: layer.eval()(t).sum())(x.detach()).shape == x.shape
