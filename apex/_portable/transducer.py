"""The transducer's joint and loss: csrc/bindings/{transducer_joint,transducer_loss}.h in Python."""

from __future__ import annotations

import torch

from apex._portable import interface, tensors, workspace
from apex._portable.checks import is_index, like, seed_for, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import address, code_of, contiguous, math_type


def _lengths(f_len, g_len, batch_offset):
    """Both lengths in one dtype, and the offsets in 64 bits; of no items they still say that rows are packed."""
    f, g = f_len.contiguous(), g_len.contiguous()
    if f.dtype is not g.dtype:
        f, g = f.to(torch.int64), g.to(torch.int64)
    if batch_offset is None:
        return f, g, None
    if not batch_offset.numel():
        return f, g, torch.zeros(1, dtype=torch.int64, device=batch_offset.device)
    return f, g, batch_offset.to(torch.int64).contiguous()


# ---- the joint -------------------------------------------------------------------------------------------------------

_JOINT = "transducer_joint"
_joint = interface.layout("TransducerJointForward").packer(
    "f", "g", "f_len", "g_len", "batch_offset", "seed", "output", "mask", "batch", "frames", "labels", "hidden", "rows",
    "scale", "keep", "type", "wide_lengths", "relu",
)  # fmt: skip
_joint_back = interface.layout("TransducerJointBackward").packer(
    "grad_output", "f", "g", "mask", "f_len", "g_len", "batch_offset", "grad_f", "grad_g", "batch", "frames", "labels",
    "hidden", "rows", "scale", "type", "wide_lengths",
)  # fmt: skip
_c_joint = interface.function("apex_transducer_joint_forward")
_c_joint_back = interface.function("apex_transducer_joint_backward")


def _check_lengths(op, f_len, labels_name, labels, batch_offset, items):
    for name, lengths in (("f_len", f_len), (labels_name, labels), ("batch_offset", batch_offset)):
        if lengths is None:
            continue
        type_(is_index(lengths), "{}: {} is int64 or int32, not {}", op, name, lengths.dtype)
        value(
            lengths.shape == (items,),
            "{}: {} has one element for each item of the batch, not the shape {}", op, name, lengths.shape,
        )  # fmt: skip


def _check_joint(f, g, f_len, g_len, batch_offset, packed_batch, dropout, seed):
    code_of(_JOINT, f.dtype)
    type_(f.dtype is g.dtype, "{}: f and g must have one dtype, not {} and {}", _JOINT, f.dtype, g.dtype)
    value(
        f.dim() == 3 and g.dim() == 3 and f.shape[0] == g.shape[0] and f.shape[2] == g.shape[2],
        "{}: f [batch, frames, hidden] and g [batch, labels, hidden] do not fit: {}, {}", _JOINT, f.shape, g.shape,
    )  # fmt: skip
    _check_lengths(_JOINT, f_len, "g_len", g_len, batch_offset, f.shape[0])
    value(packed_batch >= 0, "{}: packed_batch must not be negative", _JOINT)
    value(0 <= dropout <= 1, "{}: dropout_prob must be between 0 and 1, not {}", _JOINT, float(dropout))
    seed_for(_JOINT, dropout, seed, f)


@kernel
def transducer_joint_forward(f, g, f_len, g_len, batch_offset, packed_batch, relu, dropout, seed):
    _check_joint(f, g, f_len, g_len, batch_offset, packed_batch, dropout, seed)
    place = tensors.place_of(f)
    if place is None:
        return None
    (batch, frames, hidden), labels = f.shape, g.shape[1]
    rows = batch * frames * labels if batch_offset is None else packed_batch
    x, y = f.contiguous(), g.contiguous()
    lengths, of_g, ends = _lengths(f_len, g_len, batch_offset)
    before = (batch, frames, labels) if batch_offset is None else (packed_batch,)
    output = f.new_empty((*before, hidden))
    mask = f.new_empty((*before, (hidden + 7) // 8) if dropout > 0 else 0, dtype=torch.uint8)
    packed = _joint(
        x.data_ptr(), y.data_ptr(), lengths.data_ptr(), of_g.data_ptr(), address(ends),
        seed.data_ptr() if dropout > 0 else 0, output.data_ptr(), mask.data_ptr() if dropout > 0 else 0, batch, frames,
        labels, hidden, rows, 1 / (1 - dropout) if dropout < 1 else 0.0, int((1 - dropout) * 65536 + 0.5),
        code_of(_JOINT, f.dtype), lengths.dtype is torch.int64, relu,
    )  # fmt: skip
    status = _c_joint(place, packed)
    return None if status and tensors.must_use_reference(status, _JOINT) else (output, mask)


def _check_joint_back(grad, f, g, mask, f_len, g_len, batch_offset, max_f_len, max_g_len):
    code_of(_JOINT, grad.dtype)
    _check_lengths(_JOINT, f_len, "g_len", g_len, batch_offset, f_len.numel())
    value(
        grad.dim() == (4 if batch_offset is None else 2),
        "{}: the gradient has {} dimensions; packed it has 2, else 4", _JOINT, grad.dim(),
    )  # fmt: skip
    hidden, batch = grad.shape[-1], f_len.shape[0]
    before = (batch, max_f_len, max_g_len) if batch_offset is None else (grad.shape[0],)
    like(_JOINT, "the gradient", grad, (*before, hidden), grad.dtype, "the output's ")
    like(_JOINT, "the mask", mask, (*before, (hidden + 7) // 8), torch.uint8, "the forward's ")
    value((f is None) == (g is None), "{}: f goes with g", _JOINT)
    like(_JOINT, "f", f, (batch, max_f_len, hidden), grad.dtype, "the forward's ")
    like(_JOINT, "g", g, (batch, max_g_len, hidden), grad.dtype, "the forward's ")


@kernel
def transducer_joint_backward(
    grad_output, f, g, mask, f_len, g_len, batch_offset, max_f_len, max_g_len, scale
):
    _check_joint_back(grad_output, f, g, mask, f_len, g_len, batch_offset, max_f_len, max_g_len)
    place = tensors.place_of(grad_output)
    if place is None:
        return None
    batch, hidden = f_len.shape[0], grad_output.shape[-1]
    rows = batch * max_f_len * max_g_len if batch_offset is None else grad_output.shape[0]
    lengths, of_g, ends = _lengths(f_len, g_len, batch_offset)
    grad, bits = grad_output.contiguous(), contiguous(mask)
    x, y = (None, None) if bits is not None else (contiguous(f), contiguous(g))
    grad_f, grad_g = (grad.new_empty((batch, size, hidden)) for size in (max_f_len, max_g_len))
    code = code_of(_JOINT, grad.dtype)
    packed = _joint_back(
        grad.data_ptr(), address(x), address(y), address(bits), lengths.data_ptr(), of_g.data_ptr(), address(ends),
        grad_f.data_ptr(), grad_g.data_ptr(), batch, max_f_len, max_g_len, hidden, rows, scale, code,
        lengths.dtype is torch.int64,
    )  # fmt: skip
    return (grad_f, grad_g) if workspace.run(_c_joint_back, place, packed, _JOINT, grad) else None


# ---- the loss --------------------------------------------------------------------------------------------------------

_LOSS = "transducer_loss"
_COMMON = (
    "x", "label", "f_len", "g_len", "batch_offset", "batch", "frames", "labels", "classes", "blank", "rows", "type",
    "wide_labels", "wide_lengths",
)  # fmt: skip
_loss = interface.layout("TransducerLossForward").packer(
    *_COMMON, "normalizers", "alpha", "beta", "loss", "loss_type"
)
_loss_back = interface.layout("TransducerLossBackward").packer(
    *_COMMON, "grad_loss", "grad_stride", "grad_type", "alpha", "beta", "grad_x", "normalizers", "of_logits"
)
_c_loss, _c_loss_back = (
    interface.function("apex_transducer_loss_forward"),
    interface.function("apex_transducer_loss_backward"),
)


def _check_loss(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len):
    code_of(_LOSS, x.dtype)
    type_(is_index(label), "{}: label is int64 or int32, not {}", _LOSS, label.dtype)
    value(label.dim() == 2, "{}: label is [batch, labels], not of shape {}", _LOSS, label.shape)
    _check_lengths(_LOSS, f_len, "y_len", y_len, batch_offset, label.shape[0])
    if batch_offset is not None:
        value(x.dim() == 2, "{}: packed x is [rows, classes], not of shape {}", _LOSS, x.shape)
        value(max_f_len >= 0, "{}: max_f_len must not be negative", _LOSS)
    else:
        value(
            x.dim() == 4 and x.shape[0] == label.shape[0] and x.shape[2] == label.shape[1] + 1,
            "{}: x [batch, frames, labels + 1, classes] and label [batch, labels] do not fit: {}, {}",
            _LOSS, x.shape, label.shape,
        )  # fmt: skip
    value(
        0 <= blank_idx < x.shape[-1],
        "{}: blank_idx is {}, outside the classes of x of shape {}",
        _LOSS,
        blank_idx,
        x.shape,
    )


def _common(x, label, f_len, y_len, blank_idx, batch_offset, frames):
    """The fields _COMMON, and the tensors that must live as long."""
    kept = x.contiguous(), label.contiguous(), *_lengths(f_len, y_len, batch_offset)
    batch, labels = label.shape[0], label.shape[1] + 1
    rows = batch * frames * labels if batch_offset is None else x.shape[0]
    fields = (
        *map(address, kept), batch, frames, labels, x.shape[-1], blank_idx, rows, code_of(_LOSS, x.dtype),
        label.dtype is torch.int64, kept[2].dtype is torch.int64,
    )  # fmt: skip
    return fields, kept


@kernel
def transducer_loss_forward(
    x, label, f_len, y_len, blank_idx, batch_offset, max_f_len, log_probs, half_to_float
):
    _check_loss(x, label, f_len, y_len, blank_idx, batch_offset, max_f_len)
    place = tensors.place_of(x)
    if place is None:
        return None
    frames = x.shape[1] if batch_offset is None else max_f_len
    common, kept = _common(x, label, f_len, y_len, blank_idx, batch_offset, frames)
    math, batch, labels = math_type(x.dtype), label.shape[0], label.shape[1] + 1
    loss = x.new_empty(batch, dtype=math if half_to_float else x.dtype)
    alpha, beta = (x.new_empty((batch, frames, labels, 2), dtype=math) for _ in range(2))
    normalizers = x.new_empty(0 if log_probs else (*x.shape[:-1], 2), dtype=math)
    packed = _loss(
        *common, 0 if log_probs else normalizers.data_ptr(), alpha.data_ptr(), beta.data_ptr(), loss.data_ptr(),
        code_of(_LOSS, loss.dtype),
    )  # fmt: skip
    served = workspace.run(_c_loss, place, packed, _LOSS, x)
    del kept
    return (loss, alpha, beta, normalizers) if served else None


def _check_loss_back(
    grad_loss, x, label, f_len, y_len, alpha, beta, normalizers, blank_idx, batch_offset, of_logits
):
    value(alpha.dim() == 4 and beta.dim() == 4, "{}: alpha and beta are not the forward's", _LOSS)
    frames = alpha.shape[1]
    _check_loss(x, label, f_len, y_len, blank_idx, batch_offset, frames)
    math = math_type(x.dtype)
    nodes = (label.shape[0], x.shape[1] if batch_offset is None else frames, label.shape[1] + 1, 2)
    like(_LOSS, "alpha", alpha, nodes, math, "the forward's ")
    like(_LOSS, "beta", beta, nodes, math, "the forward's ")
    like(_LOSS, "the gradient", grad_loss, (label.shape[0],), None, "one for each item, ")
    if normalizers is None:
        return
    value(of_logits, "{}: with normalizers the gradient is that of logits", _LOSS)
    like(_LOSS, "normalizers", normalizers, (*x.shape[:-1], 2), math, "the forward's ")


@kernel
def transducer_loss_backward(
    grad_loss, x, label, f_len, y_len, alpha, beta, normalizers, blank_idx, batch_offset, of_logits
):
    _check_loss_back(
        grad_loss, x, label, f_len, y_len, alpha, beta, normalizers, blank_idx, batch_offset, of_logits
    )
    place = tensors.place_of(x)
    if place is None:
        return None
    common, kept = _common(x, label, f_len, y_len, blank_idx, batch_offset, alpha.shape[1])
    # What sum() and mean() hand back is one value for all items.
    same = grad_loss.stride(0) == 0 or grad_loss.shape[0] == 1
    grad = grad_loss if same else grad_loss.contiguous()
    forward, onward, sums = alpha.contiguous(), beta.contiguous(), contiguous(normalizers)
    gradient = x.new_empty(x.shape)
    packed = _loss_back(
        *common, grad.data_ptr(), 0 if same else 1, code_of(_LOSS, grad.dtype), forward.data_ptr(), onward.data_ptr(),
        gradient.data_ptr(), address(sums), of_logits,
    )  # fmt: skip
    status = _c_loss_back(place, packed)
    del kept
    return None if status and tensors.must_use_reference(status, _LOSS) else gradient
