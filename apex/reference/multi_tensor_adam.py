from apex.reference._multi_tensor import math_dtype, power, skip_mask, this_step, write

L2 = 0
DECOUPLED = 1


def multi_tensor_adam(
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
    decay_mode,
    bias_correction,
    weight_decay,
    lr_tensor=None,
    step_tensor=None,
    advance_step=False,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
    unscale_grads=False,
):
    """One Adam (decay_mode 0: L2 penalty) or AdamW (decay_mode 1: decoupled decay) step, in place.

    grads, params, exp_avgs, exp_avg_sqs: lists of equally many tensors. model_params: empty, or as many
    lower-precision copies of params, which then are their float32 masters. lr_tensor (float32), step_tensor
    (int32): one-element tensors that replace lr and step; with advance_step, step_tensor holds the last step
    and receives this one. Gradients are multiplied by inv_scale (float32) first, and left so if unscale_grads.
    Nothing changes if found_inf (float32) is not 0 or noop_flag (int32) is 1.

    Follows Kingma & Ba, arXiv:1412.6980, algorithm 1, and Loshchilov & Hutter, arXiv:1711.05101, algorithm 2.
    """
    skip = skip_mask(found_inf, noop_flag)
    step = this_step(step, step_tensor, advance_step, skip)
    for i, (grad, param, exp_avg, exp_avg_sq) in enumerate(
        zip(grads, params, exp_avgs, exp_avg_sqs, strict=True)
    ):
        math = math_dtype(param)
        rate = lr if lr_tensor is None else lr_tensor.reshape(()).to(math)
        correction1 = 1 - power(beta1, step, math) if bias_correction else 1.0
        correction2 = 1 - power(beta2, step, math) if bias_correction else 1.0
        p, g = param.to(math), grad.to(math)
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(math)
            if unscale_grads:
                write(grad, g, skip)
        if decay_mode == L2:
            g = g + weight_decay * p
        m = beta1 * exp_avg.to(math) + (1 - beta1) * g
        v = beta2 * exp_avg_sq.to(math) + (1 - beta2) * g * g
        update = (m / correction1) / ((v / correction2).sqrt() + eps)
        if decay_mode == DECOUPLED:
            p = p - rate * weight_decay * p
        p = p - rate * update
        write(exp_avg, m, skip)
        write(exp_avg_sq, v, skip)
        write(param, p, skip)
        if model_params:
            write(model_params[i], p, skip)
