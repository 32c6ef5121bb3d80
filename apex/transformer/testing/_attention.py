"""Attention whose heads are split over the tensor parallel ranks."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn

from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.enums import AttnMaskType, AttnType
from apex.transformer.functional import FusedScaleMaskSoftmax
from apex.transformer.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from apex.transformer.testing._modules import (
    InitMethod,
    MegatronModule,
    attention_mask_func,
    column_options,
    row_options,
)
from apex.transformer.testing.global_vars import get_args
from apex.transformer.utils import divide


def own_random(wanted: bool) -> Any:
    """A context in which this tensor parallel rank draws numbers of its own, where that is wanted."""
    return tensor_parallel.get_cuda_rng_tracker().fork() if wanted else contextlib.nullcontext()


class CoreAttention(MegatronModule):
    """softmax(queries keys^T / sqrt(size)) values, of this rank's heads.

    With --no-query-key-layer-scaling off (the default), scores are divided by the layer's number and multiplied by it
    again in the softmax, in float32: float16 scores of deep layers stay finite.
    """

    def __init__(self, layer_number: int, attn_mask_type: AttnMaskType = AttnMaskType.padding) -> None:
        super().__init__()
        args = get_args()
        self.layer_number, self.attn_mask_type = max(1, layer_number), attn_mask_type
        self.sequence_parallel = args.sequence_parallel
        scaling = args.apply_query_key_layer_scaling
        self.norm_factor = math.sqrt(args.kv_channels) * (self.layer_number if scaling else 1)
        self.scale_mask_softmax = FusedScaleMaskSoftmax(
            args.fp16,
            args.bf16,
            attn_mask_type,
            args.masked_softmax_fusion,
            attention_mask_func,
            args.attention_softmax_in_fp32 or scaling,
            self.layer_number if scaling else None,
        )
        self.attention_dropout = nn.Dropout(args.attention_dropout)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """[queries, batch, heads * size] of [sequence, batch, heads, size] each.

        attention_mask: bool, true where a key is left out, [batch or 1, 1, queries, keys].
        """
        query, key, value = (
            x.permute(1, 2, 0, 3).flatten(0, 1) for x in (query_layer, key_layer, value_layer)
        )
        nothing = query.new_empty(1, 1, 1)  # beta=0: it is not read
        scores = torch.baddbmm(nothing, query, key.transpose(1, 2), beta=0.0, alpha=1.0 / self.norm_factor)
        batch, heads = query_layer.shape[1:3]
        probabilities = self.scale_mask_softmax(scores.unflatten(0, (batch, heads)), attention_mask)
        drops = self.training and self.attention_dropout.p > 0
        with own_random(drops and not self.sequence_parallel):
            probabilities = self.attention_dropout(probabilities)
        context = torch.bmm(probabilities.flatten(0, 1), value)
        return context.unflatten(0, (batch, heads)).permute(2, 0, 1, 3).flatten(2)


class ParallelAttention(MegatronModule):
    """Attention of hidden states to themselves, or to an encoder's output."""

    def __init__(
        self,
        init_method: InitMethod,
        output_layer_init_method: InitMethod,
        layer_number: int,
        attention_type: AttnType = AttnType.self_attn,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
    ) -> None:
        super().__init__()
        args = get_args()
        self.layer_number, self.attention_type = max(1, layer_number), attention_type
        projection = args.kv_channels * args.num_attention_heads
        self.hidden_size_per_attention_head = args.kv_channels
        self.num_attention_heads_per_partition = divide(
            args.num_attention_heads, parallel_state.get_tensor_model_parallel_world_size()
        )

        def column(parts):
            outputs = parts * projection
            return ColumnParallelLinear(
                args.hidden_size, outputs, init_method=init_method, **column_options()
            )

        if attention_type == AttnType.self_attn:
            self.query_key_value = column(3)
        else:
            self.query, self.key_value = column(1), column(2)
        self.core_attention = CoreAttention(self.layer_number, attn_mask_type)
        self.checkpoint_core_attention = args.recompute_granularity == "selective"
        self.dense = RowParallelLinear(
            projection,
            args.hidden_size,
            input_is_parallel=True,
            init_method=output_layer_init_method,
            skip_bias_add=True,
            **row_options(),
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_output: torch.Tensor | None = None,
        inference_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output, bias to be added), of hidden states [sequence, batch, hidden_size].

        encoder_output: the same of an encoder, of AttnType.cross_attn. inference_params: see GPTModel.forward.
        """
        if self.attention_type == AttnType.self_attn:
            query, key, value = self._heads(self.query_key_value(hidden_states)[0], 3)
        else:
            (query,) = self._heads(self.query(hidden_states)[0], 1)
            key, value = self._heads(self.key_value(encoder_output)[0], 2)
        if inference_params is not None:
            key, value = self._with_earlier(inference_params, key, value)
        if self.checkpoint_core_attention and torch.is_grad_enabled():
            context = tensor_parallel.checkpoint(
                self.core_attention, False, query, key, value, attention_mask
            )
        else:
            context = self.core_attention(query, key, value, attention_mask)
        return self.dense(context)

    def _heads(self, mixed, parts):
        """[sequence, batch, heads, size] each: every head's parts lie behind each other."""
        size = self.hidden_size_per_attention_head
        return mixed.unflatten(-1, (self.num_attention_heads_per_partition, parts * size)).split(size, dim=-1)

    def _with_earlier(self, params, key, value):
        """Keys and values of the sequence so far: those of earlier calls and these, which are kept, too."""
        memory = params.key_value_memory_dict
        if self.layer_number not in memory:
            shape = (params.max_sequence_len, params.max_batch_size, *key.shape[2:])
            memory[self.layer_number] = key.new_empty(shape), value.new_empty(shape)
        kept = memory[self.layer_number]
        start, first = params.sequence_len_offset, params.batch_size_offset
        end, last = start + key.shape[0], first + key.shape[1]
        if end > kept[0].shape[0] or last > kept[0].shape[1]:
            raise ValueError(
                f"inference: {end} words of {last} samples do not fit the memory of {params.max_sequence_len} words of "
                f"{params.max_batch_size} samples"
            )
        for whole, part in zip(kept, (key, value), strict=True):
            whole[start:end, first:last] = part.detach()
        return tuple(whole[:end, first:last] for whole in kept)
