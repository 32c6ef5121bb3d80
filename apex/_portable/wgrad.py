"""wgrad_gemm_accum: csrc/bindings/wgrad_gemm_accum.h in Python."""

from __future__ import annotations

from apex._portable import interface, products, tensors
from apex._portable.checks import type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import BF16, F16, F32, address, code_of
from apex.reference.wgrad_gemm_accum import check_memory

_OP = "wgrad_gemm_accum"
_HALVES = (F16, BF16)
_WORKSPACE = 32 << 20  # APEX_MATMUL_WORKSPACE_BYTES
_pack = interface.layout("apex_matmul").packer(
    "a", "b", "d", "m", "n", "k", "ld_a", "ld_b", "ld_d", "transpose_a", "accumulate", "type", "type_d", "workspace",
    "workspace_bytes",
)  # fmt: skip
_c_run = interface.function("apex_matmul_run")


def _check(input, grad_output, main_grad):
    code_of(_OP, input.dtype)
    type_(
        grad_output.dtype is input.dtype,
        "{}: grad_output is {} but the input {}", _OP, grad_output.dtype, input.dtype,
    )  # fmt: skip
    half = input.dtype in _HALVES
    type_(
        main_grad.dtype is input.dtype or (half and main_grad.dtype is F32),
        "{}: main_grad is {}, not {}{}", _OP, main_grad.dtype, input.dtype, " or Float" if half else "",
    )  # fmt: skip
    value(
        input.dim() >= 1 and grad_output.dim() >= 1,
        "{}: input and grad_output must have at least one dimension", _OP,
    )  # fmt: skip
    rows, others = input.shape[:-1].numel(), grad_output.shape[:-1].numel()
    value(rows == others, "{}: the input has {} rows but grad_output {}", _OP, rows, others)
    shape = (grad_output.shape[-1], input.shape[-1])
    value(main_grad.shape == shape, "{}: main_grad has shape {}, not {}", _OP, main_grad.shape, shape)
    value(
        not main_grad.requires_grad,
        "{}: main_grad requires a gradient itself, which would be lost; detach it", _OP,
    )  # fmt: skip
    check_memory(main_grad, input, grad_output)


@kernel
def wgrad_gemm_accum(input, grad_output, main_grad):
    _check(input, grad_output, main_grad)
    if not input.numel() or not grad_output.numel():
        return True
    # float32 and float64 are torch's, which knows whether TF32 is allowed.
    place = products.place_of(input) if input.dtype in _HALVES else None
    if place is None or not products.has_dense_rows(main_grad):
        return None
    x, g = products.rows_of(input), products.rows_of(grad_output)
    workspace = products.workspace(_WORKSPACE, input)
    status = _c_run(place, _pack(
        g.data_ptr(), x.data_ptr(), main_grad.data_ptr(), g.shape[1], x.shape[1], x.shape[0], products.leading(g),
        products.leading(x), products.leading(main_grad), 1, 1, code_of(_OP, x.dtype), code_of(_OP, main_grad.dtype),
        address(workspace), 0 if workspace is None else _WORKSPACE,
    ))  # fmt: skip
    if products.was_refused(place, status, _OP):
        return None
    tensors.bump_version(main_grad)
    return True
