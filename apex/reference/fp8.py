"""The FP8 formats and casts in plain PyTorch, on any device: codes by integer arithmetic, never by torch's own casts.

The dtypes are torch's: float8_e4m3fn and float8_e5m2 (OCP), float8_e4m3fnuz and float8_e5m2fnuz (FNUZ: one NaN, no
infinity, no -0). A cast multiplies in float32, rounds to nearest even and saturates: what is finite and too large
becomes the largest value, and so does an infinity in OCP; in FNUZ it becomes NaN. NaN stays NaN (0x7F in OCP, 0x80 in
FNUZ). `scale` multiplies before a cast, `scale_inv` after; `amax` is max(amax, max |x|) afterwards, of x without scale,
NaN left out. Nothing here has a derivative.
"""

from dataclasses import dataclass

import torch

from apex.reference.bias_activation import value_and_slope

BLOCK = 128  # elements along a block's side
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Format:
    """A format: bits of its mantissa, bias of its exponent, the codes of its largest value and of NaN."""

    mantissa: int
    bias: int
    largest: int
    nan: int
    maximum: float  # the value of `largest`
    fnuz: bool
    infinity: int = -1  # its code; none: -1


FORMATS = {
    torch.float8_e4m3fn: Format(3, 7, 0x7E, 0x7F, 448.0, False),
    torch.float8_e5m2: Format(2, 15, 0x7B, 0x7F, 57344.0, False, 0x7C),
    torch.float8_e4m3fnuz: Format(3, 8, 0x7F, 0x80, 240.0, True),
    torch.float8_e5m2fnuz: Format(2, 16, 0x7F, 0x80, 57344.0, True),
}


def format_of(name, dtype):
    """The Format of a dtype. Raises TypeError, which begins with `name`, for a dtype that is not FP8."""
    if dtype not in FORMATS:
        raise TypeError(
            f"{name}: the FP8 dtype must be float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz, not {dtype}"
        )
    return FORMATS[dtype]


def to_codes(values, dtype):
    """The codes (uint8) of float32 values, rounded to nearest even and saturated."""
    form = format_of("to_codes", dtype)
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    dropped = 23 - form.mantissa
    even = (magnitude >> dropped) & 1
    normal = ((magnitude + ((1 << (dropped - 1)) - 1) + even) >> dropped) - (
        (127 - form.bias) << form.mantissa
    )
    # Below the smallest normal value a code is a multiple of the smallest subnormal one.
    shift = (dropped + 128 - form.bias - (magnitude >> 23)).clamp(1, 25)
    full = (magnitude & 0x7FFFFF) | 0x800000
    half = torch.bitwise_left_shift(torch.ones_like(shift), shift - 1)
    subnormal = (full + half - 1 + ((full >> shift) & 1)) >> shift
    code = torch.where(magnitude < (128 - form.bias) << 23, subnormal, normal).clamp_max(form.largest)
    negative = (bits < 0) & (code > 0) if form.fnuz else bits < 0
    code = torch.where(negative, code | 0x80, code)
    lost = magnitude >= 0x7F800000 if form.fnuz else magnitude > 0x7F800000
    return torch.where(lost, torch.full_like(code, form.nan), code).to(torch.uint8)


def from_codes(codes, dtype):
    """The float32 values of codes (uint8), exactly."""
    form = format_of("from_codes", dtype)
    code = codes.to(torch.int32)
    magnitude = code & 0x7F
    exponent, fraction = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    bits = ((exponent + (127 - form.bias)) << 23) | (fraction << (23 - form.mantissa))
    subnormal = fraction.to(torch.float32) * 2.0 ** (1 - form.bias - form.mantissa)
    value = torch.where(exponent == 0, subnormal, bits.view(torch.float32))
    if form.infinity >= 0:
        value = torch.where(magnitude == form.infinity, torch.full_like(value, float("inf")), value)
    value = torch.where(code >= 0x80, -value, value)
    nan = code == form.nan if form.fnuz else magnitude > max(form.largest, form.infinity)
    return torch.where(nan, torch.full_like(value, float("nan")), value)


def check_tensor(name, x):
    """Raises for a tensor without a dimension, and where autograd would have to go through it."""
    if x.dim() < 1:
        raise ValueError(f"{name}: the input must have at least one dimension")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no derivative: call it under torch.no_grad() or in a torch.autograd.Function"
        )


def check_input(name, x):
    """Raises for a tensor that cannot be cast."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} takes float32, float16 and bfloat16, not {x.dtype}")
    check_tensor(name, x)


def check_number(name, what, tensor, x):
    """Raises where `tensor` is not one float32 number on the device of x."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: {what} must be float32, not {tensor.dtype}")
    if tensor.numel() != 1:
        raise ValueError(f"{name}: {what} must have one element, not the shape {list(tensor.shape)}")
    if tensor.device != x.device:
        raise ValueError(f"{name}: {what} is on {tensor.device} but the input is on {x.device}")


def check_numbers(name, what, numbers, count, device):
    """Of `count` tensors, one each: float32 [count], side by side."""
    if numbers.dtype != torch.float32:
        raise TypeError(f"{name}: {what} must be float32, not {numbers.dtype}")
    if list(numbers.shape) != [count]:
        raise ValueError(f"{name}: {what} has shape {list(numbers.shape)}, not [{count}]")
    if numbers.device != device:
        raise ValueError(f"{name}: {what} is on {numbers.device} but the input is on {device}")
    if count > 1 and numbers.stride(0) != 1:
        raise ValueError(f"{name}: {what} must be contiguous")


def check_cast(name, x, scale, dtype, amax):
    """Raises where x cannot be cast so."""
    format_of(name, dtype)
    check_input(name, x)
    for what, number in (("scale", scale), ("amax", amax)):
        if number is not None:
            check_number(name, what, number, x)


def largest_magnitude(x):
    """max |x| as float32, of one element; NaN left out, 0 where there is nothing."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    magnitude = x.to(torch.float32).abs()
    return torch.where(magnitude.isnan(), torch.zeros_like(magnitude), magnitude).amax()


def record_amax(amax, x):
    """Writes max(amax, max |x|) into amax, a float32 tensor of one element."""
    amax.copy_(torch.maximum(amax.reshape(()), largest_magnitude(x)).reshape(amax.shape))


def cast(x, scale, dtype, amax):
    """As `quantize`, without its checks."""
    if amax is not None:
        record_amax(amax, x)
    return to_codes(x.to(torch.float32) * scale.reshape(()), dtype).view(dtype)


def quantize(x, scale, dtype, amax=None):
    """x * scale in FP8, of x's shape, contiguous.

    x: [...] float32, float16 or bfloat16. scale, amax: float32, one element; amax becomes max(amax, max |x|).
    dtype: one of FORMATS. Raises TypeError, ValueError, and RuntimeError where x asks for a gradient.
    """
    check_cast("quantize", x, scale, dtype, amax)
    with torch.no_grad():
        return cast(x, scale, dtype, amax)


def activated(x, activation, gated):
    """f(x), or gated f(x1) * x2 of the two halves of x's columns, in float32."""
    first, second = x.to(torch.float32).chunk(2, -1) if gated else (x.to(torch.float32), None)
    y = value_and_slope(first, activation)[0]
    return y if second is None else y * second


def activation_gradient(grad, before, activation, gated):
    """The gradient of what `activated` was given (`before`), in float32, from that of its result."""
    first, second = before.to(torch.float32).chunk(2, -1) if gated else (before.to(torch.float32), None)
    y, slope = value_and_slope(first, activation)
    g = grad.to(torch.float32)
    return g * slope if second is None else torch.cat((g * second * slope, g * y), -1)


def quantize_transpose(
    x, scale, dtype, amax=None, bias_gradient=False, before=None, activation=None, gated=False
):
    """(q, its transpose), both of x * scale in FP8; with bias_gradient, (q, its transpose, the sum of x's rows).

    x: [..., columns], as of `quantize`: q is [..., columns], its transpose [columns, rows] of the rows that the leading
    dimensions make. activation: "gelu" (its tanh form), "relu", "silu", "quick_gelu", "squared_relu" or "sigmoid"; then
    what is cast is f(x), or with `gated` f(x1) * x2 of the two halves of x's columns. before: what the activation was
    given, and x is the gradient of its result: cast (and summed) is then the gradient of `before`. The sum has x's
    dtype and is made in float32. Raises as `quantize` does.
    """
    check_cast("quantize_transpose", x, scale, dtype, amax)
    with torch.no_grad():
        made = x
        if activation is not None and before is None:
            made = activated(x, activation, gated)
        elif activation is not None:
            made = activation_gradient(x, before, activation, gated)
        q = cast(made, scale, dtype, amax)
        columns = transpose(q)
        if not bias_gradient:
            return q, columns
        return q, columns, column_sums(made).to(x.dtype)


def column_sums(x):
    """The sums of x's columns over all leading dimensions, in float32."""
    return x.to(torch.float32).sum(list(range(x.dim() - 1))) if x.dim() > 1 else x.to(torch.float32)


def rows_of(x):
    """The product of all dimensions but the last."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return rows


def transpose(q):
    """[columns, rows] of an FP8 tensor [..., columns], contiguous."""
    codes = q.contiguous().view(torch.uint8).reshape(rows_of(q), q.shape[-1])
    return codes.t().contiguous().view(q.dtype)


def dequantize(q, scale_inv, dtype):
    """q * scale_inv, multiplied in float32, in `dtype`: float32, float16 or bfloat16.

    q: [...] FP8. scale_inv: float32, one element. Raises TypeError and ValueError.
    """
    format_of("dequantize", q.dtype)
    check_tensor("dequantize", q)
    if dtype not in FLOATS:
        raise TypeError(f"dequantize gives float32, float16 and bfloat16, not {dtype}")
    check_number("dequantize", "scale_inv", scale_inv, q)
    return (from_codes(q.contiguous().view(torch.uint8), q.dtype) * scale_inv.reshape(())).to(dtype)


def _usable(amax):
    return (amax > 0) & (amax < float("inf"))


def _quotient(fp8_max, amax):
    """fp8_max / amax, correctly rounded (number / tensor is a reciprocal and a product in torch)."""
    return (fp8_max if isinstance(fp8_max, torch.Tensor) else torch.full_like(amax, fp8_max)) / amax


def delayed_scale(amax, scale, fp8_max, margin=0):
    """fp8_max / amax / 2**margin; the old scale where amax is 0, infinite or NaN. float32 tensors of one shape.

    A quotient that overflows becomes the largest float32 number.
    """
    found = (_quotient(fp8_max, amax) * 2.0**-margin).clamp_max(torch.finfo(torch.float32).max)
    return torch.where(_usable(amax), found, scale)


def current_scale(amax, fp8_max, power_of_two=False, epsilon=0.0):
    """fp8_max / max(amax, epsilon); 1 where that amax is 0, infinite or NaN. amax: float32 of any shape.

    power_of_two: rounded down to one. A quotient that overflows becomes the largest float32 number, or 2**127.
    """
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    found = _quotient(fp8_max, amax).clamp_max(torch.finfo(torch.float32).max)
    if power_of_two:
        found = (found.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(_usable(amax), found, torch.ones_like(amax))


def update_scales(amax_history, scale, scale_inv, fp8_max, margin=0, algorithm="max", reduced=None):
    """Delayed scaling's update of all modules, in place.

    amax_history, scale, scale_inv: lists, an entry for a module and direction: float32 [history, n], [n], [n]. fp8_max:
    a number, or a float32 [n], for each entry, or one number for all. reduced: float32, row 0 of all histories one
    behind the other (after a reduction over ranks), or None, where the histories hold it. amax of a column is its
    largest entry ("max") or its row 0 ("most_recent"); scale becomes `delayed_scale` of it and scale_inv 1 / scale.
    Each history moves up by a row, row 0 becoming the last, and row 0 is 0 then. Raises ValueError and TypeError.
    """
    check_update(amax_history, scale, scale_inv, fp8_max, algorithm, reduced)
    begin = 0
    numbers = fp8_max if isinstance(fp8_max, (list, tuple)) else [fp8_max] * len(scale)
    for history, s, inverse, maximum in zip(amax_history, scale, scale_inv, numbers, strict=True):
        if reduced is not None:
            history[0].copy_(reduced[begin : begin + s.numel()])
            begin += s.numel()
        amax = history.amax(0) if algorithm == "max" else history[0]
        s.copy_(delayed_scale(amax, s, maximum, margin))
        inverse.copy_(torch.ones_like(s) / s)
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


def is_upright(history):
    """Of a history [rows, columns]: whether each column lies whole in memory."""
    rows, columns = history.shape
    return (rows <= 1 or history.stride(0) == 1) and (columns <= 1 or history.stride(1) >= rows)


def check_update(amax_history, scale, scale_inv, fp8_max, algorithm, reduced):
    """Raises where `update_scales` cannot take its arguments."""
    name = "update_scales"
    if algorithm not in ("max", "most_recent"):
        raise ValueError(f'{name}: the algorithm must be "max" or "most_recent", not {algorithm!r}')
    counts = [len(amax_history), len(scale), len(scale_inv)]
    if isinstance(fp8_max, (list, tuple)):
        counts.append(len(fp8_max))
    if len(set(counts)) > 1:
        raise ValueError(f"{name}: histories, scales, inverses and maxima differ in number: {counts}")
    for i, (history, s, inverse) in enumerate(zip(amax_history, scale, scale_inv, strict=True)):
        for what, tensor in (("history", history), ("scale", s), ("scale_inv", inverse)):
            if tensor.dtype != torch.float32:
                raise TypeError(f"{name}: {what} {i} must be float32, not {tensor.dtype}")
        if s.dim() != 1 or inverse.shape != s.shape or history.dim() != 2 or history.shape[1:] != s.shape:
            raise ValueError(
                f"{name}: of entry {i}, the history has shape {list(history.shape)}, scale {list(s.shape)}, scale_inv "
                f"{list(inverse.shape)}, not [rows, n], [n], [n]"
            )
        if history.shape[0] < 1:
            raise ValueError(f"{name}: history {i} has no row")
    total = sum(s.numel() for s in scale)
    if reduced is not None and reduced.numel() != total:
        raise ValueError(f"{name}: reduced has {reduced.numel()} elements for {total} scales")


def _block_rows(block):
    if tuple(block) not in ((1, BLOCK), (BLOCK, BLOCK)):
        raise ValueError(f"the block must be (1, {BLOCK}) or ({BLOCK}, {BLOCK}), not {tuple(block)}")
    return block[0]


def _spread(numbers, block, rows, columns):
    """numbers [rows of blocks, columns of blocks] for every element."""
    wide = numbers.repeat_interleave(block[0], 0)[:rows]
    return wide.repeat_interleave(block[1], 1)[:, :columns]


def quantize_blocks(x, dtype, block=(1, BLOCK), power_of_two=True, epsilon=0.0):
    """(q, scale_inv): x in FP8, each block of rows and columns by a scale of its own, `current_scale` of its amax.

    x: [..., columns], as of `quantize`; its leading dimensions make the rows. block: (1, 128) or (128, 128); the last
    ones may be smaller. q: x's shape. scale_inv: float32 [rows of blocks, columns of blocks], 1 / scale. The other
    layout of a 1x128 cast is the cast of the transpose. Raises as `quantize` does.
    """
    form = format_of("quantize_blocks", dtype)
    check_input("quantize_blocks", x)
    high = _block_rows(block)
    with torch.no_grad():
        rows, columns = rows_of(x), x.shape[-1]
        wide = x.reshape(rows, columns).to(torch.float32)
        tall, across = -(-rows // high), -(-columns // BLOCK)
        padded = torch.nn.functional.pad(wide, (0, across * BLOCK - columns, 0, tall * high - rows)).abs()
        cells = torch.where(padded.isnan(), torch.zeros_like(padded), padded).view(tall, high, across, BLOCK)
        amax = cells.amax((1, 3)) if rows and columns else wide.new_zeros((tall, across))
        scale = current_scale(amax, form.maximum, power_of_two, epsilon)
        q = to_codes(wide * _spread(scale, block, rows, columns), dtype).view(dtype).reshape(x.shape)
        return q, torch.ones_like(scale) / scale


def dequantize_blocks(q, scale_inv, dtype, block=(1, BLOCK)):
    """The inverse of `quantize_blocks`: q [..., columns], scale_inv as it gives it, the result in `dtype`."""
    format_of("dequantize_blocks", q.dtype)
    _block_rows(block)
    rows, columns = rows_of(q), q.shape[-1]
    values = from_codes(q.contiguous().view(torch.uint8), q.dtype).reshape(rows, columns)
    return (values * _spread(scale_inv, block, rows, columns)).reshape(q.shape).to(dtype)
