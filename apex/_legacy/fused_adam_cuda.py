"""The functions of public apex's extension fused_adam_cuda, with its argument orders.

p, m, v: a parameter and its averages, float32 or float64. g: its gradient, of the same dtype, float16 or bfloat16.
p_copy: receives the parameter in another dtype; no elements: nobody wants it. A tensor of uint8 holds floats of one
byte (e5m2: the upper half of float16). grad_scale: gradients are divided by it. mode: eps is added to the root of the
average of squares (1) or under it (0). bias_correction: the step's size is corrected, and weight decay (decay), which
is decoupled, with it. chunk_size is ignored. Errors: TypeError, ValueError, before anything is written.

Beyond public apex: bfloat16, CPU tensors, any size. Otherwise than there, p_copy is written where gradients are
float32, too; and maybe_adam_undo undoes all elements, not every fourth one.
"""

from __future__ import annotations

import math

import torch

from apex._bits import from_e5m2, to_e5m2
from apex._legacy._raw import raw
from apex._legacy.amp_C import _call

__all__ = [
    "adam",
    "adam_mt",
    "maybe_adam_undo",
    "maybe_cast",
    "maybe_cast_mt",
    "reversible_adam",
    "strided_check_finite",
]

_IN_KERNEL = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
)  # copies that the step writes, beside such gradients
_INFINITE = 0x7C  # e5m2's infinity, and the bits that say that a number is not finite


def _options(lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay):
    if mode not in (0, 1):
        raise ValueError(f"fused_adam_cuda: mode is 0 (eps under the root) or 1 (beside it), not {mode}")
    if bias_correction and step < 1:
        raise ValueError(f"fused_adam_cuda: step counts from 1, not {step}")
    size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) if bias_correction else lr
    return dict(
        step_size=size, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, scale=grad_scale,
        eps_inside_sqrt=mode == 0,
    )  # fmt: skip


def _step(function, lists, options, **more):
    """One step on [parameters, exp_avgs, exp_avg_sqs, gradients[, copies]]."""
    p, m, v, g, *copies = lists
    copies = copies[0] if copies else []
    if len(copies) not in (0, len(p)):
        raise ValueError(f"{function}: there are {len(copies)} copies for {len(p)} parameters")
    for copy, like in zip(copies, p, strict=False):
        _check_copy(function, copy, like)
    fused = all(c.dtype == t.dtype and c.dtype in _IN_KERNEL for c, t in zip(copies, g, strict=False))
    _call("multi_tensor_reversible_adam", [g, p, m, v, copies if fused else []], **options, **more)
    if not fused:
        for copy, value in zip(copies, p, strict=True):
            _cast(value, copy, None)


def _check_copy(function, copy, like):
    if not (copy.is_floating_point() or copy.dtype == torch.uint8):
        raise TypeError(f"{function}: a copy of a parameter is floating-point or uint8, not {copy.dtype}")
    if copy.numel() != like.numel() or copy.device != like.device:
        raise ValueError(
            f"{function}: a copy has {copy.numel()} elements on {copy.device}, its parameter {like.numel()} on "
            f"{like.device}"
        )
    _check_contiguous(function, copy)


def _check_contiguous(function, *tensors):
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError(f"{function}: tensors must be contiguous: pass tensor.contiguous()")


def _check_flag(function, flag, device):
    """The flag, or None where it has no elements: nobody raises it."""
    if flag is None or not flag.numel():
        return None
    if flag.dtype != torch.int32:
        raise TypeError(f"{function}: the overflow flag must be int32, not {flag.dtype}")
    if flag.numel() != 1 or flag.device != device:
        raise ValueError(
            f"{function}: the overflow flag must be one element on {device}, not {flag.numel()} on {flag.device}"
        )
    return flag


@raw
def adam(p, p_copy, m, v, g, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay):
    """One step of Adam, in place."""
    options = _options(lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay)
    _step("adam", [[p], [m], [v], [g], *([[p_copy]] if p_copy.numel() else [])], options)


@raw
def adam_mt(
    chunk_size,
    overflow_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    eps,
    grad_scale,
    step,
    mode,
    bias_correction,
    decay,
):
    """`adam` on [parameters, exp_avgs, exp_avg_sqs, gradients[, copies]]. overflow_flag is not read."""
    if len(tensor_lists) not in (4, 5):
        raise ValueError(f"adam_mt: 4 or 5 tensor lists are required, not {len(tensor_lists)}")
    _step(
        "adam_mt",
        tensor_lists,
        _options(lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay),
    )


@raw
def reversible_adam(
    p, p_copy, m, v, g, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay
):
    """`adam` that leaves elements as they are whose gradient is inf or nan, and says so: p_copy[0] becomes inf."""
    options = _options(lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay)
    flag = torch.zeros(1, dtype=torch.int32, device=p.device)
    lists = [[p], [m], [v], [g], *([[p_copy]] if p_copy.numel() else [])]
    _step("reversible_adam", lists, options, skip_non_finite=True, overflow_flag=flag)
    if p_copy.numel():
        infinite = _INFINITE if p_copy.dtype == torch.uint8 else math.inf
        p_copy.view(-1)[:1].masked_fill_(flag != 0, infinite)


@raw
def maybe_adam_undo(
    overflow_flag, p, m, v, g, lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay
):
    """Takes back a step of `adam` or `reversible_adam` with these arguments, but for rounding.

    overflow_flag: int32 of one element: where it is 0 nothing is done; without an element it is done. Elements whose
    gradient is inf or nan stay.
    """
    options = _options(lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay)
    flag = _check_flag("maybe_adam_undo", overflow_flag, p.device)
    _call("multi_tensor_reversible_adam", [[g], [p], [m], [v]], **options, undo=True, overflow_flag=flag)


def _converted(values, dtype):
    if dtype == torch.uint8 and values.dtype != torch.uint8:
        return to_e5m2(values)
    return from_e5m2(values, dtype) if values.dtype == torch.uint8 != dtype else values.to(dtype)


def _cast(source, target, flag):
    value = _converted(source, target.dtype).view_as(target)
    target.copy_(value if flag is None else torch.where(flag.view(()) != 0, target, value))


@raw
def maybe_cast(overflow_flag, p_in, p_out):
    """p_out = p_in, of floating-point dtypes and uint8 (e5m2), unless overflow_flag, if it has an element, is not 0."""
    maybe_cast_mt(0, overflow_flag, [[p_in], [p_out]])


@raw
def maybe_cast_mt(chunk_size, overflow_flag, tensor_lists):
    """`maybe_cast` on [inputs, outputs]."""
    if len(tensor_lists) != 2 or len(tensor_lists[0]) != len(tensor_lists[1]):
        raise ValueError("maybe_cast_mt: two lists of equally many tensors are required: inputs, outputs")
    pairs = list(zip(*tensor_lists, strict=True))
    for source, target in pairs:
        _check_copy("maybe_cast", target, source)
        _check_copy("maybe_cast", source, source)
    flag = _check_flag("maybe_cast", overflow_flag, pairs[0][0].device) if pairs else None
    for source, target in pairs:
        _cast(source, target, flag)


@raw
def strided_check_finite(overflow_flag, p_copy, stride, clear_overflow_first):
    """overflow_flag (int32) becomes 1 if one of p_copy[::stride] is inf or nan.

    p_copy: floating-point, or uint8 (e5m2). clear_overflow_first: 0 before that.
    """
    if stride < 1:
        raise ValueError(f"strided_check_finite: stride must be positive, not {stride}")
    _check_copy("strided_check_finite", p_copy, p_copy)
    if _check_flag("strided_check_finite", overflow_flag, p_copy.device) is None:
        raise ValueError("strided_check_finite: the overflow flag must have an element")
    looked_at = p_copy.view(-1)[::stride]
    if p_copy.dtype == torch.uint8:
        found = (looked_at.bitwise_and(_INFINITE) == _INFINITE).any()
    else:
        found = torch.isfinite(looked_at).all().logical_not_()
    if clear_overflow_first:
        overflow_flag.zero_()
    overflow_flag.masked_fill_(found, 1)
