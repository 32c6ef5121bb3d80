"""One tensor of more than 2^31 elements: nothing faults, and both ends really change."""

from __future__ import annotations

import pytest
import torch

from apex.contrib.clip_grad import clip_grad_norm_
from apex.optimizers import FusedAdam

GB = 1 << 30


def _need(gigabytes):
    free = torch.cuda.mem_get_info()[0] // GB
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free} are free")


def _samples(tensor, count=1024):
    middle = tensor.numel() // 2
    return [tensor[:count], tensor[middle : middle + count], tensor[-count:]]


@pytest.mark.gpu
def test_adam_on_a_float32_parameter():
    _need(48)
    size = 2359332864
    p = torch.nn.Parameter(torch.full((size,), 0.5, device="cuda", dtype=torch.float32))
    optimizer = FusedAdam([p], lr=0.1, weight_decay=0.1)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    p.grad.fill_(1.0)
    optimizer.step()
    twin = torch.nn.Parameter(torch.full((1024,), 0.5, device="cuda", dtype=torch.float32))
    oracle = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.1)
    for value in (0.0, 1.0):
        twin.grad = torch.full_like(twin, value)
        oracle.step()
    for sample in _samples(p.detach()):
        torch.testing.assert_close(sample, twin.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_adam_on_a_bfloat16_parameter():
    _need(36)
    p = torch.nn.Parameter(torch.zeros(2**31 + 8, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p], lr=0.1)
    optimizer.step()
    for sample in _samples(p.detach()):
        assert (sample == -0.1).all() or torch.allclose(
            sample.float(), torch.tensor(-0.1, device="cuda", dtype=torch.float32), rtol=1e-2
        )
    for sample in _samples(optimizer.state[p]["exp_avg"]):
        assert (sample > 0).all()


@pytest.mark.gpu
def test_clipping():
    _need(12)
    p = torch.nn.Parameter(torch.empty(2**31 + 8, device="cuda", dtype=torch.float16))
    p.grad = torch.full_like(p, 0.5)
    wanted = 0.5 * (2**31 + 8) ** 0.5
    assert clip_grad_norm_([p], wanted / 2).item() == pytest.approx(wanted, rel=1e-5)
    for sample in _samples(p.grad):
        assert (sample == 0.25).all()
