"""FMHAFun and FMHA, with public apex's names: self attention of packed sequences, on any device.

float16, bfloat16, float32 and float64, heads of 1 to 256 numbers, sequences of up to 65,536. Softmax is taken of
q k^T / sqrt(d) over the tokens of a sequence; dropout drops its values. On NVIDIA GPUs from Ampere on, halves go
through torch's flash attention; everything else through products of torch (apex/contrib/fmha/_packed.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from apex import _symbolic as symbolic
from apex._once import differentiable_once
from apex.contrib.fmha import _flash, _packed


class FMHAFun(torch.autograd.Function):
    """FMHAFun.apply(qkv, cu_seqlens, p_dropout, max_s, is_training, zero_tensors): the attention, [total, h, d].

    Args:
        qkv: [total, 3, h, d]: query, key and value of every token, sequence behind sequence.
        cu_seqlens: [sequences + 1], int32, on qkv's device: where sequences begin, the first 0, and where the last one
            ends; a sequence may have no tokens. Numbers that fall, or lie behind `total`, and sequences longer than
            max_s raise ValueError on a CPU; on a GPU, where looking would make the host wait, the whole result and
            its gradient are nan, and nothing else is read.
        p_dropout: probability with which a value of the softmax is dropped, in [0, 1).
        max_s: the longest sequence's tokens, or more.
        is_training: False: nothing is dropped.
        zero_tensors: taken and left: what belongs to no sequence is 0 anyway.

    Differentiable once. Raises TypeError for dtypes, ValueError for shapes, devices and numbers that do not fit.
    """

    @staticmethod
    def forward(ctx, qkv, cu_seqlens, p_dropout, max_s, is_training, zero_tensors):
        _packed.check(qkv, cu_seqlens, p_dropout, max_s)
        p = p_dropout if is_training else 0.0
        ctx.known = p, max_s
        ctx.flash = _flash.serves(qkv, cu_seqlens.shape[0] - 1)
        if ctx.flash:
            context, *state = _flash.forward(qkv, cu_seqlens, p, max_s)
            state = [context, *state]
        else:
            context, *state = _packed.forward(qkv, cu_seqlens, p, max_s)
        ctx.save_for_backward(qkv, cu_seqlens, *state)
        return context

    @staticmethod
    @differentiable_once("fmha")
    def backward(ctx, saved, dout):
        """The gradient of qkv."""
        qkv, cu_seqlens, *state = saved
        p, max_s = ctx.known
        if ctx.flash:
            gradient = _flash.backward(dout, qkv, cu_seqlens, p, max_s, *state)
        else:
            gradient, _ = _packed.backward(dout, qkv, cu_seqlens, p, max_s, *state)
        return gradient, None, None, None, None, None


class FMHA(nn.Module):
    """The attention of a layer, without its linear layers and without parameters.

    Args:
        config: has `attention_probs_dropout_prob`, `num_attention_heads` and `hidden_size`, as BERT's configuration.

    Raises:
        ValueError: hidden_size is no multiple of num_attention_heads.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.p_dropout = config.attention_probs_dropout_prob
        self.h = config.num_attention_heads
        self.hidden_size = config.hidden_size
        self.d = self.hidden_size // self.h
        if self.d * self.h != self.hidden_size:
            raise ValueError(f"FMHA: a hidden size of {self.hidden_size} does not divide into {self.h} heads")

    def forward(
        self,
        qkv: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_s: int,
        is_training: bool = True,
        zero_tensors: bool = False,
    ) -> torch.Tensor:
        """[total, hidden_size] of qkv [total, 3 * hidden_size]; the rest as FMHAFun takes it.

        Raises ValueError for another shape.
        """
        node = symbolic.leaf(self, qkv, cu_seqlens, max_s, is_training, zero_tensors)
        if node is not None:
            return node
        if qkv.dim() != 2 or qkv.shape[1] != 3 * self.hidden_size:
            raise ValueError(f"FMHA: qkv must be [total, {3 * self.hidden_size}], not {list(qkv.shape)}")
        heads = qkv.unflatten(1, (3, self.h, self.d))
        context = FMHAFun.apply(heads, cu_seqlens, self.p_dropout, max_s, is_training, zero_tensors)
        return context.flatten(1)
