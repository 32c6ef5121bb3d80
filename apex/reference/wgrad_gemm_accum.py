"""The gradient of a weight, added to what is there, by torch's products."""

from __future__ import annotations

import math

import torch

from apex._plain import is_shape_alone, share_memory
from apex.reference.dense import _rows

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32, torch.float64)
_OP = "wgrad_gemm_accum"


def _check(input, grad_output, main_grad):
    if input.dtype not in _FLOATS:
        raise TypeError(f"{_OP} takes float32, float16, bfloat16 and float64, not {input.dtype}")
    if grad_output.dtype != input.dtype:
        raise TypeError(f"{_OP}: grad_output is {grad_output.dtype} but the input {input.dtype}")
    half = input.dtype in _HALVES
    if main_grad.dtype != input.dtype and not (half and main_grad.dtype == torch.float32):
        other = " or torch.float32" if half else ""
        raise TypeError(f"{_OP}: main_grad is {main_grad.dtype}, not {input.dtype}{other}")
    for name, tensor in (("grad_output", grad_output), ("main_grad", main_grad)):
        if tensor.device != input.device:
            raise ValueError(f"{_OP}: {name} is on {tensor.device} but the input is on {input.device}")
    if input.dim() < 1 or grad_output.dim() < 1:
        raise ValueError(f"{_OP}: input and grad_output must have at least one dimension")
    # Size.numel() would fix a dynamic size.
    rows, others = math.prod(input.shape[:-1]), math.prod(grad_output.shape[:-1])
    if rows != others:
        raise ValueError(f"{_OP}: the input has {rows} rows but grad_output {others}")
    shape = (grad_output.shape[-1], input.shape[-1])
    if main_grad.shape != shape:
        raise ValueError(f"{_OP}: main_grad has shape {list(main_grad.shape)}, not {list(shape)}")
    if main_grad.requires_grad:
        raise ValueError(f"{_OP}: main_grad requires a gradient itself, which would be lost; detach it")
    if not is_shape_alone(main_grad):
        check_memory(main_grad, input, grad_output)


def check_memory(main_grad, input, grad_output):
    """Raises ValueError where elements of `main_grad` lie in one place, or where others are read."""
    if overlaps_itself(main_grad):
        raise ValueError(
            f"{_OP}: main_grad overlaps itself (sizes {list(main_grad.shape)}, strides {list(main_grad.stride())}): it "
            "cannot be written; pass a contiguous tensor"
        )
    for name, tensor in (("the input", input), ("grad_output", grad_output)):
        if share_memory(main_grad, tensor):
            raise ValueError(
                f"{_OP}: main_grad shares memory with {name}, which is read while main_grad is written"
            )


def overlaps_itself(matrix):
    """Whether several elements of a matrix may be one in memory."""
    if matrix.is_contiguous():
        return False
    reach = 1
    for size, stride in sorted(zip(matrix.shape, matrix.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride < reach:
            return matrix.numel() > 0
        reach += max(0, size - 1) * stride
    return False


def wgrad_gemm_accum(input, grad_output, main_grad):
    """main_grad += grad_output^T input, in place.

    input: [..., inputs] and grad_output: [..., outputs], of as many rows and one dtype: float16, bfloat16, float32 or
    float64. main_grad: [outputs, inputs] of that dtype or, beside halves, float32; any view that does not overlap
    itself. Products of halves are summed in float32, and rounded once where main_grad is a half. Without rows
    main_grad stays as it is. Raises TypeError and ValueError.
    """
    _check(input, grad_output, main_grad)
    x, g = _rows(input), _rows(grad_output)
    if not x.numel() or not g.numel():
        return
    if main_grad.dtype not in _HALVES and x.dtype in _HALVES and _accumulates_wide(main_grad):
        torch.ops.aten.baddbmm.dtype_out(
            main_grad[None], g.t()[None], x[None], torch.float32, out=main_grad[None]
        )
    elif x.dtype in _HALVES and not (main_grad.is_cuda and main_grad.dtype == x.dtype):
        wide = main_grad.to(torch.float32)  # itself, if it is that
        main_grad.copy_(wide.addmm_(g.t().to(torch.float32), x.to(torch.float32)))
    else:
        main_grad.addmm_(g.t(), x)


def _accumulates_wide(main_grad):
    """Whether torch has a product of halves that adds to a float32 matrix: from 2.8 on, on CUDA."""
    has = hasattr(torch.ops.aten.baddbmm, "dtype_out") and torch.version.hip is None
    return has and main_grad.is_cuda and main_grad.is_contiguous()
