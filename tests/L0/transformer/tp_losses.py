"""Cases of cross entropy, random numbers, checkpoints, batches and the gradient scaler over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tp_common import (
    CPU,
    collectives,
    equal,
    gathered,
    integers,
    of_group,
    on_cpu,
    raises,
    raises_everywhere,
    seeded,
    split,
    tensor_sizes,
    words,
)

from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.amp import GradScaler
from apex.transformer.tensor_parallel import (
    ColumnParallelLinear,
    broadcast_data,
    random,
    vocab_parallel_cross_entropy,
)

ROWS, WORDS = (5, 7), 24


def _logits(scale, dtype=torch.float32, seed=1):
    drawn = torch.randn(*ROWS, WORDS, generator=seeded(seed), dtype=torch.float64, device=CPU)
    return (drawn * scale).to(torch.get_default_device(), dtype)


def _targets():
    return words(WORDS, ROWS, 2)


def _smoothed(logits, target, smoothing):
    """By its definition: 1 - smoothing for the target, and what the other words share, in float64."""
    wanted = torch.full(logits.shape, smoothing / (WORDS - 1), dtype=torch.float64)
    wanted.scatter_(-1, target.unsqueeze(-1), 1 - smoothing)
    return -(wanted * logits.log_softmax(-1)).sum(-1)


TOLERANCES = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6}
OF_GRADIENTS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def _cross_entropy(mesh):
    """Against float64, at every split; neither logits nor targets are written, and a second pass gives the same."""
    target = _targets()
    grad = words(9, ROWS, 3).double() / 8
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for dtype in OF_GRADIENTS:
                for scale, smoothing in ((1.0, 0.0), (1000.0, 0.0), (1.0, 0.1), (30.0, 0.5)):
                    whole = _logits(scale, dtype)
                    exact = whole.double().requires_grad_()
                    loss = _smoothed(exact, target, smoothing)
                    loss.backward(grad)
                    mine = (
                        whole.chunk(size, -1)[rank].clone().requires_grad_()
                    )  # a chunk has gaps, its clone none
                    for x in (mine, whole.chunk(size, -1)[rank].requires_grad_()):
                        kept, chosen = x.detach().clone(), target.clone()
                        found = vocab_parallel_cross_entropy(x, chosen, smoothing)
                        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                        torch.testing.assert_close(
                            found.double(), loss.detach(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
                        )
                        first, second = (
                            torch.autograd.grad(found, x, grad.to(found.dtype), retain_graph=True)[0]
                            for _ in range(2)
                        )
                        equal(first, second)
                        assert first.dtype == dtype
                        torch.testing.assert_close(
                            first.double(),
                            exact.grad.chunk(size, -1)[rank],
                            rtol=OF_GRADIENTS[dtype],
                            atol=OF_GRADIENTS[dtype],
                        )
                        equal(x.detach(), kept)
                        equal(chosen, target)
                    assert all(other == found.tolist() for other in of_group(found.tolist()))


def _cross_entropy_at_the_edges(mesh):
    """Words that cannot be, no rows, 32-bit targets, a target on the CPU that is no word."""
    for size in tensor_sizes():
        with split(size) as (rank, _):
            whole, target = _logits(1.0), _targets()
            whole[..., -1] = -float("inf")
            target = target.clamp(max=WORDS - 2)
            x = whole.chunk(size, -1)[rank].clone().requires_grad_()
            found = vocab_parallel_cross_entropy(x, target.int())
            torch.testing.assert_close(found, F.cross_entropy(whole.movedim(-1, 1), target, reduction="none"))
            found.sum().backward()
            assert x.grad.isfinite().all()
            assert torch.isinf(vocab_parallel_cross_entropy(x, target, 0.1)).all()
            none = vocab_parallel_cross_entropy(
                torch.empty(0, 3, requires_grad=True), torch.empty(0, dtype=torch.long)
            )
            assert none.shape == (0,)
            for wrong in (-100, WORDS) if on_cpu() else ():
                with raises_everywhere(IndexError, f"0 to {WORDS - 1}"):
                    vocab_parallel_cross_entropy(x, torch.full(ROWS, wrong))
            for arguments, kind, words in (
                ((x.long(), target), TypeError, "float dtype"),
                ((x, target.float()), TypeError, "integers"),
                ((x, target[:1]), ValueError, "one target for each row"),
                ((x, target, 1.0), ValueError, "within [0, 1)"),
                ((x, target, -0.1), ValueError, "within [0, 1)"),
            ):
                with raises_everywhere(kind, words):
                    vocab_parallel_cross_entropy(*arguments)


def _seeds(mesh):
    """Alike within a tensor parallel group outside of fork, alike over data parallel groups inside."""
    for size in tensor_sizes():
        with split(size) as (rank, _):
            tensor_parallel.model_parallel_cuda_manual_seed(123)
            outside = torch.rand(3)
            with tensor_parallel.get_cuda_rng_tracker().fork():
                inside = torch.rand(3)
            again = torch.rand(3)
            said = gathered((rank, outside.tolist(), inside.tolist(), again.tolist()))
            assert len({str((o, a)) for _, o, _, a in said}) == 1
            assert len({str(i) for _, _, i, _ in said}) == size
            assert len({str((r, i)) for r, _, i, _ in said}) == size
            generator = torch.Generator(torch.get_default_device()).manual_seed(123)
            equal(
                torch.stack([outside, again]), torch.stack([torch.rand(3, generator=generator) for _ in "12"])
            )


def _dropout(x, layer):
    with tensor_parallel.get_cuda_rng_tracker().fork():
        hidden = F.dropout(layer(x)[0], 0.5)
    return F.dropout(hidden.square(), 0.1), "kept", None


def _checkpoints(mesh):
    """The same bits as without, where dropout is drawn from both states; also where ranks keep parts of the input."""
    for size in tensor_sizes():
        with split(size) as (rank, _):
            torch.manual_seed(5)
            layer = ColumnParallelLinear(8, 16, gather_output=False)
            found = []
            for how in (None, False, True):
                tensor_parallel.model_parallel_cuda_manual_seed(17)
                layer.weight.grad = None
                x = integers((8, 2, 8), 1).requires_grad_()
                if how is None:
                    y, word, none = _dropout(x, layer)
                else:
                    y, word, none = tensor_parallel.checkpoint(_dropout, how, x, layer)
                assert (word, none) == ("kept", None)
                torch.rand(1)  # the second forward pass does not go on from here
                before = torch.get_rng_state(), tensor_parallel.get_cuda_rng_tracker().get_states()
                y.sum().backward()
                equal(torch.get_rng_state(), before[0])
                equal(tensor_parallel.get_cuda_rng_tracker().get_states(), before[1])
                found.append((y.detach(), x.grad, layer.weight.grad, torch.rand(2)))
            equal(found[1], found[0])
            equal(found[2], found[0])
    tensor_parallel.get_cuda_rng_tracker().reset()


def _checkpoints_in_memory(mesh):
    """Parts of inputs lie in the buffer, which is one for all passes."""
    size = dist.get_world_size()
    with split(size):
        kept = random._checkpointed_activations
        try:
            tensor_parallel.init_checkpointed_activations_memory_buffer(2, 8, 8, 4, size, 2, False)
            buffer = random._checkpointed_activations
            assert buffer.numel == 2 * 8 * 8 // size * 2 and buffer.dtype == torch.float32
            for _ in range(2):
                tensor_parallel.reset_checkpointed_activations_memory_buffer()
                x = integers((8, 2, 8), 1).requires_grad_()
                y = tensor_parallel.checkpoint(torch.square, True, x)
                y = tensor_parallel.checkpoint(torch.square, True, y)
                assert buffer.numel_in_use() == 2 * 8 * 2 * 8 // size
                y.sum().backward()
                equal(x.grad, 4 * x.detach() ** 3)
            with raises(RuntimeError, "there already"):
                tensor_parallel.init_checkpointed_activations_memory_buffer(2, 8, 8, 4, size, 2, False)
        finally:
            random._checkpointed_activations = kept
        with raises_everywhere(ValueError, "not divisible"):
            tensor_parallel.checkpoint(torch.square, True, torch.ones(size + 1, requires_grad=True))


def _data():
    return {
        "text": torch.arange(12).view(3, 4),
        "scalar": torch.tensor(7),
        "none": torch.empty(2, 0, 3, dtype=torch.int64),
        "columns": torch.arange(6).view(2, 3).t(),
        "floats": torch.ones(2),
    }


def _batches(mesh):
    keys, wanted = ["text", "scalar", "none", "columns"], _data()
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for others in (None, {}, {"text": torch.zeros(1)}):
                found = broadcast_data(keys, wanted if rank == 0 else others, torch.int64)
                assert list(found) == keys
                for key in keys:
                    equal(found[key], wanted[key].contiguous())
            assert broadcast_data([], None, torch.int64) == {}


def _wrong_batches(mesh):
    """Of the first rank, or of ranks that differ: every rank is told."""
    size = dist.get_world_size()
    with split(size) as (rank, _):
        data = (
            {**_data(), "list": [1], "deep": torch.zeros((1,) * 9, dtype=torch.int64)} if rank == 0 else None
        )
        for key, kind, words in (
            *(("no_such", KeyError, "'no_such' is not in the data"), ("floats", TypeError, "another dtype")),
            *(("list", TypeError, "no tensor"), ("deep", ValueError, "more than 8 dimensions")),
        ):
            with raises_everywhere(kind, words):
                broadcast_data(["text", key], data, torch.int64)
        with raises_everywhere(KeyError):
            broadcast_data(["text"], None, torch.int64)
        for keys, dtype in (
            (["text", "scalar"][:: -1 if rank else 1], torch.int64),
            (["text"], [torch.int64, torch.int32][rank > 0]),
        ):
            with raises_everywhere(ValueError, "the ranks differ"):
                broadcast_data(keys, data, dtype)
        equal(broadcast_data(["text"], data, torch.int64)["text"], _data()["text"])


def _step(scaler, optimizer, weight, grad, unscale):
    optimizer.zero_grad()
    before = weight.detach().clone()
    if grad is not None:
        weight.grad = torch.full_like(weight, grad) * scaler.scale(torch.tensor(1.0))
    else:
        scaler.scale(torch.tensor(1.0))
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(weight.detach(), before), scaler.get_scale()


def _scaler(mesh):
    """What one rank finds makes all ranks of its model skip the step, and no rank of another model."""
    world = dist.get_world_size()
    for tensor, pipeline in ((2, 1), (1, 2), (1, 1)):
        with split(tensor, pipeline):
            model = parallel_state.get_model_parallel_group()
            place, first = dist.get_rank(model), 0 in dist.get_process_group_ranks(model)
            for make in (
                lambda w: torch.optim.SGD([w], lr=1.0),
                lambda w: torch.optim.SGD([w], lr=1.0, fused=True),  # takes found_inf by itself
            ):
                for unscale in (False, True):
                    weight = torch.nn.Parameter(torch.zeros(3))
                    optimizer, scaler = make(weight), GradScaler(init_scale=4.0, growth_interval=1)
                    assert _step(scaler, optimizer, weight, 1.0, unscale) == (True, 8.0)
                    for bad in (float("inf"), float("nan")):
                        scaler = GradScaler(init_scale=4.0, growth_interval=1)
                        grad = bad if first and place == 0 else 1.0
                        found = _step(scaler, optimizer, weight, grad, unscale)
                        assert found == ((False, 2.0) if first else (True, 8.0)), found
                        assert weight.isfinite().all()
                    # A rank whose part has no gradient takes part.
                    scaler = GradScaler(init_scale=4.0, growth_interval=1)
                    last = place == dist.get_world_size(model) - 1 and tensor * pipeline > 1
                    assert _step(scaler, optimizer, weight, None if last else 1.0, unscale) == (not last, 8.0)
    assert world > 1
    with raises(RuntimeError, "initialize_model_parallel"):
        _step(GradScaler(), optimizer, weight, 1.0, True)


def _one_rank_says_nothing(mesh):
    with split(1), collectives() as calls:
        x = torch.ones(2, 4, requires_grad=True)
        vocab_parallel_cross_entropy(x, torch.tensor([1, 2]), 0.1).sum().backward()
        broadcast_data(["text"], _data(), torch.int64)
        weight = torch.nn.Parameter(torch.zeros(3))
        _step(GradScaler(), torch.optim.SGD([weight], lr=1.0), weight, 1.0, False)
        assert not calls


CASES = {
    "cross entropy": _cross_entropy,
    "cross entropy at the edges": _cross_entropy_at_the_edges,
    "seeds": _seeds,
    "checkpoints": _checkpoints,
    "checkpoints in memory": _checkpoints_in_memory,
    "batches": _batches,
    "wrong batches": _wrong_batches,
    "scaler": _scaler,
    "one rank": _one_rank_says_nothing,
}
