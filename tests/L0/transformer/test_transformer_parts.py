"""Of apex.transformer, what needs one process: microbatches, samplers, memory buffers, loggers, sizes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader
from torch_defaults import float32_on_cpu

import apex
from apex.transformer import utils
from apex.transformer._data import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from apex.transformer._ucc_util import HAS_UCC
from apex.transformer.log_util import RankInfoFormatter, get_transformer_logger, set_logging_level
from apex.transformer.microbatches import (
    ConstantNumMicroBatches,
    RampupBatchsizeNumMicroBatches,
    build_num_microbatches_calculator,
)
from apex.transformer.parallel_state import check_torch_ucc_availability
from apex.transformer.tensor_parallel import memory, random
from apex.transformer.tensor_parallel.utils import VocabUtility, current_device, split_tensor_along_last_dim

F32 = torch.float32


def test_constant_microbatches():
    calculator = build_num_microbatches_calculator(0, None, 1024, 4, 8)
    assert type(calculator) is ConstantNumMicroBatches and calculator.micro_batch_size == 4
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (32, 1024)
    calculator.update(10**6, True)
    assert calculator.get() == 32


def test_microbatches_that_ramp_up():
    calculator = build_num_microbatches_calculator(0, [256, 128, 600], 1024, 4, 8)
    assert type(calculator) is RampupBatchsizeNumMicroBatches
    # Six increments over 600 samples: one every 100.
    for consumed, size in (
        *((0, 256), (99, 256), (100, 384), (350, 640), (599, 896), (600, 1024), (601, 1024), (10**9, 1024)),
    ):
        calculator.update(consumed, True)
        assert (calculator.get_current_global_batch_size(), calculator.get()) == (size, size // 32)


@pytest.mark.parametrize("start, samples", [(1024, 500), (256, 0), (1024, 0)])
def test_microbatches_that_need_no_ramp(start, samples):
    assert build_num_microbatches_calculator(0, [start, 128, samples], 1024, 4, 8).get() == 32


def test_a_ramp_through_sizes_that_do_not_divide():
    calculator = build_num_microbatches_calculator(1, (32, 16, 100), 64, 8, 4)
    calculator.update(60, False)
    assert calculator.get_current_global_batch_size() == 48 and calculator.get() == 1
    with pytest.raises(ValueError, match="48 is not divisible by .* 8 x 4"):
        calculator.update(60, True)


@pytest.mark.parametrize(
    "ramp, sizes",
    [
        (None, (10, 4, 2)),
        (None, (0, 4, 2)),
        (None, (8, 0, 2)),
        (None, (2, 4, 2)),
        ([4, 4], (8, 4, 2)),
        ([4, 3, 10], (8, 4, 2)),
        ([16, 4, 10], (8, 4, 2)),
        ([4, 0, 10], (8, 4, 2)),
        ([4, 4, -1], (8, 4, 2)),
    ],
    ids=str,
)
def test_no_such_microbatches(ramp, sizes):
    with pytest.raises(ValueError):
        build_num_microbatches_calculator(0, ramp, *sizes)


def of_ranks(make, ranks, *arguments):
    return [[*make(*arguments, rank, ranks)] for rank in range(ranks)]


def test_samples_in_their_order():
    first, second = of_ranks(MegatronPretrainingSampler, 2, 14, 2, 3)
    assert first == [[2, 3, 4], [8, 9, 10]] and second == [[5, 6, 7], [11, 12, 13]]
    (alone,) = of_ranks(MegatronPretrainingSampler, 1, 7, 0, 3)
    assert alone == [[0, 1, 2], [3, 4, 5]]
    first, second = ([*MegatronPretrainingSampler(10, 0, 3, rank, 2, drop_last=False)] for rank in range(2))
    assert first == [[0, 1, 2], [6, 7, 8]] and second == [[3, 4, 5], [9]]
    sampler = MegatronPretrainingSampler(10, 0, 2, 1, 2)
    assert len(sampler) == 10 and sampler.get_start_end_idx() == (2, 4)
    given = iter(sampler)
    assert next(given) == [2, 3]
    sampler.local_minibatch_size = 3
    assert next(given) == [7, 8, 9] and sampler.local_minibatch_times_data_parallel_size == 6


def test_random_samples():
    """An epoch gives each sample of the whole batches once, on one rank; another one gives another order."""
    parts = of_ranks(MegatronPretrainingRandomSampler, 2, 23, 0, 4)
    assert all(len(batch) == 4 for part in parts for batch in part)
    assert sorted(i for part in parts for batch in part for i in batch) == list(range(16))
    assert parts == of_ranks(MegatronPretrainingRandomSampler, 2, 23, 0, 4)
    assert parts != of_ranks(MegatronPretrainingRandomSampler, 2, 23, 16, 4)
    # Goes on where another one ended.
    assert of_ranks(MegatronPretrainingRandomSampler, 2, 23, 8, 4) == [part[1:] for part in parts]
    sampler = MegatronPretrainingRandomSampler(23, 0, 4, 0, 2)
    assert (
        next(iter(sampler)) == parts[0][0] and sampler.consumed_samples == 8 and sampler.last_batch_size == 7
    )


@float32_on_cpu()
def test_the_order_does_not_hang_on_the_batch():
    """Twice 4 samples are four times 2."""
    data = list(range(100))
    found = []
    for size in (4, 2):
        loader = DataLoader(data, batch_sampler=MegatronPretrainingRandomSampler(100, 0, size, 0, 1))
        found.append(torch.cat([*loader]))
    assert torch.equal(*found)


@pytest.mark.parametrize("make", [MegatronPretrainingSampler, MegatronPretrainingRandomSampler])
@pytest.mark.parametrize(
    "arguments", [(0, 0, 1, 0, 1), (8, 0, 0, 0, 1), (8, 0, 1, 0, 0), (8, 0, 1, 2, 2), (8, 0, 1, -1, 2)]
)
def test_no_such_samples(make, arguments):
    with pytest.raises(ValueError):
        make(*arguments)


def test_no_samples_left():
    with pytest.raises(ValueError, match="8 of 8 were consumed"):
        MegatronPretrainingSampler(8, 8, 1, 0, 1)
    with pytest.raises(ValueError, match="fewer than one global batch of 10"):
        next(iter(MegatronPretrainingRandomSampler(8, 0, 5, 0, 2)))
    with pytest.raises(ValueError, match="local_minibatch_size 0"):
        MegatronPretrainingSampler(8, 0, 1, 0, 1).local_minibatch_size = 0


@float32_on_cpu()
def test_memory_buffer(capsys):
    buffer = memory.MemoryBuffer("a", 10, torch.float32, True)
    assert not buffer.is_in_use() and buffer.get_data().numel() == 0
    x = torch.arange(6, dtype=F32, device="cpu").view(2, 3).t()
    found = buffer.add(x.clone().requires_grad_())
    assert torch.equal(found, x) and not found.requires_grad
    assert found.untyped_storage().data_ptr() == buffer.data.untyped_storage().data_ptr()
    assert buffer.is_in_use() and buffer.numel_in_use() == 6
    assert torch.equal(buffer.get_data(), x.reshape(-1))
    with pytest.raises(ValueError, match="room for 4 more elements, not for 5"):
        buffer.add(torch.zeros(5, dtype=F32, device="cpu"))
    with pytest.raises(TypeError, match="float32, not torch.float64"):
        buffer.add(torch.zeros(1, dtype=torch.float64, device="cpu"))
    assert buffer.numel_in_use() == 6
    buffer.print_average_usage()
    assert capsys.readouterr().out == " > usage of a memory buffer: 30.00 %\n"
    buffer.reset()
    assert not buffer.is_in_use()
    with pytest.raises(RuntimeError, match="track_usage=False"):
        memory.MemoryBuffer("b", 1, torch.float32, False).print_average_usage()


def test_buffers_by_name(monkeypatch):
    monkeypatch.setattr(memory, "_MEM_BUFFS", {})
    buffer = memory.allocate_mem_buff("c", 4, torch.int64, False)
    assert memory.get_mem_buff("c") is buffer
    with pytest.raises(ValueError, match="'c' already"):
        memory.allocate_mem_buff("c", 4, torch.int64, False)
    ring = memory.RingMemBuffer("ring", 2, 4, torch.int64, False)
    first, second = ring.get_next_buffer(), ring.get_next_buffer()
    assert first is memory.get_mem_buff("ring 0") and second is memory.get_mem_buff("ring 1")
    assert ring.get_next_buffer() is first
    second.add(torch.zeros(1, dtype=torch.int64, device=second.data.device))
    with pytest.raises(RuntimeError, match="'ring 1' is still in use"):
        ring.get_next_buffer()


@float32_on_cpu()
def test_random_states():
    tracker = random.CudaRNGStatesTracker()
    device = current_device()
    generator = random._generator()

    def draw():
        return torch.rand(3, dtype=torch.float32, device=device)

    generator.manual_seed(1)
    alone = draw(), draw()
    generator.manual_seed(2)
    other = draw(), draw()
    generator.manual_seed(1)
    tracker.add("test", 2)
    found = [draw()]
    with tracker.fork("test"):
        inside = [draw()]
    with pytest.raises(ZeroDivisionError), tracker.fork("test"):
        inside.append(draw())
        raise ZeroDivisionError
    found.append(draw())
    assert torch.equal(torch.stack(found), torch.stack(alone))
    assert torch.equal(torch.stack(inside), torch.stack(other))
    states = tracker.get_states()
    with tracker.fork("test"):
        next_one = draw()
    tracker.set_states(states)
    with tracker.fork("test"):
        assert torch.equal(draw(), next_one)
    for name, seed in (("test", 5), ("new", 2)):
        with pytest.raises(ValueError, match="already"):
            tracker.add(name, seed)
    with pytest.raises(KeyError, match="no random state 'new'"), tracker.fork("new"):
        pass
    tracker.reset()
    tracker.add("test", 2)
    state = generator.get_state()
    wanted = draw()
    random._set_cuda_rng_state(state)
    assert torch.equal(draw(), wanted)


def _square(x, other, factor):
    return x.square() * factor + (0 if other is None else other["y"])


@float32_on_cpu()
def test_checkpoint_takes_anything():
    x = torch.arange(3, requires_grad=True, dtype=F32, device="cpu")
    found = random.checkpoint(_square, False, x, {"y": 2}, 3.0)
    found.sum().backward()
    assert torch.equal(found, 3 * x.detach() ** 2 + 2) and torch.equal(x.grad, 6 * x.detach())
    frozen = torch.ones(3, dtype=F32, device="cpu")
    random.checkpoint(torch.mul, False, x, frozen).sum().backward()
    assert frozen.grad is None


@float32_on_cpu()
def test_checkpoint_that_raises_again():
    """The random states are as before, and the next pass is right."""
    runs = []

    def fails(x):
        runs.append(torch.is_grad_enabled())
        torch.rand(1, dtype=F32, device="cpu")
        if len(runs) == 2:
            raise ZeroDivisionError
        return x * torch.rand(3, dtype=F32, device="cpu")

    x = torch.ones(3, requires_grad=True, dtype=F32, device="cpu")
    y = random.checkpoint(fails, False, x)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before) and x.grad is None and runs == [False, True]
    y = random.checkpoint(fails, False, x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@float32_on_cpu()
def test_checkpoint_under_autocast():
    x = torch.ones(4, 4, requires_grad=True, dtype=F32, device="cpu")
    seen = []

    def product(x):
        y = x @ x
        seen.append(y.dtype)
        return y

    with torch.autocast("cpu", torch.bfloat16):
        y = random.checkpoint(product, False, x)
    y.sum().backward()
    assert seen == [torch.bfloat16] * 2 and torch.equal(
        x.grad, torch.full((4, 4), 8.0, dtype=F32, device="cpu")
    )


@float32_on_cpu()
def test_checkpoint_refuses():
    x = torch.ones(3, requires_grad=True, dtype=F32, device="cpu")
    with pytest.raises(RuntimeError, match="use backward"):
        torch.autograd.grad(random.checkpoint(torch.square, False, x).sum(), x)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        random.checkpoint(torch.square, False, x).sum().backward(create_graph=True)
    with pytest.warns(UserWarning, match="no input requires a gradient"):
        random.checkpoint(torch.square, False, x.detach())


def test_loggers():
    assert get_transformer_logger("apex.transformer.utils").name == "apex.transformer"
    level = logging.getLogger("apex").level
    try:
        set_logging_level("ERROR")
        assert not get_transformer_logger("apex.transformer.utils").isEnabledFor(logging.WARNING)
    finally:
        set_logging_level(level)


def test_records_say_the_rank():
    record = logging.LogRecord("apex", logging.INFO, "file.py", 1, "text", (), None)
    assert apex.RankInfoFormatter("%(rank_info)s %(message)s").format(record) == "(0, 0, 0, 0) text"
    assert apex.RankInfoFormatter is RankInfoFormatter


def test_sizes():
    assert utils.divide(12, 4) == 3 and utils.ensure_divisibility(12, 4) is None
    with pytest.raises(ValueError, match="13 is not divisible by 4"):
        utils.divide(13, 4)
    assert VocabUtility.vocab_range_from_global_vocab_size(64, 3, 4) == (48, 64)
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)
    x = torch.arange(12, dtype=torch.int64, device="cpu").view(2, 6)
    views = split_tensor_along_last_dim(x, 3)
    assert [v.tolist() for v in views] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert views[1]._base is x._base and not views[1].is_contiguous()
    assert all(c.is_contiguous() for c in split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True))


def test_ucc():
    if HAS_UCC:
        assert check_torch_ucc_availability() is None
    else:
        with pytest.raises(ImportError, match="USE_UCC=1"):
            check_torch_ucc_availability()
