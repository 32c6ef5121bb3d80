"""Tensors on a GPU that is not the current one, and on two at once."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import lists
import pytest
import torch
import training
from lists import F32

from apex import optimizers
from apex.contrib.clip_grad import clip_grad_norm_
from apex.normalization import FusedLayerNorm, FusedRMSNorm

pytestmark = pytest.mark.two_gpus

OPTIONS = {
    "FusedAdam": dict(lr=0.05, weight_decay=0.1),
    "FusedSGD": dict(lr=0.05, momentum=0.9),
    "FusedLAMB": dict(lr=0.05),
    "FusedAdagrad": dict(lr=0.05),
}


def _trained(name, devices):
    """Parameters after three steps, the k-th on devices[k % len(devices)]."""
    params = training.parameters(F32, "cpu")
    placed = [torch.nn.Parameter(p.detach().to(devices[k % len(devices)])) for k, p in enumerate(params)]
    optimizer = getattr(optimizers, name)(placed, **OPTIONS[name])
    for step in (1, 2, 3):
        training.give_gradients(placed, training.twins_of(placed), step)
        optimizer.step()
    return [p.detach().cpu() for p in placed]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_device_gives_the_same(name, current):
    with torch.cuda.device(current):
        wanted = _trained(name, ["cuda:0"])
        lists.assert_same_bits(_trained(name, ["cuda:1"]), wanted)
        found = _trained(name, ["cuda:0", "cuda:1"])
        assert torch.cuda.current_device() == current
    if name == "FusedLAMB":  # its norm is summed in another order
        lists.assert_near(found, lists.exact(wanted), arithmetic=16)
    else:
        lists.assert_same_bits(found, wanted)


def test_norm_on_the_other_device():
    """Report: zeros, or a memory fault, where the current device was not the tensor's."""
    x = torch.tensor([[1.5, 0.0, 0.0, 0.0]], dtype=F32, device="cpu")
    for make in (FusedLayerNorm, FusedRMSNorm):
        module = make(4).to("cuda:1")
        with torch.cuda.device(0):
            before = torch.cuda.memory_allocated(0)
            leaf = x.to("cuda:1").requires_grad_()
            y = module(leaf)
            y.square().sum().backward()
            assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(0) == before
        twin = make(4)
        wanted = x.clone().requires_grad_()
        twin(wanted).square().sum().backward()
        torch.testing.assert_close(y.cpu(), twin(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(leaf.grad.cpu(), wanted.grad, rtol=1e-5, atol=1e-5)


def test_one_norm_over_two_devices():
    params = [torch.nn.Parameter(torch.ones(9, device=f"cuda:{k}", dtype=F32)) for k in (0, 1)]
    for p, value in zip(params, (1.0, 4.0 / 3.0), strict=True):
        p.grad = torch.full_like(p, value)
    norm = clip_grad_norm_(params, 1.0)
    assert norm.item() == pytest.approx(5.0, rel=1e-6)
    for p, value in zip(params, (0.2, 0.8 / 3.0), strict=True):
        assert p.grad.tolist() == pytest.approx([value] * 9, rel=1e-5)


def test_a_side_stream_of_the_other_device():
    p = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda:1", dtype=F32))
    optimizer = optimizers.FusedSGD([p], lr=1.0)
    side = torch.cuda.Stream(1)
    with torch.cuda.stream(side):
        p.grad = torch.empty_like(p)
        for value in range(50):
            p.grad.fill_(float(value))
            optimizer.step()
    side.synchronize()
    assert (p == -sum(range(50))).all()


def test_the_first_device_is_left_alone():
    """No context and no memory on a device that holds no tensor."""
    code = """
        import torch
        from apex.optimizers import FusedAdam
        p = torch.nn.Parameter(torch.ones(1000, device="cuda:1"))
        p.grad = torch.ones_like(p)
        FusedAdam([p]).step()
        torch.cuda.synchronize(1)
        assert p[0].item() < 1
        assert not torch._C._cuda_hasPrimaryContext(0), "a context was made on cuda:0"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
