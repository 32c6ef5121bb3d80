from apex.reference._multi_tensor import math_dtype, skip_mask, write


def multi_tensor_rmsprop(
    grads,
    params,
    square_avgs,
    grad_avgs,
    momentums,
    lr,
    alpha,
    eps,
    weight_decay,
    momentum,
    eps_inside=False,
    decoupled_decay=False,
    lr_in_momentum=False,
    lr_tensor=None,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
):
    """One RMSprop step, in place.

    grads, params, square_avgs: lists of equally many tensors. grad_avgs: as many for the centered form, else none.
    momentums: as many; not read, and may be none, where momentum is 0. weight_decay is an L2 penalty or, with
    decoupled_decay, what parameters lose before the step, whatever the learning rate. eps_inside: eps is under the
    root. lr_in_momentum: the learning rate multiplies what goes into the momentum buffer, not what comes out.
    Gradients are multiplied by inv_scale (float32) first. lr_tensor (float32) replaces lr. Nothing changes if
    found_inf (float32) or noop_flag (int32) is not 0.

    Follows Hinton, lecture 6e (2012), and Graves, arXiv:1308.0850, in the form of torch.optim.RMSprop.
    """
    skip = skip_mask(found_inf, noop_flag)
    rate = lr if lr_tensor is None else lr_tensor.reshape(())
    if momentum != 0 and not momentums:  # a plan gives the lists that there are, in order
        grad_avgs, momentums = momentums, grad_avgs
    for i, (grad, param, square_avg) in enumerate(zip(grads, params, square_avgs, strict=True)):
        math = math_dtype(param)
        p, g = param.to(math), grad.to(math)
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(math)
        if decoupled_decay:
            kept = p * (1 - weight_decay)
        else:
            kept = p
            g = g + weight_decay * p
        s = alpha * square_avg.to(math) + (1 - alpha) * g * g
        write(square_avg, s, skip)
        if grad_avgs:
            mean = alpha * grad_avgs[i].to(math) + (1 - alpha) * g
            write(grad_avgs[i], mean, skip)
            s = s - mean * mean
        step = g / ((s + eps).sqrt() if eps_inside else s.sqrt() + eps)
        if momentum != 0:
            step = momentum * momentums[i].to(math) + (rate * step if lr_in_momentum else step)
            write(momentums[i], step, skip)
            kept = kept - (step if lr_in_momentum else rate * step)
        else:
            kept = kept - rate * step
        write(param, kept, skip)
