import torch

from apex.reference._multi_tensor import math_dtype, norm_of, power, skip_mask, this_step, write

INSIDE = 0
DECOUPLED = 1


def multi_tensor_novograd(
    grads,
    params,
    exp_avgs,
    grad_norms,
    lr,
    beta1,
    beta2,
    eps,
    step,
    bias_correction,
    weight_decay,
    grad_averaging,
    moment_mode,
    norm_type,
    lr_tensor=None,
    step_tensor=None,
    advance_step=False,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
    update_norms=True,
    unscale_grads=False,
):
    """One NovoGrad step, in place.

    grads, params, exp_avgs: lists of equally many tensors. grad_norms: float32, one element a tensor, the
    averaged norms n of the gradients: those of this step, g, are averaged in first, as sqrt(beta2 * n^2 +
    (1 - beta2) * g^2) for norm_type 2 (L2), beta2 * n + (1 - beta2) * g for 0 (largest magnitude); a
    negative n says that there is none yet, and becomes g. update_norms=False takes them as they are.
    moment_mode 0: weight_decay is averaged with the gradient, 1: decoupled. Gradients are multiplied by
    inv_scale (float32) first, and left so if unscale_grads. lr_tensor (float32), step_tensor (int32):
    one-element tensors that replace lr and step; with advance_step, step_tensor holds the last step and
    receives this one. Nothing changes if found_inf (float32) or noop_flag (int32) is not 0.

    Follows Ginsburg et al., arXiv:1905.11286, algorithm 1, with public apex's bias correction.
    """
    skip = skip_mask(found_inf, noop_flag)
    step = this_step(step, step_tensor, advance_step, skip)
    rate = lr if lr_tensor is None else lr_tensor.reshape(())
    norms = grad_norms.view(-1)
    for i, (grad, param, exp_avg) in enumerate(zip(grads, params, exp_avgs, strict=True)):
        math = math_dtype(param)
        p, g = param.to(math), grad.to(math)
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(math)
            if unscale_grads:
                write(grad, g, skip)
        if update_norms and grad.numel():
            write(norms[i], _averaged(norms[i].to(math), g, beta2, norm_type), skip)
        correction1 = 1 - power(beta1, step, math) if bias_correction else 1.0
        correction2 = (1 - power(beta2, step, math)) ** 0.5 if bias_correction else 1.0
        denominator = norms[i].to(math) / correction2 + eps
        if moment_mode == INSIDE:
            g = g / denominator + weight_decay * p
        m = beta1 * exp_avg.to(math) + (1 - beta1 if grad_averaging else 1.0) * g
        update = m / correction1
        if moment_mode == DECOUPLED:
            update = update / denominator + weight_decay * p
        write(exp_avg, m, skip)
        write(param, p - rate * update, skip)


def _averaged(old, gradient, beta2, norm_type):
    norm = norm_of(gradient, float("inf") if norm_type == 0 else 2.0)
    if norm_type == 0:
        return torch.where(old < 0, norm, beta2 * old + (1 - beta2) * norm)
    return torch.where(old < 0, norm, (beta2 * old**2 + (1 - beta2) * norm**2).sqrt())
