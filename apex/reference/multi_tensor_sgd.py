import torch

from apex.reference._multi_tensor import math_dtype, skip_mask, write


def multi_tensor_sgd(
    grads,
    params,
    momentums,
    model_params,
    weight_decay,
    momentum,
    dampening,
    lr,
    nesterov,
    first_run,
    wd_after_momentum,
    scale,
    lr_tensor=None,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
    marked_first_run=False,
    unscale_grads=False,
):
    """One step of stochastic gradient descent, in place.

    grads, params: lists of equally many tensors. momentums: as many, or none where momentum is 0 (they are
    then not read). model_params: empty, or as many lower-precision copies of params. Gradients are
    multiplied by scale and inv_scale (float32) first, and left so if unscale_grads and inv_scale is given.
    first_run: buffers are set to the gradients, whatever they hold; marked_first_run: so is each element
    that is -0.0, and none is left -0.0. wd_after_momentum: weight decay joins what comes out of the buffer,
    not what goes in. lr_tensor (float32) replaces lr. Nothing changes if found_inf (float32) or noop_flag
    (int32) is not 0.

    Follows Sutskever et al., ICML 2013, in the form of torch.optim.SGD.
    """
    skip = skip_mask(found_inf, noop_flag)
    rate = lr if lr_tensor is None else lr_tensor.reshape(())
    for i, (grad, param) in enumerate(zip(grads, params, strict=True)):
        math = math_dtype(param)
        p, step = param.to(math), grad.to(math) * scale
        if inv_scale is not None:
            step = step * inv_scale.reshape(()).to(math)
            if unscale_grads:
                write(grad, step, skip)
        if not wd_after_momentum:
            step = step + weight_decay * p
        if momentum != 0:
            old = momentums[i].to(math)
            gathered = step if first_run else momentum * old + (1 - dampening) * step
            if marked_first_run:
                gathered = torch.where((old == 0) & torch.signbit(old), step, gathered)
            stored = gathered.to(momentums[i].dtype) + 0.0  # -0.0 becomes 0.0
            write(momentums[i], stored, skip)
            stored = stored.to(math)
            step = step + momentum * stored if nesterov else stored
        if wd_after_momentum:
            step = step + weight_decay * p
        p = p - rate * step
        write(param, p, skip)
        if model_params:
            write(model_params[i], p, skip)
