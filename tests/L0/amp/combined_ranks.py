"""What each rank of test_amp_combined_ddp.py runs: combine_ddp on gloo."""

from __future__ import annotations

import copy
import datetime
import json
import os
import pathlib
import traceback
import warnings

import amp_runs as runs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex import amp
from apex.optimizers import CombinedSGD


def run(rank, ranks, folder):
    """One rank: every case, and a file that says how each ended ("" is well)."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for name, (case, arguments) in CASES.items():
        results[name] = ""
        runs.forget()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", amp.AmpWarning)
                case(rank, *arguments)
        except Exception:
            results[name] = traceback.format_exc()
    (pathlib.Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # now and then a thread of torch's still runs while a group ends, which aborts the process


class Net(nn.Module):
    """(N, 6) -> (N, 3). Wide enough for several slices; `parts` of its branches are used."""

    def __init__(self, seed=0, branches=3, width=400):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, width, dtype=torch.float32, device="cpu")
        self.branches = nn.ModuleList(
            nn.Linear(width, width, dtype=torch.float32, device="cpu") for _ in range(branches)
        )
        self.norm = nn.LayerNorm(width, dtype=torch.float32, device="cpu")
        self.last = nn.Linear(width, 3, dtype=torch.float32, device="cpu")
        self.used = range(branches)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for i in self.used:
            x = x + torch.tanh(self.branches[i](x))
        return self.last(self.norm(x))


def groups_of(model):
    """Weights and biases apart, as weight decay wants it: the order of groups is not that of gradients."""
    params = list(model.parameters())
    return [
        dict(params=[p for p in params if p.dim() > 1]),
        dict(params=[p for p in params if p.dim() < 2], lr=0.02),
    ]


def start(level, seed=0, **options):
    model = Net(seed)
    optimizer = torch.optim.SGD(groups_of(model), lr=0.05, momentum=0.9)
    return runs.initialize(model, optimizer, opt_level=level, combine_grad=True, combine_ddp=True, **options)


def loss_of(model, step, rank):
    return runs.loss_of(model, 10 * step + rank)


def same_on_all_ranks(model):
    for p in model.parameters():
        other = p.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(p.detach(), other)


def is_ddp(rank, level, accumulate, replica_count):
    """The weights that torch's DistributedDataParallel gives, after each rank began with other ones."""
    model, optimizer = start(level, seed=rank, loss_scale=64.0, ddp_replica_count=replica_count)
    train(model, optimizer, rank, accumulate, lambda loss: runs.backward(loss, optimizer))
    same_on_all_ranks(model)
    weights = runs.values(model)
    runs.forget()
    other = Net(0)
    oracle = torch.optim.SGD(groups_of(other), lr=0.05, momentum=0.9)
    other, oracle = runs.initialize(other, oracle, opt_level=level, loss_scale=64.0)
    other = DistributedDataParallel(other)
    train(other, oracle, rank, accumulate, lambda loss: runs.backward(loss, oracle))
    tolerance = 1e-5 if level == "O1" else 2e-3  # half precision means are rounded in another order
    for p, q in zip(weights, other.module.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=tolerance, atol=tolerance)


def train(model, optimizer, rank, accumulate, backward):
    for step in range(4):
        if not (accumulate and step % 2):
            optimizer.zero_grad()
        backward(loss_of(model, step, rank))
        if not accumulate or step % 2:
            optimizer.step()


def overflow_on_one_rank(rank, level):
    """Every rank skips, and reduces its scale."""
    model, optimizer = start(level, loss_scale="dynamic", dynamic_init_scale=256.0)
    for step in range(3):
        optimizer.zero_grad()
        before = runs.values(model)
        loss = loss_of(model, step, rank) * (float("inf") if step == 1 and rank == 1 else 1.0)
        runs.backward(loss, optimizer)
        optimizer.step()
        assert runs.equal(runs.values(model), before) == (step == 1)
    assert runs.scaler().loss_scale() == 128.0
    same_on_all_ranks(model)


def unused_parameters(rank, level):
    """Not those of the first pass; afterwards other branches on neighbouring ranks, then none of a slice at all."""
    model, optimizer = start(level, loss_scale=8.0, ddp_replica_count=8)
    for step in range(4):
        model.used = range(3) if step < 2 else [rank % 3] if step == 2 else []
        optimizer.zero_grad()
        runs.backward(loss_of(model, step, rank), optimizer)
        optimizer.step()
    same_on_all_ranks(model)


def overlap(rank):
    """Once the order is known, slices go out while the backward pass runs."""
    model, optimizer = start("O1", loss_scale=8.0)
    reducer = optimizer._amp_stash.combined.reducer
    from apex.amp._combined import ddp

    least, ddp.LEAST = ddp.LEAST, 1000
    during = []
    try:
        for step in range(4):
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, step, rank), optimizer) as loss:
                loss.backward()
                during.append(len(getattr(reducer, "_works", ())))
            optimizer.step()
    finally:
        ddp.LEAST = least
    assert len(reducer._slices) >= 4
    # The last one goes out when the pass is known not to have raised.
    assert during[:2] == [0, 0] and during[2] == during[3] == len(reducer._slices) - 1
    same_on_all_ranks(model)


def delayed_passes(rank, level):
    """Two passes that are unscaled, and averaged, together: as one pass of both losses."""
    weights = []
    for delayed in (True, False):
        runs.forget()
        model, optimizer = start(level, loss_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            losses = [loss_of(model, 2 * step + k, rank) for k in (0, 1)]
            if delayed:
                runs.backward(losses[0], optimizer, delay_unscale=True)
                runs.backward(losses[1], optimizer)
            else:
                runs.backward(losses[0] + losses[1], optimizer)
            optimizer.step()
        same_on_all_ranks(model)
        weights.append(runs.values(model))
    for p, q in zip(*weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=2e-3)


def combined_optimizer(rank, level):
    """CombinedSGD trains as torch's SGD does."""
    weights = []
    for kind in (torch.optim.SGD, CombinedSGD):
        runs.forget()
        model = Net(rank)
        optimizer = kind(groups_of(model), lr=0.05, momentum=0.9)
        runs.initialize(
            model, optimizer, opt_level=level, combine_grad=True, combine_ddp=True, loss_scale=64.0
        )
        train(model, optimizer, rank, False, lambda loss, optimizer=optimizer: runs.backward(loss, optimizer))
        same_on_all_ranks(model)
        weights.append(runs.values(model))
    for p, q in zip(*weights, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-3)


def inconsistent_models(rank):
    model = Net(0)
    model.used = range(3) if rank == 0 else range(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = runs.initialize(
        model, optimizer, opt_level="O1", combine_grad=True, combine_ddp=True, loss_scale=8.0
    )
    try:
        runs.backward(loss_of(model, 0, rank), optimizer)
    except RuntimeError as error:
        assert "inconsistent parameters" in str(error) and "rank" in str(error)
    else:
        raise AssertionError("nothing was raised")


def a_second_pass(rank):
    model, optimizer = start("O1", loss_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        runs.backward(loss_of(model, step, rank), optimizer)
        optimizer.step()
    before = runs.values(model)
    optimizer.zero_grad()
    try:
        with amp.scale_loss(loss_of(model, 3, rank), optimizer) as loss:
            loss.backward(retain_graph=True)
            loss.backward()
    except RuntimeError as error:
        assert "second gradient inside one amp.scale_loss" in str(error)
    else:
        raise AssertionError("nothing was raised")
    assert runs.equal(runs.values(model), before)
    optimizer.zero_grad()
    runs.backward(loss_of(model, 4, rank), optimizer)
    optimizer.step()
    same_on_all_ranks(model)


def a_late_gradient(rank):
    model, optimizer = start("O1", loss_scale=8.0)
    model.used = range(2)
    for step in range(2):
        runs.backward(loss_of(model, step, rank), optimizer)
    model.used = range(3)
    try:
        runs.backward(loss_of(model, 2, rank), optimizer)
    except RuntimeError as error:
        assert "first gradient after gradients were combined" in str(error)
    else:
        raise AssertionError("nothing was raised")


def an_added_group(rank):
    model, optimizer = start("O2", loss_scale=8.0)
    head = copy.deepcopy(model.branches[0])
    for step in range(4):
        if step == 2:
            optimizer.add_param_group(dict(params=list(head.parameters()), lr=0.01))
            model.branches.append(head)
            model.used = range(4)
        optimizer.zero_grad()
        runs.backward(loss_of(model, step, rank), optimizer)
        optimizer.step()
    same_on_all_ranks(model)


def gradients_replaced_in_the_pass(rank):
    """create_graph=True: what arrived is copied into the slice before it goes out."""
    model, optimizer = start("O1", loss_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, step, rank), optimizer) as loss:
            loss.backward(create_graph=step == 3)
        optimizer.step()
    same_on_all_ranks(model)


def refused(function, *words):
    try:
        function()
    except (RuntimeError, ArithmeticError) as error:
        assert any(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("nothing was raised")


def raises(rank, level):
    """A hook raises on one rank, or on all, in the first pass, in that which shows the order, and later."""
    weights = []
    for who in ((), (0,), (1,), range(dist.get_world_size())):
        for layer in (0, 2) if who else (0,):
            runs.forget()
            model, optimizer = start(level, loss_scale=8.0, ddp_replica_count=8)
            lit = []
            model.branches[layer].weight.register_hook(lambda grad, lit=lit: burn(lit))
            for step in range(4):
                optimizer.zero_grad()
                lit += [1] if rank in who else []
                if who:
                    refused(
                        lambda step=step, model=model, optimizer=optimizer: runs.backward(
                            loss_of(model, step, rank), optimizer
                        ),
                        "on purpose",
                        "of a rank raised",
                    )
                    assert step == 0 or not any(p.grad.any() for p in model.parameters())
                    optimizer.zero_grad()
                runs.backward(loss_of(model, step, rank), optimizer)
                optimizer.step()
            same_on_all_ranks(model)
            weights.append(runs.values(model))
    for others in weights[1:]:
        assert runs.equal(others, weights[0])


def burn(lit):
    if lit:
        lit.clear()
        raise ArithmeticError("on purpose")


def one_late_gradient(rank):
    """On one rank alone, inside a pass and before one: named on every rank, again as long as it lasts."""
    for before in (False, True):
        runs.forget()
        model, optimizer = start("O1", loss_scale=8.0)
        model.used = range(2)
        for step in range(2):
            optimizer.zero_grad()
            runs.backward(loss_of(model, step, rank), optimizer)
            optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            if rank == 1 and before:
                for p in model.branches[2].parameters():
                    p.grad = torch.ones_like(p)
            model.used = range(3) if rank == 1 and not before else range(2)
            refused(
                lambda model=model, optimizer=optimizer: runs.backward(loss_of(model, 2, rank), optimizer),
                "first gradient after",
                "of a rank raised",
            )
        model.used = range(2)
        optimizer.zero_grad()
        runs.backward(loss_of(model, 3, rank), optimizer)
        optimizer.step()
        same_on_all_ranks(model)


def nothing_on_one_rank(rank):
    """The first pass reaches nothing there: named everywhere; afterwards such a pass counts as 0."""
    model, optimizer = start("O1", loss_scale=8.0)

    def pass_of(step):
        if rank == 1:
            return torch.ones(3, requires_grad=True, dtype=torch.float32, device="cpu").sum()
        return loss_of(model, step, rank)

    refused(lambda: runs.backward(pass_of(0), optimizer), "inconsistent parameters")
    for step in range(4):
        optimizer.zero_grad()
        runs.backward(pass_of(step) if step else loss_of(model, step, rank), optimizer)
        optimizer.step()
    same_on_all_ranks(model)


def defaults(rank):
    """Other default dtypes and another default device change nothing, nor do values that lie behind a negative bit."""
    weights = []
    for dtype, device in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float64, None),
        (torch.float32, "meta"),
    ):
        runs.forget()
        model = Net(0)
        model.register_buffer(
            "offset",
            torch.full((4,), -1.0 - rank, dtype=torch.float32, device="cpu")._neg_view()
            if rank
            else torch.ones(4, dtype=torch.float32, device="cpu"),
        )
        optimizer = torch.optim.SGD(groups_of(model), lr=0.05, momentum=0.9)
        batches = [loss_inputs(rank, step) for step in range(3)]
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            runs.initialize(
                model, optimizer, opt_level="O1", combine_grad=True, combine_ddp=True, loss_scale=8.0
            )
            for x in batches:
                optimizer.zero_grad()
                runs.backward(model(x).float().square().mean(), optimizer)
                optimizer.clip_optimizer_grad_norm_fused(1.0)
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        assert model.offset.tolist() == [1.0] * 4
        weights.append(runs.values(model))
    for others in weights[1:]:
        assert runs.equal(others, weights[0])


def loss_inputs(rank, step):
    return torch.randn(
        8, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float32, device="cpu"
    )


CASES = {
    "raises-O1": (raises, ("O1",)),
    "raises-O2": (raises, ("O2",)),
    "one_late_gradient": (one_late_gradient, ()),
    "nothing_on_one_rank": (nothing_on_one_rank, ()),
    "defaults": (defaults, ()),
    **{
        f"is_ddp-{level}-{accumulate}-{count}": (is_ddp, (level, accumulate, count))
        for level in ("O1", "O2")
        for accumulate in (False, True)
        for count in (1, 4)
    },
    "overflow-O1": (overflow_on_one_rank, ("O1",)),
    "overflow-O2": (overflow_on_one_rank, ("O2",)),
    "unused-O1": (unused_parameters, ("O1",)),
    "unused-O2": (unused_parameters, ("O2",)),
    "delayed-O1": (delayed_passes, ("O1",)),
    "delayed-O2": (delayed_passes, ("O2",)),
    "CombinedSGD-O1": (combined_optimizer, ("O1",)),
    "CombinedSGD-O2": (combined_optimizer, ("O2",)),
    "overlap": (overlap, ()),
    "inconsistent_models": (inconsistent_models, ()),
    "a_second_pass": (a_second_pass, ()),
    "a_late_gradient": (a_late_gradient, ()),
    "an_added_group": (an_added_group, ()),
    "gradients_replaced_in_the_pass": (gradients_replaced_in_the_pass, ()),
}
