import torch

from apex.reference._multi_tensor import math_dtype, store


def multi_tensor_lamb_stage1(
    grads,
    params,
    exp_avgs,
    exp_avg_sqs,
    updates,
    per_tensor_decay,
    step,
    beta1,
    beta2,
    eps,
    global_grad_norm,
    max_global_grad_norm,
):
    """LAMB's moments and updates; decoupled decay, bias-corrected.

    grads, params, exp_avgs, exp_avg_sqs: lists of equally many tensors; updates: as many, receive the updates.
    per_tensor_decay: float32, one element a tensor. step: 1 at the first. Gradients are divided by
    global_grad_norm (float32 of one element) / max_global_grad_norm where that exceeds 1.
    """
    norm = global_grad_norm.reshape(())
    clip = torch.where(norm > max_global_grad_norm, max_global_grad_norm / norm, torch.ones_like(norm))
    if max_global_grad_norm <= 0:
        clip = torch.ones_like(norm)
    for i, (grad, param, exp_avg, exp_avg_sq, out) in enumerate(
        zip(grads, params, exp_avgs, exp_avg_sqs, updates, strict=True)
    ):
        math = math_dtype(param)
        g = grad.to(math) * clip.to(math)
        m = beta1 * exp_avg.to(math) + (1 - beta1) * g
        v = beta2 * exp_avg_sq.to(math) + (1 - beta2) * g * g
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        store(out, update + per_tensor_decay[i].to(math) * param.to(math))
        store(exp_avg, m)
        store(exp_avg_sq, v)
