"""Multihead attention with public apex's names: modules, and the functions behind them."""

from apex.contrib.multihead_attn.encdec_multihead_attn import EncdecMultiheadAttn
from apex.contrib.multihead_attn.encdec_multihead_attn_func import encdec_attn_func
from apex.contrib.multihead_attn.fast_encdec_multihead_attn_func import fast_encdec_attn_func
from apex.contrib.multihead_attn.fast_encdec_multihead_attn_norm_add_func import (
    fast_encdec_attn_norm_add_func,
)
from apex.contrib.multihead_attn.fast_self_multihead_attn_func import fast_self_attn_func
from apex.contrib.multihead_attn.fast_self_multihead_attn_norm_add_func import fast_self_attn_norm_add_func
from apex.contrib.multihead_attn.mask_softmax_dropout_func import fast_mask_softmax_dropout_func
from apex.contrib.multihead_attn.self_multihead_attn import SelfMultiheadAttn
from apex.contrib.multihead_attn.self_multihead_attn_func import self_attn_func

__all__ = [
    "EncdecMultiheadAttn",
    "SelfMultiheadAttn",
    "encdec_attn_func",
    "fast_encdec_attn_func",
    "fast_encdec_attn_norm_add_func",
    "fast_mask_softmax_dropout_func",
    "fast_self_attn_func",
    "fast_self_attn_norm_add_func",
    "self_attn_func",
]
