"""LARC around torch's optimizers and the fused ones."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp._amp_state import _amp_state
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel.LARC import LARC

OPTIMIZERS = {
    "SGD": lambda params, **o: torch.optim.SGD(params, lr=0.1, momentum=0.9, **o),
    "Adam": lambda params, **o: torch.optim.Adam(params, lr=0.01, **o),
    "FusedSGD": lambda params, **o: FusedSGD(params, lr=0.1, momentum=0.9, **o),
    "FusedAdam": lambda params, **o: FusedAdam(params, lr=0.01, **o),
}


def parameters(dtype=torch.float32):
    """What is usual, a scalar, one that is 0, and one that will get no gradient."""
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((5, 3), (7,), ())
    ]
    return [
        nn.Parameter(t.to(dtype))
        for t in (
            *values,
            torch.zeros(4, dtype=torch.float32, device="cpu"),
            torch.ones(2, dtype=torch.float32, device="cpu"),
        )
    ]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(1 + step)
    for p in params[:-1]:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu").to(p.dtype)
    params[1].grad.mul_(1e3)  # a large gradient, and in the last step none
    if step == 2:
        params[1].grad.zero_()


def adapt(params, lr, weight_decay, trust_coefficient, clip, eps):
    """LARC's gradients by the book, in float64."""
    for p in params:
        if p.grad is None:
            continue
        w, g = p.detach().double(), p.grad.double()
        if w.norm() == 0 or g.norm() == 0:
            continue
        rate = trust_coefficient * w.norm() / (g.norm() + weight_decay * w.norm() + eps)
        if clip:
            rate = min(rate / lr, torch.tensor(1.0, dtype=torch.float32, device="cpu"))
        p.grad = ((g + weight_decay * w) * rate).to(p.dtype)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name, weight_decay, clip):
    ours, theirs = parameters(), parameters()
    wrapped = LARC(
        OPTIMIZERS[name](ours, weight_decay=weight_decay), trust_coefficient=0.05, clip=clip, eps=1e-3
    )
    oracle = OPTIMIZERS[name](theirs)  # decay is in the gradients
    for group in oracle.param_groups:
        group["weight_decay"] = 0
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        adapt(theirs, oracle.param_groups[0]["lr"], weight_decay, 0.05, clip, 1e-3)
        wrapped.step()
        oracle.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert wrapped.param_groups[0]["weight_decay"] == weight_decay
    assert ours[-1].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    """Norms of half precision are taken in float32: a sum of squares past 65504 is fine."""
    p, q = (nn.Parameter(torch.full((100,), 60.0, dtype=dtype, device="cpu")) for _ in range(2))
    p.grad = torch.full_like(p, 100.0)
    q.grad = p.grad.clone()
    optimizer = LARC(torch.optim.SGD([p], lr=1.0), trust_coefficient=0.5, clip=False)
    adapt([q], 1.0, 0.0, 0.5, False, 1e-8)
    torch.optim.SGD([q], lr=1.0).step()
    optimizer.step()
    torch.testing.assert_close(p, q)
    assert p[0].item() == pytest.approx(30.0)


def test_groups_keep_their_own():
    a, b = (
        nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu")),
        nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu")),
    )
    groups = [{"params": [a], "weight_decay": 0.5}, {"params": [b], "lr": 0.001}]
    optimizer = LARC(torch.optim.SGD(groups, lr=0.1), trust_coefficient=0.02)
    for p in (a, b):
        p.grad = torch.ones(2, dtype=torch.float32, device="cpu")
    optimizer.step()
    # |p| = |g|: rates are 0.02 / 1.5 and 0.02; the second is above its lr, which then holds.
    torch.testing.assert_close(a, torch.full((2,), 1 - 0.02 / 1.5 * 1.5, dtype=torch.float32, device="cpu"))
    torch.testing.assert_close(b, torch.full((2,), 1 - 0.001, dtype=torch.float32, device="cpu"))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0]


def test_weight_decay_comes_back_after_an_error():
    p = nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
    optimizer = LARC(torch.optim.SGD([p], lr=1.0, weight_decay=0.1))
    optimizer.optim.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_is_the_optimizer_that_it_wraps():
    params = parameters()
    inner = FusedAdam(params, lr=0.01)
    optimizer = LARC(inner)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults and optimizer.set_grad_none is inner.set_grad_none
    assert repr(optimizer) == repr(inner)
    with pytest.raises(AttributeError):
        optimizer.no_such_attribute  # noqa: B018
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer.state_dict()["state"].keys() == inner.state_dict()["state"].keys() != set()
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))]})
    assert len(inner.param_groups) == 2
    other = LARC(FusedAdam(parameters(), lr=0.5))
    other.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))]})
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.01


def test_closure():
    p = nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
    optimizer = LARC(torch.optim.SGD([p], lr=0.1), trust_coefficient=10.0)

    def closure():
        optimizer.zero_grad()
        loss = (2 * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert p.item() == pytest.approx(0.8)


def test_copies_and_pickles():
    optimizer = LARC(torch.optim.SGD(parameters(), lr=0.1), trust_coefficient=0.3, clip=False, eps=0.5)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.trust_coefficient, other.clip, other.eps) == (0.3, False, 0.5)
        assert other.optim is not optimizer.optim and other.param_groups[0]["lr"] == 0.1


def test_schedulers():
    """And without the warning that optimizer.step() was never called."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
    optimizer = LARC(torch.optim.SGD([p], lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    p.grad = torch.ones(1, dtype=torch.float32, device="cpu")
    optimizer.step()
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_grad_scaler(fused):
    """It unscales before LARC measures, and skips a step that overflowed."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu"))
    optimizer = LARC(torch.optim.SGD([p], lr=0.1, fused=fused), trust_coefficient=10.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == pytest.approx(0.9)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("first", ["LARC", "amp"])
def test_with_amp(level, name, first):
    """Wrapped before amp.initialize or after: it measures unscaled gradients of float32 weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8, dtype=torch.float32, device="cpu"),
        nn.Tanh(),
        nn.Linear(8, 3, dtype=torch.float32, device="cpu"),
    )
    alone = copy.deepcopy(model)
    options = dict(trust_coefficient=0.05, clip=False)
    optimizer, oracle = (OPTIMIZERS[name](m.parameters()) for m in (model, alone))
    oracle = LARC(oracle, **options)
    if first == "LARC":
        optimizer = LARC(optimizer, **options)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            if first == "amp":
                optimizer = LARC(optimizer, **options)
            for step in range(3):
                x = torch.randn(
                    16, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float32, device="cpu"
                )
                for factor in (float("inf"), 1.0) if step == 1 and level in ("O1", "O2") else (1.0,):
                    optimizer.zero_grad()
                    loss = model(x).float().square().mean() * factor
                    with amp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                    optimizer.step()
                with amp.disable_casts():
                    oracle.zero_grad()
                    alone(x).square().mean().backward()
                    oracle.step()
            found = list(amp.master_params(optimizer))
        tolerance = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3}.get(level, 2e-2)
        for p, q in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    finally:
        amp.amp.unpatch()
        vars(_amp_state).clear()
        _amp_state.__init__()


def test_a_copy_steps_itself_under_a_scheduler():
    """The scheduler's counting step() knows the object that it was put on, and must not be copied with it."""
    params = parameters()
    optimizer = LARC(torch.optim.SGD(params, lr=0.1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        before = [p.detach().clone() for p in params]
        copies = [p for group in other.param_groups for p in group["params"]]
        give_gradients(copies, 0)
        other.step()
        assert all(map(torch.equal, before, params)) and not torch.equal(copies[0], params[0])


def test_what_it_refuses():
    with pytest.raises(TypeError, match="optimizer of torch"):
        LARC(nn.Linear(1, 1, dtype=torch.float32, device="cpu"))
    embedding = nn.Embedding(3, 2, sparse=True, dtype=torch.float32, device="cpu")
    embedding(torch.tensor([0], dtype=torch.int64, device="cpu")).sum().backward()
    with pytest.raises(TypeError, match="sparse=True"):
        LARC(torch.optim.SGD(embedding.parameters(), lr=0.1)).step()
