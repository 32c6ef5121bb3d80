"""Cases of test_distributed_fused_adam.py: ranks without work, or that raise; what is frozen, thawed, or strange."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ddp_common import raises, same_on_all_ranks
from sharded_adam import shorten
from zero_common import (
    SMALL,
    Oracle,
    agree,
    backward,
    clones,
    equal,
    gradients,
    make,
    parameters,
    rank,
    ranks,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TIGHT = dict(SMALL, pipeline_size=1)
ACCELERATOR = dict(SMALL, pipeline_size=1000, on_host=False)


def _idle_backward():
    """A pass that reaches no parameter of the optimizer."""
    torch.ones(1, requires_grad=True).sum().backward()


def _pass(params, seed, used):
    """This rank's pass, which reaches the parameters that `used` names."""
    mine = [params[i] for i in used(rank())]
    backward(mine, seed) if mine else _idle_backward()


def _accumulate(oracle, seed, used):
    """What the passes of all ranks give together."""
    for q in oracle.copies:
        q.grad = torch.zeros_like(q) if q.grad is None else q.grad
    for r in range(ranks()):
        mine = used(r)
        found = gradients([oracle.params[i] for i in mine], seed, r)
        for i, g in zip(mine, found, strict=True):
            oracle.copies[i].grad += g.to("cpu", torch.float64) / ranks()


EVERY = range(7)
USES = (
    lambda r: EVERY if r == 0 else [],
    lambda r: [] if r == 0 else EVERY,
    lambda r: [r % 7],
    lambda r: [],
    lambda r: EVERY,
)


def _idle(mesh):
    """Ranks that reach nothing, in one pass a step and in several, outside no_sync and within."""
    for options in (
        {},
        TIGHT,
        dict(TIGHT, overlap_param_sync=True),
        dict(TIGHT, contiguous_grad_buffer=True),
        ACCELERATOR,
    ):
        for passes in (1, 2, 3):
            params = parameters()
            optimizer, oracle = make(params, **options), Oracle(params)
            for step in range(5):
                optimizer.zero_grad()
                for n in range(passes):
                    used = USES[(step + n) % len(USES)]
                    _pass(params, 10 * step + n, used)
                    _accumulate(oracle, 10 * step + n, used)
                optimizer.step()
                oracle.optimizer.step()
                oracle.optimizer.zero_grad()
            optimizer.param_sync()
            oracle.check()
            same_on_all_ranks(params)


def _skipped(mesh):
    """zero_grad() after passes that reached parameters on some ranks only: nothing of them is left."""
    for options in ({}, TIGHT, dict(TIGHT, contiguous_grad_buffer=True), ACCELERATOR):
        for first in (False, True):  # before anything was made, or after a step
            params = parameters()
            optimizer, oracle = make(params, **options), Oracle(params)
            for step in range(3):
                if first or step:
                    optimizer.zero_grad()
                    for used in USES[: step + 1]:
                        _pass(params, 50 + step, used)
                        optimizer.zero_grad()
                optimizer.zero_grad()
                optimizer.zero_grad()
                backward(params, step)
                norm = optimizer.grad_norm()
                optimizer.step()
                agree(norm, oracle.step(step), 1e-5)
            oracle.check()


def _thawed(mesh):
    """Frozen and thawed on all ranks, before and after zero_grad(), and reached on one rank only."""
    for options in ({}, TIGHT, dict(TIGHT, contiguous_grad_buffer=True), ACCELERATOR):
        for late in (False, True):
            params = parameters()
            params[2].requires_grad_(False)
            optimizer, oracle = make(params, **options), Oracle(params, weight_decay=0.0)
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
            for step in range(6):
                thawed = step in (2, 3, 5)
                if not late:
                    params[2].requires_grad_(thawed)
                optimizer.zero_grad()
                params[2].requires_grad_(thawed)

                def used(r, thawed=thawed):
                    return [i for i in EVERY if i != 2 or (thawed and r == 0)]

                _pass(params, step, used)
                before = clones(params[2:3])
                optimizer.step()
                if thawed:
                    assert not torch.equal(params[2].detach(), before[0])
                else:
                    equal(clones(params[2:3]), before)
                kept = oracle.copies[2].grad
                _accumulate(oracle, step, used)
                if not thawed:
                    oracle.copies[2].grad = kept
                oracle.optimizer.step()
                oracle.optimizer.zero_grad()
            same_on_all_ranks(params)
            for i in EVERY:
                if i != 2:  # whose moments torch's optimizer does not decay while it has no gradient
                    agree(params[i], oracle.copies[i], 1e-5, 1e-5)


def _frozen_on_some_ranks(mesh):
    """Named on every rank; set alike, it goes on."""
    for options in (TIGHT, ACCELERATOR):
        params = parameters()
        optimizer = make(params, **options)
        for step in range(2):
            optimizer.zero_grad()
            params[2].requires_grad_(rank() != 1)
            backward([p for p in params if p.requires_grad], step)
            before = clones(params)
            with raises(RuntimeError, "some ranks only"):
                optimizer.step()
            equal(clones(params), before)
        params[2].requires_grad_(True)
        optimizer.zero_grad()
        oracle = Oracle(params)
        backward(params, 3)
        optimizer.step()
        oracle.step(3)
        oracle.check()


def _dropped_on_some_ranks(mesh):
    """zero_grad() on one rank alone, of gradients that wait for a step: named everywhere; dropped alike, it goes on."""
    for options in ({}, TIGHT, ACCELERATOR):
        params = parameters()
        optimizer, oracle = make(params, **options), Oracle(params)
        for step in range(3):
            backward(params, step)
            before = clones(params)
            if rank() == 1:
                optimizer.zero_grad()
                backward(params, step)
            with raises(RuntimeError, "only some ranks called zero_grad()"):
                optimizer.step()
            equal(clones(params), before)
            optimizer.zero_grad()
            backward(params, step)
            optimizer.step()
            oracle.step(step)
        oracle.check()


def _in_other_groups(mesh):
    """Ranks that are in different numbers of process groups make an optimizer together, and one of some ranks."""
    dist.new_group([0])
    first = dist.new_group([0, 1])
    params = parameters()
    optimizer, oracle = make(params), Oracle(params)
    if rank() < 2:
        few = parameters()
        others, of_two = make(few, process_group=first), Oracle(few, of=2)
        backward(few, 7)
        others.step()
        of_two.step(7)
        of_two.check()
    optimizer.zero_grad()
    backward(params, 0)
    optimizer.step()
    oracle.step(0)
    oracle.check()


def _several_optimizers(mesh):
    """Each with a group of its own: a rank reaches one of them alone, or both in another order."""
    params = [parameters(seed=seed) for seed in (1, 2)]
    optimizers = [make(each, **TIGHT, process_group=dist.new_group()) for each in params]
    oracles = [Oracle(each) for each in params]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for i in (1, 0) if rank() == 1 else (0, 1):
            if rank() or i == step % 2:
                backward(params[i], step)
        for i, (optimizer, oracle) in enumerate(zip(optimizers, oracles, strict=True)):
            _accumulate(oracle, step, lambda r, one=i == step % 2: EVERY if r or one else [])
            optimizer.step()
            oracle.optimizer.step()
            oracle.optimizer.zero_grad()
    for oracle in oracles:
        oracle.check()


def _raises(mesh):
    """A hook raises on one rank, or on all, early or late in the pass; dropped everywhere, it is run again."""
    for options in ({}, TIGHT, ACCELERATOR):
        for who in ((0,), (1,), range(ranks())):
            for place in (0, 6):
                params = parameters()
                optimizer, oracle = make(params, **options), Oracle(params)
                lit = []
                params[place].register_hook(lambda grad, lit=lit: _burn(lit))
                for step in range(3):
                    optimizer.zero_grad()
                    lit += [1] if rank() in who else []
                    with raises((ArithmeticError, ZeroDivisionError), "on purpose"):
                        backward(params, step)
                        raise ZeroDivisionError("not on purpose, on a rank where nothing raised")
                    optimizer.zero_grad()
                    backward(params, step)
                    optimizer.step()
                    oracle.step(step)
                oracle.check()


def _burn(lit):
    if lit:
        lit.clear()
        raise ArithmeticError("on purpose")


def _raises_and_goes_on_alone(mesh):
    """One rank drops its gradients and the others step: named on every rank, nothing is changed, then it goes on."""
    for options in ({}, TIGHT, ACCELERATOR):
        params = parameters()
        optimizer, oracle = make(params, **options), Oracle(params)
        lit = []
        params[3].register_hook(lambda grad, lit=lit: _burn(lit))
        for step in range(3):
            optimizer.zero_grad()
            before = clones(params)
            lit += [1] if rank() == 1 else []
            with raises(RuntimeError, "zero_grad()", "on every rank alike"):
                try:
                    backward(params, step)
                except ArithmeticError:
                    optimizer.zero_grad()
                optimizer.step()
            equal(clones(params), before)
            optimizer.zero_grad()
            backward(params, step)
            optimizer.step()
            oracle.step(step)
        oracle.check()


def _step_that_raises(mesh):
    """An option that is none, in the second group: no group was updated, nothing was counted; mended, it steps."""
    for options in ({}, dict(capturable=True), dict(store_params=False)):
        params = parameters()
        optimizer = make([dict(params=params[:3]), dict(params=params[3:])], **options)
        oracle = Oracle(params)
        for step in range(2):
            optimizer.zero_grad()
            backward(params, step)
            before = clones(params)
            betas = optimizer.param_groups[1]["betas"]
            optimizer.param_groups[1]["betas"] = (0.9,)
            with raises(ValueError):
                optimizer.step()
            optimizer.param_groups[1]["betas"] = betas
            equal(clones(params), before)
            assert int(optimizer.state["step"]) == step
            optimizer.step()
            oracle.step(step)
        oracle.check()


def _group_that_comes_within(mesh):
    """add_param_group() between passes of one step, of which some ranks' reached nothing."""
    params, later = parameters(), parameters(shapes=((5, 5), (3,)), seed=7)
    optimizer, oracle = make(params, **TIGHT), Oracle([*params, *later])
    everything = [*params, *later]
    for step in range(2):
        optimizer.zero_grad()
        for n, used in enumerate(USES):
            _pass(params, 10 * step + n, used)
            _accumulate(oracle, 10 * step + n, used)
            if not step and n == 1:
                optimizer.add_param_group(dict(params=later))
        optimizer.zero_grad()
        for q in oracle.copies:
            q.grad = None
        backward(everything, 90 + step)
        oracle.accumulate(90 + step)
        optimizer.step()
        oracle.optimizer.step()
        oracle.optimizer.zero_grad()
    oracle.check()


def _strange_gradients(mesh):
    """Negative, expanded, copy-on-write, strided and zero gradients count by their values."""
    for options in ({}, dict(contiguous_grad_buffer=True)):
        p = torch.nn.Parameter(torch.zeros(2, 3))
        optimizer = make([p], **options)
        values = torch.arange(6.0).view(2, 3) * (rank() + 1)
        mean = torch.arange(6.0).view(2, 3) * (ranks() + 1) / 2
        for grad, wanted in (
            ((-values)._neg_view(), mean),
            (torch._lazy_clone(values), mean),
            (values.t().contiguous().t(), mean),
            (torch.stack([values, values], -1)[..., 0], mean),
            (torch.full((1, 1), rank() + 1.0).expand(2, 3), torch.full((2, 3), (ranks() + 1) / 2)),
            (torch._efficientzerotensor((2, 3)), torch.zeros(2, 3)),
        ):
            optimizer.zero_grad(set_to_none=True)
            p.grad = grad
            agree(optimizer.grad_norm(), wanted.norm(), 1e-6)
            assert p.grad is None
        z = torch.complex(torch.zeros(2, 3), p * 1.0)
        optimizer.zero_grad()
        (z.conj() * torch.complex(torch.zeros(2, 3), torch.ones(2, 3))).real.sum().backward()
        optimizer.step()
        assert (p < 0).all()
    with raises(TypeError, "clone"):
        make([torch.nn.Parameter(torch.ones(3)._neg_view())])


def _defaults(mesh):
    """Under other default dtypes and on another default device the numbers are the same."""
    found = []
    for dtype, device in ((F32, None), (BF16, None), (F16, None), (torch.float64, None), (F32, "meta")):
        params = parameters()
        given = [gradients(params, seed, rank()) for seed in range(3)]
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            for options in (SMALL, dict(capturable=True), dict(dtype=F16, with_scaled_states=True)):
                optimizer = make(params, **options)
                for gradient in given:
                    optimizer.zero_grad()
                    for p, g in zip(params, gradient, strict=True):
                        p.grad = g.clone()
                    optimizer.clip_grad_norm(1.0)
                    optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        finally:
            torch.set_default_dtype(F32)
            torch.set_default_device(None)
        found.append(clones(params))
    for others in found[1:]:
        equal(others, found[0])


def _absent(mesh):
    """Where a rank does not step the others are told, when the time is over."""
    group = dist.new_group()
    params = parameters()
    optimizer = make(params, process_group=group)
    shorten(group)
    shorten(optimizer._ranks._hosts)
    if rank() == 0:
        backward(params, 0)
        with raises(RuntimeError, "in vain", "alike"):
            optimizer.step()


def _unequal(mesh):
    """Other shapes on one rank: an error on every one, in words, where a broadcast would hang or mix up values."""
    shapes = ((3,), (2, 4)) if rank() else ((3,), (4, 2))
    with raises(RuntimeError, "not the same on all ranks"):
        make(parameters(shapes=shapes))
    with raises(RuntimeError, "not the same on all ranks"):
        make(parameters(shapes=shapes[min(rank(), 1) :]))


CASES = {
    "absent": _absent,
    "unequal": _unequal,
    "idle": _idle,
    "skipped": _skipped,
    "thawed": _thawed,
    "frozen_on_some_ranks": _frozen_on_some_ranks,
    "dropped_on_some_ranks": _dropped_on_some_ranks,
    "in_other_groups": _in_other_groups,
    "several_optimizers": _several_optimizers,
    "raises": _raises,
    "raises_and_goes_on_alone": _raises_and_goes_on_alone,
    "step_that_raises": _step_that_raises,
    "group_that_comes_within": _group_that_comes_within,
    "strange_gradients": _strange_gradients,
    "defaults": _defaults,
}
