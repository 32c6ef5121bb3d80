"""What each rank of test_distributed.py runs, on gloo. A case takes the device mesh, and raises if it fails."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.amp._amp_state import _amp_state
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import Reducer, distributed
from apex.parallel.LARC import LARC

BATCH = 4  # rows a rank


def network(seed=0, dtype=torch.float32):
    """(N, 5) -> (N, 2): six parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def rows(step=0, width=5):
    """The batch of all ranks together, the same on each."""
    count = BATCH * dist.get_world_size()
    return torch.randn(count, width, generator=torch.Generator().manual_seed(100 + step))


def mine(whole):
    first = BATCH * dist.get_rank()
    return whole[first : first + BATCH]


def loss_of(output):
    return output.float().square().mean()


def grads(module):
    return [p.grad for p in module.parameters()]


def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_on_all_ranks(tensors):
    for others in gathered([None if t is None else t.detach() for t in tensors]):
        for t, other in zip(tensors, others, strict=True):
            assert (t is None) == (other is None)
            assert t is None or torch.equal(t, other)


def close(found, wanted, tolerance=1e-6):
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def collectives():
    """The all-reduces of a backward pass: [(elements, dtype, group)], flags of presence left out."""
    calls, all_reduce = [], dist.all_reduce

    def note(tensor, *args, group=None, **kwargs):
        calls.append((tensor.numel(), tensor.dtype, group))
        return all_reduce(tensor, *args, group=group, **kwargs)

    dist.all_reduce = note
    try:
        yield calls
    finally:
        dist.all_reduce = all_reduce


def messages(ddp, step=0):
    """The all-reduces of one backward pass."""
    ddp.zero_grad()
    with collectives() as calls:
        loss_of(ddp(mine(rows(step)))).backward()
    return calls


@contextlib.contextmanager
def raises(kind, *words):
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


# ---- the mean of gradients -------------------------------------------------------------------------------


def _parity(mesh, passes=3, **options):
    """The same gradients as one process has with the whole batch."""
    whole = network(seed=0)
    model = network(seed=dist.get_rank())  # rank 0's parameters are broadcast
    ddp = DDP(model, **{"message_size": 20, **options})
    close(model.parameters(), whole.parameters(), 0)
    for step in range(passes):
        ddp.zero_grad()
        whole.zero_grad()
        loss_of(ddp(mine(rows(step)))).backward()
        loss_of(whole(rows(step))).backward()
        close(grads(model), grads(whole))
        same_on_all_ranks(grads(model))
    return ddp


def _triggers(mesh):
    module = network()
    ddp = DDP(module, message_size=1, allreduce_trigger_params=[module[2].weight])
    messages(ddp)
    # Gradients come from the last layer to the first, of a layer's parameters in an order of the engine's.
    for calls in (messages(ddp, 1), messages(ddp, 2)):
        assert (
            len(calls) == 2 and sum(n for n, *_ in calls) == sum(p.numel() for p in module.parameters()) + 6
        )
    assert ddp._live.bucket_of[id(module[2].weight)] == ddp._live.bucket_of[id(module[4].weight)] == 0
    assert ddp._live.bucket_of[id(module[0].weight)] == 1


def _message_size(mesh):
    small, large = DDP(network(), message_size=1), DDP(network())
    for ddp, count in ((small, 6), (large, 1)):
        for step in range(3):
            assert len(messages(ddp, step)) == count
    medium = DDP(network(), message_size=40)
    messages(medium)
    *full, last = messages(medium, 1)
    assert len(full) >= 1 and all(n >= 40 for n, *_ in full), full


class Probe(nn.Module):
    """Calls a function when the backward pass comes by."""

    def __init__(self, call=None):
        super().__init__()
        self.call = call

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: self.call())
        return x


def _overlaps(mesh):
    """From the second pass on, the last layer's gradients are on their way before the first layer's exist."""
    for options, expected in (({}, [False, True, True]), ({"delay_allreduce": True}, [False] * 3)):
        module, probe = network(), Probe()
        ddp = DDP(nn.Sequential(module[0], probe, *module[1:]), 1, **options)
        for step, overlaps in enumerate(expected):
            seen = []
            with collectives() as calls:
                probe.call = functools.partial(_count, calls, seen)
                loss_of(ddp(mine(rows(step)))).backward()
            assert (seen[0] > 0) == overlaps, (options, step, seen)
            assert len(calls) > seen[0]


def _count(calls, seen):
    seen.append(len(calls))


# ---- options ---------------------------------------------------------------------------------------------


def _retained(mesh):
    ddp = _parity(mesh, retain_allreduce_buffers=True)
    assert len(ddp.allreduce_buffers) == len(ddp._live.buckets) > 1
    for buffer, bucket in zip(ddp.allreduce_buffers, ddp._live.buckets, strict=True):
        assert torch.equal(buffer, torch.cat([p.grad.reshape(-1) for p in bucket.params]))
        buffer.fill_(7.0)
        assert all((p.grad == 7.0).all() for p in bucket.params)
    _parity(mesh, retain_allreduce_buffers=True, delay_allreduce=True)
    assert DDP(network()).allreduce_buffers == []


def _large_gradients(mesh, **options):
    """The gradient of a float16 parameter that is 20000 on each rank; the sum of four is past float16."""
    weight = nn.Linear(1, 1, bias=False).to(torch.float16)
    ddp = DDP(weight, **options)
    with collectives() as calls:
        (ddp(torch.full((1, 1), 100.0, dtype=torch.float16)) * 200.0).sum().backward()
    return weight.weight.grad.item(), calls[0][1]


def _always_fp32(mesh):
    ranks = dist.get_world_size()
    assert _large_gradients(mesh, allreduce_always_fp32=True) == (20000.0, torch.float32)
    found, dtype = _large_gradients(mesh)
    assert dtype == torch.float16
    assert found == (20000.0 if ranks < 4 else float("inf"))
    module = nn.Linear(3, 3).double()  # what is wider than float32 stays
    ddp = DDP(module, allreduce_always_fp32=True)
    with collectives() as calls:
        ddp(torch.ones(1, 3).double()).sum().backward()
    assert calls[0][1] == torch.float64


def _factors(mesh):
    ranks = dist.get_world_size()
    assert _large_gradients(mesh, gradient_predivide_factor=float(ranks))[0] == 20000.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _large_gradients(mesh, gradient_average_split_factor=float(ranks))[0] == 20000.0
    assert any("gradient_predivide_factor" in str(w.message) for w in caught)
    _parity(mesh, gradient_predivide_factor=3.0)
    for options, factor in (
        (dict(gradient_average=False), 1.0),
        (dict(gradient_average=False, gradient_predivide_factor=4.0), 0.25),
        (dict(gradient_average=False, delay_allreduce=True), 1.0),
    ):
        module, whole = network(), network()
        ddp = DDP(module, 20, **options)
        loss_of(whole(rows())).backward()
        for _ in range(2):
            messages(ddp)
            close(grads(module), [g * ranks * factor for g in grads(whole)])


def _streams(mesh):
    """Process groups take turns: two that it makes itself, two that are given."""
    ddp = _parity(mesh, num_allreduce_streams=2)
    groups = [group for *_, group in messages(ddp)]
    assert len(set(groups)) == 2 and None not in groups
    assert groups == [groups[i % 2] for i in range(len(groups))]
    given = [dist.new_group() for _ in range(2)]
    ddp = _parity(mesh, num_allreduce_streams=2, allreduce_communicators=(given, [None, None]))
    assert {group for *_, group in messages(ddp)} == set(given)


def _prof(mesh):
    from torch.profiler import ProfilerActivity, profile

    names = []
    for prof in (True, False):
        ddp = DDP(network(), 20, prof=prof)
        messages(ddp)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            messages(ddp)
        names.append({event.key for event in trace.key_averages()})
    ours = {"forward pass DDP logic", "allreduce_hook", "comm_ready_buckets", "allreduce_epilogue"}
    assert ours <= names[0] and not ours & names[1]


def _refused(mesh):
    for options, word in (
        (dict(shared_param=True), "delay_allreduce=True"),
        (dict(delay_allreduce=True, num_allreduce_streams=2), "num_allreduce_streams"),
        (dict(delay_allreduce=True, allreduce_trigger_params=[]), "allreduce_trigger_params"),
        (dict(gradient_predivide_factor=0.0), "above 0"),
        (dict(allreduce_communicators=([None], [None])), "num_allreduce_streams"),
        (dict(allreduce_communicators=([None], [None]), num_allreduce_streams=2), "got 1 and 1"),
    ):
        with raises(ValueError, word):
            DDP(network(), **options)
    with raises(RuntimeError, "the same module on every rank"):
        DDP(nn.Linear(2, 2 + dist.get_rank()))
    with raises(RuntimeError, "no shape yet"):
        DDP(nn.LazyLinear(2))
    sparse = DDP(nn.Embedding(4, 2, sparse=True))
    with raises(TypeError, "weight", "sparse=True"):
        sparse(torch.tensor([1])).sum().backward()


# ---- parameters of all sorts -----------------------------------------------------------------------------


class Mixed(nn.Module):
    """One layer for each dtype, with what is empty, a scalar, not contiguous, shared, complex and frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(5, 5).to(dtype) for dtype in dtypes)
        self.again = self.layers[0]
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.complex = nn.Parameter(torch.tensor([1.0 + 2.0j]))
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x):
        total = (self.scalar * x).sum() + self.empty.sum() + (self.complex * x.sum()).abs().sum()
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        image = self.again(x.float()).unsqueeze(1).unsqueeze(1).expand(-1, 1, 5, 5)
        total = total + self.conv(image.contiguous(memory_format=torch.channels_last)).sum()
        return total * self.frozen.sum()


def _all_sorts(mesh):
    for options in ({}, {"delay_allreduce": True}, {"message_size": 1}, {"allreduce_always_fp32": True}):
        module = Mixed()
        alone = [copy.deepcopy(module) for _ in range(dist.get_world_size())]
        ddp = DDP(module, **options)
        for step in range(2):
            ddp.zero_grad()
            with collectives() as calls:
                ddp(mine(rows(step))).backward()
            assert {torch.float64, torch.float32, torch.complex64} <= {dtype for _, dtype, _ in calls}
            same_on_all_ranks(grads(module))
            for rank, other in enumerate(alone):
                other.zero_grad()
                other(rows(step)[BATCH * rank : BATCH * (rank + 1)]).backward()
            for (name, p), *others in zip(
                module.named_parameters(), *(m.parameters() for m in alone), strict=True
            ):
                if name == "frozen":
                    assert p.grad is None
                    continue
                mean = torch.stack([q.grad.to(torch.promote_types(q.dtype, torch.float32)) for q in others])
                assert p.grad.stride() == others[0].grad.stride()
                tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(p.dtype, 1e-5)
                torch.testing.assert_close(
                    p.grad.to(mean.dtype),
                    mean.mean(0),
                    rtol=tolerance,
                    atol=tolerance,
                    msg=name,
                )


class Branches(nn.Module):
    """Three layers, of which a pass uses those that it names, in that order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x, *used):
        for i in used:
            x = self.layers[i](x)
        return x


def _unused(mesh):
    """What a rank does not use counts as 0 there; what nobody uses keeps None, and what it held."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for options in ({}, {"delay_allreduce": True}, {"message_size": 1}, {"retain_allreduce_buffers": True}):
        ddp = DDP(Branches(), **options)
        for used in (
            lambda r: (0,),  # the same one everywhere
            lambda r: (0, 1),  # one that was not there when the buckets were made
            lambda r: (0, 1) if r else (0,),  # ranks differ
            lambda r: (0,) if r else (0, 1),
            lambda r: (1, 0) if r else (0, 1),  # in another order
            lambda r: (r % 2,),
        ):
            ddp.zero_grad()
            loss_of(ddp(mine(rows()), *used(rank))).backward()
            same_on_all_ranks(grads(ddp))
            wanted = [torch.zeros_like(p) for p in ddp.parameters()]
            known = [False] * len(wanted)
            for other in range(ranks):
                alone = Branches()
                loss_of(alone(rows()[BATCH * other : BATCH * (other + 1)], *used(other))).backward()
                for i, grad in enumerate(grads(alone)):
                    if grad is not None:
                        wanted[i] += grad / ranks
                        known[i] = True
            for p, grad, used_somewhere in zip(ddp.parameters(), wanted, known, strict=True):
                assert (p.grad is not None) == used_somewhere
                if used_somewhere:
                    close([p.grad], [grad])


def _order_of_rank_0(mesh):
    """Ranks whose gradients come in different orders make the same buckets."""
    ddp = DDP(Branches(), message_size=1)
    order = (2, 1, 0) if dist.get_rank() else (0, 1, 2)
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp(mine(rows()), *order)).backward()
        same_on_all_ranks(grads(ddp))
    index = {id(p): i for i, p in enumerate(ddp.parameters())}
    found = gathered([[index[id(p)] for p in bucket.params] for bucket in ddp._live.buckets])
    assert all(buckets == found[0] for buckets in found)
    assert {i for bucket in found[0][:2] for i in bucket} == {4, 5}  # rank 0's last layer


# ---- passes of all sorts ---------------------------------------------------------------------------------


def _accumulated(mesh):
    """One message for two passes."""
    module, whole = network(), network()
    ddp = DDP(module, 20)
    for round in range(3):
        ddp.zero_grad()
        whole.zero_grad()
        with collectives() as calls:
            ddp.disable_allreduce()
            loss_of(ddp(mine(rows(2 * round)))).backward()
            assert not calls
            ddp.enable_allreduce()
            loss_of(ddp(mine(rows(2 * round + 1)))).backward()
        assert calls
        loss_of(whole(rows(2 * round))).backward()
        loss_of(whole(rows(2 * round + 1))).backward()
        close(grads(module), grads(whole))


def _several_passes(mesh):
    """Two backward passes of one forward pass, two forward passes of one backward pass, a gradient's gradient."""
    module, whole = network(), network()
    ddp = DDP(module, 20)

    def run(model, take):
        loss = loss_of(model(take(rows(0))))
        loss.backward(retain_graph=True)
        loss.backward()
        (loss_of(model(take(rows(1)))) + loss_of(model(take(rows(2))))).backward()
        x = take(rows(3)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(1).mean(), x, create_graph=True)
        (slope * len(x)).square().sum(1).mean().backward()

    for _ in range(2):
        ddp.zero_grad()
        whole.zero_grad()
        run(ddp, mine)
        run(whole, lambda x: x)
        close(grads(module), grads(whole))
    with collectives() as calls, torch.no_grad():
        ddp(mine(rows()))
    x = mine(rows()).requires_grad_()
    with collectives() as calls:
        torch.autograd.grad(ddp(x).sum(), x)
    assert not calls


class Checkpointed(nn.Module):
    def __init__(self, module, reentrant, shared=False):
        super().__init__()
        self.module, self.reentrant, self.shared = module, reentrant, shared

    def forward(self, x):
        first, *rest = self.module
        x = first(x)
        for layer in rest:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        if self.shared:
            x = checkpoint(
                self.module,
                checkpoint(nn.functional.pad, x, (0, 3), use_reentrant=self.reentrant),
                use_reentrant=self.reentrant,
            )
        return x


def _checkpoints(mesh):
    whole = network()
    for reentrant in (False, True):
        module = network()
        ddp = DDP(Checkpointed(module, reentrant), 20)
        outside = DDP(network(), 20)
        for step in range(3):
            for model in (whole, module, outside):
                model.zero_grad()
            loss_of(whole(rows(step))).backward()
            with collectives() as calls:
                loss_of(ddp(mine(rows(step)))).backward()
            assert len(calls) == len(ddp._live.buckets) > 1
            close(grads(module), grads(whole))
            x = mine(rows(step)).requires_grad_()
            loss_of(checkpoint(outside, x, use_reentrant=reentrant)).backward()
            close(grads(outside), grads(whole))


def _checkpoints_that_share(mesh):
    """Reentrant checkpoints give a shared parameter its gradient in parts, the first of which may be gone."""
    for options, fails in (({"message_size": 1}, True), ({"delay_allreduce": True}, False)):
        module, whole = network(), network()
        ddp = DDP(Checkpointed(module, True, shared=True), **options)
        loss_of(Checkpointed(whole, False, shared=True)(rows())).backward()
        for step in range(2):
            ddp.zero_grad()
            if step and fails:
                with raises(RuntimeError, "twice", "use_reentrant=False", "delay_allreduce=True"):
                    loss_of(ddp(mine(rows()))).backward()
            else:
                loss_of(ddp(mine(rows()))).backward()
                close(grads(module), grads(whole))


def _after_an_error(mesh):
    """A backward pass that raises leaves nothing behind."""
    module, whole = network(), network()
    switch = {"on": False}

    def call():
        if switch["on"]:
            raise ArithmeticError("on purpose")

    ddp = DDP(nn.Sequential(module[:2], Probe(call), module[2:]), 1)
    for step, fails in enumerate((True, False, True, False, False)):
        switch["on"] = fails
        ddp.zero_grad()
        whole.zero_grad()
        if fails:
            with raises(ArithmeticError):
                loss_of(ddp(mine(rows(step)))).backward()
        else:
            loss_of(ddp(mine(rows(step)))).backward()
            loss_of(whole(rows(step))).backward()
            close(grads(module), grads(whole))


def _refresh(mesh):
    """Parameters that come to require gradients, or no longer do, make the buckets anew."""
    module, whole = network(), network()
    ddp = DDP(module, 20)
    assert ddp.needs_refresh
    for step in range(4):
        for model in (module, whole):
            model[2].requires_grad_(step >= 2)
            model.zero_grad()
        loss_of(ddp(mine(rows(step)))).backward()
        assert not ddp.needs_refresh
        loss_of(whole(rows(step))).backward()
        for p, q in zip(module.parameters(), whole.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
            if p.requires_grad:
                close([p.grad], [q.grad])
    assert len(ddp.active_params) == 6


# ---- the wrapped module as a module ----------------------------------------------------------------------


def _state_dict(mesh):
    module = network(seed=3)
    ddp = DDP(module)
    messages(ddp)
    assert list(ddp.state_dict()) == ["module." + name for name in module.state_dict()]
    other = DDP(network(seed=4))
    other.load_state_dict(ddp.state_dict())
    close(other.parameters(), module.parameters(), 0)
    messages(other, 1)
    same_on_all_ranks(grads(other))


def _copies(mesh):
    ddp = DDP(network(), 20, num_allreduce_streams=2, allreduce_trigger_params=None)
    messages(ddp)
    pickled = io.BytesIO()
    torch.save(ddp, pickled)
    pickled.seek(0)
    for other in (
        copy.deepcopy(ddp),
        pickle.loads(pickle.dumps(ddp)),
        torch.load(pickled, weights_only=False),
    ):
        assert other.message_size == 20 and other.needs_refresh
        whole = network()
        for step in range(2):
            ddp.zero_grad()
            assert messages(other, step)
            whole.zero_grad()
            loss_of(whole(rows(step))).backward()
            close(grads(other.module), grads(whole))
            assert grads(ddp) == [None] * 6
    triggered = DDP(module := network(), 1, allreduce_trigger_params=[module[2].weight])
    again = copy.deepcopy(triggered)
    messages(again)
    assert len(messages(again)) == 2


def _given_up(mesh):
    """A module whose wrapper is gone is on its own."""
    module = network()
    ddp = DDP(module)
    messages(ddp)
    module.zero_grad()
    del ddp
    gc.collect()
    with collectives() as calls:
        loss_of(module(mine(rows()))).backward()
    assert not calls and module[0].weight.grad is not None


def _compiled(mesh):
    whole = network()
    for wrap in (
        lambda m: DDP(torch.compile(m, backend="aot_eager"), 20),
        lambda m: torch.compile(DDP(m, 20), backend="aot_eager"),
    ):
        torch._dynamo.reset()
        module = network()
        model = wrap(module)
        for step in range(3):
            module.zero_grad()
            whole.zero_grad()
            loss_of(model(mine(rows(step)))).backward()
            loss_of(whole(rows(step))).backward()
            close(grads(module), grads(whole))


# ---- amp, Reducer, LARC ----------------------------------------------------------------------------------


def _forget_amp():
    amp.amp.unpatch()
    vars(_amp_state).clear()
    _amp_state.__init__()


def _amp(mesh, level, optimizer=lambda params: FusedAdam(params, lr=0.01), **options):
    """Like one process with the whole batch; an overflow on one rank is skipped on all."""
    whole = network()
    with contextlib.redirect_stdout(io.StringIO()):
        module = network()
        ranks_model, ranks_optimizer = amp.initialize(
            module,
            optimizer(module.parameters()),
            opt_level=level,
            verbosity=0,
            dynamic_init_scale=2.0**10,  # the sum of four float16 gradients stays finite
        )
        ddp = DDP(ranks_model, 20, **options)
        oracle = optimizer(whole.parameters())
        for step in range(4):
            ranks_optimizer.zero_grad()
            with amp.scale_loss(loss_of(ddp(mine(rows(step)))), ranks_optimizer) as scaled:
                scaled.backward()
            ranks_optimizer.step()
        same_on_all_ranks(list(ddp.parameters()))
        same_on_all_ranks(list(amp.master_params(ranks_optimizer)))
        with amp.disable_casts():
            for step in range(4):
                oracle.zero_grad()
                loss_of(whole(rows(step))).backward()
                oracle.step()
        tolerance = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O3": 2e-2, "O4": 4e-2, "O5": 4e-2}[level]
        close([p.float() for p in ddp.parameters()], whole.parameters(), tolerance)

        before = [p.detach().clone() for p in ddp.parameters()]
        if _amp_state.loss_scalers[0].dynamic:
            ranks_optimizer.zero_grad()
            bad = float("inf") if dist.get_rank() == 1 else 1.0
            with amp.scale_loss(loss_of(ddp(mine(rows()))) * bad, ranks_optimizer) as scaled:
                scaled.backward()
            ranks_optimizer.step()
            close(ddp.parameters(), before, 0)
            assert set(gathered(_amp_state.loss_scalers[0].loss_scale())) == {2.0**9}
    _forget_amp()


def _amp_all(mesh):
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        _amp(mesh, level)
    _amp(mesh, "O2", delay_allreduce=True)
    _amp(mesh, "O2", allreduce_always_fp32=True, retain_allreduce_buffers=True)
    _amp(mesh, "O2", lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
    _amp(mesh, "O1", lambda params: LARC(torch.optim.SGD(params, lr=0.05, momentum=0.9)))


def _amp_after_ddp(mesh):
    ddp = DDP(network())
    with raises(RuntimeError, "DistributedDataParallel", "amp.initialize(model, optimizer"):
        amp.initialize(ddp, FusedAdam(ddp.parameters()), opt_level="O1", verbosity=0)
    _forget_amp()


def _reducer(mesh):
    module, whole = network(seed=dist.get_rank()), network()
    reducer = Reducer(module)
    close(module.parameters(), whole.parameters(), 0)
    for step in range(2):  # gradients accumulate until it is told
        loss_of(module(mine(rows(step)))).backward()
        loss_of(whole(rows(step))).backward()
    reducer.reduce()
    close(grads(module), grads(whole))

    module = Branches()
    reducer = Reducer(module)
    loss_of(module(mine(rows()), 0, *([1] if dist.get_rank() == 1 else []))).backward()
    reducer.reduce()
    same_on_all_ranks(grads(module))
    assert [g is None for g in grads(module)] == [False] * 4 + [True] * 2

    tensors = [torch.full((2,), float(dist.get_rank())), [torch.full((3,), dist.get_rank() * 2.0).double()]]
    Reducer(tensors).reduce()
    mean = (dist.get_world_size() - 1) / 2
    assert (tensors[0] == mean).all() and (tensors[1][0] == 2 * mean).all()


def _flat_calls(mesh):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full(shape, float(rank)) for shape in ((2, 3), (), (0, 4))]
    tensors += [torch.full((4, 2), float(rank)).t().double(), torch.full((5,), rank)]
    strides = [t.stride() for t in tensors]
    with collectives() as calls:
        distributed.flat_dist_call(tensors[:4], dist.all_reduce)
    assert [n for n, *_ in calls] == [7, 8]
    assert all((t == (ranks - 1) / 2).all() for t in tensors[:4])
    for t in tensors:
        t.fill_(rank)
    distributed.flat_dist_call(tensors, dist.broadcast, (1,))
    assert all((t == 1).all() for t in tensors) and [t.stride() for t in tensors] == strides
    same = [torch.full((3,), float(rank))]
    distributed.apply_flat_dist_call(same, dist.all_reduce, (dist.ReduceOp.MAX,))
    assert (same[0] == (ranks - 1) / ranks).all()  # as in public apex: every all_reduce is divided


def _parity_with(**options):
    return lambda mesh: _parity(mesh, **options)


CASES = {
    "parity": _parity,
    "parity_delayed": _parity_with(delay_allreduce=True),
    "parity_one_bucket": _parity_with(message_size=10**6),
    "parity_bucket_each": _parity_with(message_size=1),
    "parity_prof": _parity_with(prof=True),
    "message_size": _message_size,
    "triggers": _triggers,
    "overlaps": _overlaps,
    "retained": _retained,
    "always_fp32": _always_fp32,
    "factors": _factors,
    "streams": _streams,
    "prof": _prof,
    "refused": _refused,
    "all_sorts": _all_sorts,
    "unused": _unused,
    "order_of_rank_0": _order_of_rank_0,
    "accumulated": _accumulated,
    "several_passes": _several_passes,
    "checkpoints": _checkpoints,
    "checkpoints_that_share": _checkpoints_that_share,
    "after_an_error": _after_an_error,
    "refresh": _refresh,
    "state_dict": _state_dict,
    "copies": _copies,
    "given_up": _given_up,
    "compiled": _compiled,
    "amp": _amp_all,
    "amp_after_ddp": _amp_after_ddp,
    "reducer": _reducer,
    "flat_calls": _flat_calls,
}
