"""What raised leaves nothing behind: the run goes on as if that pass, or that step, had not been."""

from __future__ import annotations

import warnings

import amp_runs as runs
import lists
import pytest
import torch
from torch import nn

from apex import amp
from apex.amp import amp as registration
from apex.amp.lists import torch_overrides
from apex.fp16_utils import FP16_Optimizer, network_to_half
from apex.optimizers import CombinedAdam, FusedLAMB

OPTIMIZERS = {
    **{name: runs.OPTIMIZERS[name] for name in ("sgd", "FusedAdam", "FusedSGD")},
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
    "CombinedAdam": lambda params: CombinedAdam(params, lr=0.01),
}


class Boom(Exception):
    pass


def boom(*_):
    raise Boom


def in_forward(model, optimizer):
    hook = model[-1].register_forward_hook(boom)
    try:
        runs.backward(runs.loss_of(model, 5), optimizer)
    finally:
        hook.remove()


def in_backward(model, optimizer):
    """After the other parameters have their gradients."""
    hook = model[0].weight.register_hook(boom)
    try:
        runs.backward(runs.loss_of(model, 5), optimizer)
    finally:
        hook.remove()


def inside_scale_loss(model, optimizer):
    with amp.scale_loss(runs.loss_of(model, 5), optimizer) as scaled_loss:
        scaled_loss.backward()
        raise Boom


def in_unscaling(model, optimizer):
    with amp.scale_loss(runs.loss_of(model, 5), optimizer) as scaled_loss:
        scaled_loss.backward()
        grad = model[0].bias.grad.clone()
        grad.untyped_storage().resize_(0)
        model[0].bias.grad = grad


PASSES = [in_forward, in_backward, inside_scale_loss, in_unscaling]


def in_step(model, optimizer):
    methods = optimizer._amp_stash.methods
    own, methods["step"] = methods["step"], boom
    try:
        optimizer.step()
    finally:
        methods["step"] = own


def in_a_closure(model, optimizer):
    optimizer.step(boom)


STEPS = [in_step, in_a_closure]


def train(level, name, combine, broken_pass=None, broken_step=None, scale="dynamic"):
    runs.forget()
    model = runs.plain()
    optimizer = OPTIMIZERS[name](model.parameters())
    options = dict(opt_level=level, loss_scale=scale, dynamic_init_scale=2.0**8, combine_grad=combine)
    model, optimizer = runs.initialize(model, optimizer, **options)
    for first in range(2):
        if broken_pass and first == 1:
            with pytest.raises((Boom, RuntimeError, ValueError)):
                broken_pass(model, optimizer)
        runs.backward(runs.loss_of(model, first), optimizer)
        if broken_pass:
            with pytest.raises((Boom, RuntimeError, ValueError)):
                broken_pass(model, optimizer)
        runs.backward(runs.loss_of(model, first + 1), optimizer)
        if broken_step:
            with pytest.raises(Boom):
                broken_step(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    runs.train(model, optimizer, 2)
    runs.overflow(model, optimizer)
    optimizer.step()
    runs.train(model, optimizer, 1)
    return runs.values(model) + runs.values(optimizer) + [lists.scalar(runs.scaler().loss_scale(), "cpu")]


# CombinedAdam combines in any case; combined gradients that are replaced give a warning, and do not raise.
CASES = [
    (broken, name, combine)
    for broken in (*PASSES, *STEPS)
    for name in OPTIMIZERS
    for combine in ([True] if name == "CombinedAdam" else [False, True])
    if not (combine and broken is in_unscaling)
]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize(("broken", "name", "combine"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_run_goes_on(broken, level, name, combine):
    where = dict(broken_pass=broken) if broken in PASSES else dict(broken_step=broken)
    assert runs.equal(train(level, name, combine, **where), train(level, name, combine))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_of_two_optimizers_raises(level):
    """The flag of what was taken is not kept, and the gradients of what waits are as before."""
    found = []
    for broken in (False, True):
        runs.forget()
        models = [runs.plain(seed) for seed in (1, 2)]
        optimizers = [runs.OPTIMIZERS["FusedAdam"](m.parameters()) for m in models]
        models, optimizers = runs.initialize(models, optimizers, opt_level=level, dynamic_init_scale=2.0**8)
        own = optimizers[0]._post_amp_backward
        for step in range(3):
            if broken:
                optimizers[0]._post_amp_backward = boom
                with pytest.raises(Boom):
                    runs.backward(sum(runs.loss_of(m, 5) for m in models), optimizers)
                optimizers[0]._post_amp_backward = own
                assert runs.scaler()._taken is None
            runs.backward(sum(runs.loss_of(m, step) for m in models), optimizers)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append([value for m in models for value in runs.values(m)])
    assert runs.equal(*found)


def test_a_skipped_step_that_raised_skips_no_other():
    model = runs.plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = runs.initialize(model, optimizer, opt_level="O1")
    runs.overflow(model, optimizer)
    with pytest.raises(Boom):
        optimizer.step(boom)
    before = runs.values(model)
    runs.train(model, optimizer, 1)  # begins with zero_grad()
    assert not runs.equal(runs.values(model), before)


def functions():
    return torch.nn.functional.linear, torch.mm, torch.Tensor.__matmul__, torch.softmax, torch.cat


def test_patching_that_raises(monkeypatch):
    """A warning that was made an error, halfway: torch is as it was, and amp can be initialized."""
    before = functions()
    monkeypatch.setattr(torch_overrides, "FP32_FUNCS", [*torch_overrides.FP32_FUNCS, "no_such_function"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Warning, match="no_such_function"):
            registration.init()
    assert functions() == before
    monkeypatch.undo()
    registration.init()
    assert functions() != before
    registration.unpatch()
    assert functions() == before


def test_casts_come_back_after_an_exception():
    model = runs.initialize(nn.Linear(4, 4, dtype=torch.float32, device="cpu"), opt_level="O1")
    x = torch.ones(2, 4, dtype=torch.float32, device="cpu")
    for _ in range(2):
        with pytest.raises(Boom), amp.disable_casts():
            assert model(x).dtype == torch.float32
            raise Boom
        assert model(x).dtype == torch.float16


@pytest.mark.parametrize("broken", ["backward", "full precision"])
@pytest.mark.filterwarnings("ignore:FP16_Optimizer is of old")
def test_fp16_optimizer(broken):
    found = []
    for raises in (False, True):
        model = network_to_half(runs.network())
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.05), 64.0, verbose=False)
        network = model[1]
        hooked = network[0].weight if broken == "backward" else network[1].weight

        def one_pass(step, update, model=model, optimizer=optimizer):
            x, y = runs.batch(step)
            optimizer.backward(nn.functional.cross_entropy(model(x).float(), y), update_master_grads=update)

        def maybe_broken(hooked=hooked, raises=raises, one_pass=one_pass):
            if raises:
                hook = hooked.register_hook(boom)
                with pytest.raises(Boom):
                    one_pass(9, True)
                hook.remove()

        for p in network.modules():
            p.eval()  # running statistics would see the pass that raised
        for step in range(2):
            maybe_broken()
            one_pass(step, False)
            maybe_broken()
            one_pass(step + 1, True)
            maybe_broken()
            optimizer.step()
            optimizer.zero_grad(set_grads_to_None=step == 0)
        found.append(runs.values(model) + [p.detach().clone() for p in optimizer.param_groups[0]["params"]])
    assert runs.equal(*found)
