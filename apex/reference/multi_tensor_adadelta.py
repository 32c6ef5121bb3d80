from apex.reference._multi_tensor import math_dtype, skip_mask, write


def multi_tensor_adadelta(
    grads,
    params,
    square_avgs,
    acc_deltas,
    lr,
    rho,
    eps,
    weight_decay,
    lr_tensor=None,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
):
    """One Adadelta step, in place; weight_decay is an L2 penalty on the gradient.

    grads, params, square_avgs, acc_deltas: lists of equally many tensors. Gradients are multiplied by inv_scale
    (float32) first. lr_tensor (float32) replaces lr. Nothing changes if found_inf (float32) or noop_flag (int32)
    is not 0.

    Follows Zeiler, arXiv:1212.5701, algorithm 1, with a learning rate as torch.optim.Adadelta has it.
    """
    skip = skip_mask(found_inf, noop_flag)
    rate = lr if lr_tensor is None else lr_tensor.reshape(())
    for grad, param, square_avg, acc_delta in zip(grads, params, square_avgs, acc_deltas, strict=True):
        math = math_dtype(param)
        p, g, a = param.to(math), grad.to(math), acc_delta.to(math)
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(math)
        g = g + weight_decay * p
        s = rho * square_avg.to(math) + (1 - rho) * g * g
        delta = ((a + eps) / (s + eps)).sqrt() * g
        write(square_avg, s, skip)
        write(acc_delta, rho * a + (1 - rho) * delta * delta, skip)
        write(param, p - rate * delta, skip)
