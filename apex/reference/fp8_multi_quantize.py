"""Casts of many matrices to FP8 in plain PyTorch: the op over apex/reference/fp8.py."""

import torch

from apex.reference import fp8

_NAME = "fp8_multi_quantize"

NO_DERIVATIVE = True


def _check_output(what, output, shape, x, i):
    fp8.format_of(_NAME, output.dtype)
    if list(output.shape) != shape or output.device != x.device:
        raise ValueError(
            f"{_NAME}: {what}[{i}] has shape {list(output.shape)} on {output.device}, not {shape} on {x.device}"
        )
    if not output.is_contiguous():
        raise ValueError(f"{_NAME}: {what}[{i}] must be contiguous")


def _check(scales, amaxes, inputs, rows, columns):
    if inputs and not rows and not columns:
        raise ValueError(f"{_NAME}: neither rows nor columns are given")
    for what, given in (("rows", rows), ("columns", columns)):
        if given and len(given) != len(inputs):
            raise ValueError(f"{_NAME}: {len(inputs)} inputs, {len(given)} {what}")
    fp8.check_numbers(_NAME, "scales", scales, len(inputs), scales.device)
    if amaxes is not None:
        fp8.check_numbers(_NAME, "amaxes", amaxes, len(inputs), scales.device)
    for i, x in enumerate(inputs):
        fp8.check_input(_NAME, x)
        if x.device != scales.device:
            raise ValueError(f"{_NAME}: scales is on {scales.device} but the input is on {x.device}")
        if x.dtype != inputs[0].dtype:
            raise TypeError(f"{_NAME}: inputs have the dtypes {inputs[0].dtype} and {x.dtype}")
        if rows:
            _check_output("rows", rows[i], list(x.shape), x, i)
        if columns:
            _check_output("columns", columns[i], [x.shape[-1], fp8.rows_of(x)], x, i)
        if len({t.dtype for t in (*rows, *columns)}) > 1:
            raise TypeError(f"{_NAME}: outputs must have one dtype")


def fp8_multi_quantize(scales, amaxes, inputs, rows, columns):
    """inputs[i] * scales[i] in FP8 into rows[i], and its transpose into columns[i].

    scales: float32 [n]; amaxes likewise, or None: amaxes[i] becomes max(amaxes[i], max |inputs[i]|). inputs: n tensors
    [..., columns] of one dtype, float32, float16 or bfloat16. rows, columns: n FP8 tensors each, of the inputs' shapes
    and [columns, rows]; or none. Raises ValueError, TypeError, RuntimeError where an input asks for a gradient.
    """
    _check(scales, amaxes, inputs, rows, columns)
    for i, x in enumerate(inputs):
        dtype = (rows or columns)[i].dtype
        q = fp8.cast(x, scales[i], dtype, None if amaxes is None else amaxes[i])
        for written, made in ((rows, q), (columns, fp8.transpose(q) if columns else q)):
            if written:
                written[i].view(torch.uint8).copy_(made.view(torch.uint8))
