"""Gradients of all parameters handled at once in C++ give what Python, one by one, gives, and cost no Python loop."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from amp_runs import (
    OPTIMIZERS,
    backward,
    forget,
    initialize,
    loss_of,
    network,
    overflow,
    scaler,
    train,
    values,
)
from torch import nn

from apex import amp
from apex._loader import bindings
from apex.amp._policies.base import Policy
from apex.optimizers import FusedAdam, FusedSGD

needs_binding = pytest.mark.skipif(bindings.load().module is None, reason="no binding fits this torch")
MASTERS = ("O2", "O5")


def zeroed(model, optimizer):
    """Gradients stay and are zero, as FusedSGD's zero_grad() leaves them."""
    for step in range(4):
        optimizer.zero_grad(set_to_none=step == 2)
        backward(loss_of(model, step), optimizer)
        optimizer.step()


def accumulating(model, optimizer):
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            backward(loss_of(model, 3 * step + part), optimizer, delay_unscale=part == 1)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
        optimizer.step()


def without_zero_grad(model, optimizer):
    for step in range(3):
        backward(loss_of(model, step), optimizer)
        optimizer.step()


def with_parameters_left_out(model, optimizer):
    for step in range(3):
        optimizer.zero_grad()
        for i, p in enumerate(model.parameters()):
            p.requires_grad_((i + step) % 3 > 0)
        backward(loss_of(model, step), optimizer)
        optimizer.step()


def overflowing(model, optimizer):
    train(model, optimizer, 2)
    overflow(model, optimizer)
    optimizer.step()
    train(model, optimizer, 2)


def raising(model, optimizer):
    for step in range(2):
        backward(loss_of(model, step), optimizer)
        with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model, 7), optimizer) as scaled_loss:
            scaled_loss.backward()
            raise ZeroDivisionError
        optimizer.step()


def adding_a_group(model, optimizer):
    more = nn.Linear(3, 3, dtype=torch.float32, device="cpu").to(model[0].weight.dtype)
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": list(more.parameters())})
        if step == 3:
            optimizer.zero_grad()
        if step == 1:  # over the parameters that were there before, while the pass is open
            with amp.scale_loss(loss_of(model, step), optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            backward(
                loss_of(model, step)
                + more(torch.ones(2, 3, dtype=more.weight.dtype, device="cpu")).float().sum(),
                optimizer,
            )
        optimizer.step()


RUNS = (
    zeroed,
    accumulating,
    without_zero_grad,
    with_parameters_left_out,
    overflowing,
    raising,
    adding_a_group,
)


@needs_binding
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_as_one_by_one(level, make, run, monkeypatch):
    found = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(Policy, "_make_native", lambda self, own: None)
        forget()
        torch.manual_seed(1)
        model = network()
        model, optimizer = initialize(model, make(model.parameters()), opt_level=level)
        assert (optimizer._amp_stash.policy.native() is not None) == native
        run(model, optimizer)
        gradients = [p.grad for p in (*model.parameters(), *amp.master_params(optimizer))]
        found.append((values(model), values(optimizer), gradients))
    (models, masters, gradients), (expected_models, expected_masters, expected_gradients) = found
    same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    same(models + masters, expected_models + expected_masters)
    same(gradients, expected_gradients)


def convolution():
    return nn.Conv2d(4, 8, 3, dtype=torch.float32, device="cpu").to(memory_format=torch.channels_last)


@needs_binding
@pytest.mark.parametrize("level", MASTERS)
def test_masters_gradients_lie_as_their_masters(level):
    model = convolution()
    model, optimizer = initialize(model, FusedAdam(model.parameters()), opt_level=level)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float32, device="cpu")
    backward(model(x).square().mean(), optimizer)
    for master, param in zip(amp.master_params(optimizer), model.parameters(), strict=True):
        assert master.grad.stride() == master.stride() == param.stride()
        assert master.grad.data_ptr() % 16 == 0 and not master.grad.requires_grad
        assert torch.equal(master.grad, param.grad.float() / scaler().loss_scale())
    first, second = (master.grad for master in amp.master_params(optimizer))
    before = second.clone()
    first.fill_(3.0)
    assert torch.equal(second, before)


def test_a_sparse_gradient_goes_one_by_one():
    model = nn.Embedding(5, 3, sparse=True, dtype=torch.float32, device="cpu")
    model, optimizer = initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level="O2", loss_scale=8.0
    )
    backward(model(torch.tensor([1, 1, 4], device="cpu", dtype=torch.int64)).float().sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    before = master.clone()
    assert torch.equal(
        master.grad.to_dense(),
        torch.tensor([0.0, 2, 0, 0, 1], dtype=torch.float32, device="cpu").repeat(3, 1).T,
    )
    optimizer.step()
    assert torch.equal(
        master, before - torch.tensor([0.0, 2, 0, 0, 1], dtype=torch.float32, device="cpu").repeat(3, 1).T
    )


LAYOUTS = {
    "transposed": lambda grad: grad.T.contiguous().T,
    "with gaps": lambda grad: torch.stack([grad, grad], -1)[..., 0],
    "expanded": lambda grad: grad[:1, :1].expand(grad.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", ["adam", "FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_gradients_of_another_layout(level, kind, layout):
    """Somebody (gradient surgery, say) replaced gradients between two passes: only their values count."""
    weights = []
    for replace in (layout, lambda grad: layout(grad).contiguous()):
        forget()
        model = network()
        model, optimizer = initialize(
            model, OPTIMIZERS[kind](model.parameters()), opt_level=level, loss_scale=8.0
        )
        for _ in range(2):
            backward(loss_of(model), optimizer)
            for p in amp.master_params(optimizer):
                p.grad = replace(p.grad) if p.dim() == 2 else p.grad
            backward(loss_of(model, 1), optimizer)
            optimizer.step()
        weights.append(values(model))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_of_other_layouts(level):
    """Transposed, and with gaps: autograd gives them gradients of their layout, and contiguous ones."""
    model = nn.Module()
    model.transposed = nn.Parameter(torch.randn(5, 3, dtype=torch.float32, device="cpu").T)
    model.gaps = nn.Parameter(torch.randn(4, 6, dtype=torch.float32, device="cpu")[:, ::2])
    model.forward = lambda x: (x @ model.transposed.to(x.dtype)).sum() + (x @ model.gaps.to(x.dtype).T).sum()
    model, optimizer = initialize(model, FusedAdam(model.parameters()), opt_level=level, loss_scale=8.0)
    for _ in range(2):
        backward(model(torch.ones(2, 3, dtype=torch.float32, device="cpu")), optimizer)
    for p in amp.master_params(optimizer):
        assert torch.equal(p.grad, torch.full_like(p, 4.0))


def calls_a_step(parameters, make, level):
    """Python functions called, of Python and of C, from the end of the backward pass to the end of the step."""
    forget()
    model = nn.Sequential(
        *(nn.Linear(2, 2, dtype=torch.float32, device="cpu") for _ in range(parameters // 2))
    )
    model, optimizer = initialize(model, make(model.parameters()), opt_level=level)
    x = torch.ones(2, 2, dtype=torch.float32, device="cpu")
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(3):
        optimizer.zero_grad()
        context = amp.scale_loss(model(x).float().square().mean(), optimizer)
        context.__enter__().backward()
        calls = 0
        sys.setprofile(count)
        try:
            context.__exit__(None, None, None)
            optimizer.step()
        finally:
            sys.setprofile(None)
    return calls


@needs_binding
@pytest.mark.parametrize("level", ["O1", *MASTERS])
@pytest.mark.parametrize("make", [FusedAdam, lambda p: FusedSGD(p, 0.1, 0.9)], ids=["FusedAdam", "FusedSGD"])
def test_no_python_loop_over_parameters(level, make):
    assert calls_a_step(40, make, level) == calls_a_step(4, make, level)
