"""Rotary position embedding: csrc/bindings/rope.h in Python."""

from __future__ import annotations

import torch

from apex._portable import interface, tensors
from apex._portable.checks import like, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import address, code_of

_pack = interface.layout("Rope").packer(
    "input", "output", "batch", "height", "width", "heads", "dim", "in_batch", "in_y", "in_x", "in_head", "in_element",
    "out_batch", "out_y", "out_x", "out_head", "cos", "sin", "angle_stride", "angle_step", "angle_rows", "cos_x",
    "sin_x", "angle_stride_x", "angle_step_x", "cu_seqlens", "sequences", "groups", "rotary", "type", "angle_type",
    "transposed",
)  # fmt: skip
_c = interface.function("apex_rope")
# [batch, height, width, heads, element] of input and output; -1: a dimension that is not there.
_IMAGE, _PACKED, _PLAIN = (0, 1, 2, 3, 4), (-1, -1, 0, 1, 2), (1, -1, 0, 2, 3)


def _check_table(name, table, cos):
    value(table.dim() == 4, "rope: {} must have 4 dimensions, not {}", name, table.dim())
    type_(
        table.dtype is cos.dtype, "rope: {} is {} but the first table is {}: all must have one dtype",
        name, table.dtype, cos.dtype,
    )  # fmt: skip


def _check_image(input, cos, sin, cos_w, sin_w, cu_seqlens):
    value(
        sin is not None and sin_w is not None and cu_seqlens is None,
        "rope: images need cos and sin of both directions, and no cu_seqlens",
    )
    value(
        input.dim() == 5,
        "rope: an image has 5 dimensions [batch, height, width, heads, dim], not {}",
        input.dim(),
    )
    _check_table("cos_w", cos_w, cos)
    _check_table("sin_w", sin_w, cos)
    like("rope", "sin_w", sin_w, cos_w.shape, None, "the cosines' ")
    for side, (table, name) in enumerate(((cos, "cos_h and sin_h"), (cos_w, "cos_w and sin_w"))):
        value(
            table.shape[0] == 1 and table.shape[2] == 1 and table.shape[1] >= input.shape[1 + side],
            "rope: {} must be [1, n, 1, dim / 2] with n at least {}, not {}", name, input.shape[1 + side], table.shape,
        )  # fmt: skip
        value(
            table.shape[3] * 2 == input.shape[4],
            "rope: the last dimension of {} must be half of the input's {}, not {}",
            name, input.shape[4], table.shape[3],
        )  # fmt: skip


def _check_packed(input, ends):
    value(
        input.dim() == 3,
        "rope: with cu_seqlens the input has 3 dimensions [places, heads, dim], not {}",
        input.dim(),
    )
    type_(ends.dtype is torch.int32, "rope: cu_seqlens must be int32, not {}", ends.dtype)
    value(
        ends.dim() == 1 and ends.shape[0] >= 1, "rope: cu_seqlens must be [sequences + 1], not {}", ends.shape
    )


def _check(input, cos, sin, cos_w, sin_w, cu_seqlens):
    code_of("rope", input.dtype)
    code_of("rope", cos.dtype)
    first = "freqs" if sin is None else "cos"
    _check_table(first, cos, cos)
    if sin is not None:
        _check_table("sin", sin, cos)
        like("rope", "sin", sin, cos.shape, None, "the cosines' ")
    rotary = cos.shape[3]
    value(rotary % 2 == 0, "rope: the last dimension of {} is {}; pairs need an even number", first, rotary)
    if cos_w is not None:
        _check_image(input, cos, sin, cos_w, sin_w, cu_seqlens)
        return
    value(sin_w is None, "rope: sin_w without cos_w")
    value(cos.shape[1] == cos.shape[2] == 1, "rope: {} must be [places, 1, 1, dim], not {}", first, cos.shape)
    value(
        rotary <= input.shape[-1], "rope: the last dimension of {}, {}, is more than the input's {}",
        first, rotary, input.shape[-1],
    )  # fmt: skip
    if cu_seqlens is not None:
        _check_packed(input, cu_seqlens)
        return
    value(
        input.dim() == 4,
        "rope: the input must have 4 dimensions [places, batch, heads, dim], not {}",
        input.dim(),
    )
    value(
        cos.shape[0] == input.shape[0],
        "rope: {} has {} places but the input {}",
        first,
        cos.shape[0],
        input.shape[0],
    )


def _alike(cos, sin):
    """Both as kernels read them: as they lie, if they lie alike."""
    if sin is None or sin.stride() == cos.stride():
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def _turn(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output, transposed):
    _check(input, cos, sin, cos_w, sin_w, cu_seqlens)
    place = tensors.place_of(input)
    if place is None:
        return None
    image, shape, strides = cos_w is not None, input.shape, input.stride()
    if transpose_output and not image and cu_seqlens is None:
        output = input.new_empty((shape[1], shape[0], *shape[2:])).transpose(0, 1)
    else:
        output = input.new_empty(shape)
    at = _IMAGE if image else _PACKED if cu_seqlens is not None else _PLAIN
    sizes = [1 if d < 0 else shape[d] for d in at]
    value(sizes[4] <= 0x7FFFFFFF, "rope: a head of {} elements", sizes[4])
    read, out = [0 if d < 0 else strides[d] for d in at], output.stride()
    written = [0 if d < 0 else out[d] for d in at[:4]]
    rows = 1 if image else 0  # the tables' dimension
    c, s = _alike(cos, sin)
    c_x, s_x = _alike(cos_w, sin_w) if image else (None, None)
    ends = tensors.contiguous(cu_seqlens)
    packed = _pack(
        input.data_ptr(), output.data_ptr(), *sizes, *read, *written, c.data_ptr(), address(s), c.stride(rows),
        c.stride(3), c.shape[rows], address(c_x), address(s_x), c_x.stride(rows) if image else 0,
        c_x.stride(3) if image else 0, address(ends), 0 if ends is None else ends.numel() - 1, 2 if image else 1,
        c.shape[3], code_of("rope", input.dtype), code_of("rope", c.dtype), transposed,
    )  # fmt: skip
    status = _c(place, packed)
    return None if status and tensors.must_use_reference(status, "rope") else output


@kernel
def rope_forward(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output):
    return _turn(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output, False)


@kernel
def rope_backward(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output):
    return _turn(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output, True)
