"""EncdecMultiheadAttn, with public apex's parameters, names and arguments."""

from __future__ import annotations

import math

import torch
from torch import nn

from apex import _symbolic as symbolic
from apex.contrib.multihead_attn import _module
from apex.contrib.multihead_attn._core import dropout_add as jit_dropout_add
from apex.contrib.multihead_attn.encdec_multihead_attn_func import encdec_attn_func


class EncdecMultiheadAttn(nn.Module):
    """Multihead attention of a decoder's queries to an encoder's results.

    Args:
        embed_dim: C; a multiple of num_heads.
        num_heads, dropout, bias, include_norm_add, impl: as SelfMultiheadAttn's.

    Parameters: in_proj_weight_q [C, C], in_proj_weight_kv [2 C, C], which has for each head the rows of its key and
    value side by side, out_proj_weight [C, C]; in_proj_bias_q, in_proj_bias_kv, out_proj_bias.

    Raises:
        ValueError: as SelfMultiheadAttn.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        include_norm_add: bool = False,
        impl: str = "fast",
    ) -> None:
        super().__init__()
        self.head_dim = _module.head_dim_of(embed_dim, num_heads, dropout, impl)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.bias, self.include_norm_add, self.impl = bias, include_norm_add, impl
        self.scaling = self.head_dim**-0.5
        rows = {"q": embed_dim, "kv": 2 * embed_dim}
        _module.register(self, {f"in_proj_weight_{part}": (n, embed_dim) for part, n in rows.items()})
        _module.register(self, {"out_proj_weight": (embed_dim, embed_dim)})
        _module.register(self, {f"in_proj_bias_{part}": (n,) if bias else None for part, n in rows.items()})
        _module.register(self, {"out_proj_bias": (embed_dim,) if bias else None})
        _module.register_norm(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's uniform init of each projection as a [C, C] matrix; biases are 0, the norm is as it begins."""
        nn.init.xavier_uniform_(self.in_proj_weight_q)
        nn.init.xavier_uniform_(self.in_proj_weight_kv, gain=math.sqrt(1.5))
        nn.init.xavier_uniform_(self.out_proj_weight)
        _module.reset_biases(self.in_proj_bias_q, self.in_proj_bias_kv, self.out_proj_bias)
        _module.reset_norm(self)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        is_training: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """(outputs [Tq, B, C], None).

        query: [Tq, B, C]; key: [Tk, B, C]; value is not looked at: it is the key. key_padding_mask: [B, Tk], bool or
        uint8, 1 where a key is left out; attn_mask: [Tq, Tk], 1 where a query leaves a key out. The others: as
        SelfMultiheadAttn's.

        Raises ValueError for inputs and masks that do not fit.
        """
        arguments = query, key, value, key_padding_mask, need_weights, attn_mask, is_training
        if (node := symbolic.leaf(self, *arguments)) is not None:
            return node
        _module.check_input(self, query=query, key=key)
        mask, is_time_mask = _module.mask_of(key_padding_mask, attn_mask)
        outputs = encdec_attn_func(
            is_time_mask, is_training, self.num_heads, self.scaling, _module.normalized(self, query), key,
            self.in_proj_weight_q, self.in_proj_weight_kv, self.out_proj_weight, self.in_proj_bias_q,
            self.in_proj_bias_kv, self.out_proj_bias, mask, self.dropout,
        )  # fmt: skip
        if self.include_norm_add:
            outputs = jit_dropout_add(outputs, query, self.dropout, is_training)
        return outputs, None
