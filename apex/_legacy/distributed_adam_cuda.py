"""The functions of public apex's extension distributed_adam_cuda, with its argument orders.

tensor_lists: [parameters, exp_avgs, exp_avg_sqs, gradients, copies]: float32, float16 or bfloat16, the first three
alike; copies receive the parameters. Arithmetic is float32. grad_scale: float32 of one element: gradients are
multiplied by it. mode 0: an L2 penalty, 1: decoupled weight decay. chunk_size is ignored. Errors: TypeError,
ValueError, before anything is written.
"""

from __future__ import annotations

import torch

from apex._bits import join_remainders, split_remainders
from apex._legacy._raw import raw
from apex._legacy.amp_C import _call

__all__ = [
    "multi_tensor_fused_adam",
    "multi_tensor_fused_adam_capturable",
    "multi_tensor_fused_adam_with_param_remainders",
]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _adam(lists, grad_scale, flag=None, **options):
    """One step on lists as above. flag: int32: where it is 1 nothing changes."""
    if len(lists) != 5 or len({len(column) for column in lists}) > 1:
        raise ValueError(
            "distributed_adam_cuda: five lists of equally many tensors are required: parameters, exp_avgs, "
            "exp_avg_sqs, gradients, copies"
        )
    for tensor in (t for column in lists for t in column):
        if tensor.dtype not in _FLOATS:
            raise TypeError(
                f"distributed_adam_cuda takes float32, float16 and bfloat16 tensors, not {tensor.dtype}"
            )
    params, averages, squares, grads, copies = lists
    options |= dict(inv_scale=grad_scale, noop_flag=flag)
    states = [params, averages, squares]
    plain = all(t.dtype == torch.float32 for column in states for t in column)
    if plain and all(
        c.dtype in (t.dtype, *_HALVES_OF.get(t.dtype, ())) for c, t in zip(copies, grads, strict=True)
    ):
        _call("multi_tensor_adam", [grads, *states, copies], **options)
        return
    wide = states if plain else [[t.float() for t in column] for column in states]
    _call("multi_tensor_adam", [grads, *wide], **options)
    for column, values in zip(states, wide, strict=True):
        if column is not values and column:
            torch._foreach_copy_(column, values)
    for copy, value in zip(copies, params, strict=True):
        value = value.to(copy.dtype).view_as(copy)
        copy.copy_(value if flag is None else torch.where(flag.view(()) == 1, copy, value))


_HALVES_OF = {
    torch.float32: (torch.float16, torch.bfloat16)
}  # copies that one launch writes beside such gradients


def _options(beta1, beta2, eps, mode, bias_correction, weight_decay, **step):
    return dict(
        beta1=beta1, beta2=beta2, eps=eps, decay_mode=mode, bias_correction=bool(bias_correction),
        weight_decay=weight_decay, **step,
    )  # fmt: skip


@raw
def multi_tensor_fused_adam(
    chunk_size,
    noop_flag,
    tensor_lists,
    grad_scale,
    lr,
    beta1,
    beta2,
    eps,
    step,
    mode,
    bias_correction,
    weight_decay,
):
    """One step of Adam, in place. noop_flag is not read."""
    options = _options(beta1, beta2, eps, mode, bias_correction, weight_decay, lr=lr, step=step)
    _adam(tensor_lists, grad_scale, **options)


@raw
def multi_tensor_fused_adam_capturable(
    chunk_size,
    noop_flag,
    tensor_lists,
    grad_scale,
    lr,
    beta1,
    beta2,
    eps,
    step,
    mode,
    bias_correction,
    weight_decay,
):
    """As multi_tensor_fused_adam, with lr (float32) and step (int32) as tensors of one element. Nothing is done if
    noop_flag is 1."""
    options = _options(
        beta1, beta2, eps, mode, bias_correction, weight_decay, lr=0.0, step=0, lr_tensor=lr, step_tensor=step
    )
    _adam(tensor_lists, grad_scale, noop_flag, **options)


@raw
def multi_tensor_fused_adam_with_param_remainders(
    chunk_size,
    noop_flag,
    tensor_lists,
    grad_scale,
    lr,
    beta1,
    beta2,
    eps,
    step,
    mode,
    bias_correction,
    weight_decay,
):
    """As multi_tensor_fused_adam, on [parameters, remainders, exp_avgs, exp_avg_sqs, gradients, copies].

    parameters, copies: bfloat16 (or int16 of the same bits). remainders: int16, what float32 parameters have beyond
    them. noop_flag is not read.
    """
    if len(tensor_lists) != 6:
        raise ValueError(f"six tensor lists are required, with param remainders, not {len(tensor_lists)}")
    params, remainders, averages, squares, grads, copies = tensor_lists
    for tensor in (*params, *copies):
        if tensor.dtype not in (torch.bfloat16, torch.int16):
            raise TypeError(f"parameters with remainders are bfloat16 or int16, not {tensor.dtype}")
    for tensor in remainders:
        if tensor.dtype != torch.int16:
            raise TypeError(f"remainders are int16, not {tensor.dtype}")
    wide = [join_remainders(p.view(torch.bfloat16), r) for p, r in zip(params, remainders, strict=True)]
    options = _options(beta1, beta2, eps, mode, bias_correction, weight_decay, lr=lr, step=step)
    _call("multi_tensor_adam", [grads, wide, averages, squares], **options, inv_scale=grad_scale)
    for value, remainder, copy in zip(wide, remainders, copies, strict=True):
        rounded, rest = split_remainders(value)
        remainder.copy_(rest)
        copy.view(torch.bfloat16).copy_(rounded)
