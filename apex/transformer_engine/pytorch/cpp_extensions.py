"""The public engine's functions by the state of a layer, beside those of transformer_engine_extensions themselves.

fp8_meta_tensor: a layer's fp8_meta["scaling_fwd"] or ["scaling_bwd"], or an FP8TensorMeta; fp8_tensor: which of its
tensors, whose scale casts and whose magnitude is recorded. Dtypes are DTypes, of which codes are uint8 tensors, or
torch's. Errors: TypeError (dtypes), ValueError (shapes, devices).
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch

from apex.transformer_engine.pytorch import _tex as raw
from apex.transformer_engine.pytorch._tex.casts import is_fp8
from apex.transformer_engine.pytorch.constants import (
    DType,
    FP8BwdTensors,
    FP8FwdTensors,
    FP8TensorMeta,
    TE_DType,
    torch_dtype,
)

__all__ = [  # and, as attributes, all of transformer_engine_extensions
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8TensorMeta",
    "cast_from_fp8",
    "cast_to_fp8",
    "fp8_cast_transpose_bgrad_dgelu_fused",
    "fp8_cast_transpose_bgrad_fused",
    "fp8_cast_transpose_fused",
    "fp8_gemm",
    "fp8_transpose_bgrad_fused",
    "geglu",
    "gelu",
    "gemm",
    "layernorm_fwd_fp8",
    "layernorm_fwd_fp8_inf",
    "layernorm_fwd_inf",
    "qgelu",
    "reglu",
    "relu",
    "rmsnorm_fwd_fp8",
    "rmsnorm_fwd_fp8_inf",
    "rmsnorm_fwd_inf",
    "srelu",
    "swiglu",
]
_Dtype: TypeAlias = DType | torch.dtype


def __getattr__(name: str) -> Any:
    if name in raw.__all__:
        return getattr(raw, name)
    raise raw.missing(name, sys._getframe(1))


def _of(meta: Any, index: int) -> tuple[torch.Tensor | None, ...]:
    """(scale, amax, scale_inv) of a tensor of a state; three Nones of none."""
    if meta is None:
        return None, None, None
    return meta.scale[index], meta.amax_history[0, index], meta.scale_inv[index]


def _codes(made: torch.Tensor, dtype: _Dtype) -> torch.Tensor:
    """uint8 as FP8 where it was asked for by torch's dtype."""
    return made.view(dtype) if isinstance(dtype, torch.dtype) and is_fp8(dtype) else made


# ---- casts -----------------------------------------------------------------------------------------------------------


def cast_to_fp8(
    inp: torch.Tensor, fp8_meta_tensor: Any, fp8_tensor: int, otype: _Dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The codes of inp [...] float32, float16 or bfloat16. out: where they go, of inp's shape."""
    scale, amax, scale_inv = _of(fp8_meta_tensor, fp8_tensor)
    if out is None:
        return _codes(raw.cast_to_fp8(inp, scale, amax, scale_inv, otype), otype)
    raw.cast_to_fp8_noalloc(inp, scale, out, amax, scale_inv, otype)
    return out


def cast_from_fp8(
    inp: torch.Tensor, fp8_meta_tensor: Any, fp8_tensor: int, itype: _Dtype, otype: _Dtype
) -> torch.Tensor:
    """The numbers of codes inp of itype, in otype."""
    return raw.cast_from_fp8(inp, fp8_meta_tensor.scale_inv[fp8_tensor], itype, otype)


def fp8_cast_transpose_fused(
    inp: torch.Tensor,
    fp8_meta_tensor: Any,
    fp8_tensor: int,
    otype: _Dtype,
    cast_out: torch.Tensor | None = None,
    transpose_out: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of inp [rows, columns], their transpose), into cast_out and transpose_out where they are given.

    noop_flag: float32, of one element: where it is 1, nothing is written.
    """
    made = [cast_out, transpose_out]
    for i, shape in enumerate((inp.shape, inp.shape[::-1])):
        if made[i] is None:
            made[i] = torch.empty(shape, dtype=torch.uint8, device=inp.device)
    state = _of(fp8_meta_tensor, fp8_tensor)
    raw.fused_cast_transpose_noop(inp, noop_flag, *state, *made, otype)
    return _codes(made[0], otype), _codes(made[1], otype)  # type: ignore[arg-type]


def fp8_cast_transpose_bgrad_fused(
    inp: torch.Tensor, fp8_meta_tensor: Any, fp8_tensor: int, otype: _Dtype
) -> list[torch.Tensor]:
    """[sums of inp's columns, codes of inp [rows, columns], their transpose]"""
    return raw.fused_cast_transpose_bgrad(inp, *_of(fp8_meta_tensor, fp8_tensor), otype)


def fp8_cast_transpose_bgrad_dgelu_fused(
    grad_output: torch.Tensor, gelu_input: torch.Tensor, fp8_meta_tensor: Any, fp8_tensor: int, otype: _Dtype
) -> list[torch.Tensor]:
    """The same of grad_output times the slope of gelu at gelu_input."""
    state = _of(fp8_meta_tensor, fp8_tensor)
    return raw.fused_cast_transpose_bgrad_dgelu(grad_output, gelu_input, *state, otype)


def fp8_transpose_bgrad_fused(
    inp: torch.Tensor, fp8_meta_tensor: Any, fp8_tensor: int, otype: _Dtype, grad_bias_type: _Dtype
) -> list[torch.Tensor]:
    """[sums of the columns of codes inp [rows, columns], of grad_bias_type; the transposed codes]"""
    state = _of(fp8_meta_tensor, fp8_tensor)
    return raw.fused_fp8_transpose_bgrad(inp, *state, otype, grad_bias_type)


# ---- activations and norms -------------------------------------------------------------------------------------------


def _activation(name):
    def run(inp: torch.Tensor, fp8_meta_tensor: Any, fp8_tensor: int, otype: _Dtype) -> torch.Tensor:
        made = getattr(raw, name)(inp, *_of(fp8_meta_tensor, fp8_tensor), otype)
        return _codes(made, otype)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = (
        f"{name} of inp [..., columns], as a matrix. fp8_meta_tensor may be None where otype is none of FP8."
    )
    return run


_ACTIVATIONS = ("gelu", "relu", "reglu", "geglu", "swiglu", "qgelu", "srelu")
gelu, relu, reglu, geglu, swiglu, qgelu, srelu = map(_activation, _ACTIVATIONS)


def layernorm_fwd_fp8(
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    fp8_meta_tensor: Any,
    fp8_tensor: int,
    otype: _Dtype,
    sm_margin: int,
    zero_centered_gamma: bool,
    ln_out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[codes of layer norm of inp [rows, columns], mean, 1 / deviation]; the codes in ln_out where it is given."""
    state, options = _of(fp8_meta_tensor, fp8_tensor), (otype, sm_margin, zero_centered_gamma)
    if ln_out is None:
        return raw.layernorm_fwd_fp8(inp, weight, bias, eps, *state, *options)
    return raw.layernorm_fwd_fp8_noalloc(inp, weight, bias, eps, state[0], ln_out, *state[1:], *options)


def rmsnorm_fwd_fp8(
    inp: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    fp8_meta_tensor: Any,
    fp8_tensor: int,
    otype: _Dtype,
    sm_margin: int,
    zero_centered_gamma: bool,
    rmsnorm_out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[codes of RMS norm of inp [rows, columns], 1 / root mean square]; the codes in rmsnorm_out where it is given."""
    state, options = _of(fp8_meta_tensor, fp8_tensor), (otype, sm_margin, zero_centered_gamma)
    if rmsnorm_out is None:
        return raw.rmsnorm_fwd_fp8(inp, weight, eps, *state, *options)
    return raw.rmsnorm_fwd_fp8_noalloc(inp, weight, eps, state[0], rmsnorm_out, *state[1:], *options)


def _first(function):
    def run(*arguments: Any) -> torch.Tensor:
        return function(*arguments)[0]

    run.__name__ = run.__qualname__ = f"{function.__name__}_inf"
    run.__doc__ = f"The first of what {function.__name__} gives."
    return run


layernorm_fwd_fp8_inf, rmsnorm_fwd_fp8_inf = map(_first, (layernorm_fwd_fp8, rmsnorm_fwd_fp8))
layernorm_fwd_inf, rmsnorm_fwd_inf = map(_first, (raw.layernorm_fwd, raw.rmsnorm_fwd))


# ---- products --------------------------------------------------------------------------------------------------------


def fp8_gemm(
    A: torch.Tensor,
    A_scale_inv: torch.Tensor,
    A_fp8_tensor: int,
    A_dtype: _Dtype,
    B: torch.Tensor,
    B_scale_inv: torch.Tensor,
    B_fp8_tensor: int,
    B_dtype: _Dtype,
    out_dtype: torch.dtype,
    workspace: torch.Tensor | None = None,
    gelu: bool = False,
    accumulate: bool = False,
    out: torch.Tensor | None = None,
    out_index: int | None = None,
    fp8_meta_tensor: FP8TensorMeta | Any = None,
    bias: torch.Tensor | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: _Dtype | None = None,
    ub_algo: None = None,
    ub: None = None,
    extra_output_tensor: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B A^T [n, m] of codes A [m, k] and B [n, k], what gelu was taken of or a tensor without an element).

    A_scale_inv, B_scale_inv: float32 [tensors], of which A_fp8_tensor and B_fp8_tensor count. bias [m] counts with
    use_bias alone. D_dtype of FP8: the product is cast by tensor out_index of fp8_meta_tensor, and out is uint8. ub:
    refused. Raises TypeError, ValueError, NotImplementedError.
    """
    _refuse_overlap(ub_algo, ub)
    out = _made(out, B.shape[0], A.shape[0], out_dtype, A)
    before = (
        torch.empty_like(out, dtype=torch.bfloat16 if bias is None else bias.dtype)
        if gelu
        else A.new_empty(0)
    )
    state = _of(None if out_index is None else fp8_meta_tensor, out_index or 0)
    raw.te_gemm(
        *(A, A_scale_inv[A_fp8_tensor], A_dtype, True, B, B_scale_inv[B_fp8_tensor], B_dtype, False),
        *(out, state[0], TE_DType[out.dtype] if D_dtype is None else D_dtype, state[1]),
        *(bias if use_bias else None, None, before, False, workspace, 0, accumulate, use_split_accumulator),
    )
    return out, before


def gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    dtype: torch.dtype,
    workspace: torch.Tensor | None = None,
    gelu: bool = False,
    gelu_input: torch.Tensor | None = None,
    grad: bool = False,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_bias: bool = False,
    ub_algo: None = None,
    ub: None = None,
    extra_output_tensor: None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, gradient of the bias, what gelu was taken of): a product of matrices of `dtype`, without FP8.

    layout: of A and B, "TN" (B A^T), "NN" (B A), "NT" (B^T A). grad: with use_bias, the sums of B^T's rows are the
    bias's gradient; with gelu, the product is multiplied with gelu's slope at gelu_input. What is not asked for has no
    element. Raises TypeError, ValueError, NotImplementedError (ub).
    """
    _refuse_overlap(ub_algo, ub)
    if layout not in ("TN", "NN", "NT"):
        raise ValueError(f"gemm: the layout must be 'TN', 'NN' or 'NT', not {layout!r}")
    transa, transb = (letter == "T" for letter in layout)
    out = _made(out, B.shape[1 if transb else 0], A.shape[0 if transa else 1], dtype, A)
    empty = A.new_empty(0)
    before = empty if not gelu else torch.empty_like(out, dtype=dtype) if not grad else gelu_input
    grad_bias = A.new_empty(B.shape[1], dtype=out.dtype) if grad and use_bias else empty
    given, of = grad_bias if grad else bias if use_bias else None, TE_DType[dtype]
    raw.te_gemm(
        *(A, None, of, transa, B, None, of, transb, out, None, TE_DType[out.dtype], None),
        *(given, None, before, grad, workspace, 0, accumulate),
    )
    return out, grad_bias, before  # type: ignore[return-value]


def _made(out, rows, columns, dtype, like):
    return like.new_empty((rows, columns), dtype=torch_dtype(dtype, like.device)) if out is None else out


def _refuse_overlap(*given):
    if any(what is not None for what in given):
        raise NotImplementedError(
            "communication does not overlap with products here: leave ub and ub_algo None"
        )
