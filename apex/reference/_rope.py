"""What the reference of rope is made of: checks, tables of angles, the turn itself, and its autograd."""

import torch

_NAMES = ("input", "cos", "sin", "cos_w", "sin_w", "cu_seqlens", "transpose_output")
LARGEST_ANGLE = 2.0**50  # as in csrc/device/trigonometry.h
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _table(name, table, input, cos):
    if table.dim() != 4:
        raise ValueError(f"rope: {name} must have 4 dimensions, not {table.dim()}")
    if table.dtype != cos.dtype:
        raise TypeError(
            f"rope: {name} is {table.dtype} but the first table is {cos.dtype}: all must have one dtype"
        )
    if table.device != input.device:
        raise ValueError(f"rope: {name} is on {table.device} but the input is on {input.device}")


def check(input, cos, sin, cos_w, sin_w, cu_seqlens):
    """Raises ValueError or TypeError where shapes, dtypes or devices do not fit, as the bindings do."""
    for dtype in (input.dtype, cos.dtype):
        if dtype not in _FLOATS:
            raise TypeError(f"rope takes float32, float16, bfloat16 and float64, not {dtype}")
    first = "freqs" if sin is None else "cos"
    for name, table in ((first, cos), ("sin", sin), ("cos_w", cos_w), ("sin_w", sin_w)):
        if table is not None:
            _table(name, table, input, cos)
    for a, b in ((cos, sin), (cos_w, sin_w)):
        if b is not None and (a is None or a.shape != b.shape):
            raise ValueError("rope: sines and cosines must come together and have one shape")
    if cos.shape[3] % 2:
        raise ValueError(f"rope: the last dimension of {first} is {cos.shape[3]}; pairs need an even number")
    if cos_w is not None:
        _check_image(input, cos, sin, cos_w, sin_w, cu_seqlens)
        return
    if cos.shape[1] != 1 or cos.shape[2] != 1:
        raise ValueError(f"rope: {first} must be [places, 1, 1, dim], not {list(cos.shape)}")
    wanted = 4 if cu_seqlens is None else 3
    if input.dim() != wanted:
        raise ValueError(f"rope: the input must have {wanted} dimensions, not {input.dim()}")
    if cos.shape[3] > input.shape[-1]:
        raise ValueError(
            f"rope: the last dimension of {first}, {cos.shape[3]}, is more than the input's {input.shape[-1]}"
        )
    if cu_seqlens is None:
        if cos.shape[0] != input.shape[0]:
            raise ValueError(f"rope: {first} has {cos.shape[0]} places but the input {input.shape[0]}")
        return
    _check_packed(input, cos, cu_seqlens)


def _check_image(input, cos, sin, cos_w, sin_w, cu_seqlens):
    if sin is None or sin_w is None or cu_seqlens is not None:
        raise ValueError("rope: images need cos and sin of both directions, and no cu_seqlens")
    if input.dim() != 5:
        raise ValueError(
            f"rope: an image has 5 dimensions [batch, height, width, heads, dim], not {input.dim()}"
        )
    for name, table, size in (
        ("cos_h and sin_h", cos, input.shape[1]),
        ("cos_w and sin_w", cos_w, input.shape[2]),
    ):
        if table.shape[0] != 1 or table.shape[2] != 1 or table.shape[1] < size:
            raise ValueError(
                f"rope: {name} must be [1, n, 1, dim / 2] with n at least {size}, not {list(table.shape)}"
            )
        if table.shape[3] * 2 != input.shape[4]:
            raise ValueError(
                f"rope: the last dimension of {name} must be half of the input's {input.shape[4]}, not {table.shape[3]}"
            )


def _check_packed(input, cos, cu_seqlens):
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"rope: cu_seqlens must be int32, not {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"rope: cu_seqlens must be [sequences + 1], not {list(cu_seqlens.shape)}")
    if cu_seqlens.device != input.device:
        raise ValueError(f"rope: cu_seqlens is on {cu_seqlens.device} but the input is on {input.device}")
    # Elements are looked at where that makes nobody wait, and not while shapes alone are traced.
    if cu_seqlens.device.type != "cpu" or type(cu_seqlens) is not torch.Tensor:
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] > input.shape[0]:
        raise ValueError(
            f"rope: cu_seqlens must begin at 0 and end within the input's {input.shape[0]} places, "
            f"not go from {ends[0]} to {ends[-1]}"
        )
    for index in range(1, len(ends)):
        length = ends[index] - ends[index - 1]
        if length < 0:
            raise ValueError(
                f"rope: cu_seqlens falls from {ends[index - 1]} to {ends[index]} at index {index}"
            )
        if length > cos.shape[0]:
            raise ValueError(f"rope: sequence {index - 1} has {length} places but freqs only {cos.shape[0]}")


def _cos_sin(cos, sin, math):
    if sin is not None:
        return cos.to(math), sin.to(math)
    angles = cos if cos.dtype == torch.float64 else cos.to(math)
    angles = angles.masked_fill(angles.abs() >= LARGEST_ANGLE, torch.nan)
    return angles.cos().to(math), angles.sin().to(math)


def _turn_pairs(x, cos, sin, back):
    """x's last dimension, all of it pairs."""
    (low, high), (cos_low, cos_high), (sin_low, sin_high) = (t.chunk(2, -1) for t in (x, cos, sin))
    of_low, of_high = (sin_high, -sin_low) if back else (-sin_low, sin_high)
    return torch.cat((low * cos_low + high * of_low, high * cos_high + low * of_high), -1)


def _rows(rows, cu_seqlens, places):
    """(row of every place's angles, whether it has none because something is wrong, whether it is padding)"""
    ends, place = cu_seqlens.long(), torch.arange(places, dtype=torch.int64, device=cu_seqlens.device)
    fits = (ends[0] == 0) & (ends[-1] <= places) & (ends.diff() >= 0).all()
    sequence = (torch.searchsorted(ends, place, right=True) - 1).clamp(min=0)
    row, padding = place - ends[sequence], fits & (place >= ends[-1])
    return row.clamp(0, max(rows - 1, 0)), ~padding & (~fits | (row >= rows)), padding


def turn(input, cos, sin, cos_w, sin_w, cu_seqlens, transpose_output, back):
    """The input with its heads turned, or turned back."""
    math = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = input.to(math)
    cos, sin = _cos_sin(cos, sin, math)
    rotary = cos.shape[-1]
    if cos_w is not None:
        height, width = input.shape[1:3]
        cos_w, sin_w = _cos_sin(cos_w, sin_w, math)
        parts = [
            _turn_pairs(x[..., :rotary], cos[:, :height, None], sin[:, :height, None], back),
            _turn_pairs(x[..., rotary:], cos_w[:, None, :width], sin_w[:, None, :width], back),
        ]
    else:
        padding = None
        if cu_seqlens is not None:
            row, wrong, padding = _rows(cos.shape[0], cu_seqlens, input.shape[0])
            if not cos.shape[0]:  # no place has angles; there must be a row to read
                cos = sin = cos.new_zeros(1, 1, 1, rotary)
            cos, sin = (t[row, 0].masked_fill(wrong[:, None, None], torch.nan) for t in (cos, sin))
        turned = _turn_pairs(x[..., :rotary], cos, sin, back)
        if padding is not None:
            turned = torch.where(padding[:, None, None], x[..., :rotary], turned)
        parts = [turned, x[..., rotary:]]
    output = torch.cat(parts, -1).to(input.dtype)
    if transpose_output and output.dim() == 4:
        return output.transpose(0, 1).contiguous().transpose(0, 1)
    return output.contiguous()


class Pair:
    """autograd and autocast of rope_forward and rope_backward, as torch.library wants them.

    The gradient of one is the other: a turn, and the turn back. Angles get no gradient, as in public apex.
    """

    name = "rope"

    def setup_context(self, ctx, inputs, output):
        """Keeps the angles."""
        ctx.save_for_backward(*inputs[1:6])
        ctx.transpose_output = inputs[6]

    def backward(self, ctx, grad):
        """Gradients of the forward's inputs."""
        return (torch.ops.apex.rope_backward(grad, *ctx.saved_tensors, ctx.transpose_output), *(None,) * 6)

    setup_double_context = setup_context

    def double_backward(self, ctx, grad):
        """Gradients of the backward's inputs."""
        return (torch.ops.apex.rope_forward(grad, *ctx.saved_tensors, ctx.transpose_output), *(None,) * 6)

    def autocast(self, device_type, arguments, keywords):
        """None: the output has the input's dtype."""
        return dict(zip(_NAMES, arguments, strict=False)) | keywords
