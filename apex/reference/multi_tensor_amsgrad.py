import torch

from apex.reference._multi_tensor import math_dtype, power, skip_mask, this_step, write

L2 = 0
DECOUPLED = 1


def multi_tensor_amsgrad(
    grads,
    params,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    lr,
    beta1,
    beta2,
    eps,
    step,
    decay_mode,
    bias_correction,
    weight_decay,
    lr_tensor=None,
    step_tensor=None,
    advance_step=False,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
):
    """One AMSGrad step of Adam (decay_mode 0) or AdamW (decay_mode 1), in place.

    As multi_tensor_adam, but the denominator is made of max_exp_avg_sqs, the largest exp_avg_sqs so far.

    Follows Reddi, Kale & Kumar, arXiv:1904.09237, algorithm 2, with bias corrections as torch.optim.Adam has them.
    """
    skip = skip_mask(found_inf, noop_flag)
    step = this_step(step, step_tensor, advance_step, skip)
    for grad, param, exp_avg, exp_avg_sq, largest in zip(
        grads, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, strict=True
    ):
        math = math_dtype(param)
        rate = lr if lr_tensor is None else lr_tensor.reshape(()).to(math)
        correction1 = 1 - power(beta1, step, math) if bias_correction else 1.0
        correction2 = 1 - power(beta2, step, math) if bias_correction else 1.0
        p, g = param.to(math), grad.to(math)
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(math)
        if decay_mode == L2:
            g = g + weight_decay * p
        m = beta1 * exp_avg.to(math) + (1 - beta1) * g
        v = beta2 * exp_avg_sq.to(math) + (1 - beta2) * g * g
        most = torch.maximum(largest.to(math), v)
        update = (m / correction1) / ((most / correction2).sqrt() + eps)
        if decay_mode == DECOUPLED:
            p = p - rate * weight_decay * p
        write(exp_avg, m, skip)
        write(exp_avg_sq, v, skip)
        write(largest, most, skip)
        write(param, p - rate * update, skip)
