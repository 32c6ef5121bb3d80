"""The functions of public apex's fast_multihead_attn, in its argument orders. They record no gradients, as there.

Float16, bfloat16, float32 and float64. T and S are the lengths of queries and keys, B the batch, C the width, H the
heads. Projections have for each head the rows of its query, key and value (encdec: key and value) side by side. A mask
is uint8 or bool [B, S], 1 where a key is left out, or [T, S] with use_time_mask; an additive one has numbers, -inf to
leave a key out. A row whose keys are all left out is zeros. dropout_mask is uint8, 1 where dropout keeps: all ones
without is_training, where dropout_results are the softmax's.
"""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings
from apex._plain import contiguous
from apex._random import new_seed
from apex.contrib.multihead_attn import _core

bindings.load()
__all__ = [
    "additive_mask_softmax_dropout_backward",
    "additive_mask_softmax_dropout_forward",
    "encdec_multihead_attn_backward",
    "encdec_multihead_attn_forward",
    "encdec_multihead_attn_norm_add_backward",
    "encdec_multihead_attn_norm_add_forward",
    "mask_softmax_dropout_backward",
    "mask_softmax_dropout_forward",
    "self_attn_backward",
    "self_attn_bias_additive_mask_backward",
    "self_attn_bias_additive_mask_forward",
    "self_attn_bias_backward",
    "self_attn_bias_forward",
    "self_attn_forward",
    "self_attn_norm_add_backward",
    "self_attn_norm_add_forward",
]
_EPS = 1e-5
_MODULE = "fast_multihead_attn"


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_like(like, **tensors):
    """TypeError or ValueError unless all are tensors of one dtype and device."""
    for name, tensor in tensors.items():
        if tensor.dtype != like.dtype or not tensor.is_floating_point():
            raise TypeError(
                f"{_MODULE}: {name} is {tensor.dtype}; all are of one floating dtype, as {like.dtype}"
            )
        if tensor.device != like.device:
            raise ValueError(f"{_MODULE}: {name} is on {tensor.device}, not on {like.device}")


def _check_sizes(heads, inputs, **weights):
    """ValueError unless inputs are [T, B, C], C is a multiple of the heads, and each weight's last dimension is C."""
    if inputs.dim() != 3 or heads < 1 or inputs.shape[2] % heads:
        raise ValueError(
            f"{_MODULE}: inputs are [T, B, C], C a multiple of {heads} heads, not {list(inputs.shape)}"
        )
    for name, (weight, rows) in weights.items():
        if list(weight.shape) != [rows * inputs.shape[2], inputs.shape[2]]:
            raise ValueError(
                f"{_MODULE}: {name} is {[rows * inputs.shape[2], inputs.shape[2]]}, not {list(weight.shape)}"
            )


# ---- the steps -------------------------------------------------------------------------------------------------------


def _softmax(scores, heads, mask, use_time_mask, additive, is_training, dropout_prob):
    """(dropout_results, dropout_mask, softmax_results), each [B * H, T, S]."""
    mask = _core.mask_of_scores(mask, use_time_mask, additive, scores.dtype)
    dropout = float(dropout_prob) if is_training else 0.0
    seed = new_seed(scores.device) if dropout > 0 else None
    by_heads = scores.view(-1, heads, *scores.shape[1:]) if scores.shape[0] else scores.unsqueeze(1)
    output, softmax, kept = torch.ops.apex.masked_softmax_dropout_forward(by_heads, mask, dropout, seed, True)
    output, kept = output.view(scores.shape), kept.view(scores.shape)
    return output, kept, softmax.view(scores.shape) if dropout > 0 else output


def _softmax_backward(output_grads, softmax_results, dropout_mask, dropout_prob):
    op = torch.ops.apex.masked_softmax_dropout_backward
    return op(output_grads, softmax_results, dropout_mask, float(dropout_prob))


def _attend(q, k, v, heads, mask, use_time_mask, additive, is_training, dropout_prob):
    """(scores, softmax_results, dropout_results, dropout_mask, matmul2_results) of views [T or S, B * H, d]."""
    scores = _core.scores_of(q, k, q.shape[2] ** -0.5)
    dropped, kept, softmax = _softmax(scores, heads, mask, use_time_mask, additive, is_training, dropout_prob)
    return scores, softmax, dropped, kept, _core.context_of(dropped, v)


def _attend_backward(grad, dropped, softmax, kept, dropout_prob, parts, grads):
    """Writes the gradients of q, k, v."""
    q, k, v = parts
    grad_q, grad_k, grad_v = grads
    grad = _core.products_backward(grad.reshape(q.shape), dropped, v, grad_v)
    grad = _softmax_backward(grad, softmax, kept, dropout_prob)
    _core.scores_backward(grad, q, k, q.shape[2] ** -0.5, grad_q, grad_k)


def _linear(x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias)


def _linear_backward(grad, x, weight):
    """(gradient of x, of the weight)."""
    rows = grad.reshape(-1, grad.shape[-1])
    return torch.matmul(grad, weight), torch.mm(rows.t(), x.reshape(-1, x.shape[-1]))


def _sum_rows(grad):
    return grad.reshape(-1, grad.shape[-1]).sum(0)


def _norm(inputs, gamma, beta):
    """(results, mean, invvar); the last two are [T * B]."""
    normalized, mean, rstd = torch.ops.apex.layer_norm_forward(inputs, inputs.shape[-1:], gamma, beta, _EPS)
    return normalized, mean.reshape(-1), rstd.reshape(-1)


def _norm_backward(grad, inputs, mean, invvar, gamma, beta):
    """(gradient of the inputs, of gamma, of beta)."""
    shape = inputs.shape[-1:]
    return torch.ops.apex.layer_norm_backward(grad, inputs, mean, invvar, shape, gamma, beta, _EPS)


def _drop_and_add(outputs, residual, is_training, dropout_prob):
    """(residual + dropout(outputs), what it keeps as uint8)."""
    if not is_training or not dropout_prob:
        return residual + outputs, torch.ones_like(outputs, dtype=torch.uint8)
    dropped, kept = torch.native_dropout(outputs, float(dropout_prob), True)
    return dropped.add_(residual), kept.to(torch.uint8)


def _drop_backward(grad, kept, dropout_prob):
    scale = 1 / (1 - float(dropout_prob)) if dropout_prob < 1 else 0.0
    return (grad * scale).masked_fill(~kept.bool(), 0)


# ---- self-attention --------------------------------------------------------------------------------------------------


def _self_forward(
    use_mask, use_time_mask, is_training, heads, inputs, weights, biases, pad_mask, additive, dropout
):
    """[input_lin_results, scores, softmax, dropout_results, dropout_mask, matmul2_results, outputs]"""
    heads, (input_weights, output_weights), (input_biases, output_biases) = int(heads), weights, biases
    _check_sizes(heads, inputs, input_weights=(input_weights, 3), output_weights=(output_weights, 1))
    _check_like(inputs, inputs=inputs, input_weights=input_weights, output_weights=output_weights)
    projected = _linear(inputs, input_weights, input_biases)
    mask = pad_mask if use_mask else None
    parts = _core.split(projected, heads, 3)
    made = _attend(*parts, heads, mask, use_time_mask, additive, is_training, dropout)
    return [projected, *made, _linear(made[-1].view(inputs.shape), output_weights, output_biases)]


def _self_backward(heads, output_grads, context, dropped, softmax, projected, inputs, weights, kept, dropout):
    """(gradient of the inputs, of both weights, of both biases)"""
    heads, (input_weights, output_weights) = int(heads), weights
    grad, of_output = _linear_backward(output_grads, context.reshape(output_grads.shape), output_weights)
    projected = contiguous(projected)
    of_projected = torch.empty_like(projected)
    parts, grads = _core.split(projected, heads, 3), _core.split(of_projected, heads, 3)
    _attend_backward(grad, dropped, softmax, kept, dropout, parts, grads)
    of_inputs, of_input = _linear_backward(of_projected, inputs, input_weights)
    return of_inputs, of_input, of_output, of_projected, output_grads


@_raw
def self_attn_forward(
    use_mask, use_time_mask, is_training, heads, inputs, input_weights, output_weights, pad_mask, dropout_prob
):
    """[input_lin_results, softmax_results, dropout_results, dropout_mask, matmul2_results, outputs]"""
    made = _self_forward(
        use_mask, use_time_mask, is_training, heads, inputs, (input_weights, output_weights), (None, None), pad_mask,
        False, dropout_prob,
    )  # fmt: skip
    return [made[0], *made[2:]]


@_raw
def self_attn_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_results, inputs, input_weights,
    output_weights, dropout_mask, dropout_prob,
):  # fmt: skip
    """[input_grads, input_weight_grads, output_weight_grads]"""
    weights = input_weights, output_weights
    return list(
        _self_backward(
            heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_results, inputs, weights,
            dropout_mask, dropout_prob,
        )[:3]
    )  # fmt: skip


@_raw
def self_attn_bias_forward(
    use_mask, use_time_mask, is_training, heads, inputs, input_weights, output_weights, input_biases, output_biases,
    pad_mask, dropout_prob,
):  # fmt: skip
    """[input_lin_results, softmax_results, dropout_results, dropout_mask, matmul2_results, outputs]"""
    weights, biases = (input_weights, output_weights), (input_biases, output_biases)
    made = _self_forward(
        use_mask, use_time_mask, is_training, heads, inputs, weights, biases, pad_mask, False, dropout_prob
    )
    return [made[0], *made[2:]]


@_raw
def self_attn_bias_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_results, inputs, input_weights,
    output_weights, dropout_mask, dropout_prob,
):  # fmt: skip
    """[input_grads, input_weight_grads, output_weight_grads, input_bias_grads, output_bias_grads]"""
    *made, of_projected, grad = _self_backward(
        heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_results, inputs,
        (input_weights, output_weights), dropout_mask, dropout_prob,
    )  # fmt: skip
    return [*made, _sum_rows(of_projected), _sum_rows(grad)]


@_raw
def self_attn_bias_additive_mask_forward(
    use_mask, use_time_mask, is_training, heads, inputs, input_weights, output_weights, input_biases, output_biases,
    pad_mask, dropout_prob,
):  # fmt: skip
    """[input_lin_results, bmm1_results, dropout_results, dropout_mask, matmul2_results, outputs]

    bmm1_results: the scores without the mask. use_time_mask does not count: the mask is [B, S].
    """
    weights, biases = (input_weights, output_weights), (input_biases, output_biases)
    made = _self_forward(
        use_mask, False, is_training, heads, inputs, weights, biases, pad_mask, True, dropout_prob
    )
    return [*made[:2], *made[3:]]


@_raw
def self_attn_bias_additive_mask_backward(
    heads, output_grads, matmul2_results, dropout_results, bmm1_results, pad_mask, input_lin_results, inputs,
    input_weights, output_weights, dropout_mask, dropout_prob,
):  # fmt: skip
    """[input_grads, input_weight_grads, output_weight_grads, input_bias_grads, output_bias_grads]"""
    softmax = _softmax(bmm1_results, int(heads), pad_mask, False, True, False, 0.0)[2]
    return self_attn_bias_backward(
        heads, output_grads, matmul2_results, dropout_results, softmax, input_lin_results, inputs, input_weights,
        output_weights, dropout_mask, dropout_prob,
    )  # fmt: skip


@_raw
def self_attn_norm_add_forward(
    use_mask, use_time_mask, is_training, heads, inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights,
    output_weights, pad_mask, dropout_prob,
):  # fmt: skip
    """[lyr_nrm_results, lyr_nrm_mean, lyr_nrm_invvar, input_lin_results, softmax_results, dropout_results,
    dropout_mask, matmul2_results, dropout_add_mask, outputs]
    """
    norm = _norm(inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights)
    *made, outputs = self_attn_forward(
        use_mask,
        use_time_mask,
        is_training,
        heads,
        norm[0],
        input_weights,
        output_weights,
        pad_mask,
        dropout_prob,
    )
    outputs, kept = _drop_and_add(outputs, inputs, is_training, dropout_prob)
    return [*norm, *made, kept, outputs]


@_raw
def self_attn_norm_add_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_results, lyr_nrm_results,
    lyr_nrm_mean, lyr_nrm_invvar, inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights, output_weights,
    dropout_mask, dropout_add_mask, dropout_prob,
):  # fmt: skip
    """[input_grads, lyr_nrm_gamma_grads, lyr_nrm_beta_grads, input_weight_grads, output_weight_grads]"""
    grad = _drop_backward(output_grads, dropout_add_mask, dropout_prob)
    of_normalized, *of_weights = self_attn_backward(
        heads, grad, matmul2_results, dropout_results, softmax_results, input_lin_results, lyr_nrm_results,
        input_weights, output_weights, dropout_mask, dropout_prob,
    )  # fmt: skip
    of_inputs, *of_norm = _norm_backward(
        of_normalized, inputs, lyr_nrm_mean, lyr_nrm_invvar, lyr_nrm_gamma_weights, lyr_nrm_beta_weights
    )
    return [of_inputs + output_grads, *of_norm, *of_weights]


# ---- attention to other keys -----------------------------------------------------------------------------------------


@_raw
def encdec_multihead_attn_forward(
    use_mask, use_time_mask, is_training, heads, inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights,
    pad_mask, dropout_prob,
):  # fmt: skip
    """[input_lin_q_results, input_lin_kv_results, softmax_results, dropout_results, dropout_mask, matmul2_results,
    outputs]
    """
    heads = int(heads)
    _check_sizes(heads, inputs_q, input_weights_q=(input_weights_q, 1), output_weights=(output_weights, 1))
    _check_sizes(heads, inputs_kv, input_weights_kv=(input_weights_kv, 2))
    weights = dict(
        input_weights_q=input_weights_q, input_weights_kv=input_weights_kv, output_weights=output_weights
    )
    _check_like(inputs_q, inputs_q=inputs_q, inputs_kv=inputs_kv, **weights)
    of_q, of_kv = _linear(inputs_q, input_weights_q), _linear(inputs_kv, input_weights_kv)
    parts = (*_core.split(of_q, heads, 1), *_core.split(of_kv, heads, 2))
    mask = pad_mask if use_mask else None
    _, *made = _attend(*parts, heads, mask, use_time_mask, False, is_training, dropout_prob)
    return [of_q, of_kv, *made, _linear(made[-1].view(inputs_q.shape), output_weights)]


@_raw
def encdec_multihead_attn_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_q_results, input_lin_kv_results,
    inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights, dropout_mask, dropout_prob,
):  # fmt: skip
    """[input_q_grads, input_kv_grads, input_weight_q_grads, input_weight_kv_grads, output_weight_grads]"""
    heads = int(heads)
    grad, of_output = _linear_backward(
        output_grads, matmul2_results.reshape(output_grads.shape), output_weights
    )
    projected = contiguous(input_lin_q_results), contiguous(input_lin_kv_results)
    of_projected = [torch.empty_like(p) for p in projected]
    parts, grads = (
        (*_core.split(q, heads, 1), *_core.split(kv, heads, 2)) for q, kv in (projected, of_projected)
    )
    _attend_backward(grad, dropout_results, softmax_results, dropout_mask, dropout_prob, parts, grads)
    of_q, of_weight_q = _linear_backward(of_projected[0], inputs_q, input_weights_q)
    of_kv, of_weight_kv = _linear_backward(of_projected[1], inputs_kv, input_weights_kv)
    return [of_q, of_kv, of_weight_q, of_weight_kv, of_output]


@_raw
def encdec_multihead_attn_norm_add_forward(
    use_mask, use_time_mask, is_training, heads, inputs_q, inputs_kv, lyr_nrm_gamma_weights, lyr_nrm_beta_weights,
    input_weights_q, input_weights_kv, output_weights, pad_mask, dropout_prob,
):  # fmt: skip
    """[lyr_nrm_results, lyr_nrm_mean, lyr_nrm_invvar, input_lin_q_results, input_lin_kv_results, softmax_results,
    dropout_results, dropout_mask, matmul2_results, dropout_add_mask, outputs]
    """
    norm = _norm(inputs_q, lyr_nrm_gamma_weights, lyr_nrm_beta_weights)
    *made, outputs = encdec_multihead_attn_forward(
        use_mask, use_time_mask, is_training, heads, norm[0], inputs_kv, input_weights_q, input_weights_kv,
        output_weights, pad_mask, dropout_prob,
    )  # fmt: skip
    outputs, kept = _drop_and_add(outputs, inputs_q, is_training, dropout_prob)
    return [*norm, *made, kept, outputs]


@_raw
def encdec_multihead_attn_norm_add_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_q_results, input_lin_kv_results,
    lyr_nrm_results, lyr_nrm_mean, lyr_nrm_invvar, inputs_q, inputs_kv, lyr_nrm_gamma_weights, lyr_nrm_beta_weights,
    input_weights_q, input_weights_kv, output_weights, dropout_mask, dropout_add_mask, dropout_prob,
):  # fmt: skip
    """[input_q_grads, input_kv_grads, lyr_nrm_gamma_grads, lyr_nrm_beta_grads, input_weight_q_grads,
    input_weight_kv_grads, output_weight_grads]
    """
    grad = _drop_backward(output_grads, dropout_add_mask, dropout_prob)
    of_normalized, of_kv, *of_weights = encdec_multihead_attn_backward(
        heads, grad, matmul2_results, dropout_results, softmax_results, input_lin_q_results, input_lin_kv_results,
        lyr_nrm_results, inputs_kv, input_weights_q, input_weights_kv, output_weights, dropout_mask, dropout_prob,
    )  # fmt: skip
    of_q, *of_norm = _norm_backward(
        of_normalized, inputs_q, lyr_nrm_mean, lyr_nrm_invvar, lyr_nrm_gamma_weights, lyr_nrm_beta_weights
    )
    return [of_q + output_grads, of_kv, *of_norm, *of_weights]


# ---- the softmax alone -----------------------------------------------------------------------------------------------


@_raw
def mask_softmax_dropout_forward(use_mask, is_training, heads, input, pad_mask, dropout_prob):
    """[dropout_results, dropout_mask, softmax_results], each as the input, [B * H, T, S]"""
    mask = pad_mask if use_mask else None
    return list(_softmax(contiguous(input), int(heads), mask, False, False, is_training, dropout_prob))


@_raw
def mask_softmax_dropout_backward(
    use_mask, heads, output_grads, softmax_results, dropout_mask, padding_mask, dropout_prob
):
    """The gradient of the input, in memory of its own. What the padding mask leaves out has a softmax of 0."""
    return _softmax_backward(output_grads, softmax_results, dropout_mask, dropout_prob)


@_raw
def additive_mask_softmax_dropout_forward(use_mask, is_training, heads, input, pad_mask, dropout_prob):
    """[dropout_results, dropout_mask, softmax_results], each as the input, [B * H, T, S]"""
    mask = pad_mask if use_mask else None
    return list(_softmax(contiguous(input), int(heads), mask, False, True, is_training, dropout_prob))


@_raw
def additive_mask_softmax_dropout_backward(
    use_mask, heads, output_grads, softmax_results, dropout_mask, dropout_prob
):
    """The gradient of the input, in memory of its own."""
    return _softmax_backward(output_grads, softmax_results, dropout_mask, dropout_prob)
