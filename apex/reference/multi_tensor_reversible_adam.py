import torch

from apex.reference._multi_tensor import math_dtype, note_non_finite, write


def multi_tensor_reversible_adam(
    grads,
    params,
    exp_avgs,
    exp_avg_sqs,
    model_params,
    step_size,
    beta1,
    beta2,
    eps,
    weight_decay,
    scale=1.0,
    eps_inside_sqrt=False,
    skip_non_finite=False,
    undo=False,
    overflow_flag=None,
):
    """One step of Adam as public apex's first FusedAdam has it, in place; or, with undo, that step taken back.

    grads, params, exp_avgs, exp_avg_sqs: lists of equally many tensors. model_params: empty, or as many lower-precision
    copies of params (not to undo). Gradients are divided by scale. step_size: the learning rate, with corrections of
    the averages in it; weight decay shares in it. eps is added to the root of exp_avg_sqs, or under it.

    skip_non_finite: elements whose gradient is inf or nan stay as they are, and overflow_flag (int32) becomes 1.
    undo leaves such elements alone, and where overflow_flag is 0 it does nothing. What it gives back is what was there
    before the step but for rounding.
    """
    for i, (grad, param, exp_avg, exp_avg_sq) in enumerate(
        zip(grads, params, exp_avgs, exp_avg_sqs, strict=True)
    ):
        math = math_dtype(param)
        g, p, m, v = (t.to(math) for t in (grad, param, exp_avg, exp_avg_sq))
        g = g / scale
        if undo:
            left = ~torch.isfinite(g)
            if overflow_flag is not None:
                left = left | (overflow_flag.reshape(()) == 0)
            p = (p + step_size * m / _divisor(v, eps, eps_inside_sqrt)) / (1 - step_size * weight_decay)
            m = (m - (1 - beta1) * g) / beta1
            v = ((v - (1 - beta2) * g * g) / beta2).clamp(min=0)
        else:
            left = ~torch.isfinite(g) if skip_non_finite else None
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            p = p - step_size * (m / _divisor(v, eps, eps_inside_sqrt) + weight_decay * p)
            if skip_non_finite:
                note_non_finite(overflow_flag, g)
        write(exp_avg, m, left)
        write(exp_avg_sq, v, left)
        write(param, p, left)
        if model_params:
            write(model_params[i], param.to(math), None)


def _divisor(v, eps, inside):
    return (v + eps).sqrt() if inside else v.sqrt() + eps
