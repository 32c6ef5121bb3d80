"""Cases of a whole model: a small GPT gives the same losses and gradients at every split, against float64."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_common import equal, gathered, split, tensor_sizes, words

from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.tensor_parallel import mappings

WORDS, HIDDEN, HEADS, SEQUENCE, BATCH = 32, 16, 4, 8, 2
# Of losses and gradients, to the largest of each; float32 sums of halves' products, and roundings of a few layers.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 4e-2}


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, dtype, sequence):
        super().__init__()
        column = dict(
            gather_output=False,
            params_dtype=dtype,
            sequence_parallel_enabled=sequence,
            no_async_tensor_model_parallel_allreduce=sequence,
        )
        row = dict(input_is_parallel=True, params_dtype=dtype, sequence_parallel_enabled=sequence)
        self.norms = nn.ModuleList(
            FusedLayerNorm(HIDDEN, sequence_parallel_enabled=sequence).to(dtype) for _ in range(2)
        )
        self.qkv = tensor_parallel.ColumnParallelLinear(HIDDEN, 3 * HIDDEN, stride=3, **column)
        self.out = tensor_parallel.RowParallelLinear(HIDDEN, HIDDEN, **row)
        self.up = tensor_parallel.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, **column)
        self.down = tensor_parallel.RowParallelLinear(4 * HIDDEN, HIDDEN, **row)

    def forward(self, x):
        qkv, _ = self.qkv(self.norms[0](x))  # [sequence, batch, 3 * hidden / ranks]
        q, k, v = (
            part.unflatten(-1, (-1, HIDDEN // HEADS)).permute(1, 2, 0, 3) for part in qkv.chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.permute(2, 0, 1, 3).flatten(2))[0]
        return x + self.down(F.gelu(self.up(self.norms[1](x))[0]))[0]


class GPT(nn.Module):
    """Two blocks between word embeddings, which give the logits, too."""

    def __init__(self, dtype, sequence, checkpointed):
        super().__init__()
        self.sequence, self.checkpointed = sequence, checkpointed
        self.embedding = tensor_parallel.VocabParallelEmbedding(WORDS, HIDDEN, params_dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype, sequence) for _ in range(2))

    def forward(self, text):
        x = self.embedding(text)
        if self.sequence:
            x = mappings.scatter_to_sequence_parallel_region(x)
        for block in self.blocks:
            x = tensor_parallel.checkpoint(block, False, x) if self.checkpointed else block(x)
        if self.sequence:
            x = mappings.gather_from_sequence_parallel_region(x)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(x)
        logits = x @ self.embedding.weight.t()
        return tensor_parallel.vocab_parallel_cross_entropy(logits[:-1], text[1:]).mean()


def _words():
    return words(WORDS, (SEQUENCE, BATCH), 1)


def _make(dtype, sequence=False, checkpointed=False):
    torch.manual_seed(7)
    return GPT(dtype, sequence, checkpointed)


def _whole(parameter, grad):
    """The gradient of the whole parameter, on every rank."""
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_world_size(group)
    if getattr(parameter, "sequence_parallel_enabled", False):
        grad = mappings._reduce(grad)
    if not getattr(parameter, "tensor_model_parallel", False) or ranks == 1:
        return grad
    dim, stride = parameter.partition_dim, parameter.partition_stride
    parts = mappings._gather_along_first_dim(grad.unsqueeze(0)).unbind()
    pieces = zip(*(part.chunk(stride, dim) for part in parts), strict=True)
    return torch.cat([piece for of_all in pieces for piece in of_all], dim)


def _run(model):
    """(loss, gradients by name), whole."""
    loss = model(_words())
    loss.backward()
    return loss.detach(), {name: _whole(p, p.grad) for name, p in model.named_parameters()}


def _reference(dtype):
    """In float64, of the same weights."""
    with split(1):
        model = _make(dtype)
        exact = _make(torch.float64)
        exact.load_state_dict(model.state_dict())
        return _run(exact)


def _near(found, wanted, bound):
    scale = wanted.abs().max().clamp_min(1e-3).item()
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound * scale)


def _any_split(mesh):
    for dtype, bound in BOUNDS.items():
        loss, grads = _reference(dtype)
        assert abs(loss.item() - torch.log(torch.tensor(float(WORDS))).item()) < 1.5
        for size in tensor_sizes():
            same = {}
            with split(size):
                for sequence, checkpointed in itertools.product(
                    (False, True) if size > 1 else (False,), (False, True)
                ):
                    found, found_grads = _run(_make(dtype, sequence, checkpointed))
                    _near(found, loss, bound)
                    for name, grad in found_grads.items():
                        _near(grad, grads[name], bound)
                    assert len({str(said) for said in gathered(found.item())}) == 1
                    # The same sums: a checkpoint changes no bit, and sequence parallelism none of the loss.
                    equal(found, same.setdefault("loss", found))
                    equal(found_grads, same.setdefault(sequence, found_grads))


def _trains(mesh):
    """Three steps of SGD give each split the weights of one rank, to rounding."""
    found = []
    for size in tensor_sizes():
        with split(size):
            model = _make(torch.float32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(_words())
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            found.append(torch.tensor(losses))
    assert found[0][2] < found[0][0] - 0.1
    for losses in found[1:]:
        torch.testing.assert_close(losses, found[0], rtol=1e-5, atol=1e-5)


CASES = {"a model at any split": _any_split, "training": _trains}
