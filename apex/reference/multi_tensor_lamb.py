import torch

from apex.reference._multi_tensor import math_dtype, norm_of, power, skip_mask, this_step, trust_ratio, write

L2 = 0
DECOUPLED = 1


def multi_tensor_lamb(
    grads,
    params,
    exp_avgs,
    exp_avg_sqs,
    model_params,
    lr,
    beta1,
    beta2,
    eps,
    step,
    bias_correction,
    weight_decay,
    grad_averaging,
    decay_mode,
    global_grad_norm,
    max_grad_norm,
    use_nvlamb=False,
    lr_tensor=None,
    step_tensor=None,
    advance_step=False,
    max_grad_norm_tensor=None,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
    max_param_norm=0.0,
):
    """One LAMB step, in place; each gradient is overwritten by its parameter's update.

    grads, params, exp_avgs, exp_avg_sqs: lists of equally many tensors. model_params: empty, or as many
    lower-precision copies of params. Gradients are multiplied by inv_scale (float32) and divided by
    global_grad_norm / max_grad_norm where that exceeds 1 (max_grad_norm 0: never; max_grad_norm_tensor, float32,
    replaces it). decay_mode 0: weight_decay is an L2 penalty on the gradient, 1: decoupled. Without use_nvlamb the
    ratio of norms scales the step only where weight_decay is not 0; in it a parameter's norm is at most max_param_norm
    (0: as it is). lr_tensor (float32), step_tensor (int32):
    one-element tensors that replace lr and step; with advance_step, step_tensor holds the last step and receives
    this one. Nothing changes if found_inf (float32) or noop_flag (int32) is not 0.

    Follows You et al., arXiv:1904.00962, algorithm 2, with public apex's clipping.
    """
    skip = skip_mask(found_inf, noop_flag)
    step = this_step(step, step_tensor, advance_step, skip)
    rate = lr if lr_tensor is None else lr_tensor.reshape(())
    clip = _gradient_scale(global_grad_norm, max_grad_norm, max_grad_norm_tensor)
    for i, (grad, param, exp_avg, exp_avg_sq) in enumerate(
        zip(grads, params, exp_avgs, exp_avg_sqs, strict=True)
    ):
        math = math_dtype(param)
        p, g = param.to(math), grad.to(math)
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(math)
        if clip is not None:
            g = g * clip.to(math)
        if decay_mode == L2:
            g = g + weight_decay * p
        m = beta1 * exp_avg.to(math) + (1 - beta1 if grad_averaging else 1.0) * g
        v = beta2 * exp_avg_sq.to(math) + (1 - beta2) * g * g
        correction1 = 1 - power(beta1, step, math) if bias_correction else 1.0
        correction2 = 1 - power(beta2, step, math) if bias_correction else 1.0
        update = (m / correction1) / ((v / correction2).sqrt() + eps)
        if decay_mode == DECOUPLED:
            update = update + weight_decay * p
        ratio = 1.0
        if use_nvlamb or weight_decay != 0:
            of_param = norm_of(p)
            if max_param_norm > 0:
                of_param = of_param.clamp(max=max_param_norm)
            ratio = trust_ratio(of_param, norm_of(update))
        p = p - rate * ratio * update
        write(grad, update, skip)
        write(exp_avg, m, skip)
        write(exp_avg_sq, v, skip)
        write(param, p, skip)
        if model_params:
            write(model_params[i], p, skip)


def _gradient_scale(norm, limit, limit_tensor):
    if norm is None:
        return None
    limit = norm.new_tensor(limit) if limit_tensor is None else limit_tensor.reshape(())
    norm = norm.reshape(())
    return torch.where((limit > 0) & (norm > limit), limit / norm, torch.ones_like(norm))
