from apex.reference._multi_tensor import math_dtype, skip_mask, write

L2 = 0
DECOUPLED = 1


def multi_tensor_adagrad(
    grads,
    params,
    sums,
    lr,
    eps,
    decay_mode,
    weight_decay,
    lr_tensor=None,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
    unscale_grads=False,
):
    """One Adagrad step, in place; decay_mode 0: weight_decay is an L2 penalty on the gradient, 1: decoupled.

    grads, params, sums: lists of equally many tensors; sums gather the squares of the gradients, which are
    multiplied by inv_scale (float32) first, and left so if unscale_grads. lr_tensor (float32) replaces lr.
    Nothing changes if found_inf (float32) or noop_flag (int32) is not 0.

    Follows Duchi, Hazan & Singer, JMLR 12 (2011), the diagonal form.
    """
    skip = skip_mask(found_inf, noop_flag)
    rate = lr if lr_tensor is None else lr_tensor.reshape(())
    for grad, param, total in zip(grads, params, sums, strict=True):
        math = math_dtype(param)
        p, g = param.to(math), grad.to(math)
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(math)
            if unscale_grads:
                write(grad, g, skip)
        if decay_mode == L2:
            g = g + weight_decay * p
        h = total.to(math) + g * g
        update = g / (h.sqrt() + eps)
        if decay_mode == DECOUPLED:
            update = update + weight_decay * p
        write(total, h, skip)
        write(param, p - rate * update, skip)
