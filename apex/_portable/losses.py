"""Cross entropy and focal loss: csrc/bindings/{xentropy,focal_loss}.h in Python."""

from __future__ import annotations

import torch

from apex._portable import interface, tensors, workspace
from apex._portable.checks import labelled, like, value
from apex._portable.functional import kernel
from apex._portable.tensors import code_of, math_type

# ---- xentropy --------------------------------------------------------------------------------------------------------

_IGNORED = -100  # torch's ignore_index
_FIELDS = (
    "logits", "labels", "rows", "classes", "row_stride", "padding_index", "has_padding", "smoothing", "logits_type",
    "wide_labels",
)  # fmt: skip
_forward = interface.layout("XentropyForward").packer(*_FIELDS, "losses", "normalizers", "loss_type")
_backward = interface.layout("XentropyBackward").packer(
    *_FIELDS, "grad_losses", "grad_stride", "grad_type", "normalizers", "grad_logits"
)
_c_forward, _c_backward = (
    interface.function("apex_xentropy_forward"),
    interface.function("apex_xentropy_backward"),
)


def _check(logits, labels, smoothing):
    labelled("xentropy", logits, "labels", labels)
    value(0 <= smoothing <= 1, "xentropy: smoothing must be between 0 and 1, not {}", smoothing)


def _rows(logits):
    """The logits as rows at even distances: a view where their strides allow it (a slice of a padded vocabulary)."""
    if logits.is_contiguous():
        return logits, logits.shape[-1]
    if logits.dim() == 2 and logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]:
        return logits, logits.stride(0)
    return logits.contiguous(), logits.shape[-1]


def _common(logits, labels, smoothing, padding_idx):
    """What both structs begin with, and the tensors that must live as long."""
    (rows, stride), given = _rows(logits), labels.contiguous()
    classes, count = rows.shape[-1], given.numel()
    value(classes > 0 or count == 0, "xentropy: logits have no classes: their shape is {}", rows.shape)
    packed = (
        rows.data_ptr(), given.data_ptr(), count, classes, stride, padding_idx or 0, padding_idx is not None, smoothing,
        code_of("xentropy", rows.dtype), given.dtype is torch.int64,
    )  # fmt: skip
    return packed, (rows, given)


@kernel
def xentropy_forward(logits, labels, smoothing, padding_idx, half_to_float):
    _check(logits, labels, smoothing)
    place = tensors.place_of(logits)
    if place is None:
        return None
    common, kept = _common(logits, labels, smoothing, padding_idx)
    math = math_type(logits.dtype)
    losses = logits.new_empty(labels.shape, dtype=math if half_to_float else logits.dtype)
    normalizers = logits.new_empty((*labels.shape, 2), dtype=math)
    packed = _forward(*common, losses.data_ptr(), normalizers.data_ptr(), code_of("xentropy", losses.dtype))
    served = workspace.run(_c_forward, place, packed, "xentropy", logits)
    del kept
    return (losses, normalizers) if served else None


def _is_one_value(grad):
    """What sum() and mean() hand back is one value for all rows."""
    return all(stride == 0 or size == 1 for stride, size in zip(grad.stride(), grad.shape, strict=True))


@kernel
def xentropy_backward(grad_losses, logits, labels, normalizers, smoothing, padding_idx):
    _check(logits, labels, smoothing)
    math = math_type(logits.dtype)
    like("xentropy", "the gradient", grad_losses, labels.shape, None, "the labels' ")
    like("xentropy", "normalizers", normalizers, (*labels.shape, 2), math, "the forward's ")
    place = tensors.place_of(logits)
    if place is None:
        return None
    common, kept = _common(logits, labels, smoothing, padding_idx)
    same, saved = _is_one_value(grad_losses), normalizers.contiguous()
    grad, gradient = grad_losses if same else grad_losses.contiguous(), logits.new_empty(logits.shape)
    packed = _backward(
        *common,
        grad.data_ptr(),
        0 if same else 1,
        code_of("xentropy", grad.dtype),
        saved.data_ptr(),
        gradient.data_ptr(),
    )
    status = _c_backward(place, packed)
    del kept
    return None if status and tensors.must_use_reference(status, "xentropy") else gradient


# ---- focal_loss ------------------------------------------------------------------------------------------------------

_focal = interface.layout("FocalLoss").packer(
    "logits", "targets", "num_positives", "rows", "classes", "real_classes", "alpha", "gamma", "smoothing", "type",
    "wide_targets", "in_vectors", "grad_loss", "result",
)  # fmt: skip
_focal_forward = interface.function("apex_focal_loss_forward")
_focal_backward = interface.function("apex_focal_loss_backward")


def _check_focal(logits, targets, num_positives, classes, smoothing):
    labelled("focal_loss", logits, "targets", targets)
    value(
        num_positives.numel() == 1 and num_positives.is_floating_point(),
        "focal_loss: num_positives_sum is a floating-point tensor of one element, not {} of shape {}",
        num_positives.dtype, num_positives.shape,
    )  # fmt: skip
    value(
        0 <= classes <= logits.shape[-1],
        "focal_loss: {} real classes do not fit logits of shape {}",
        classes,
        logits.shape,
    )
    value(0 <= smoothing <= 1, "focal_loss: label_smoothing must be between 0 and 1, not {}", smoothing)


def _focal_call(logits, targets, num_positives, classes, alpha, gamma, smoothing, grad=None, result=None):
    """(buffer, tensors that must live as long)"""
    x, t, n = logits.contiguous(), targets.contiguous(), num_positives.to(math_type(logits.dtype))
    aligned = x.data_ptr() % 16 == 0 and (result is None or result.data_ptr() % 16 == 0)
    buffer = _focal(
        x.data_ptr(), t.data_ptr(), n.data_ptr(), t.numel(), x.shape[-1], classes, alpha, gamma, smoothing,
        code_of("focal_loss", x.dtype), t.dtype is torch.int64, aligned, tensors.address(grad), tensors.address(result),
    )  # fmt: skip
    return buffer, (x, t, n)


@kernel
def focal_loss_forward(logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing):
    _check_focal(logits, targets, num_positives, num_real_classes, smoothing)
    place = tensors.place_of(logits)
    if place is None:
        return None
    loss = logits.new_empty((), dtype=math_type(logits.dtype))
    packed, kept = _focal_call(
        logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing, result=loss
    )
    served = workspace.run(_focal_forward, place, packed, "focal_loss", logits)
    del kept
    return loss if served else None


@kernel
def focal_loss_backward(grad_loss, logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing):
    _check_focal(logits, targets, num_positives, num_real_classes, smoothing)
    value(
        grad_loss.numel() == 1,
        "focal_loss: the gradient of the loss is one element, not a tensor of shape {}", grad_loss.shape,
    )  # fmt: skip
    place = tensors.place_of(logits)
    if place is None:
        return None
    grad, gradient = grad_loss.to(math_type(logits.dtype)), logits.new_empty(logits.shape)
    buffer, kept = _focal_call(
        logits, targets, num_positives, num_real_classes, alpha, gamma, smoothing, grad, gradient
    )
    status = _focal_backward(place, buffer)
    del kept
    return None if status and tensors.must_use_reference(status, "focal_loss") else gradient
