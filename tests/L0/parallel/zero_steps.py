"""Cases of test_distributed_fused_adam.py: steps are torch's, with every option, on any number of ranks."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from ddp_common import gathered, same_on_all_ranks
from zero_common import (
    HYPER,
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

from apex.contrib.optimizers import DistributedFusedAdam, _ranks, distributed_fused_adam

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def _parity(mesh=None, dtype=F32, tolerance=1e-5, adam_w_mode=True, steps=4, state=F32, **options):
    params = parameters(dtype)
    options["dtype"] = state
    optimizer = make(params, adam_w_mode=adam_w_mode, **options)
    oracle = Oracle(params, adam_w_mode, average=options.get("average_grad_sync", True))
    for seed in range(steps):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
        oracle.step(seed)
    optimizer.param_sync()
    oracle.check(tolerance)
    same_on_all_ranks(params)
    assert int(optimizer.state["step"]) == steps
    return optimizer


def _small_buckets(mesh):
    optimizer = _parity(**SMALL, pipeline_size=1)
    buckets = optimizer.state["buckets"]
    assert len(buckets) > 2
    assert max(len(optimizer.state[p]["fragments"]) for p in optimizer.parameters()) > 1
    assert max(len(b.fragments) for b in buckets) > 1
    kept = sum(t.numel() for b in buckets for t in (b.params_shard, b.exp_avg_shard, b.exp_avg_sq_shard))
    whole = 3 * sum(p.numel() for p in optimizer.parameters())
    assert kept <= whole / ranks() + 3 * 64 * len(buckets)  # a shard, and what alignment takes


def _accumulation(mesh, **options):
    """Passes within no_sync, copied at once or not, and passes that are reduced one by one."""
    for greedy in (False, True):
        for synced in ((False, False, True), (False, True, False), (True, True, True), (False, False, False)):
            params = parameters()
            optimizer, oracle = make(params, **SMALL, **options), Oracle(params)
            for step in range(2):
                optimizer.zero_grad()
                for micro, sync in enumerate(synced):
                    with contextlib.nullcontext() if sync else optimizer.no_sync(greedy_grad_copy=greedy):
                        backward(params, 10 * step + micro)
                optimizer.step()
                oracle.step(*(10 * step + micro for micro in range(3)))
            optimizer.param_sync()
            oracle.check()


def _groups(mesh):
    params = parameters()
    options = [dict(lr=1e-3, weight_decay=0.0), dict(betas=(0.8, 0.9), eps=1e-3), {}]
    groups = [dict(params=params[i::3], **o) for i, o in enumerate(options)]
    optimizer = make(groups[:2], **SMALL)
    optimizer.add_param_group(groups[2])
    oracle = Oracle(params)
    copies = oracle.copies
    oracle.optimizer = torch.optim.AdamW(
        [dict(params=copies[i::3], **o) for i, o in enumerate(options)], **HYPER
    )
    for seed in range(3):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
        oracle.step(seed)
        for group in (*optimizer.param_groups, *oracle.optimizer.param_groups):
            group["lr"] *= 0.9
    oracle.check()
    later = parameters(shapes=((5, 5),), seed=7)
    if rank():
        later[0].data.zero_()  # it becomes the first rank's
    optimizer.add_param_group(dict(params=later))
    other = Oracle(parameters(shapes=((5, 5),), seed=7))
    optimizer.zero_grad()
    backward([*params, *later], 5)
    optimizer.step()
    same_on_all_ranks(later)
    assert not torch.equal(later[0].double(), other.copies[0])


def _unused(mesh):
    """Ranks whose passes reach other parameters, another one each step, and parameters that none reaches."""
    params = parameters()
    optimizer, oracle = make(params, **SMALL, pipeline_size=1), Oracle(params, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for step in range(3):
        optimizer.zero_grad()
        mine = [(i + step + rank()) % 3 != 0 and i != 1 for i in range(len(params))]
        backward([p for p, used in zip(params, mine, strict=True) if used], step)
        for q in oracle.copies:
            q.grad = torch.zeros_like(q)
        for r in range(ranks()):
            used = [i for i in range(len(params)) if (i + step + r) % 3 != 0 and i != 1]
            for i, g in zip(used, gradients([params[i] for i in used], step, r), strict=True):
                oracle.copies[i].grad += g.double() / ranks()
        optimizer.step()
        oracle.optimizer.step()
    oracle.check()


def _frozen(mesh):
    """A parameter that requires no gradient stays, also between others, until it requires one."""
    for options in ({}, dict(param_sync_dtype=BF16), dict(dtype=BF16), dict(contiguous_param_buffer=True)):
        params = parameters()
        params[2].requires_grad_(False)
        optimizer = make(params, **options)
        before = clones(params)
        trained = [p for i, p in enumerate(params) if i != 2]
        for seed in range(2):
            optimizer.zero_grad()
            backward(trained, seed)
            optimizer.step()
        assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [i == 2 for i in range(7)]
        params[2].requires_grad_(True)
        optimizer.zero_grad()
        backward(params, 3)
        optimizer.step()
        assert not torch.equal(params[2].detach(), before[2])


def _broadcast(mesh):
    params = parameters(seed=rank())
    make(params)
    equal(params, parameters(seed=0))


def _grid(mesh):
    """Sharded over half of the ranks, twice; and not sharded at all."""
    n = ranks()
    for sharded in {1, n // 2}:
        rows = [list(range(first, first + sharded)) for first in range(0, n, sharded)]
        columns = [list(range(first, n, sharded)) for first in range(sharded)]
        row = [dist.new_group(r) for r in rows][rank() // sharded]
        column = [dist.new_group(c) for c in columns][rank() % sharded]
        _parity(**SMALL, distributed_process_group=row, redundant_process_group=column)


def _order_of_use(mesh):
    """overlap_param_sync: nothing waits until it is used, in any way; then values are those of a step that waits."""
    uses = (
        lambda p: p + 1,
        lambda p: torch.nn.functional.relu(p),
        lambda p: torch.stack([p]),
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.tolist(),
        lambda p: p[None],
    )
    for n, use in enumerate(uses):
        params, others = parameters(), parameters()
        late = make(params, **SMALL, overlap_param_sync=True, pipeline_size=1)
        prompt = make(others, **SMALL)
        for step in range(2):
            for ps, optimizer in ((params, late), (others, prompt)):
                optimizer.zero_grad()
                backward(ps, step)
                optimizer.step()
            assert all(type(p) is not torch.nn.Parameter for p in params)
            late.zero_grad()  # waits for nothing
            assert isinstance(params[-1], torch.nn.Parameter)
            assert all(type(p) is not torch.nn.Parameter for p in params)
            found = use(params[n % len(params)])
            wanted = use(others[n % len(params)])
            assert type(params[n % len(params)]) is torch.nn.Parameter
            assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted
        late.param_sync()
        assert all(type(p) is torch.nn.Parameter for p in params)
        equal(clones(params), clones(others))


@contextlib.contextmanager
def _reductions():
    """A list that grows by one for each reduction that starts."""
    calls, reduce_scatter = [], _ranks._reduce_scatter
    _ranks._reduce_scatter = lambda *args, **kwargs: calls.append(1) or reduce_scatter(*args, **kwargs)
    try:
        yield calls
    finally:
        _ranks._reduce_scatter = reduce_scatter


def _overlap(mesh):
    """Reductions start while the backward pass runs, and in no_sync do not."""
    params = parameters()
    params[1].requires_grad_(False)
    trained = [p for p in params if p.requires_grad]
    optimizer = make(params, **SMALL)
    optimizer.zero_grad()  # from here on
    with _reductions() as calls:
        backward(trained, 0)
        whole = len(optimizer.state["buckets"])
        assert len(calls) == whole, (len(calls), whole)
        optimizer.step()
        assert len(calls) == whole
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward(trained, 1)
        assert len(calls) == whole
        optimizer.grad_sync()
        optimizer.step()
        assert len(calls) == 2 * whole


class _FusedLinear(torch.autograd.Function):
    """A layer whose weight gradient is added to `weight.main_grad`, and not autograd's affair."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        return grad @ ctx.weight, None


class _Derived(DistributedFusedAdam):
    """Overrides and uses what NeMo's optimizer does."""

    def _broadcast_params(self):
        pass

    def _make_post_backward_hook(self, param, param_group_id, param_id):
        def hook(*unused):
            with self._lock:
                first = "fragments" not in self.state[param]
                if first:
                    self._init_param_state(param, param_group_id, param_id)
                if self.greedy_grad_copy and not getattr(param, "_disable_greedy_grad_copy", False):
                    self._grad_copy(param)
                    if self.overlap_grad_sync:
                        self._try_start_bucket_grad_sync(params=[param], ignore_last_bucket=first)

        return hook

    def init_params(self, params=None, param_sync_dtype=None, **options):
        params = [p for p in (params or self.parameters()) if "fragments" not in self.state[p]]
        if params:
            super().init_params(params, param_sync_dtype=param_sync_dtype, **options)

    def init_params_bucket(self, params, grad_sync_dtype=None, param_sync_dtype=None, **options):
        params = list(params)
        first = len(self.state["buckets"])
        super().init_params_bucket(
            params[:1], grad_sync_dtype=torch.float32, param_sync_dtype=param_sync_dtype, **options
        )
        super().init_params_bucket(
            params[1:], grad_sync_dtype=grad_sync_dtype, param_sync_dtype=param_sync_dtype, **options
        )
        for bucket in self.state["buckets"][first:]:
            for p in params[1:] if bucket is self.state["buckets"][first] else params[:1]:
                fragments = self.state[p]["fragments"]
                empty = self.ParameterFragment(
                    param_group_id=fragments[0].param_group_id,
                    param_id=fragments[0].param_id,
                    bucket_id=bucket.fragments[0].bucket_id,
                    param_range=(p.numel(), p.numel()),
                    bucket_range=(bucket.bucket_size, bucket.bucket_size),
                    in_local_shard=False,
                    shard_range=None,
                    shard_bucket_range=None,
                    shard_param_range=None,
                )
                fragments.append(empty)
                bucket.fragments.append(empty)

    def _init_param_state(self, param, param_group_id, param_id, param_sync_dtype=None, **options):
        super()._init_param_state(
            param, param_group_id, param_id, param_sync_dtype=param_sync_dtype, **options
        )

    def init_param_buffer(self):
        self.contiguous_param_buffer = True
        self.init_params()
        ends = {}
        for bucket in self.state["buckets"]:
            end = bucket.contiguous_buffer_offset + bucket.bucket_size
            ends[bucket.dtypes()] = max(end, ends.get(bucket.dtypes(), 0))
        for dtypes, end in ends.items():
            self._param_buffers[dtypes] = torch.zeros(end, dtype=dtypes[2], device=self.device)
        views = []
        for p in self.parameters():
            fragment = self.state[p]["fragments"][0]
            bucket = self.state["buckets"][fragment.bucket_id]
            first = bucket.contiguous_buffer_offset + fragment.bucket_range[0]
            views.append(self._param_buffers[bucket.dtypes()][first : first + p.numel()].detach())
        flat = [p.detach().view(-1) for p in self.parameters()]
        distributed_fused_adam._multi_tensor_copy(flat, views, dummy_overflow_buf=self._dummy_overflow_buf)
        for p, view in zip(self.parameters(), views, strict=True):
            p.data = view.view(p.shape)

    def try_grad_sync(self, params):
        for p in params:
            self._grad_copy(p)
        self._try_start_bucket_grad_sync(params=params)

    def zero_grad(self, *args, **kwargs):
        super().zero_grad(*args, **kwargs)
        if self.contiguous_grad_buffer:
            for p in self.parameters():
                with distributed_fused_adam._disable_pre_forward_hook(p):
                    p.main_grad = self.grad_buffer_view(p)

    def grad_norm(self, parameters=None, norm_type=2.0, force=False):
        if force or self._grad_norm is None:
            squares = self._local_grad_norm(parameters=parameters, norm_type=norm_type)
            if self.redundant_size > 1:
                squares /= self.redundant_size
            dist.all_reduce(squares)
            self._grad_norm = squares.sqrt()
        return super().grad_norm()


def _derived(mesh):
    """A subclass as NeMo's is: layers write their gradients into the buffer, its loop starts what overlaps."""
    for options in (
        dict(),
        dict(overlap_grad_sync=False, contiguous_param_buffer=True),
        dict(contiguous_param_buffer=True, overlap_param_sync=True, param_sync_dtype=BF16),
    ):
        sync = options.get("param_sync_dtype", F32)
        params = parameters(sync, shapes=((16, 8), (8, 16), (4, 8)))
        twins = [p.detach().double().requires_grad_() for p in params]
        optimizer = _Derived(params, **HYPER, **SMALL, contiguous_grad_buffer=True, **options)
        for bucket in (params[2:], params[:2]):
            optimizer.init_params_bucket(bucket)
        if "contiguous_param_buffer" in options:
            optimizer.init_param_buffer()
        oracle = torch.optim.AdamW(twins, **HYPER)
        with _reductions() as calls:
            for step in range(3):
                optimizer.zero_grad()
                seed = torch.Generator().manual_seed(step)
                x = torch.randn(4 * ranks(), 8, generator=seed).to(sync)
                x = x[4 * rank() : 4 * rank() + 4].requires_grad_()
                y = _FusedLinear.apply(
                    _FusedLinear.apply(_FusedLinear.apply(x, params[0]), params[1]), params[2]
                )
                y.float().square().mean().backward()
                reduced = len(calls)
                if not optimizer.overlap_grad_sync:
                    optimizer.try_grad_sync(params)
                optimizer._finish_bucket_grad_sync()
                norm = optimizer.clip_grad_norm(0.5, parameters=params)
                if optimizer.overlap_grad_sync and ranks() > 1:
                    assert reduced == len(calls) == (step + 1) * len(optimizer.state["buckets"])
                optimizer.step()
                optimizer._try_start_bucket_param_sync(params[:1])
                whole = (
                    torch.randn(4 * ranks(), 8, generator=torch.Generator().manual_seed(step))
                    .to(sync)
                    .double()
                )
                oracle.zero_grad()
                (whole @ twins[0].t() @ twins[1].t() @ twins[2].t()).square().mean().backward()
                wanted = torch.nn.utils.clip_grad_norm_(twins, 0.5)
                oracle.step()
                agree(norm, wanted, 3e-2 if sync == BF16 else 1e-4)
        optimizer.param_sync()
        for p, q in zip(params, twins, strict=True):
            tolerance = 3e-2 if sync == BF16 else 1e-5
            agree(p, q, tolerance, tolerance)
        saved = optimizer.state_dict()["state"]
        torch.testing.assert_close(saved[1]["param"].to(sync), params[1].detach())


def _views(mesh):
    """Contiguous buffers: parameters and gradients are views, and what is written into a view counts."""
    params = parameters()
    optimizer = make(params, **SMALL, contiguous_param_buffer=True, contiguous_grad_buffer=True)
    oracle = Oracle(params)
    optimizer.init_param_buffer()
    assert len({p.untyped_storage().data_ptr() for p in params}) == 1
    places = [p.data_ptr() for p in params]
    for seed in range(3):
        optimizer.zero_grad()
        for p in params:
            assert p.grad.data_ptr() == optimizer.grad_buffer_view(p).data_ptr() and not p.grad.any()
        if seed == 1:
            for p, g in zip(params, gradients(params, seed, rank()), strict=True):
                optimizer.grad_buffer_view(p).copy_(g)
        else:
            backward(params, seed)
        optimizer.step()
        oracle.step(seed)
    oracle.check()
    assert places == [p.data_ptr() for p in params]


def _hybrid(mesh):
    """init_params and init_params_bucket: places, dtypes and what waits for what."""
    params = parameters()
    optimizer = make(params, grad_sync_dtype=F32)
    optimizer.init_params_bucket(params[:2])
    optimizer.init_params(params[2:4], grad_sync_dtype=BF16)
    optimizer.init_params(params[4], param_sync_dtype=BF16)
    optimizer.init_params(params)
    oracle = Oracle(params)
    for seed in range(3):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
        oracle.step(seed)
    oracle.check(3e-2)
    buckets = optimizer.state["buckets"]
    assert {b.grad_sync_dtype for b in buckets} == {F32, BF16}
    assert {b.param_sync_dtype for b in buckets} == {F32, BF16}
    assert buckets[0].waits_for == {(0, 0), (0, 1)} and len(buckets[0].fragments) == 2
    optimizer = make(params, bucket_cap_mb=1e-6)
    optimizer.init_params_bucket(params[:2])  # far more than one bucket holds
    optimizer.init_params(params)
    first = [b for b in optimizer.state["buckets"] if (0, 0) in b.waits_for]
    assert len(first) > 1 and all(b.waits_for == {(0, 0), (0, 1)} for b in first)


def _norm(mesh):
    """Norm and clip are of the mean gradient, whole or of some parameters."""
    params = parameters()
    optimizer, oracle = make(params, **SMALL), Oracle(params)
    for seed in range(3):
        optimizer.zero_grad()
        backward(params, seed)
        norm = optimizer.clip_grad_norm(0.5)
        agree(norm, oracle.step(seed, clip=0.5), 1e-5)
        torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(0.5), rtol=1e-4, atol=0)
        optimizer.step()
    oracle.check()
    optimizer.zero_grad()
    backward(params, 5)
    oracle.accumulate(5)
    some = [0, 4]
    whole = optimizer.grad_norm()
    norm = optimizer.clip_grad_norm(0.5, parameters=[params[i] for i in some])
    wanted = torch.nn.utils.get_total_norm([oracle.copies[i].grad for i in some])
    agree(norm, wanted, 1e-5)
    for q in oracle.copies:  # all of them: other ranks may have measured other ones
        q.grad *= 0.5 / wanted
    torch.testing.assert_close(optimizer.grad_norm(), whole * 0.5 / wanted.float(), rtol=1e-5, atol=0)
    optimizer.step()
    oracle.optimizer.step()
    oracle.check()


def _scaler(mesh):
    """One rank's overflow keeps every rank from stepping, and halves the scale."""
    params = parameters(F16)
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    before = clones(params)
    optimizer.zero_grad()
    backward(params, 0, scale=4.0)
    with torch.no_grad():
        params[0].grad = torch.full_like(params[0], float("inf") if rank() == 0 else 0.0)
    scaler.step(optimizer)
    scaler.update()
    equal(clones(params), before)
    assert scaler.get_scale() == 2.0 and optimizer.state["step"] == 0
    optimizer.zero_grad()
    backward(params, 0, scale=2.0)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state["step"] == 1
    assert all(x == gathered(scaler.get_scale())[0] for x in gathered(scaler.get_scale()))


CASES = {
    "parity": _parity,
    "l2": lambda mesh: _parity(adam_w_mode=False),
    "sum": lambda mesh: _parity(average_grad_sync=False, tolerance=1e-4),
    "small_buckets": _small_buckets,
    "no_overlap": lambda mesh: _parity(**SMALL, overlap_grad_sync=False),
    "overlap_params": lambda mesh: _parity(**SMALL, overlap_param_sync=True),
    "overlap_params_views": lambda mesh: _parity(
        **SMALL, overlap_param_sync=True, contiguous_param_buffer=True, pipeline_size=1
    ),
    "contiguous": lambda mesh: _parity(**SMALL, contiguous_param_buffer=True, contiguous_grad_buffer=True),
    "capturable": lambda mesh: _parity(**SMALL, capturable=True),
    "no_params": lambda mesh: _parity(store_params=False),
    "halves": lambda mesh: _parity(dtype=(F16, BF16, F32), tolerance=3e-2),
    "half_gradients": lambda mesh: _parity(dtype=BF16, grad_sync_dtype=BF16, tolerance=3e-2),
    "half_parameters": lambda mesh: _parity(
        dtype=F16, grad_sync_dtype=F16, param_sync_dtype=F16, tolerance=1e-2, contiguous_param_buffer=True
    ),
    "half_states": lambda mesh: _parity(dtype=BF16, state=BF16, tolerance=5e-2),
    "accumulation": _accumulation,
    "accumulation_contiguous": lambda mesh: _accumulation(mesh, contiguous_grad_buffer=True),
    "groups": _groups,
    "unused": _unused,
    "frozen": _frozen,
    "broadcast": _broadcast,
    "grid": _grid,
    "order_of_use": _order_of_use,
    "overlap": _overlap,
    "views": _views,
    "hybrid": _hybrid,
    "derived": _derived,
    "norm": _norm,
    "scaler": _scaler,
}
