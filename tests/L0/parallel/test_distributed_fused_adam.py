"""DistributedFusedAdam: one process; two and four on gloo; a GPU, and two on NCCL."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import sharded_adam
import torch
import torch.distributed as dist
import torch.multiprocessing
import zero_cuda
import zero_ranks
from zero_common import HYPER, SMALL, Oracle, backward, clones, equal, make, parameters

from apex import amp
from apex._bits import join_remainders, split_remainders
from apex.amp import AmpUsageError
from apex.contrib import nccl_allocator
from apex.contrib.optimizers import DistributedFusedAdam, _contiguous, _options
from apex.contrib.optimizers._buckets import Layout

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Cases that one rank has nothing of.
SEVERAL = ("grid", "order_of_use", "overlap", "frozen_on_some_ranks", "raises_and_goes_on_alone", "absent")
SEVERAL += ("dropped_on_some_ranks", "in_other_groups", "unequal")


class Wrapper(torch.Tensor):
    """A tensor whose elements lie in another one, as those of DTensor and float8 tensors do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0] if function is torch.ops.aten.detach.default else NotImplemented


@pytest.fixture(scope="module", params=[(2, "cpu"), (4, "reference")], ids=["2-cpu", "4-reference"])
def results(request, tmp_path_factory):
    """How each case ended, by rank."""
    ranks, variant = request.param
    return sharded_adam.results_of(ranks, variant, tmp_path_factory.mktemp(variant), "zero_ranks")


@pytest.mark.parametrize("case", zero_ranks.CASES)
def test_ranks(results, case):
    for rank, result in enumerate(results):
        assert not result[case], f"rank {rank}: {result[case]}"


@pytest.mark.parametrize("case", [case for case in zero_ranks.CASES if case not in SEVERAL])
def test_alone(alone, case):
    zero_ranks.CASES[case](None)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("options", [{}, dict(store_params=False), dict(capturable=True)], ids=str)
def test_variants(alone, variant, dtype, options):
    """Norm, clip and step run on the kernels: one launch a group and combination of dtypes."""
    params = parameters(dtype, device=variant.device)
    optimizer = make(params, grad_sync_dtype=dtype, bucket_cap_mb=2.5e-4 * dtype.itemsize, **options)
    oracle = Oracle(params)
    for seed in range(2):
        optimizer.zero_grad()
        backward(params, seed)
        norm = optimizer.clip_grad_norm(1.0)
        optimizer.step()
        torch.testing.assert_close(norm.double().cpu(), oracle.step(seed, clip=1.0), rtol=1e-3, atol=0)
    oracle.check(1e-5 if dtype == F32 else 2e-2)
    counts = variant.kernels if variant.runs_kernels else variant.references
    updates = sum(count for name, count in counts.items() if name.startswith("multi_tensor_adam"))
    if variant.simt or variant.name == "reference":
        buckets = len(optimizer.state["buckets"])
        assert buckets > 2 and updates == 2 * (buckets if "store_params" in options else 1)


# ---- GradScaler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, F32])
def test_clip_after_unscale(alone, dtype):
    """The threshold is that of the gradients as they are, not of the scaled ones."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).to(dtype)
    twin = copy.deepcopy(model).double()
    optimizer = make(model.parameters())
    oracle = torch.optim.AdamW(twin.parameters(), **HYPER)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
    for seed in range(5):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
        optimizer.zero_grad()
        scaler.scale(model(x).float().square().mean() * 0.1).backward()
        optimizer.unscale_grads(grad_scaler=scaler)
        norm = optimizer.clip_grad_norm(1.0)
        scaler.step(optimizer)
        scaler.update()
        oracle.zero_grad()
        (twin(x.double()).square().mean() * 0.1).backward()
        wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        oracle.step()
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-2, atol=0)
    assert scaler.get_scale() == 2.0**16 and optimizer.state["step"] == 5
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q, rtol=5e-3, atol=5e-3 if dtype == F16 else 1e-5)


def test_large_gradients_are_clipped_to_the_threshold(alone):
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = DistributedFusedAdam([p], lr=1.0)
    (p * torch.full((4,), 50.0 * 2.0**16)).sum().backward()
    optimizer.unscale_grads(torch.tensor([2.0**-16]), None, False)  # as scalers call it
    assert optimizer.clip_grad_norm(1.0) == pytest.approx(100.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.state["buckets"][0].exp_avg_shard[:4], torch.full((4,), 0.05))


def test_torch_unscale_is_refused(alone):
    """torch's unscale_ finds no gradients: clipped and stepped as if it had, they would vanish."""
    params = parameters()
    optimizer = make(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    backward(params, 0, scale=2.0**16)
    before = clones(params)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_grads\(grad_scaler=scaler\)"):
        scaler.step(optimizer)
    equal(clones(params), before)


def test_amp_is_refused():
    model = torch.nn.Linear(2, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(AmpUsageError, match="GradScaler"):
            amp.initialize(model, make(model.parameters()), opt_level="O2", verbosity=0)
    finally:
        dist.destroy_process_group()


# ---- misuse ---------------------------------------------------------------------------------------------------


def test_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        make(parameters())


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (RuntimeError, "AMSGrad", dict(amsgrad=True)),
        (ValueError, "betas", dict(betas=(0.9, 1.0))),
        (ValueError, "lr", dict(lr=-1.0)),
        (ValueError, "pipeline_size", dict(pipeline_size=0)),
        (ValueError, "bucket_cap_mb", dict(bucket_cap_mb=0)),
        (ValueError, "float32, float16 or bfloat16", dict(dtype=torch.float64)),
        (ValueError, "float32, float16 or bfloat16", dict(grad_sync_dtype=torch.int32)),
        (ValueError, "float32, float16 or bfloat16", dict(param_sync_dtype=torch.float64)),
        (RuntimeError, "leave device out", dict(device="meta")),
        (RuntimeError, "store_params=False", dict(store_param_remainders=True)),
        (RuntimeError, "bfloat16", dict(store_param_remainders=True, store_params=False)),
        (RuntimeError, "half precision", dict(with_scaled_states=True)),
        (
            NotImplementedError,
            "dtype=torch.float32",
            dict(with_scaled_states=True, dtype=F16, capturable=True),
        ),
        (RuntimeError, "contiguous_grad_buffer=True", dict(nccl_ub=True)),
        (RuntimeError, "nccl_ub=False", dict(nccl_ub=True, contiguous_grad_buffer=True)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_are_refused(alone, error, words, options):
    with pytest.raises(error, match=words):
        make(parameters(), **options)


@pytest.mark.parametrize(
    ("error", "words", "make_parameter"),
    [
        (TypeError, "float64", lambda: torch.zeros(2, dtype=torch.float64)),
        (TypeError, "contiguous", lambda: torch.zeros(4, 4)[:, :2]),
        (TypeError, "contiguous", lambda: torch.zeros(1, 4).expand(3, 4)),
        (ValueError, "one device", lambda: torch.zeros(2, device="meta")),
        (TypeError, "FusedAdam", lambda: Wrapper(torch.zeros(2))),
    ],
    ids=["float64", "gaps", "overlaps", "devices", "subclass"],
)
def test_parameters_that_are_refused(alone, error, words, make_parameter):
    with pytest.raises(error, match=words):
        make([torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(make_parameter())])


def test_calls_that_are_refused(alone):
    params = parameters()
    optimizer, stranger = make(params), torch.nn.Parameter(torch.zeros(2))
    backward(params, 0)
    for error, words, call in (
        (ValueError, "positive", lambda: optimizer.clip_grad_norm(0.0)),
        (ValueError, "norm_type", lambda: optimizer.grad_norm(norm_type=1)),
        (RuntimeError, "pass its own", lambda: optimizer.clip_grad_norm(1.0, [stranger])),
        (ValueError, "either", optimizer.unscale_grads),
        (RuntimeError, "contiguous_grad_buffer=True", lambda: optimizer.grad_buffer_view(params[0])),
        (TypeError, "ParameterFragment", lambda: optimizer.parameter(params[0])),
        (ValueError, "1 or 2", lambda: optimizer.state_dict(state_dict_format=3)),
        (ValueError, "whole on every rank", lambda: optimizer.state_dict(gather_on_root=True)),
        (TypeError, "state_dict", lambda: copy.deepcopy(optimizer)),
        (ValueError, "its state", lambda: make(parameters()).init_params(dtype=F16)),
    ):
        with pytest.raises(error, match=words):
            call()
    other = make(parameters(), param_sync_dtype=BF16)
    with pytest.raises(RuntimeError, match="param_sync_dtype=torch.float32"):
        other.init_param_buffer()
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    other = make(embedding.parameters())
    with pytest.raises(TypeError, match="sparse=True"):
        embedding(torch.tensor([1])).sum().backward()


def test_unscale_twice(alone):
    params = parameters()
    optimizer, scaler = make(params), torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="scaled no loss"):
        optimizer.unscale_grads(grad_scaler=scaler)
    scaler.scale(torch.ones(()))
    backward(params, 0)
    optimizer.unscale_grads(grad_scaler=scaler)
    with pytest.raises(RuntimeError, match="update"):
        optimizer.unscale_grads(grad_scaler=scaler)


# ---- one process, other things -------------------------------------------------------------------------------


def test_parts(alone):
    """parameters(), parameter(), closure, and a second optimizer that takes parameters over."""
    params = parameters()
    optimizer = make([dict(params=params[:2]), dict(params=params[2:])], **SMALL)
    assert list(optimizer.parameters()) == params
    assert optimizer.parameter(1, 0) is params[2]
    optimizer.init_params()
    assert all(optimizer.parameter(f) is p for p in params for f in optimizer.state[p]["fragments"])

    def closure():
        optimizer.zero_grad()
        loss = sum(p.sum() for p in params)
        loss.backward()
        return loss

    before = float(sum(p.detach().sum() for p in params))
    assert float(optimizer.step(closure).detach()) == pytest.approx(before)
    other, oracle = make(params), Oracle(params)
    backward(params, 0)
    other.step()
    oracle.step(0)
    oracle.check()
    assert all(p.grad is None for p in params)


def test_a_memory_format_that_changes_is_refused(alone):
    """Elements lie in buckets as they lay in the parameter: in another order they would be mixed up."""
    model = torch.nn.Conv2d(3, 4, 3)
    optimizer = make(model.parameters())
    x = torch.randn(1, 3, 5, 5)
    model(x).sum().backward()
    saved = optimizer.state_dict()
    model.to(memory_format=torch.channels_last)
    before = clones(model.parameters())
    for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match="strides"):
            call()
    equal(clones(model.parameters()), before)
    other = make(model.parameters())
    other.load_state_dict(saved)
    model(x).sum().backward()
    other.step()


def test_a_model_can_be_saved_and_copied(alone, tmp_path):
    model = torch.nn.Linear(3, 3)
    optimizer = make(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    equal(clones(again.parameters()), clones(model.parameters()))
    equal(clones(copy.deepcopy(model).parameters()), clones(model.parameters()))
    optimizer.step()


def test_no_small_model_pays_for_a_large_bucket(alone):
    params = parameters()
    optimizer = make(params)  # 100 MB
    backward(params, 0)
    (bucket,) = optimizer.state["buckets"]
    assert bucket.bucket_size <= sum(p.numel() for p in params) + 32 * len(params)


def test_remainders_of_every_kind():
    values = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 1e-45, 3.4028235e38, float("inf"), float("-inf"), 1.00390625]
    )
    values = torch.cat([values, torch.randn(1000) * torch.logspace(-40, 38, 1000)])
    rounded, remainders = split_remainders(values)
    assert torch.equal(join_remainders(rounded, remainders).view(torch.int32), values.view(torch.int32))
    assert ((rounded.float() - values)[10:].abs() <= values[10:].abs() * 2**-8 + 1e-40).all()


def test_layout():
    """Places of three parameters over two ranks, as one sees them and the other."""
    dtypes = (F32, F32, F32)
    for rank in (0, 1):
        buckets = []
        layout = Layout(buckets, 2, rank, capacity=70, alignment=32)
        for i, numel in enumerate((40, 120, 6)):
            layout.place(0, i, numel, dtypes, store_params=True, store_param_remainders=False)
        with layout.together([(0, 3), (0, 4)]):
            layout.place(0, 3, 1, dtypes, store_params=True, store_param_remainders=False)
        layout.close()
        assert [b.bucket_size for b in buckets] == [128, 192 - 64, 64]
        assert [b.contiguous_buffer_offset for b in buckets] == [0, 128, 256]
        parts = [(f.param_id, f.param_range, f.bucket_range) for b in buckets for f in b.fragments]
        assert parts == [
            (0, (0, 40), (0, 40)),
            (1, (0, 64), (64, 128)),
            (1, (64, 120), (0, 56)),
            (2, (0, 6), (64, 70)),
            (3, (0, 1), (0, 1)),
        ]
        assert [b.waits_for for b in buckets] == [{(0, 0), (0, 1)}, {(0, 1), (0, 2)}, {(0, 3), (0, 4)}]
        first = [f.shard_range for f in buckets[0].fragments]
        assert first == ([(0, 40), None] if rank == 0 else [None, (0, 64)])
        assert [f.in_local_shard for f in buckets[2].fragments] == [rank == 0]


# ---- GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_captured_step(alone):
    zero_cuda.captured()


def test_user_buffers_lie_in_registered_memory(alone, monkeypatch):
    """Contiguous buffers, and nothing else, are allocated while NCCL's pool is torch's. There is no NCCL here."""
    within, made = [], []

    @contextlib.contextmanager
    def nccl_mem(pool, device, group):
        within.append(pool)
        yield
        within.pop()

    for name in ("gradient_buffers", "parameter_buffers"):
        real = getattr(_contiguous, name)
        note = lambda *a, real=real, name=name: made.append((name, list(within))) or real(*a)  # noqa: E731
        monkeypatch.setattr(_contiguous, name, note)
    monkeypatch.setattr(nccl_allocator, "create_nccl_mem_pool", lambda: "pool")
    monkeypatch.setattr(nccl_allocator, "nccl_mem", nccl_mem)
    monkeypatch.setattr(_options, "check_user_buffers", lambda *a: None)
    params = parameters()
    optimizer = make(params, nccl_ub=True, contiguous_grad_buffer=True, contiguous_param_buffer=True)
    oracle = Oracle(params)
    for seed in range(2):
        optimizer.zero_grad()
        backward(params, seed)
        optimizer.step()
        oracle.step(seed)
    oracle.check()
    assert made == [("gradient_buffers", ["pool"]), ("parameter_buffers", ["pool"])] and not within


@pytest.mark.two_gpus
def test_user_buffers_on_two_gpus(tmp_path):
    torch.multiprocessing.spawn(zero_cuda.run_user_buffers, (2, str(tmp_path)), nprocs=2)


@pytest.mark.alone
@pytest.mark.two_gpus
def test_two_gpus(tmp_path):
    """Parity on NCCL; in a trace, reduce-scatters run while the backward pass's kernels do."""
    torch.multiprocessing.spawn(zero_cuda.run, (2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["messages"] >= 4 and found["beside_us"] > 0.3 * found["reduce_us"], found
