"""What ranks send each other, against the formula of the split, counted on torch's process group without processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from apex.transformer import _collectives, parallel_state, tensor_parallel

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed")

BATCH, HIDDEN = 2, 1024


@pytest.fixture
def messages(monkeypatch):
    """[(collective, elements of the whole tensor)]."""
    found = []

    def note(name, module, attribute, whole):
        original = getattr(module, attribute)

        def call(*tensors, **options):
            found.append((name, tensors[whole].numel()))
            return original(*tensors, **options)

        monkeypatch.setattr(module, attribute, call)

    note("all-reduce", dist, "all_reduce", 0)
    note("gather", _collectives, "_all_gather", 0)
    note("reduce-scatter", _collectives, "_reduce_scatter", 1)
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("world, tensor", [(2, 2), (8, 4), (64, 8), (1024, 64)])
def test_messages_of_a_perceptron(messages, world, tensor, sequence):
    """One sum a pass; along the sequence a gather and a reduce-scatter, and the input's gather again for the weight."""
    import torch.testing._internal.distributed.fake_pg as fake

    dist.init_process_group("fake", store=fake.FakeStore(), rank=world // 2, world_size=world)
    try:
        parallel_state.initialize_model_parallel(tensor)
        options = dict(sequence_parallel_enabled=sequence, use_cpu_initialization=True)
        up = tensor_parallel.ColumnParallelLinear(
            *(HIDDEN, 2 * HIDDEN, True, False, torch.nn.init.zeros_),
            no_async_tensor_model_parallel_allreduce=sequence,
            **options,
        )
        down = tensor_parallel.RowParallelLinear(
            2 * HIDDEN, HIDDEN, True, True, torch.nn.init.zeros_, **options
        )
        length = tensor if sequence else 1
        rows = 1 if sequence else length
        x = torch.zeros(rows, BATCH, HIDDEN, dtype=torch.float32, device="cpu", requires_grad=True)
        output, _ = down(F.gelu(up(x)[0]))
        whole = length * BATCH * HIDDEN
        forward = [("gather", whole), ("reduce-scatter", whole)] if sequence else [("all-reduce", whole)]
        assert messages == forward
        messages.clear()
        output.backward(torch.zeros_like(output))
        again = [("gather", whole)] if sequence else []
        assert messages == (
            [("gather", whole), *again, ("reduce-scatter", whole)] if sequence else [("all-reduce", whole)]
        )
        assert x.grad.shape == x.shape and output.shape == (rows, BATCH, HIDDEN)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
