"""What both attention modules share."""

from __future__ import annotations

import torch
from torch import nn

from apex.normalization.fused_layer_norm import FusedLayerNorm, fused_layer_norm_affine


def head_dim_of(embed_dim, num_heads, dropout, impl):
    """embed_dim / num_heads; ValueError for arguments that do not fit."""
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"multihead_attn: embed_dim {embed_dim} is not divisible by num_heads {num_heads}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"multihead_attn: dropout must be between 0 and 1, not {dropout}")
    if impl not in ("fast", "default"):
        raise ValueError(f"multihead_attn: impl is 'fast' or 'default', not {impl!r}")
    return embed_dim // num_heads


def register(module, shapes):
    """Parameters of these names and shapes, without values; None in place of a shape registers none."""
    for name, shape in shapes.items():
        module.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape)))


def register_norm(module):
    """The norm's parameters, named by the implementation as in public apex."""
    if not module.include_norm_add:
        return
    if module.impl == "fast":
        shape = (module.embed_dim,)
        register(module, {"lyr_nrm_gamma_weights": shape, "lyr_nrm_beta_weights": shape})
        module.lyr_nrm = None
    else:
        register(module, {"lyr_nrm_gamma_weights": None, "lyr_nrm_beta_weights": None})
        module.lyr_nrm = FusedLayerNorm(module.embed_dim)


def reset_norm(module):
    if not module.include_norm_add:
        return
    if module.impl == "fast":
        nn.init.ones_(module.lyr_nrm_gamma_weights)
        nn.init.zeros_(module.lyr_nrm_beta_weights)
    else:
        module.lyr_nrm.reset_parameters()


def reset_biases(*biases):
    for bias in biases:
        if bias is not None:
            nn.init.zeros_(bias)


def normalized(module, query):
    """layer_norm(query), with eps 1e-5; the query itself without include_norm_add."""
    if not module.include_norm_add:
        return query
    if module.impl == "default":
        return module.lyr_nrm(query)
    weights = module.lyr_nrm_gamma_weights, module.lyr_nrm_beta_weights
    return fused_layer_norm_affine(query, *weights, (module.embed_dim,), 1e-5)


def mask_of(key_padding_mask, attn_mask):
    """(the mask, whether it is of each query); ValueError where both are given."""
    if key_padding_mask is not None and attn_mask is not None:
        raise ValueError("multihead_attn: attn_mask and key_padding_mask cannot both be given")
    return (attn_mask, True) if attn_mask is not None else (key_padding_mask, False)


def check_input(module, **inputs):
    """ValueError unless all are [T, B, embed_dim] of one batch."""
    for name, tensor in inputs.items():
        if tensor.dim() != 3 or tensor.shape[2] != module.embed_dim:
            raise ValueError(
                f"multihead_attn: {name} is [time, batch, {module.embed_dim}], not of shape {list(tensor.shape)}"
            )
    batches = [
        tensor.shape[1] for tensor in inputs.values()
    ]  # numbers, or what stands for them in a trace: no set
    if any(batch != batches[0] for batch in batches):
        raise ValueError(f"multihead_attn: {' and '.join(inputs)} have different batches: {batches}")
