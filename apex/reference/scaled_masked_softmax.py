"""Scaled softmax with a mask, a causal mask, both or none, in plain PyTorch."""

import torch

from apex.reference._leaves import differentiate

_OP = "scaled_masked_softmax"


def _math_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(input, mask, causal, op=_OP, added=False, name_of=str):
    """Raises ValueError or TypeError, as the bindings do. added: the mask may have numbers, which are added. name_of:
    what a dtype is called."""
    if input.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise TypeError(f"{op} takes float32, float16, bfloat16 and float64, not {input.dtype}")
    if input.dim() < (2 if causal else 1):
        raise ValueError(
            f"{op}: the input needs a dimension of keys{' and one of queries' if causal else ''}, "
            f"but its shape is {list(input.shape)}"
        )
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.uint8) and not (added and mask.is_floating_point()):
        or_added = " or of floating point, added to the input," if added else ""
        instead = "" if added else "; a mask of numbers is added to the input instead"
        raise TypeError(
            f"{op}: the mask is bool or uint8, true where a key is left out,{or_added} not "
            f"{name_of(mask.dtype)}{instead}"
        )
    if mask.device != input.device:
        raise ValueError(f"{op}: the mask is on {mask.device} but the input is on {input.device}")
    ends = zip(reversed(mask.shape), reversed(input.shape), strict=False)
    if mask.dim() > input.dim() or not all(m in (1, n) for m, n in ends):
        raise ValueError(
            f"{op}: the mask's shape {list(mask.shape)} does not broadcast to the input's {list(input.shape)}"
        )


def _past_the_diagonal(like):
    queries, keys = like.shape[-2:]
    ones = torch.ones(queries, keys, dtype=torch.bool, device=like.device)
    return ones.triu(keys - queries + 1)


def scaled_masked_softmax_forward(input, mask=None, scale=1.0, causal=False):
    """softmax(scale * input) over the last dimension, zero where masked; a row without an unmasked key is zeros.

    input: (..., queries, keys), float16, bfloat16, float32 or float64; the output is like it. mask: bool or
    uint8, true where a key is left out, of a shape that broadcasts to the input's. causal: leaves out the keys
    past the diagonal that ends in the last query's last key. Values that are masked are not looked at; other
    values of nan or inf do what they do in torch.softmax. Raises ValueError and TypeError.
    """
    _check(input, mask, causal)
    masked = None if mask is None else mask.bool()
    upper = _past_the_diagonal(input) if causal else None
    if causal:
        masked = upper if masked is None else masked | upper
    x = input.to(_math_dtype(input.dtype)) * scale
    if masked is not None:
        x = x.masked_fill(masked, -torch.inf)
    y = torch.softmax(x, -1)
    if masked is not None:
        y = y.masked_fill(masked.all(-1, keepdim=True), 0.0)
    if causal:
        y = y.masked_fill(upper, 0.0)  # in rows of nan too
    return y.to(input.dtype).contiguous()


def scaled_masked_softmax_backward(grad_output, output, scale=1.0, causal=False):
    """The gradient of the forward's input: scale * output * (grad_output - sum(output * grad_output)).

    grad_output, output: as the forward's output. Neither is written.
    """
    return _gradient(grad_output, output, scale, causal).to(output.dtype).contiguous()


def _gradient(grad_output, output, scale, causal):
    math = _math_dtype(output.dtype)
    y, dy = output.to(math), grad_output.to(math)
    if causal:
        dy = dy.masked_fill(_past_the_diagonal(output), 0.0)
    return y * (dy - (y * dy).sum(-1, keepdim=True)) * scale


class _Pair:
    """Autograd and autocast of the two ops, as torch.library wants them where no binding fits."""

    name = _OP

    def setup_context(self, ctx, inputs, output):
        """Keeps the output."""
        _, _, ctx.scale, ctx.causal = inputs
        ctx.save_for_backward(output)

    def backward(self, ctx, grad_output):
        """Gradients of the forward's inputs, through the backward op."""
        (output,) = ctx.saved_tensors
        op = torch.ops.apex.scaled_masked_softmax_backward
        return op(grad_output, output, ctx.scale, ctx.causal), None, None, None

    def setup_double_context(self, ctx, inputs, output):
        """Keeps the inputs of the backward."""
        grad_output, saved, ctx.scale, ctx.causal = inputs
        ctx.save_for_backward(grad_output, saved)

    def double_backward(self, ctx, gradient):
        """By torch's own differentiable ops."""
        again = lambda dy, y: [_gradient(dy, y, ctx.scale, ctx.causal).to(y.dtype)]  # noqa: E731
        return *differentiate(again, ctx.saved_tensors, [gradient]), None, None

    def autocast(self, device_type, arguments, keywords):
        """Arguments of the forward as autocast changes them."""
        given = dict(zip(("input", "mask", "scale", "causal"), arguments, strict=False)) | keywords
        if given["input"].is_floating_point() and given["input"].dtype != torch.float64:
            given["input"] = given["input"].to(torch.get_autocast_dtype(device_type))
        return given


PAIRS = (_Pair(),)
