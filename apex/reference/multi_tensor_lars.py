import torch

from apex.reference._multi_tensor import math_dtype, norm_of, skip_mask, write


def multi_tensor_lars(
    grads,
    params,
    momentums,
    model_params,
    lr,
    trust_coefficient,
    eps,
    weight_decay,
    momentum,
    nesterov,
    is_skipped,
    scale=1.0,
    grad_norms=None,
    param_norms=None,
    lr_tensor=None,
    inv_scale=None,
    found_inf=None,
    noop_flag=None,
    unscale_grads=False,
):
    """One LARS step, in place.

    grads, params, momentums: lists of equally many tensors; momentums gather steps, not gradients.
    model_params: empty, or as many lower-precision copies of params. Gradients are multiplied by scale and
    inv_scale (float32) first, and left so if unscale_grads and inv_scale is given. The learning rate of a
    tensor is lr * trust_coefficient * |p| / (|g| + weight_decay * |p| + eps), or lr where a norm is 0 or
    is_skipped is set. grad_norms, param_norms: the norms (of scaled gradients), float32, one element a
    tensor; measured if they are not given. lr_tensor (float32) replaces lr. Nothing changes if found_inf
    (float32) or noop_flag (int32) is not 0.

    Follows You, Gitman & Ginsburg, arXiv:1708.03888, with public apex's form of the momentum.
    """
    skip = skip_mask(found_inf, noop_flag)
    rate = lr if lr_tensor is None else lr_tensor.reshape(())
    for i, (grad, param, buffer) in enumerate(zip(grads, params, momentums, strict=True)):
        math = math_dtype(param)
        p, g = param.to(math), grad.to(math) * scale
        if inv_scale is not None:
            g = g * inv_scale.reshape(()).to(math)
            if unscale_grads:
                write(grad, g, skip)
        size = rate
        if not is_skipped:
            g_norm = norm_of(g) if grad_norms is None else grad_norms.view(-1)[i].to(math)
            p_norm = norm_of(p) if param_norms is None else param_norms.view(-1)[i].to(math)
            ratio = trust_coefficient * p_norm / (g_norm + weight_decay * p_norm + eps)
            size = rate * torch.where((g_norm > 0) & (p_norm > 0), ratio, torch.ones_like(ratio))
        step = size * (g + weight_decay * p)
        velocity = momentum * buffer.to(math) - step
        p = p + (momentum * velocity - step if nesterov else velocity)
        write(buffer, velocity, skip)
        write(param, p, skip)
        if model_params:
            write(model_params[i], p, skip)
