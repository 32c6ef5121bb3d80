"""What a rank sends in a step, against the formula of the split, for 2 to 1,024 ranks: counted on torch's process group
without processes."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from apex.transformer import _collectives, parallel_state, tensor_parallel
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")

BATCH, HIDDEN, LENGTH = 2, 64, 64
# (ranks, tensor, pipeline, virtual); the rest is data parallel
SPLITS = [
    *((2, 1, 2, 1), (2, 2, 1, 1), (2, 1, 1, 1), (4, 2, 2, 1), (8, 2, 2, 2), (16, 4, 4, 1)),
    *((64, 8, 4, 2), (128, 4, 8, 1), (256, 8, 8, 3), (1024, 8, 16, 2), (1024, 16, 64, 1), (1024, 1, 8, 1)),
]


class Perceptron(nn.Module):
    """A part: one split product up and one down."""

    def __init__(self, sequence, *, pre_process, post_process):
        super().__init__()
        options = dict(sequence_parallel_enabled=sequence, use_cpu_initialization=True)
        self.up = tensor_parallel.ColumnParallelLinear(
            *(HIDDEN, 2 * HIDDEN, True, False, nn.init.zeros_),
            no_async_tensor_model_parallel_allreduce=sequence,
            **options,
        )
        self.down = tensor_parallel.RowParallelLinear(
            2 * HIDDEN, HIDDEN, True, True, nn.init.zeros_, **options
        )

    def set_input_tensor(self, tensors):
        self.input = tensors[0]

    def forward(self, x):
        return self.down(F.gelu(self.up(x if self.input is None else self.input)[0]))[0]


@pytest.fixture
def sent(monkeypatch):
    """{what: elements}: of collectives the whole tensor's, of messages what this rank sends."""
    found = collections.Counter()

    def note(name, module, attribute, whole):
        original = getattr(module, attribute)

        def call(*tensors, **options):
            found[name] += tensors[whole].numel()
            return original(*tensors, **options)

        monkeypatch.setattr(module, attribute, call)

    note("all-reduce", dist, "all_reduce", 0)
    note("gather", _collectives, "_all_gather", 0)
    note("reduce-scatter", _collectives, "_reduce_scatter", 1)
    exchange = dist.batch_isend_irecv

    def messages(ops):
        for op in ops:
            found["sent" if op.op is dist.isend else "received"] += op.tensor.numel()
        return exchange(ops)

    monkeypatch.setattr(dist, "batch_isend_irecv", messages)
    return found


def formula(world, tensor, stages, chunks, stage, microbatches, sequence):
    """What `sent` holds after a step."""
    whole = LENGTH * BATCH * HIDDEN
    wire = whole // tensor if sequence else whole
    passes = microbatches * chunks
    # One forward and one backward, but for the first part, whose input needs no gradient.
    sums = 2 * passes - (microbatches if stage == 0 else 0)
    found = collections.Counter()
    # To the next part, but from the last one; back to the one before, but from the first one. What comes is alike.
    parts = [chunk * stages + stage for chunk in range(chunks)]
    last = stages * chunks - 1
    for part in parts:
        found["sent"] += microbatches * wire * ((part < last) + (part > 0))
        found["received"] += microbatches * wire * ((part > 0) + (part < last))
    if tensor > 1 and sequence:
        found["gather"] = (
            passes * 3 * whole
        )  # for the product up, its weight's gradient, the product down's gradient
        found["reduce-scatter"] = sums * whole
    elif tensor > 1:
        found["all-reduce"] = sums * whole
    if tensor * stages > 1 and stages > 1:
        found["all-reduce"] += 1  # whether all stages ran
    if world > tensor * stages:
        # Both weights' parts, the bias of one, and the other's whole, once a step.
        found["gradients"] = chunks * (2 * HIDDEN * 2 * HIDDEN // tensor + 2 * HIDDEN // tensor + HIDDEN)
    return +found


CASES = [(split, sequence) for split in SPLITS for sequence in ([False, True] if split[1] > 1 else [False])]


@pytest.mark.parametrize("split, sequence", CASES, ids=str)
def test_what_a_rank_sends(sent, split, sequence):
    import torch.testing._internal.distributed.fake_pg as fake

    world, tensor, stages, chunks = split
    for stage in sorted({0, stages // 2, stages - 1}):
        sent.clear()
        rank = stage * (world // stages)
        dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world)
        try:
            virtual = chunks if chunks > 1 else None
            parallel_state.initialize_model_parallel(tensor, stages, virtual)
            assert parallel_state.get_pipeline_model_parallel_rank() == stage
            data = world // (tensor * stages)
            microbatches = 2 * stages
            utils._reconfigure_microbatch_calculator(0, None, microbatches * BATCH * data, BATCH, data)
            models = build_model(Perceptron, data > 1, virtual, sequence=sequence)
            for model in models if data > 1 else ():
                model.register_comm_hook(sent, _count_gradients)
            rows = LENGTH // tensor if sequence else LENGTH
            batch = [torch.zeros(microbatches * BATCH, rows, HIDDEN, dtype=torch.float32, device="cpu")]
            get_forward_backward_func(virtual, stages)(
                *(_step, batch, models),
                forward_only=False,
                tensor_shape=(LENGTH, BATCH, HIDDEN),
                sequence_parallel_enabled=sequence,
            )
            assert dict(+sent) == dict(formula(*split, stage, microbatches, sequence))
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _count_gradients(sent, bucket):
    sent["gradients"] += bucket.buffer().numel()
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _step(batch, model):
    return model(batch[0].transpose(0, 1)), lambda x: (x.sum(), x.detach().sum())
