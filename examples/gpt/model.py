"""A stage of GPT: layers split over tensor parallel ranks, which are numbered and drawn alike whatever the split."""

import torch
import torch.nn.functional as F
from torch import nn

from apex.transformer import parallel_state
from apex.transformer.functional import fused_bias_gelu
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    mappings,
    vocab_parallel_cross_entropy,
)


def normal(tensor):
    return nn.init.normal_(tensor, std=0.02)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self, hidden, heads, sequence_parallel):
        super().__init__()
        split = dict(sequence_parallel_enabled=sequence_parallel, init_method=normal)
        column = dict(
            gather_output=False, no_async_tensor_model_parallel_allreduce=sequence_parallel, **split
        )
        self.size = hidden // heads
        self.norm_1 = FusedLayerNorm(hidden, sequence_parallel_enabled=sequence_parallel)
        self.qkv = ColumnParallelLinear(hidden, 3 * hidden, **column)
        self.out = RowParallelLinear(hidden, hidden, input_is_parallel=True, **split)
        self.norm_2 = FusedLayerNorm(hidden, sequence_parallel_enabled=sequence_parallel)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, skip_bias_add=True, **column)
        self.down = RowParallelLinear(4 * hidden, hidden, input_is_parallel=True, **split)

    def forward(self, x):
        """[sequence, batch, hidden] to the same; with sequence parallelism, of this rank's part of the sequence."""
        qkv = self.qkv(self.norm_1(x))[0].unflatten(
            -1, (-1, 3 * self.size)
        )  # [sequence, batch, own heads, ...]
        q, k, v = qkv.permute(1, 2, 0, 3).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.permute(2, 0, 1, 3).flatten(2))[0]
        return x + self.down(fused_bias_gelu(*self.up(self.norm_2(x))))[0]


class GPT(nn.Module):
    """The blocks of a stage, or of one of its parts. The first part embeds words; the last one has the loss, and a copy
    of the words' embeddings, which give the logits."""

    def __init__(
        self,
        pre_process,
        post_process,
        *,
        seed,
        words,
        hidden,
        heads,
        layers,
        context,
        sequence_parallel,
        recompute,
    ):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.sequence_parallel, self.recompute = sequence_parallel, recompute
        self.input = None
        if pre_process or post_process:
            torch.manual_seed(seed)
            self.words = VocabParallelEmbedding(words, hidden, normal)
        if pre_process:
            self.positions = nn.Parameter(normal(torch.empty(context, 1, hidden)))
        self.blocks = nn.ModuleDict()
        for number in numbers_of_blocks(layers):
            torch.manual_seed(seed + 1 + number)  # whoever holds the block, it begins with the same weights
            self.blocks[str(number)] = Block(hidden, heads, sequence_parallel)
        if post_process:
            self.norm = FusedLayerNorm(hidden, sequence_parallel_enabled=sequence_parallel)

    def set_input_tensor(self, tensors):
        """What the stage before gave, from the schedule."""
        (self.input,) = tensors

    def forward(self, text, following):
        """Words [batch, sequence] and those that follow; hidden states for the next stage, or each word's loss."""
        x = self.input
        if self.pre_process:
            x = self.words(text.t()) + self.positions[: text.shape[1]]
            x = mappings.scatter_to_sequence_parallel_region(x) if self.sequence_parallel else x
        for block in self.blocks.values():
            x = checkpoint(block, False, x) if self.recompute and torch.is_grad_enabled() else block(x)
        if not self.post_process:
            return x
        x = self.norm(x)
        if self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x)
        else:
            x = mappings.copy_to_tensor_model_parallel_region(x)
        return vocab_parallel_cross_entropy(F.linear(x, self.words.weight), following.t())


def numbers_of_blocks(layers):
    """Of the part that is being made: stages take turns, part by part."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    parts = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    part = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    size = layers // (stages * parts)
    first = (part * stages + parallel_state.get_pipeline_model_parallel_rank()) * size
    return range(first, first + size)


def sum_shared_gradients(parts):
    """What backward passes leave apart: gradients of parameters that work on a part of the sequence, and of the words'
    embeddings, of which the first and the last stage have a copy each."""
    for part in parts:
        for parameter in part.parameters():
            if getattr(parameter, "sequence_parallel_enabled", False):
                group = parallel_state.get_tensor_model_parallel_group()
                torch.distributed.all_reduce(parameter.grad, group=group)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        for part in parts:
            if hasattr(part, "words"):
                group = parallel_state.get_embedding_group()
                torch.distributed.all_reduce(part.words.weight.grad, group=group)
