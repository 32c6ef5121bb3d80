"""The functions of public apex's extension distributed_lamb_cuda, with its argument orders.

LAMB over fragments of parameters, whose norms the caller measures over all ranks. Arguments per_tensor_...: one element
a fragment. Scalars that are tensors (step, global_scale, ...) have one element and stay on the device, so that a CUDA
graph can hold the step. Nothing is done if noop_flag (int32) is not 0. chunk_size is ignored. Errors: TypeError,
ValueError, before anything is written.
"""

from __future__ import annotations

import torch

from apex._legacy._raw import raw
from apex._legacy.amp_C import _call
from apex._legacy.fused_adam_cuda import _check_copy, maybe_cast_mt

__all__ = ["multi_tensor_lamb_compute_update_term", "multi_tensor_lamb_update_weights"]


@raw
def multi_tensor_lamb_compute_update_term(
    chunk_size,
    noop_flag,
    tensor_lists,
    per_tensor_beta1,
    per_tensor_beta2,
    per_tensor_beta3,
    per_tensor_bias_correction,
    step,
    per_tensor_epsilon,
    mode,
    per_tensor_decay,
    global_scale,
    global_grad_norm,
    max_grad_norm,
):
    """Moments and updates, on [gradients, parameters, exp_avgs, exp_avg_sqs, updates].

    Gradients are divided by global_scale and, where max_grad_norm is not 0, clipped to it: global_grad_norm is of the
    gradients as they come. step: int32, from 1. mode 0: an L2 penalty, 1: decoupled decay. per_tensor_beta3 weighs the
    gradient in its average (public apex takes 1 - beta1 in its place).
    """
    inv_scale = global_scale.float().reciprocal()
    if max_grad_norm > 0:
        norm = global_grad_norm.float().view_as(inv_scale) * inv_scale
        inv_scale = inv_scale * (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    _call(
        "multi_tensor_lamb_stage1",
        tensor_lists,
        per_tensor_decay.float(),
        step=1,
        beta1=0.0,
        beta2=0.0,
        eps=0.0,
        global_grad_norm=None,
        max_global_grad_norm=0.0,
        decay_mode=mode,
        step_tensor=step,
        inv_scale=inv_scale,
        noop_flag=noop_flag,
        per_tensor_beta1=per_tensor_beta1.float(),
        per_tensor_beta2=per_tensor_beta2.float(),
        per_tensor_gradient_share=per_tensor_beta3.float(),
        per_tensor_eps=per_tensor_epsilon.float(),
        per_tensor_bias_correction=per_tensor_bias_correction.float(),
    )


@raw
def multi_tensor_lamb_update_weights(
    chunk_size,
    noop_flag,
    tensor_lists,
    per_tensor_param_norm,
    per_tensor_update_norm,
    update_norm_offset,
    learning_rate,
    per_tensor_decay,
    global_grad_norm,
    use_nvlamb,
):
    """Moves parameters, on [updates, parameters, copies]; copies (floating-point, or uint8: e5m2) receive them.

    The norm of fragment i's update is per_tensor_update_norm[update_norm_offset[i]], an int64 tensor. learning_rate:
    float32. global_grad_norm is not read.
    """
    if len(tensor_lists) != 3 or len({len(column) for column in tensor_lists}) > 1:
        raise ValueError("three lists of equally many tensors are required: updates, parameters, copies")
    updates, params, copies = tensor_lists
    for copy, like in zip(copies, params, strict=True):
        _check_copy("multi_tensor_lamb_update_weights", copy, like)
    fused = all(
        p.dtype == u.dtype == torch.float32 and c.dtype in (torch.float16, torch.bfloat16)
        for u, p, c in zip(*tensor_lists, strict=True)
    )
    _call(
        "multi_tensor_lamb_stage2",
        [params, updates, copies if fused else []],
        per_tensor_param_norm.float(),
        per_tensor_update_norm.float()[update_norm_offset],
        lr=0.0,
        weight_decay=0.0,
        use_nvlamb=bool(use_nvlamb),
        lr_tensor=learning_rate.float(),
        noop_flag=noop_flag,
        per_tensor_decay=per_tensor_decay.float(),
    )
    if not fused:
        maybe_cast_mt(0, noop_flag, [params, copies])
