import torch

from apex.reference._multi_tensor import math_dtype, norm_of, power, skip_mask, write

L2 = 0


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
    decay_mode=1,
    bias_correction=True,
    grad_averaging=True,
    step_tensor=None,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
    per_tensor_beta1=None,
    per_tensor_beta2=None,
    per_tensor_gradient_share=None,
    per_tensor_eps=None,
    per_tensor_bias_correction=None,
    per_tensor_param_norm=None,
    per_tensor_update_norm=None,
):
    """LAMB's moments and updates.

    grads, params, exp_avgs, exp_avg_sqs: lists of equally many tensors; updates: as many, receive the updates.
    per_tensor_decay: float32, one element a tensor. decay_mode 0: it is an L2 penalty on the gradient, 1: decoupled.
    step: 1 at the first; step_tensor (int32 of one element) replaces it. Gradients are multiplied by inv_scale
    (float32 of one element) and divided by global_grad_norm (likewise) / max_global_grad_norm where that exceeds 1.
    Nothing changes if found_inf (float32) or noop_flag (int32) is not 0.

    per_tensor_beta1, ..., per_tensor_bias_correction: None, or float32, one element a tensor, in place of beta1, beta2,
    what the gradient is weighed by in its average, eps and bias_correction (not 0: corrected).

    per_tensor_param_norm, per_tensor_update_norm: None, or both float32, one element a tensor: receive the L2 norms
    that multi_tensor_lamb_stage2 takes, of parameters and of updates before these are rounded to their dtype (as
    multi_tensor_lamb measures them). Where nothing changes they, too, stay as they are.
    """
    skip = skip_mask(found_inf, noop_flag)
    scale = _gradient_scale(inv_scale, global_grad_norm, max_global_grad_norm)
    step = step if step_tensor is None else step_tensor.reshape(())
    for i, (grad, param, exp_avg, exp_avg_sq, out) in enumerate(
        zip(grads, params, exp_avgs, exp_avg_sqs, updates, strict=True)
    ):
        math = math_dtype(param)
        b1, b2, share, added = beta1, beta2, 1 - beta1 if grad_averaging else 1.0, eps
        correct = torch.as_tensor(bias_correction, dtype=torch.bool, device=param.device)
        if per_tensor_beta1 is not None:
            wide = math if param.device.type == "mps" else torch.float64
            own = per_tensor_beta1, per_tensor_beta2, per_tensor_gradient_share, per_tensor_eps
            b1, b2, share, added = (numbers[i].to(wide) for numbers in own)
            correct = per_tensor_bias_correction[i] != 0
        p, decay = param.to(math), per_tensor_decay[i].to(math)
        g = grad.to(math) if scale is None else grad.to(math) * scale.to(math)
        if decay_mode == L2:
            g = g + decay * p
        m = b1 * exp_avg.to(math) + share * g
        v = b2 * exp_avg_sq.to(math) + (1 - b2) * g * g
        c1, c2 = (_correction(b, step, math, correct) for b in (b1, b2))
        update = (m / c1) / ((v / c2).sqrt() + added)
        if decay_mode != L2:
            update = update + decay * p
        write(out, update, skip)
        write(exp_avg, m, skip)
        write(exp_avg_sq, v, skip)
        if per_tensor_param_norm is not None:
            write(per_tensor_param_norm[i], norm_of(p), skip)
            write(per_tensor_update_norm[i], norm_of(update), skip)


def _correction(beta, step, math, correct):
    """1 - beta ** step where `correct` holds, else 1."""
    found = 1 - power(beta, step, math)
    if not isinstance(found, torch.Tensor):
        found = torch.tensor(found, dtype=math, device=correct.device)
    return torch.where(correct, found, torch.ones_like(found))


def _gradient_scale(inv_scale, norm, limit):
    scale = None if inv_scale is None else inv_scale.reshape(())
    if norm is None or limit <= 0:
        return scale
    norm = norm.reshape(())
    clip = torch.where(norm > limit, limit / norm, torch.ones_like(norm))
    return clip if scale is None else scale * clip
