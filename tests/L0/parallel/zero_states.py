"""Cases of test_distributed_fused_adam.py: what is kept of parameters and state, and how parameters travel."""

from __future__ import annotations

import torch
from ddp_common import same_on_all_ranks
from zero_common import SMALL, Oracle, backward, clones, equal, make, parameters

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CONTIGUOUS = dict(contiguous_param_buffer=True, contiguous_grad_buffer=True)


def _train(params, optimizer, steps=4):
    for seed in range(steps):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
    optimizer.param_sync()
    return params


def _remainders(mesh, **options):
    """bfloat16 parameters and 16 bits are as good as float32 ones, bit for bit."""
    kinds = (dict(), dict(store_params=False, store_param_remainders=True))
    optimizers = []
    for kind in kinds:
        params = parameters(BF16)
        optimizers.append(make(params, **SMALL, param_sync_dtype=BF16, **kind, **options))
        _train(params, optimizers[-1])
    whole, halves = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for key in range(len(params)):
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(whole[key][name], halves[key][name]), (key, name)
    assert not any(torch.equal(whole[key]["param"], whole[key]["param"].bfloat16().float()) for key in (0, 5))
    assert all(bucket.params_shard is None for bucket in optimizers[1].state["buckets"])
    for p, q in zip(*(optimizer.parameters() for optimizer in optimizers), strict=True):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=0)  # halves are rounded up, or to even


def _scaled(mesh, dtype=F16, sync=F16, model=F16, tolerance=1e-2):
    """Averages far below what float16 holds are kept all the same."""
    params = parameters(model)
    optimizer = make(
        params, **SMALL, dtype=dtype, param_sync_dtype=sync, grad_sync_dtype=F32, with_scaled_states=True
    )
    oracle = Oracle(params)
    for seed in range(4):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.unscale_grads(torch.tensor(2.0**-10))
        optimizer.step()
        oracle.accumulate(seed)
        for q in oracle.copies:
            q.grad *= 2.0**-10
        oracle.optimizer.step()
        oracle.optimizer.zero_grad()
    oracle.check(tolerance)
    saved = optimizer.state_dict()["state"]
    for key, q in enumerate(oracle.copies):
        wanted = oracle.optimizer.state[q]["exp_avg_sq"]
        error = (saved[key]["exp_avg_sq"] - wanted).norm() / wanted.norm()
        assert error < 1e-2 and float(wanted.abs().max()) < 1e-5, (key, error)
    assert all(b.exp_avg_sq_shard.dtype == dtype for b in optimizer.state["buckets"])


def _integers(mesh):
    """Parameters that travel as integers: as many leading bytes."""
    for sync, model, state in (
        (torch.int64, F32, F32),
        (torch.int32, F32, F32),
        (torch.int32, BF16, F32),
        (torch.uint8, F16, F16),
    ):
        options = dict(**SMALL, dtype=state, grad_sync_dtype=F32)
        if (sync, model) == (torch.int32, F32):
            options.update(CONTIGUOUS)
        params = parameters(model)
        optimizer, oracle = make(params, param_sync_dtype=sync, **options), Oracle(params)
        _train(params, optimizer, 1)
        oracle.step(0)
        oracle.check(0.26 if sync == torch.uint8 else 1e-2 if model == BF16 else 1e-5)
        same_on_all_ranks(params)


def _channels_last(mesh):
    """Weights keep their memory format, and the numbers are the same."""
    for options in ({}, CONTIGUOUS, dict(overlap_param_sync=True)):
        weights = []
        for layout in (torch.contiguous_format, torch.channels_last):
            torch.manual_seed(0)
            net = torch.nn.Conv2d(3, 8, 3).to(memory_format=layout)
            strides = [p.stride() for p in net.parameters()]
            optimizer = make(net.parameters(), **SMALL, **options)
            for seed in range(3):
                optimizer.zero_grad()
                x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
                net(x.to(memory_format=layout)).square().mean().backward()
                optimizer.step()
            optimizer.param_sync()
            assert strides == [p.stride() for p in net.parameters()]
            weights.append(clones(net.parameters()))
            saved = optimizer.state_dict()["state"]
            torch.testing.assert_close(saved[0]["param"], net.weight.detach())
        for a, b in zip(*weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _layouts(mesh):
    """Gradients and parameters of other strides: a transposed parameter, a channels-last one."""
    params = [torch.nn.Parameter(torch.arange(12.0).view(3, 4).t()), torch.nn.Parameter(torch.ones(2, 3, 4))]
    params[1].data = params[1].data.permute(2, 0, 1)
    optimizer, oracle = make(params, **SMALL), Oracle(params)
    for _ in range(2):
        for p, q in zip(params, oracle.copies, strict=True):
            p.grad = torch.arange(float(p.numel())).view(p.shape)
            q.grad = p.grad.double().clone()
        optimizer.step()
        oracle.optimizer.step()
        optimizer.zero_grad()
    oracle.check()


def _skipped(mesh):
    """capturable: a step that overflows leaves parameters, state and count as they are, and asks no host."""
    options = (
        dict(param_sync_dtype=BF16),
        dict(param_sync_dtype=BF16, contiguous_param_buffer=True),
        dict(param_sync_dtype=BF16, store_params=False, store_param_remainders=True),
    )
    for option in options:
        params = parameters(BF16)
        optimizer = make(params, **SMALL, capturable=True, **option)
        _train(params, optimizer, 1)
        before, state = clones(params), optimizer.state_dict()["state"]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        for overflow in (True, False):
            optimizer.zero_grad()
            backward(params, 1, scale=float("inf") if overflow else 1.0)
            scaler.step(optimizer)
            scaler.update()
            after = optimizer.state_dict()["state"]
            same = [torch.equal(after[k][n], state[k][n]) for k in range(len(params)) for n in state[k]]
            assert all(same) if overflow else not any(same)
            if overflow:
                equal(clones(params), before)
            assert int(after["step"]) == 2 - overflow


CASES = {
    "remainders": _remainders,
    "remainders_contiguous": lambda mesh: _remainders(mesh, **CONTIGUOUS),
    "remainders_late": lambda mesh: _remainders(mesh, overlap_param_sync=True),
    "scaled": _scaled,
    "scaled_bf16": lambda mesh: _scaled(mesh, BF16, BF16, BF16, 5e-2),
    "scaled_integers": lambda mesh: _scaled(mesh, F16, torch.int32, BF16, 5e-2),
    "integers": _integers,
    "channels_last": _channels_last,
    "layouts": _layouts,
    "skipped": _skipped,
}
