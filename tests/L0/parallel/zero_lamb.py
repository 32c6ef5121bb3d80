"""What each rank of test_distributed_fused_lamb.py runs, on gloo: DistributedFusedLAMB against LAMB in float64."""

from __future__ import annotations

import copy
import functools
import io
import math

import lamb
import torch
import zero_common
from ddp_common import raises
from zero_common import agree, backward, clones, equal, gradients, parameters, rank, ranks

from apex._bits import from_e5m2, to_e5m2
from apex.contrib.optimizers import DistributedFusedLAMB
from apex.optimizers import FusedLAMB

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HYPER = dict(lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
FORMULA = ("max_grad_norm", "use_nvlamb", "adam_w_mode", "bias_correction", "grad_averaging", *HYPER)


def make(params, **options):
    return DistributedFusedLAMB(params, **{**HYPER, **options})


class Oracle:
    """LAMB in float64 over the mean of all ranks' gradients."""

    def __init__(self, params, **options):
        self.params, self.steps, self.pending = params, 0, None
        self.options = dict(max_grad_norm=0.0) | HYPER | options
        self.values = [p.detach().to("cpu", torch.float64) for p in params]
        self.states = [{} for _ in params]

    def accumulate(self, *seeds, clip=None):
        """clip: of each rank's own gradients."""
        for seed in seeds:
            for r in range(ranks()):
                found = [g.to("cpu", torch.float64) for g in gradients(self.params, seed, r)]
                norm = math.sqrt(sum(float(g.square().sum()) for g in found))
                factor = min(1.0, clip / norm) / ranks() if clip else 1 / ranks()
                found = [factor * g for g in found]
                pending = self.pending or [torch.zeros_like(g) for g in found]
                self.pending = [a + b for a, b in zip(pending, found, strict=True)]

    def step(self, *seeds, clip=None):
        """Returns the norm of the mean."""
        self.accumulate(*seeds, clip=clip)
        self.steps += 1
        grads, self.pending = self.pending, None
        norm, limit = math.sqrt(sum(float(g.square().sum()) for g in grads)), self.options["max_grad_norm"]
        factor = limit / norm if limit and norm > limit else 1.0
        rows = zip(self.states, self.values, grads, strict=True)
        self.values = [lamb.update(s, p, g, factor, self.steps, self.options) for s, p, g in rows]
        return norm

    def check(self, tolerance=1e-5):
        for p, value in zip(self.params, self.values, strict=True):
            agree(p, value, tolerance, tolerance)


def train(params, optimizer, oracle, seeds=range(3), tolerance=1e-5):
    for seed in seeds:
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.complete_reductions()
        norm = oracle.step(seed)
        agree(optimizer.L2_grad_norm, torch.tensor(norm, dtype=torch.float64, device="cpu"), 100 * tolerance)
        optimizer.step()
    optimizer.param_sync()
    oracle.check(tolerance)
    assert int(optimizer.state["step"]) == len(seeds)


def _parity(mesh, dtype=F32, tolerance=1e-5, **options):
    params = parameters(dtype)
    oracle = Oracle(params, **{name: options[name] for name in FORMULA if name in options})
    train(params, make(params, **options), oracle, tolerance=tolerance)


def _groups(mesh):
    """Groups with learning rates, decays and betas of their own, one of them without decay."""
    params = parameters()
    own = [dict(lr=0.02, weight_decay=0.0), dict(betas=(0.5, 0.9)), {}]
    split = [params[:2], params[2:5], params[5:]]
    groups = [dict(params=ps, **o) for ps, o in zip(split, own, strict=True)]
    optimizer = make(groups, max_grad_norm=1.0)
    oracles = [Oracle(ps, **o) for ps, o in zip(split, own, strict=True)]
    for seed in range(3):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
        mean = [sum(g.to("cpu", torch.float64) for g in column) / ranks()
                for column in zip(*(gradients(params, seed, r) for r in range(ranks())), strict=True)]  # fmt: skip
        norm, done = math.sqrt(sum(float(g.square().sum()) for g in mean)), 0
        for oracle in oracles:
            oracle.pending = [g * min(1.0, 1.0 / norm) for g in mean[done : done + len(oracle.params)]]
            done += len(oracle.params)
            oracle.step()
    for oracle in oracles:
        oracle.check()


def _equals_fused_lamb(mesh):
    """On the mean of the gradients, in the same order of sums: the same bits where one rank has it all."""
    params, options = parameters(), dict(HYPER, max_grad_norm=1.0)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = make(params, max_grad_norm=1.0, dwu_num_blocks=1, dwu_num_chunks=1)
    other = FusedLAMB(twins, **options)
    for seed in range(4):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
        for column in zip(twins, *(gradients(params, seed, r) for r in range(ranks())), strict=True):
            column[0].grad = sum(g / ranks() for g in column[1:])
        other.step()
    for p, q in zip(params, twins, strict=True):
        agree(p, q, 2e-6, 2e-6)


def _clips_before(mesh, **options):
    """Each rank's gradients are clipped by their own norm."""
    params = parameters()
    optimizer, oracle = make(params, clip_after_ar=False, max_grad_norm=0.5, **options), Oracle(params)
    for seed in range(3):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.complete_reductions()
        own = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(params, seed, rank())))
        agree(optimizer.L2_grad_norm, torch.tensor(own, dtype=torch.float64, device="cpu"), 1e-5)
        oracle.step(seed, clip=0.5)
        optimizer.step()
    oracle.check()


def _bytes(mesh, dtype=F16):
    """The model gets e5m2, masters stay as they are."""
    params = parameters(dtype)
    optimizer, oracle = make(params, e5m2_allgather=True), Oracle(params)
    for seed in range(3):
        optimizer.zero_grad()
        backward(params, seed)
        oracle.step(seed)
        optimizer.step()
    saved = optimizer.state_dict()
    for key, (p, wanted) in enumerate(zip(params, oracle.values, strict=True)):
        master = saved["state"][key]["param"]
        agree(master, wanted, 5e-3, 5e-3)
        equal([p.detach()], [from_e5m2(to_e5m2(master), dtype)])


def _masters(mesh, dtype=BF16):
    """The model is the rounding of float32 masters, in whatever order of ranks."""
    params = parameters(dtype)
    optimizer, oracle = make(params), Oracle(params)
    train(params, optimizer, oracle, tolerance=2e-2)
    saved = optimizer.state_dict()["state"]
    equal(clones(params), [saved[i]["param"].to(dtype) for i in range(len(params))])


def _overflow(mesh, **options):
    """A gradient of one rank that is not finite: nothing changes anywhere, nor for the steps that follow."""
    params = parameters()
    optimizer, oracle = make(params, max_grad_norm=1.0, **options), Oracle(params, max_grad_norm=1.0)
    by_rank = not options.get("clip_after_ar", True)
    for seed, value in ((0, None), (1, math.inf), (2, math.nan), (3, None)):
        optimizer.zero_grad()
        backward(params, seed)
        if value is not None and rank() == ranks() - 1:
            (params[1] * value).sum().backward()
        before = clones(params)
        optimizer.step()
        if value is not None:
            equal(clones(params), before)
        elif not by_rank:
            oracle.step(seed)
    assert int(optimizer.state["step"]) == 2
    if not by_rank:
        oracle.check()


def _scales(mesh):
    """A global scale, as a number and as a tensor: as if there were none."""
    for scale in (64.0, torch.tensor([64.0], dtype=F32, device=zero_common.DEVICE)):
        params = parameters()
        optimizer, oracle = make(params, max_grad_norm=1.0), Oracle(params, max_grad_norm=1.0)
        optimizer.set_global_scale(scale)
        assert optimizer.global_scale is scale
        for seed in range(2):
            optimizer.zero_grad()
            backward(params, seed, scale=64.0)
            optimizer.complete_reductions()
            norm = oracle.step(seed)
            agree(optimizer.L2_grad_norm / 64, torch.tensor(norm, dtype=torch.float64, device="cpu"), 1e-4)
            optimizer.step()
        oracle.check()


def _public_script(mesh):
    """The calls of public apex's test, with a GradScaler, which backs off after an overflow on one rank."""
    params = parameters(F16)
    optimizer = make(params, lr=0.0, max_grad_norm=1.0, dwu_group_size=ranks(), overlap_reductions=False)
    oracle = Oracle(params, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler(zero_common.DEVICE, init_scale=16.0, growth_interval=1000)
    optimizer.set_global_scale(16.0)
    for seed in range(3):
        optimizer._lazy_init_stage1()
        scaler.scale(torch.zeros((), dtype=F32, device=zero_common.DEVICE))
        backward(params, seed, scale=scaler.get_scale())
        if seed == 1 and rank() == 0:
            (params[0] * math.inf).sum().backward()
        optimizer._lazy_init_stage2()
        optimizer._lr = torch.tensor(HYPER["lr"], dtype=F32, device=zero_common.DEVICE)
        optimizer.complete_reductions()
        optimizer.set_global_scale(scaler._get_scale_async())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if seed != 1:
            oracle.step(seed)
    oracle.check(1e-2)
    assert scaler.get_scale() == 8.0 and int(optimizer.state["step"]) == 2


def _scaler_alone(mesh):
    """Without set_global_scale the GradScaler's scale is taken; unscale_grads and clip_grad_norm serve, too."""
    for unscales in (False, True):
        params = parameters()
        optimizer, oracle = make(params, max_grad_norm=1.0), Oracle(params, max_grad_norm=1.0)
        scaler = torch.amp.GradScaler(zero_common.DEVICE, init_scale=16.0)
        for seed in range(2):
            optimizer.zero_grad()
            scaler.scale(torch.zeros((), dtype=F32, device=zero_common.DEVICE))
            backward(params, seed, scale=16.0)
            if unscales:
                optimizer.unscale_grads(grad_scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            oracle.step(seed)
        oracle.check()


def _accumulates(mesh, **options):
    """Passes of accumulation steps stay on the rank, and are reduced by the pass that ends them."""
    params = parameters()
    optimizer, oracle = make(params, **options), Oracle(params)
    for first in (0, 3):
        optimizer.zero_grad()
        optimizer.set_is_accumulation_step(True)
        for seed in (first, first + 1):
            backward(params, seed)
            assert all(p.grad is not None for p in params)
        optimizer.set_is_accumulation_step(False)
        backward(params, first + 2)
        assert all(p.grad is None for p in params)
        optimizer.step()
        oracle.step(first, first + 1, first + 2)
    oracle.check()


def _last_step(mesh):
    """Parameters without a gradient count as 0 there, as everywhere."""
    params = parameters()
    optimizer, oracle = make(params), Oracle(params)
    optimizer.set_last_step(True)
    optimizer.zero_grad()
    backward(params, 0)
    optimizer.complete_reductions()
    optimizer.step()
    oracle.step(0)
    oracle.check()


def _skips_allgather(mesh):
    params = parameters()
    optimizer, oracle = make(params, skip_allgather=True), Oracle(params)
    for seed in range(2):
        optimizer.zero_grad()
        backward(params, seed)
        before = clones(params)
        optimizer.step()
        equal(clones(params), before)
        optimizer.param_sync()
        oracle.step(seed)
        oracle.check()


def _views(mesh):
    """Parameters are views of a buffer, in the order that is asked for."""
    params = parameters()
    order = {p: i for i, p in enumerate(params)}
    options = dict(set_param_views_to_flat_buffer=True, param_order=order, dwu_num_blocks=1, dwu_num_chunks=1)
    optimizer = make(params, **options)
    train(params, optimizer, Oracle(params))
    storage = {p.untyped_storage().data_ptr() for p in params}
    assert len(storage) == 1
    places = [p.data_ptr() for p in params]
    assert places == sorted(places)


def _idle(mesh):
    """A rank whose passes reach nothing, or other parameters: counts as 0."""
    params = parameters()
    optimizer, oracle = make(params), Oracle(params)
    for seed in range(2):
        optimizer.zero_grad()
        if rank() == 0:
            backward(params[seed:], seed)
        optimizer.step()
        found = gradients(params[seed:], seed, 0)
        pending = [torch.zeros_like(p, requires_grad=False) for p in params[:seed]] + found
        oracle.pending = [g.to("cpu", torch.float64) / ranks() for g in pending]
        oracle.step()
    oracle.check()


def _frozen(mesh):
    params = parameters()
    optimizer, oracle = make(params), Oracle(params)
    params[1].requires_grad_(False)
    before = params[1].detach().clone()
    optimizer.zero_grad()
    backward(params, 0)
    optimizer.step()
    assert torch.equal(params[1].detach(), before)
    oracle.step(0)
    for p, value in list(zip(params, oracle.values, strict=True))[2:]:
        agree(p, value, 1e-5, 1e-5)


def _unequal(mesh):
    """Other shapes on one rank: an error on every one, in words."""
    shapes = ((3,), (2, 4)) if rank() else ((3,), (4, 2))
    with raises(RuntimeError, "not the same on all ranks"):
        make(parameters(shapes=shapes))


def _stored(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)  # with weights_only


def _resumes(mesh, dtype=F32, **options):
    """Saved with shards over groups of one size, continued over any other: the next steps are the same."""
    sizes = [size for size in (1, 2, 4) if size <= ranks()]
    params = parameters(dtype)
    optimizer = make(params, dwu_group_size=sizes[-1], **options)
    for seed in range(2):
        _step(params, optimizer, seed)
    saved, others = _stored(optimizer.state_dict()), []
    for size in sizes:
        ps = parameters(dtype, seed=2)
        other = make(ps, dwu_group_size=size, lr=7.0, **options)
        other.load_state_dict(copy.deepcopy(saved))
        equal(clones(ps), clones(params))
        assert float(other.param_groups[0]["lr"]) == torch.tensor(HYPER["lr"], dtype=F32, device="cpu").item()
        others.append((ps, other))
    for seed in (2, 3):
        _step(params, optimizer, seed)
        for ps, other in others:
            _step(ps, other, seed)
            for p, q in zip(ps, params, strict=True):
                agree(p, q, 1e-6 if dtype == F32 else 1e-2, 1e-6 if dtype == F32 else 1e-2)
            assert int(other.state["step"]) == seed + 1


def _step(params, optimizer, seed):
    optimizer.zero_grad()
    backward(params, seed)
    optimizer.step()


def _shards_of_format_1(mesh):
    params = parameters()
    optimizer = make(params)
    _step(params, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict(state_dict_format=1, gather_on_root=False))
    before = clones(params)
    _step(params, optimizer, 1)
    after = clones(params)
    ps = [torch.nn.Parameter(p) for p in before]
    other = make(ps)
    other.load_state_dict(saved)
    _step(ps, other, 1)
    equal(clones(ps), after)


case = functools.partial
CASES = {
    "plain": _parity,
    "clipped": case(_parity, max_grad_norm=1.0),
    "no_overlap": case(_parity, overlap_reductions=False, max_grad_norm=1.0),
    "nvlamb": case(_parity, use_nvlamb=True, weight_decay=0.0),
    "no_decay": case(_parity, weight_decay=0.0),
    "l2": case(_parity, adam_w_mode=False),
    "no_correction": case(_parity, bias_correction=False, grad_averaging=False),
    "one_block": case(_parity, dwu_num_blocks=1, dwu_num_chunks=1, fused_norm=True, fuse_scale=True),
    "full_ar": case(_parity, full_ar=True, max_grad_norm=1.0),
    "several_groups": case(_parity, dwu_num_rs_pg=2, dwu_num_ag_pg=2, max_grad_norm=1.0),
    "full_ar_by_turns": case(_parity, full_ar=True, dwu_num_ar_pg=2, dwu_num_ag_pg=1),
    "copies": case(_parity, dwu_group_size=1, max_grad_norm=1.0),
    "grid": case(_parity, dwu_group_size=2, dwu_num_rs_pg=2, dwu_num_ar_pg=2, max_grad_norm=1.0),
    "grid_full_ar": case(_parity, dwu_group_size=2, full_ar=True, max_grad_norm=1.0),
    "mixed": case(_parity, dtype=(F32, BF16, F16), tolerance=2e-2),
    "groups": _groups,
    "equals_fused_lamb": _equals_fused_lamb,
    "clips_before": _clips_before,
    "clips_before_full": case(_clips_before, full_ar=True, fused_norm=True, fuse_scale=True),
    "bytes": _bytes,
    "bytes_bfloat16": case(_bytes, dtype=BF16),
    "masters": _masters,
    "masters_float16": case(_masters, dtype=F16),
    "overflow": _overflow,
    "overflow_clipped_before": case(_overflow, clip_after_ar=False),
    "scales": _scales,
    "public_script": _public_script,
    "scaler_alone": _scaler_alone,
    "accumulates": _accumulates,
    "accumulates_without_overlap": case(_accumulates, overlap_reductions=False),
    "last_step": _last_step,
    "skips_allgather": _skips_allgather,
    "views": _views,
    "idle": _idle,
    "frozen": _frozen,
    "unequal": _unequal,
    "resumes": _resumes,
    "resumes_bfloat16": case(_resumes, dtype=BF16, max_grad_norm=1.0),
    "format_1": _shards_of_format_1,
}
SEVERAL = ("grid", "grid_full_ar", "unequal")  # cases that one rank has nothing of
