"""SelfMultiheadAttn, with public apex's parameters, names and arguments."""

from __future__ import annotations

import math

import torch
from torch import nn

from apex import _symbolic as symbolic
from apex.contrib.multihead_attn import _module
from apex.contrib.multihead_attn._core import dropout_add as jit_dropout_add
from apex.contrib.multihead_attn.self_multihead_attn_func import self_attn_func

_PARTS = ("q", "k", "v")


class SelfMultiheadAttn(nn.Module):
    """Multihead attention of a sequence to itself ("Attention Is All You Need", Vaswani et al., 2017).

    Args:
        embed_dim: C; a multiple of num_heads.
        num_heads: how many heads share it.
        dropout: of the probabilities, and with include_norm_add of the result before the input is added to it.
        bias: of both projections.
        include_norm_add: input + dropout(attention(layer_norm(input))); a `fast` norm's parameters are
            lyr_nrm_gamma_weights and lyr_nrm_beta_weights, a `default` one's lyr_nrm.weight and lyr_nrm.bias.
        impl: 'fast' or 'default': what the norm's parameters are called; the computation is one.
        separate_qkv_params: q_weight, k_weight and v_weight, [C, C] each, in the place of in_proj_weight, [3 C, C],
            which has for each head the rows of its query, key and value side by side; biases likewise.
        mask_additive: key_padding_mask and attn_mask are numbers that are added to the scores.

    Dtypes are float16, bfloat16, float32 and float64; under autocast those of torch.nn.functional.linear.
    Random numbers follow torch's generator of the device, in activation checkpoints and CUDA graphs too.

    Raises:
        ValueError: embed_dim is not a multiple of num_heads; dropout or impl is none of those.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
        separate_qkv_params: bool = False,
        mask_additive: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = _module.head_dim_of(embed_dim, num_heads, dropout, impl)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.bias, self.include_norm_add, self.impl = bias, include_norm_add, impl
        self.scaling = self.head_dim**-0.5
        self.separate_qkv_params, self.mask_additive = separate_qkv_params, mask_additive
        square, row = (embed_dim, embed_dim), (embed_dim,) if bias else None
        if separate_qkv_params:
            _module.register(self, {f"{part}_weight": square for part in _PARTS})
        else:
            _module.register(self, {"in_proj_weight": (3 * embed_dim, embed_dim)})
        _module.register(self, {"out_proj_weight": square})
        if separate_qkv_params:
            _module.register(self, {f"{part}_bias": row for part in _PARTS})
        else:
            _module.register(self, {"in_proj_bias": (3 * embed_dim,) if bias else None})
        _module.register(self, {"out_proj_bias": row})
        _module.register_norm(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's uniform init of each projection as a [C, C] matrix; biases are 0, the norm is as it begins."""
        if self.separate_qkv_params:
            for part in _PARTS:
                nn.init.xavier_uniform_(getattr(self, f"{part}_weight"))
            _module.reset_biases(*(getattr(self, f"{part}_bias") for part in _PARTS))
        else:
            nn.init.xavier_uniform_(self.in_proj_weight, gain=math.sqrt(2))
            _module.reset_biases(self.in_proj_bias)
        nn.init.xavier_uniform_(self.out_proj_weight)
        _module.reset_biases(self.out_proj_bias)
        _module.reset_norm(self)

    def _packed(self, kind):
        """in_proj's weight or bias: for each head the rows of its query, key and value side by side."""
        if not self.separate_qkv_params:
            return getattr(self, f"in_proj_{kind}")
        parts = [getattr(self, f"{part}_{kind}") for part in _PARTS]
        if parts[0] is None:
            return None
        return torch.stack([p.unflatten(0, (self.num_heads, self.head_dim)) for p in parts], 1).flatten(0, 2)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """(outputs [T, B, C], None).

        query: [T, B, C]; key and value are not looked at: they are the query. key_padding_mask: [B, T], bool or
        uint8, 1 where a key is left out; attn_mask: [T, T], 1 where a query leaves a key out. With mask_additive both
        are numbers. A query whose keys are all left out attends to nothing: zeros. need_weights: as in public apex
        the weights are never returned. is_training: whether there is dropout, whatever module.training says.

        Raises ValueError and TypeError for inputs and masks that do not fit.
        """
        arguments = query, key, value, key_padding_mask, need_weights, attn_mask, is_training
        if (node := symbolic.leaf(self, *arguments)) is not None:
            return node
        _module.check_input(self, query=query)
        mask, is_time_mask = _module.mask_of(key_padding_mask, attn_mask)
        normalized = _module.normalized(self, query)
        outputs = self_attn_func(
            is_time_mask, is_training, self.num_heads, self.scaling, normalized, self._packed("weight"),
            self.out_proj_weight, self._packed("bias"), self.out_proj_bias, mask, self.mask_additive, self.dropout,
        )  # fmt: skip
        if self.include_norm_add:
            outputs = jit_dropout_add(outputs, query, self.dropout, is_training)
        return outputs, None
