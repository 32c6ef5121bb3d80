"""Softmax with a mask and dropout after it, as attention takes it, in plain PyTorch."""

import torch

from apex.reference import _philox
from apex.reference._leaves import differentiate
from apex.reference.scaled_masked_softmax import _check as _check_softmax
from apex.reference.scaled_masked_softmax import _gradient, _math_dtype

_OP = "masked_softmax_dropout"
_LAST = (None, 0.0, None, None)  # the backward's defaults, of the arguments after the softmax


def _check_dropout(dropout, seed):
    if not 0 <= dropout <= 1:
        raise ValueError(f"{_OP}: the dropout probability must be between 0 and 1, not {dropout:g}")
    if dropout and (seed is None or seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError(f"{_OP}: dropout needs a seed, one int64")


def _check(input, mask, dropout, seed):
    """Raises ValueError or TypeError, as the bindings do."""
    _check_softmax(input, mask, False, op=_OP, added=True)
    _check_dropout(dropout, seed)


def _kept(like, dropout, seed):
    """Bool of the tensor's shape: what dropout keeps. Element e has bit e % 8 of the numbers of counter e // 8."""
    n = like.numel()
    counter = torch.arange((n + 7) // 8, dtype=torch.int64, device=like.device)
    keep = min(round((1 - dropout) * 2**32), 2**32 - 1)
    return _philox.keep_eight_finely(seed.reshape(()), counter, keep).flatten()[:n].view(like.shape)


def _scale(dropout):
    return 1 / (1 - dropout) if dropout < 1 else 0.0


def masked_softmax_dropout_forward(input, mask=None, dropout=0.0, seed=None, keep_mask=False):
    """(output, softmax, kept_mask): softmax(input + mask) over the last dimension, before and after dropout.

    input: (..., queries, keys), float16, bfloat16, float32 or float64. mask: of a shape that broadcasts to the
    input's; bool or uint8, true where a key is left out, or of floating point, rounded to the input's dtype and added,
    where -inf leaves a key out. A row whose keys are all left out is zeros. dropout: the probability of 0, with the
    others scaled by 1 / (1 - dropout); seed: one int64, the key of the random numbers. output: like the input.
    softmax: likewise, before dropout; without elements where dropout is 0, as it is the output. kept_mask: with
    keep_mask, uint8 of the input's shape, 1 where dropout keeps; else without elements. Raises ValueError, TypeError.
    """
    _check(input, mask, dropout, seed)
    x = input.to(_math_dtype(input.dtype))
    if mask is not None:
        if mask.is_floating_point():
            mask = mask.to(input.dtype)
            left_out = mask == -torch.inf
            x = x + mask.to(x.dtype)
        else:
            left_out = mask.bool()
        x = x.masked_fill(left_out, -torch.inf)
    y = torch.softmax(x, -1)
    if mask is not None:
        y = y.masked_fill(left_out.all(-1, keepdim=True), 0.0)
    softmax, kept = input.new_empty(0), input.new_empty(0, dtype=torch.uint8)
    if dropout > 0:
        bits = _kept(input, dropout, seed)
        softmax = y.to(input.dtype).contiguous()
        y = (y * _scale(dropout)).masked_fill(~bits, 0.0)
        if keep_mask:
            kept = bits.to(torch.uint8)
    elif keep_mask:
        kept = torch.ones(input.shape, dtype=torch.uint8, device=input.device)
    return y.to(input.dtype).contiguous(), softmax, kept


def masked_softmax_dropout_backward(
    grad_output, softmax, kept_mask=None, dropout=0.0, seed=None, grad_softmax=None
):
    """The gradient of the forward's input: softmax * (g - sum(softmax * g)), where g is what dropout leaves.

    grad_output: of the forward's output. softmax: before dropout. kept_mask: uint8 or bool of its shape, 1
    where dropout kept; or the forward's seed, from which it is found again. grad_softmax: of the forward's softmax,
    added to g; None, or without elements: nothing is. None of them is written.
    """
    if kept_mask is None:
        _check_dropout(dropout, seed)
    return _backward(grad_output, softmax, kept_mask, dropout, seed, grad_softmax).contiguous()


def _backward(grad_output, softmax, kept_mask, dropout, seed, grad_softmax):
    grad = grad_output.to(_math_dtype(softmax.dtype))
    if kept_mask is not None or dropout > 0:
        kept = kept_mask.bool() if kept_mask is not None else _kept(softmax, dropout, seed)
        grad = grad.masked_fill(~kept, 0.0) * _scale(dropout)
    if grad_softmax is not None and grad_softmax.numel():
        grad = grad + grad_softmax.to(grad.dtype)
    return _gradient(grad, softmax, 1.0, False).to(softmax.dtype)


class _Pair:
    """Autograd and autocast of the two ops, as torch.library wants them where no binding fits."""

    name = _OP

    def setup_context(self, ctx, inputs, output):
        """Keeps the softmax and the seed."""
        _, _, ctx.dropout, seed, _ = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[1] if ctx.dropout > 0 else output[0], seed)
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad_output, grad_softmax, _):
        """Gradients of the forward's inputs, through the backward op."""
        if grad_output is None and grad_softmax is None:
            return (None,) * 5
        softmax, seed = ctx.saved_tensors
        grad_output = torch.zeros_like(grad_softmax) if grad_output is None else grad_output
        op = torch.ops.apex.masked_softmax_dropout_backward
        return op(grad_output, softmax, None, ctx.dropout, seed, grad_softmax), None, None, None, None

    def setup_double_context(self, ctx, inputs, output):
        """Keeps the inputs of the backward."""
        grad_output, softmax, kept_mask, ctx.dropout, seed, grad_softmax = (
            *inputs,
            *_LAST[len(inputs) - 2 :],
        )
        ctx.save_for_backward(grad_output, softmax, grad_softmax, kept_mask, seed)

    def double_backward(self, ctx, gradient):
        """By torch's own differentiable ops."""
        *tensors, kept_mask, seed = ctx.saved_tensors
        again = lambda dy, y, more: [_backward(dy, y, kept_mask, ctx.dropout, seed, more)]  # noqa: E731
        of_output, of_softmax, of_more = differentiate(again, tensors, [gradient])
        return of_output, of_softmax, None, None, None, of_more

    def autocast(self, device_type, arguments, keywords):
        """Arguments of the forward as autocast changes them."""
        names = ("input", "mask", "dropout", "seed", "keep_mask")
        given = dict(zip(names, arguments, strict=False)) | keywords
        if given["input"].is_floating_point() and given["input"].dtype != torch.float64:
            given["input"] = given["input"].to(torch.get_autocast_dtype(device_type))
        return given


PAIRS = (_Pair(),)
