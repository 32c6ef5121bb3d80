"""The transducer's joint and loss: csrc/bindings/{transducer_joint,transducer_loss}.h in Python."""

from __future__ import annotations

import torch

from apex._portable import interface, tensors
from apex._portable.checks import index, is_index, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import F32, F64, address, code_of, contiguous, math_type


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
_joint_layout = interface.layout("TransducerJointBackward")
_joint_back = _joint_layout.filler(
    "grad_output", "f", "g", "mask", "f_len", "g_len", "batch_offset", "grad_f", "grad_g", "batch", "frames", "labels",
    "hidden", "rows", "scale", "type", "wide_lengths",
)  # fmt: skip
_c_joint = interface.function("apex_transducer_joint_forward")
_c_joint_prepare = interface.function("apex_transducer_joint_prepare")
_c_joint_back = interface.function("apex_transducer_joint_backward")


def _check_lengths(tensor, f_len, g_len, batch_offset):
    value(
        f_len.dim() == 1,
        "{}: f_len has one element for each item of the batch, not the shape {}",
        _JOINT,
        f_len.shape,
    )
    for name, lengths in (("f_len", f_len), ("g_len", g_len), ("batch_offset", batch_offset)):
        if lengths is None:
            continue
        type_(is_index(lengths), "{}: {} is int64 or int32, not {}", _JOINT, name, lengths.dtype)
        value(
            lengths.dim() == 1 and lengths.shape[0] == f_len.shape[0],
            "{}: {} has one element for each item of the batch, not the shape {}", _JOINT, name, lengths.shape,
        )  # fmt: skip
        value(
            lengths.device == tensor.device,
            "{}: {} is on {}, not on {}",
            _JOINT,
            name,
            lengths.device,
            tensor.device,
        )


def _check_joint(f, g, f_len, g_len, batch_offset, packed_batch, dropout, seed):
    code_of(_JOINT, f.dtype)
    type_(f.dtype is g.dtype, "{}: f and g must have one dtype, not {} and {}", _JOINT, f.dtype, g.dtype)
    value(
        f.dim() == 3 and g.dim() == 3 and f.shape[0] == g.shape[0] and f.shape[2] == g.shape[2],
        "{}: f [batch, frames, hidden] and g [batch, labels, hidden] do not fit: {}, {}", _JOINT, f.shape, g.shape,
    )  # fmt: skip
    value(f.device == g.device, "{}: f is on {} but g on {}", _JOINT, f.device, g.device)
    _check_lengths(f, f_len, g_len, batch_offset)
    value(
        f_len.shape[0] == f.shape[0],
        "{}: f_len has one element for each item of the batch, not the shape {}", _JOINT, f_len.shape,
    )  # fmt: skip
    value(packed_batch >= 0, "{}: packed_batch must not be negative", _JOINT)
    value(0 <= dropout <= 1, "{}: dropout_prob must be between 0 and 1, not {}", _JOINT, float(dropout))
    fits = seed is not None and seed.dtype is torch.int64 and seed.numel() == 1 and seed.device == f.device
    value(dropout == 0 or fits, "{}: dropout needs a seed, one int64 on {}", _JOINT, f.device)


def _check_joint_items(f_len, g_len, batch_offset, frames, labels, rows):
    """A CPU can look before it leaps; elsewhere such an item is nan."""
    if not f_len.is_cpu:
        return
    end, ends = 0, None if batch_offset is None else batch_offset.tolist()
    for b, (t, u) in enumerate(zip(f_len.tolist(), g_len.tolist(), strict=True)):
        value(0 <= t <= frames, "{}: f_len[{}] is {}, but f has {} frames", _JOINT, b, t, frames)
        value(0 <= u <= labels, "{}: g_len[{}] is {}, but g has {} labels", _JOINT, b, u, labels)
        if ends is None:
            continue
        end += t * u
        value(
            ends[b] == end, "{}: batch_offset[{}] is {}, but the sum of f_len * g_len up to it is {}",
            _JOINT, b, ends[b], end,
        )  # fmt: skip
        value(end <= rows, "{}: packed_batch is {}, less than the {} rows of the items", _JOINT, rows, end)


@kernel
def transducer_joint_forward(f, g, f_len, g_len, batch_offset, packed_batch, relu, dropout, seed):
    _check_joint(f, g, f_len, g_len, batch_offset, packed_batch, dropout, seed)
    place = tensors.place_of(f)
    if place is None:
        return None
    (batch, frames, hidden), labels = f.shape, g.shape[1]
    rows = batch * frames * labels if batch_offset is None else packed_batch
    _check_joint_items(f_len, g_len, batch_offset, frames, labels, rows)
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
    _check_lengths(grad, f_len, g_len, batch_offset)
    hidden, batch = grad.shape[-1], f_len.shape[0]
    before = (batch, max_f_len, max_g_len) if batch_offset is None else (grad.shape[0],)

    def fits(tensor, columns):
        return tensor.device == grad.device and tensor.shape == (*before, columns)

    value(
        grad.dim() == (4 if batch_offset is None else 2) and fits(grad, hidden),
        "{}: the gradient's shape {} is not the output's: {} items, {} frames, {} labels",
        _JOINT, grad.shape, batch, max_f_len, max_g_len,
    )  # fmt: skip
    value(
        mask is None or (mask.dtype is torch.uint8 and fits(mask, (hidden + 7) // 8)),
        "{}: the mask is not the forward's", _JOINT,
    )  # fmt: skip
    value((f is None) == (g is None), "{}: f goes with g", _JOINT)
    for tensor, size in () if f is None else ((f, max_f_len), (g, max_g_len)):
        value(
            tensor.dtype is grad.dtype and tensor.device == grad.device and tensor.shape == (batch, size, hidden),
            "{}: f or g is not the forward's: {} of shape {}", _JOINT, tensor.dtype, tensor.shape,
        )  # fmt: skip


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
    _check_joint_items(f_len, g_len, batch_offset, max_f_len, max_g_len, rows)
    lengths, of_g, ends = _lengths(f_len, g_len, batch_offset)
    grad, bits = grad_output.contiguous(), contiguous(mask)
    x, y = (None, None) if bits is not None else (contiguous(f), contiguous(g))
    grad_f, grad_g = (grad.new_empty((batch, size, hidden)) for size in (max_f_len, max_g_len))
    code = code_of(_JOINT, grad.dtype)
    buffer = _joint_back(
        grad.data_ptr(), address(x), address(y), address(bits), lengths.data_ptr(), of_g.data_ptr(), address(ends),
        grad_f.data_ptr(), grad_g.data_ptr(), batch, max_f_len, max_g_len, hidden, rows, scale, code,
        lengths.dtype is torch.int64,
    )  # fmt: skip
    variant = interface.variant()
    status = _c_joint_prepare(place, buffer, variant)
    if status and tensors.must_use_reference(status, _JOINT):
        return None
    splits, kept = _joint_layout.get(buffer, "splits"), []
    if splits > 1:
        math = F64 if grad.dtype is F64 else F32
        kept.append(grad.new_empty((splits, batch, max_g_len, hidden), dtype=math))
        kept.append(tensors.ZeroedCounters(place, grad.device, batch * hidden, _JOINT))
        _joint_layout.set(buffer, partials=kept[0].data_ptr(), counters=kept[1].address)
    status = _c_joint_back(place, buffer, variant[0])
    return None if status and tensors.must_use_reference(status, _JOINT) else (grad_f, grad_g)


# ---- the loss --------------------------------------------------------------------------------------------------------

_LOSS = "transducer_loss"
_COMMON = (
    "x", "label", "f_len", "g_len", "batch_offset", "batch", "frames", "labels", "classes", "blank", "rows", "type",
    "wide_labels", "wide_lengths",
)  # fmt: skip
_loss = interface.layout("TransducerLossForward").packer(
    *_COMMON, "normalizers", "emissions", "alpha", "beta", "loss", "loss_type"
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
    _check_length("f_len", f_len, label, x)
    _check_length("y_len", y_len, label, x)
    value(label.device == x.device, "{}: label is on {}, x on {}", _LOSS, label.device, x.device)
    if batch_offset is not None:
        _check_length("batch_offset", batch_offset, label, x)
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


def _check_length(name, lengths, label, x):
    type_(is_index(lengths), "{}: {} is int64 or int32, not {}", _LOSS, name, lengths.dtype)
    value(
        lengths.dim() == 1 and lengths.shape[0] == label.shape[0],
        "{}: {} has one element for each item of the batch, not the shape {}", _LOSS, name, lengths.shape,
    )  # fmt: skip
    value(lengths.device == x.device, "{}: {} is on {}, x on {}", _LOSS, name, lengths.device, x.device)


def _check_loss_items(x, label, f_len, y_len, batch_offset, frames):
    """A CPU can look before it leaps; elsewhere such an item is nan."""
    if not f_len.is_cpu:
        return
    end, most, classes = 0, label.shape[1], x.shape[-1]
    ends, labels = None if batch_offset is None else batch_offset.tolist(), label.tolist()
    for b, (t, u) in enumerate(zip(f_len.tolist(), y_len.tolist(), strict=True)):
        value(
            1 <= t <= frames,
            "{}: f_len[{}] is {}, outside [1, {}]: an item has at least one frame",
            _LOSS,
            b,
            t,
            frames,
        )
        value(0 <= u <= most, "{}: y_len[{}] is {}, but label has {} columns", _LOSS, b, u, most)
        for i, one in enumerate(labels[b][:u]):
            index(0 <= one < classes, "{}: label[{}, {}] is {}, outside [0, {})", _LOSS, b, i, one, classes)
        if ends is None:
            continue
        end += t * (u + 1)
        value(
            ends[b] == end, "{}: batch_offset[{}] is {}, but the sum of f_len * (y_len + 1) up to it is {}",
            _LOSS, b, ends[b], end,
        )  # fmt: skip
        value(
            end <= x.shape[0],
            "{}: packed x has {} rows, less than the {} of the items",
            _LOSS,
            x.shape[0],
            end,
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
    _check_loss_items(x, label, f_len, y_len, batch_offset, frames)
    common, kept = _common(x, label, f_len, y_len, blank_idx, batch_offset, frames)
    math, batch, labels = math_type(x.dtype), label.shape[0], label.shape[1] + 1
    loss = x.new_empty(batch, dtype=math if half_to_float else x.dtype)
    alpha, beta = (x.new_empty((batch, frames, labels, 2), dtype=math) for _ in range(2))
    normalizers = x.new_empty(0 if log_probs else (*x.shape[:-1], 2), dtype=math)
    emissions = x.new_empty((batch, frames + labels - 1, labels, 2), dtype=math)
    packed = _loss(
        *common, 0 if log_probs else normalizers.data_ptr(), emissions.data_ptr(), alpha.data_ptr(), beta.data_ptr(),
        loss.data_ptr(), code_of(_LOSS, loss.dtype),
    )  # fmt: skip
    status = _c_loss(place, packed)
    del kept
    return None if status and tensors.must_use_reference(status, _LOSS) else (loss, alpha, beta, normalizers)


def _check_loss_back(
    grad_loss, x, label, f_len, y_len, alpha, beta, normalizers, blank_idx, batch_offset, of_logits
):
    value(alpha.dim() == 4 and beta.dim() == 4, "{}: alpha and beta are not the forward's", _LOSS)
    frames = alpha.shape[1]
    _check_loss(x, label, f_len, y_len, blank_idx, batch_offset, frames)
    math = math_type(x.dtype)
    nodes = (label.shape[0], x.shape[1] if batch_offset is None else frames, label.shape[1] + 1, 2)
    for one in (alpha, beta):
        value(
            one.shape == nodes and one.dtype is math and one.device == x.device,
            "{}: alpha and beta are {} of shape {}, as the forward gives them", _LOSS, math, nodes,
        )  # fmt: skip
    value(
        grad_loss.dim() == 1 and grad_loss.shape[0] == label.shape[0] and grad_loss.device == x.device,
        "{}: the gradient of the losses has one element for each item, not the shape {}", _LOSS, grad_loss.shape,
    )  # fmt: skip
    if normalizers is None:
        return
    value(of_logits, "{}: with normalizers the gradient is that of logits", _LOSS)
    value(
        normalizers.shape == (*x.shape[:-1], 2) and normalizers.dtype is math and normalizers.device == x.device,
        "{}: normalizers are two {} for each row of x, as the forward gives them", _LOSS, math,
    )  # fmt: skip


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
    _check_loss_items(x, label, f_len, y_len, batch_offset, alpha.shape[1])
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
