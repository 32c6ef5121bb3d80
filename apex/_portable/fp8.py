"""The FP8 ops: csrc/bindings/fp8*.h in Python."""

from __future__ import annotations

import torch

from apex._portable import interface, tensors, workspace
from apex._portable.activation import FUNCTIONS, function_of
from apex._portable.checks import like, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import BF16, CODES, F16, F32, address, bump_version, contiguous
from apex.reference.fp8 import BLOCK, rows_of

_FORMATS = {
    torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.float8_e4m3fnuz: 2, torch.float8_e5m2fnuz: 3,
}  # fmt: skip
_OF_INPUT, _OF_ACTIVATION, _OF_GRADIENT = range(3)  # in csrc/device/fp8_quantize.h
_quantize = interface.layout("Fp8Quantize").packer(
    "input", "before", "scale", "amax", "by_row", "by_column", "grad_bias", "scale_inv", "rows", "columns", "slope",
    "cubic", "function", "source", "gated", "type", "format", "epsilon", "power_of_two",
)  # fmt: skip
_dequantize = interface.layout("Fp8Dequantize").packer(
    "input", "scale_inv", "output", "count", "type", "format"
)
_transpose = interface.layout("Fp8Transpose").packer(
    "input", "scale_inv", "output", "grad_bias", "rows", "columns", "type", "format"
)
_update = interface.layout("Fp8UpdateScales").packer(
    "amax_history", "scale", "scale_inv", "fp8_max", "reduced", "rows", "columns", "pitch", "column_pitch", "factor",
    "most_recent",
)  # fmt: skip
_blocks = interface.layout("Fp8QuantizeBlocks").packer(
    "input", "by_row", "by_column", "scale_inv", "scale_inv_turned", "rows", "columns", "epsilon", "square",
    "power_of_two", "type", "format",
)  # fmt: skip
_multi = interface.layout("Fp8MultiQuantize").packer(
    "input", "by_row", "by_column", "rows", "columns", "scale", "amax", "count", "type", "format"
)
_MOST = 64  # matrices of a launch, in csrc/device/fp8_multi_quantize.h
_updates = interface.layout("apex_fp8_updates").packer(
    "count", "rows", "scale", "scale_inv", "fp8_max", "factor", "most_recent"
)
_history = interface.layout("apex_fp8_history").packer(
    "amax_history", "scale", "columns", "pitch", "column_pitch"
)
_c_updates = interface.function("apex_fp8_multi_update_scales")
_c_blocks = interface.function("apex_fp8_quantize_blocks")
_c_multi = interface.function("apex_fp8_multi_quantize")
_c_quantize = interface.function("apex_fp8_quantize")
_c_dequantize = interface.function("apex_fp8_dequantize")
_c_transpose = interface.function("apex_fp8_transpose")
_c_update = interface.function("apex_fp8_update_scales")


def _format_of(op, dtype):
    type_(
        dtype in _FORMATS,
        "{}: the FP8 dtype must be float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz, not {}",
        op, dtype,
    )  # fmt: skip
    return _FORMATS[dtype]


def _type_of(op, dtype):
    type_(dtype in (F32, F16, BF16), "{} takes float32, float16 and bfloat16, not {}", op, dtype)
    return CODES[dtype]


def _check_input(op, input):
    value(input.dim() >= 1, "{}: the input must have at least one dimension", op)
    if input.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{op} has no derivative: call it under torch.no_grad() or in a torch.autograd.Function"
        )


def _check_number(op, what, number):
    type_(number.dtype is F32, "{}: {} must be float32, not {}", op, what, number.dtype)
    value(number.numel() == 1, "{}: {} must have one element, not the shape {}", op, what, number.shape)


def _check_numbers(op, what, numbers, count, whose=""):
    type_(numbers.dtype is F32, "{}: {} must be float32, not {}", op, what, numbers.dtype)
    like(op, what, numbers, (count,), None, whose)
    value(count <= 1 or numbers.stride(0) == 1, "{}: {} must be contiguous", op, what)


def _check_activation(input, before, activation, gated, bias_gradient):
    op = "fp8_quantize"
    if activation == "none":
        value(not gated and before is None, "{}: without an activation there is no `before`, and no gate", op)
        return
    function_of(activation)
    columns = input.shape[-1]
    value(
        not gated or before is not None or columns % 2 == 0,
        "{}: a gated activation halves the last dimension, which is {}", op, columns,
    )  # fmt: skip
    value(
        before is not None or not bias_gradient,
        "{}: a bias gradient is of a gradient, not of an activation: give `before`", op,
    )  # fmt: skip
    if before is None:
        return
    type_(before.dtype is input.dtype, "{}: `before` is {} but the input {}", op, before.dtype, input.dtype)
    like(op, "`before`", before, (*input.shape[:-1], columns * (2 if gated else 1)))


@kernel
def fp8_quantize(
    input, scale, amax, dtype, rowwise, columnwise, bias_gradient, before, activation, gated, power_of_two,
    epsilon,
):  # fmt: skip
    op = "fp8_quantize"
    format, code = _format_of(op, dtype), _type_of(op, input.dtype)
    _check_input(op, input)
    for what, number in (("scale", scale), ("amax", amax)):
        if number is not None:
            _check_number(op, what, number)
    _check_activation(input, before, activation, gated, bias_gradient)
    place = tensors.place_of(input)
    if place is None:
        return None
    x, u = input.contiguous(), contiguous(before)
    columns = x.shape[-1] // (2 if gated and u is None else 1)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    width = columns * (2 if gated and u is not None else 1)
    by_row = x.new_empty((*x.shape[:-1], width) if rowwise else 0, dtype=dtype)
    by_column = x.new_empty((width, rows_of(x)) if columnwise else 0, dtype=dtype)
    grad_bias = x.new_empty(width if bias_gradient else 0)
    scale_inv = x.new_empty(() if scale is None else 0, dtype=F32)
    if scale is None and x.numel() == 0:
        scale_inv.fill_(1.0)
    source = _OF_INPUT if activation == "none" else _OF_ACTIVATION if u is None else _OF_GRADIENT
    if amax is not None:
        bump_version(amax)
    packed = _quantize(
        x.data_ptr(), address(u), address(scale), address(amax), by_row.data_ptr() if rowwise else 0,
        by_column.data_ptr() if columnwise else 0, grad_bias.data_ptr() if bias_gradient else 0,
        scale_inv.data_ptr() if scale is None else 0, rows, columns, *FUNCTIONS.get(activation, (0.0, 0.0, 0)),
        source, gated, code, format, epsilon, power_of_two,
    )  # fmt: skip
    return (
        (by_row, by_column, grad_bias, scale_inv)
        if workspace.run(_c_quantize, place, packed, op, x)
        else None
    )


@kernel
def fp8_dequantize(input, scale_inv, dtype):
    op = "fp8_dequantize"
    format, dtype = _format_of(op, input.dtype), dtype or F32
    code = _type_of(op, dtype)
    _check_input(op, input)
    _check_number(op, "scale_inv", scale_inv)
    place = tensors.place_of(input)
    if place is None:
        return None
    x = input.contiguous()
    made = x.new_empty(x.shape, dtype=dtype)
    packed = _dequantize(x.data_ptr(), scale_inv.data_ptr(), made.data_ptr(), x.numel(), code, format)
    status = _c_dequantize(place, packed)
    return None if status and tensors.must_use_reference(status, op) else made


@kernel
def fp8_transpose(input, scale_inv, bias_gradient, dtype):
    op = "fp8_transpose"
    format, dtype = _format_of(op, input.dtype), dtype or F32
    _check_input(op, input)
    code = _type_of(op, dtype) if bias_gradient else CODES[F32]
    if bias_gradient:
        value(scale_inv is not None, "{}: a bias gradient needs scale_inv", op)
        _check_number(op, "scale_inv", scale_inv)
    place = tensors.place_of(input)
    if place is None:
        return None
    x, columns, rows = input.contiguous(), input.shape[-1], rows_of(input)
    made, grad_bias = x.new_empty((columns, rows)), x.new_empty(columns if bias_gradient else 0, dtype=dtype)
    packed = _transpose(
        x.data_ptr(), address(scale_inv) if bias_gradient else 0, made.data_ptr(),
        grad_bias.data_ptr() if bias_gradient else 0, rows, columns, code, format,
    )  # fmt: skip
    return (made, grad_bias) if workspace.run(_c_transpose, place, packed, op, x) else None


def _is_upright(history):
    """Whether each column lies whole in memory, as those of layers do, one behind the other."""
    rows, columns = history.shape
    return (rows <= 1 or history.stride(0) == 1) and (columns <= 1 or rows <= history.stride(1) < 2**32)


@kernel
def fp8_update_scales(amax_history, scale, scale_inv, fp8_max, margin, most_recent, reduced):
    op = "fp8_update_scales"
    type_(amax_history.dtype is F32, "{}: amax_history must be float32, not {}", op, amax_history.dtype)
    value(
        amax_history.dim() == 2 and amax_history.shape[0] >= 1,
        "{}: amax_history must be [rows, columns] with at least one row, not {}", op, amax_history.shape,
    )  # fmt: skip
    given = {"scale": scale, "scale_inv": scale_inv, "fp8_max": fp8_max, "reduced": reduced}
    for what, numbers in given.items():
        if numbers is not None:
            _check_numbers(op, what, numbers, amax_history.shape[1], "amax_history's columns, ")
    rows, columns = amax_history.shape
    upright = _is_upright(amax_history)
    value(
        columns <= 1 or amax_history.stride(1) == 1 or upright,
        "{}: the rows of amax_history must be contiguous, or its columns", op,
    )  # fmt: skip
    tensors.refuse_overlap(amax_history, f"{op}: amax_history")
    place = tensors.place_of(amax_history)
    if place is None:
        return None
    status = _c_update(place, _update(
        amax_history.data_ptr(), scale.data_ptr(), scale_inv.data_ptr(), fp8_max.data_ptr(), address(reduced), rows,
        columns, *((1, amax_history.stride(1)) if upright else (amax_history.stride(0), 1)), 2.0**-margin, most_recent,
    ))  # fmt: skip
    if status and tensors.must_use_reference(status, op):
        return None
    for written in (amax_history, scale, scale_inv):
        bump_version(written)
    return True


def _end(tensor):
    """The address behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _described(history, scale):
    rows, columns = history.shape
    if _is_upright(history):
        pitches = 1, history.stride(1) if columns > 1 else rows
    else:
        pitches = columns, 1
    return _history(history.data_ptr(), scale.data_ptr(), columns, *pitches)


def _check_updates(op, histories, scales, fp8_max, scale, scale_inv):
    value(len(histories) == len(scales), "{}: {} histories, {} scales", op, len(histories), len(scales))
    for i, (history, old) in enumerate(zip(histories, scales, strict=True)):
        type_(history.dtype is F32, "{}: amax_histories[{}] must be float32, not {}", op, i, history.dtype)
        value(
            history.dim() == 2 and history.shape[0] >= 1,
            "{}: amax_histories[{}] must be [rows, columns] with at least one row, not {}", op, i, history.shape,
        )  # fmt: skip
        rows = histories[0].shape[0]
        value(history.shape[0] == rows, "{}: amax_histories have {} and {} rows", op, rows, history.shape[0])
        value(
            history.is_contiguous() or _is_upright(history),
            "{}: amax_histories[{}] must be contiguous, or each of its columns", op, i,
        )  # fmt: skip
        _check_numbers(op, f"scales[{i}]", old, history.shape[1], "its history's columns, ")
    total = sum(history.shape[1] for history in histories)
    for what, numbers in (("fp8_max", fp8_max), ("scale", scale), ("scale_inv", scale_inv)):
        _check_numbers(op, what, numbers, total, "all histories' columns, ")


def _check_lists(op, beside, device, **lists):
    """Of the lists by name: each tensor has plain values, on the device, which is that of the argument `beside`."""
    for name, given in lists.items():
        for i, tensor in enumerate(given):
            tensors.refuse_unless_plain(tensor, f"apex::{op}: {name}[{i}]")
            value(
                tensor.device == device,
                "{}: {} is on {} but {} is on {}", op, name, tensor.device, beside, device,
            )  # fmt: skip


@kernel
def fp8_multi_update_scales(fp8_max, amax_histories, scales, scale, scale_inv, margin, most_recent):
    op = "fp8_multi_update_scales"
    _check_lists(op, "scale", scale.device, amax_histories=amax_histories, scales=scales)
    _check_updates(op, amax_histories, scales, fp8_max, scale, scale_inv)
    place = tensors.place_of(scale)
    if place is None:
        return None
    if not scales:
        return True
    named = [(f"amax_histories[{i}]", history) for i, history in enumerate(amax_histories)]
    named += [("scale", scale), ("scale_inv", scale_inv)]
    ranges = [(t.data_ptr(), _end(t), "", what) for what, t in named if t.numel()]
    tensors.refuse_shared(ranges, lambda _, what: what, f"{op}: ")
    histories = b"".join(map(_described, amax_histories, scales))
    numbers = (t.data_ptr() for t in (scale, scale_inv, fp8_max))
    packed = _updates(len(scales), amax_histories[0].shape[0], *numbers, 2.0**-margin, most_recent)
    status = _c_updates(place, packed, histories)
    if status and tensors.must_use_reference(status, op):
        return None
    for written in (*amax_histories, scale, scale_inv):
        bump_version(written)
    return True


def _check_output(op, what, output, shape, i):
    _format_of(op, output.dtype)
    value(output.shape == shape, "{}: {}[{}] has shape {}, not {}", op, what, i, output.shape, shape)
    value(output.is_contiguous(), "{}: {}[{}] must be contiguous", op, what, i)


def _check_multi(op, scales, amaxes, inputs, rows, columns):
    value(rows or columns or not inputs, "{}: neither rows nor columns are given", op)
    for what, given in (("rows", rows), ("columns", columns)):
        value(
            not given or len(given) == len(inputs), "{}: {} inputs, {} {}", op, len(inputs), len(given), what
        )
    _check_numbers(op, "scales", scales, len(inputs))
    if amaxes is not None:
        _check_numbers(op, "amaxes", amaxes, len(inputs))
    for i, x in enumerate(inputs):
        _type_of(op, x.dtype)
        _check_input(op, x)
        type_(
            x.dtype is inputs[0].dtype, "{}: inputs have the dtypes {} and {}", op, inputs[0].dtype, x.dtype
        )
        for what, given, shape in (("rows", rows, x.shape), ("columns", columns, (x.shape[-1], rows_of(x)))):
            if given:
                _check_output(op, what, given[i], shape, i)
                type_(given[i].dtype is (rows or columns)[0].dtype, "{}: outputs must have one dtype", op)


@kernel
def fp8_multi_quantize(scales, amaxes, inputs, rows, columns):
    op = "fp8_multi_quantize"
    _check_lists(op, "scales", scales.device, inputs=inputs, rows=rows, columns=columns)
    _check_multi(op, scales, amaxes, inputs, rows, columns)
    place = tensors.place_of(scales)
    if place is None:
        return None
    ranges = [
        (t.data_ptr(), t.data_ptr() + t.numel(), what, (what, i))  # an index of its own for each output
        for what, given in (("rows", rows), ("columns", columns))
        for i, t in enumerate(given)
        if t.numel()
    ]
    tensors.refuse_shared(ranges, lambda what, index: f"{what}[{index[1]}]", f"{op}: ")
    dense = [x.contiguous() for x in inputs]
    for first in range(0, len(dense), _MOST):
        part = slice(first, min(first + _MOST, len(dense)))
        status = _c_multi(place, _multi_arguments(op, scales, amaxes, dense, rows, columns, part))
        if status and tensors.must_use_reference(status, op):
            return None
    for written in (*rows, *columns, *(() if amaxes is None else (amaxes,))):
        bump_version(written)
    return True


def _multi_arguments(op, scales, amaxes, dense, rows, columns, part):
    """The struct of one launch: matrices `part`."""
    count = part.stop - part.start

    def of(values):
        return (*values, *(0,) * (_MOST - count))

    inputs = dense[part]
    return _multi(
        of(x.data_ptr() for x in inputs), of(t.data_ptr() for t in rows[part]) if rows else of([0] * count),
        of(t.data_ptr() for t in columns[part]) if columns else of([0] * count), of(rows_of(x) for x in inputs),
        of(x.shape[-1] for x in inputs), scales.data_ptr() + 4 * part.start,
        0 if amaxes is None else amaxes.data_ptr() + 4 * part.start, count, _type_of(op, inputs[0].dtype),
        _format_of(op, (rows or columns)[0].dtype),
    )  # fmt: skip


@kernel
def fp8_quantize_blocks(input, dtype, square, rowwise, columnwise, power_of_two, epsilon):
    op = "fp8_quantize_blocks"
    format, code = _format_of(op, dtype), _type_of(op, input.dtype)
    _check_input(op, input)
    place = tensors.place_of(input)
    if place is None:
        return None
    x, width, height = input.contiguous(), input.shape[-1], rows_of(input)
    high, wide = (-(-size // BLOCK) for size in (height, width))
    rows = x.new_empty(x.shape if rowwise else 0, dtype=dtype)
    columns = x.new_empty((width, height) if columnwise else 0, dtype=dtype)
    scale_inv = x.new_empty((high, wide) if square else (wide, height) if rowwise else 0, dtype=F32)
    turned = x.new_empty((high, width) if columnwise and not square else 0, dtype=F32)
    status = _c_blocks(place, _blocks(
        x.data_ptr(), rows.data_ptr() if rowwise else 0, columns.data_ptr() if columnwise else 0, scale_inv.data_ptr(),
        turned.data_ptr(), height, width, epsilon, square, power_of_two, code, format,
    ))  # fmt: skip
    return None if status and tensors.must_use_reference(status, op) else (rows, scale_inv, columns, turned)


# ---- norms -----------------------------------------------------------------------------------------------------------

_norm = interface.layout("NormForward").packer(
    "input", "weight", "bias", "output", "mean", "rstd", "rows", "hidden", "eps", "input_type", "output_type",
    "weight_type",
)  # fmt: skip
_norm_codes = interface.layout("Fp8Norm").packer("scale", "amax", "format", "zero_centered_gamma")
_c_layer_norm, _c_rms_norm = (interface.function(f"apex_fp8_{name}_norm") for name in ("layer", "rms"))


def _check_weights(op, weight, bias, input):
    for what, numbers in (("weight", weight), ("bias", bias)):
        if numbers is None:
            continue
        _type_of(op, numbers.dtype)
        like(op, what, numbers, input.shape[-1:], None, "the input's last, ")
    type_(
        weight is None or bias is None or weight.dtype is bias.dtype,
        "{}: weight and bias must have one dtype", op,
    )  # fmt: skip


def _run_norm(op, function, input, weight, bias, eps, scale, amax, dtype, zero_centered_gamma):
    """(output, mean, rstd), or None where the reference must run."""
    format, code = _format_of(op, dtype), _type_of(op, input.dtype)
    _check_input(op, input)
    _check_number(op, "scale", scale)
    if amax is not None:
        _check_number(op, "amax", amax)
    _check_weights(op, weight, bias, input)
    place = tensors.place_of(input)
    if place is None:
        return None
    x, w, b = input.contiguous(), contiguous(weight), contiguous(bias)
    rows, hidden = rows_of(x), x.shape[-1]
    made = x.new_empty(x.shape, dtype=dtype)
    mean, rstd = (x.new_empty(rows, dtype=F32) for _ in range(2))
    if amax is not None:
        bump_version(amax)
    of_weight = code if w is None and b is None else CODES[(b if w is None else w).dtype]
    status = function(
        place,
        _norm(
            x.data_ptr(), address(w), address(b), made.data_ptr(), mean.data_ptr(), rstd.data_ptr(), rows, hidden, eps,
            code, code, of_weight,
        ),
        _norm_codes(scale.data_ptr(), address(amax), format, zero_centered_gamma),
    )  # fmt: skip
    if status and tensors.must_use_reference(status, op):
        return None
    if hidden == 0:
        mean.fill_(float("nan"))
        rstd.fill_(float("nan"))
    return made, mean, rstd


@kernel
def fp8_layer_norm(input, weight, bias, eps, scale, amax, dtype, zero_centered_gamma):
    return _run_norm(
        "fp8_layer_norm", _c_layer_norm, input, weight, bias, eps, scale, amax, dtype, zero_centered_gamma
    )


@kernel
def fp8_rms_norm(input, weight, eps, scale, amax, dtype, zero_centered_gamma):
    made = _run_norm(
        "fp8_rms_norm", _c_rms_norm, input, weight, None, eps, scale, amax, dtype, zero_centered_gamma
    )
    return None if made is None else (made[0], made[2])
