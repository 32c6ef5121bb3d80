"""Softmax cross entropy with label smoothing in plain PyTorch."""

import torch

from apex.reference._leaves import leaf

IGNORED = -100  # torch's ignore_index


def _math_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(logits, labels, smoothing):
    """Raises TypeError or ValueError, as the bindings do."""
    if not logits.dtype.is_floating_point:
        raise TypeError(f"xentropy takes float32, float16, bfloat16 and float64, not {logits.dtype}")
    if logits.dim() < 1 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"xentropy: logits of shape {list(logits.shape)} need labels of the same shape without the last "
            f"dimension, not {list(labels.shape)}"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"xentropy: labels are int64 or int32, not {labels.dtype}")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"xentropy: smoothing must be between 0 and 1, not {smoothing}")
    if labels.numel() and logits.shape[-1] == 0:
        raise ValueError(f"xentropy: logits have no classes: their shape is {list(logits.shape)}")


def _labels(logits, labels, padding_idx):
    """(labels that may index, which are ignored, which are outside), the last two bool.

    Raises IndexError for labels outside on a CPU; elsewhere that would make the host wait.
    """
    classes = logits.shape[-1]
    ignored = labels == IGNORED
    if padding_idx is not None:
        ignored = ignored | (labels == padding_idx)
    outside = ((labels < 0) | (labels >= classes)) & ~ignored
    if labels.device.type == "cpu" and outside.any():
        raise IndexError(
            f"xentropy: label {labels[outside][0].item()} is outside [0, {classes}), and neither padding_idx "
            "nor -100"
        )
    return labels.long().clamp(0, max(classes - 1, 0)), ignored, outside


def xentropy_forward(logits, labels, smoothing=0.0, padding_idx=None, half_to_float=False):
    """(losses, normalizers) of (1 - smoothing) (lse - logits[label]) + smoothing (lse - mean(logits)).

    logits: [..., classes], float16, bfloat16, float32 or float64. labels: [...], int64 or int32. losses:
    [...], of the logits' dtype, or float32 for half logits with half_to_float. normalizers: [..., 2], float32
    (float64 for float64): the largest logit, and the sum of exp(logit - largest); lse is the logarithm of the
    sum of exp(logit). Labels equal to padding_idx or -100 have loss 0. Other labels outside [0, classes) raise
    IndexError on a CPU and give nan elsewhere. Raises TypeError and ValueError.
    """
    _check(logits, labels, smoothing)
    index, ignored, outside = _labels(logits, labels, padding_idx)
    math = _math_dtype(logits.dtype)
    dtype = math if half_to_float else logits.dtype
    if not labels.numel():
        return logits.new_empty(labels.shape, dtype=dtype), logits.new_empty((*labels.shape, 2), dtype=math)
    x = logits.to(math)
    largest = x.amax(-1)
    total = (x - largest.unsqueeze(-1)).exp().sum(-1)
    log_total = total.log()
    of_label = x.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    losses = (1 - smoothing) * (largest - of_label + log_total)
    if smoothing:  # not where it is 0: 0 times infinity is nan
        losses = losses + smoothing * (largest - x.mean(-1) + log_total)
    losses = losses.masked_fill(outside, float("nan")).masked_fill(ignored, 0)
    normalizers = torch.stack((largest.masked_fill(ignored, 0), total.masked_fill(ignored, 1)), -1)
    return losses.to(dtype), normalizers


def xentropy_backward(grad_losses, logits, labels, normalizers, smoothing=0.0, padding_idx=None):
    """The gradient of the logits, of their shape and dtype; 0 where a label is ignored."""
    _check(logits, labels, smoothing)
    index, ignored, outside = _labels(logits, labels, padding_idx)
    if not logits.numel():
        return logits.new_empty(logits.shape)
    math = _math_dtype(logits.dtype)
    largest, total = normalizers.unsqueeze(-2).unbind(-1)
    g = grad_losses.to(math).masked_fill(outside, float("nan")).unsqueeze(-1)
    gradient = (logits.to(math) - largest).exp() * (g / total) - g * (smoothing / logits.shape[-1])
    gradient = gradient.scatter_add(-1, index.unsqueeze(-1), -(1 - smoothing) * g)
    return gradient.masked_fill(ignored.unsqueeze(-1), 0).to(logits.dtype).contiguous()


class _Pair:
    """How autograd and autocast treat the pair where no binding fits this torch."""

    name = "xentropy"

    def setup_context(self, ctx, inputs, output):
        """Keeps what the backward needs."""
        logits, labels, smoothing, padding_idx, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, labels, output[1])
        ctx.known = (smoothing, padding_idx)
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad_losses, _):
        """Gradients of the forward's inputs, through the backward op."""
        if grad_losses is None:
            return (None,) * 5
        gradient = torch.ops.apex.xentropy_backward(grad_losses, *ctx.saved_tensors, *ctx.known)
        return gradient, None, None, None, None

    def setup_double_context(self, ctx, inputs, output):
        """Keeps the inputs of the backward."""
        grad_losses, logits, labels, normalizers, smoothing, padding_idx = inputs
        ctx.save_for_backward(grad_losses, logits, labels)
        ctx.known = (smoothing, padding_idx)

    def double_backward(self, ctx, gradient):
        """By torch's own differentiable ops."""
        grad_losses, logits, labels = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [leaf(t) for t in (grad_losses, logits)]
            largest = leaves[1].detach().to(_math_dtype(logits.dtype)).amax(-1)
            total = (leaves[1].to(largest.dtype) - largest.unsqueeze(-1)).exp().sum(-1)
            found = xentropy_backward(*leaves, labels, torch.stack((largest, total), -1), *ctx.known)
            of_losses, of_logits = torch.autograd.grad(found, leaves, gradient)
        return of_losses, of_logits, None, None, None, None

    def autocast(self, device_type, arguments, keywords):
        """Arguments of the forward as autocast changes them: losses are float32."""
        names = ("logits", "labels", "smoothing", "padding_idx", "half_to_float")
        return dict(zip(names, arguments, strict=False)) | keywords | {"half_to_float": True}


PAIRS = (_Pair(),)
