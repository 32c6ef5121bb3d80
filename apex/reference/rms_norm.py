"""RMS norm, and RMS norm of a sum, in plain PyTorch."""

from apex.reference import _norm

PAIRS = (
    _norm.Pair("rms_norm", centered=False, residual=False),
    _norm.Pair("add_rms_norm", centered=False, residual=True),
)


def rms_norm_forward(input, normalized_shape, weight=None, eps=1e-05, memory_efficient=False, dtype=None):
    """(output, rstd) of input * rstd * weight over the last dimensions; rstd is 1 / sqrt(mean square + eps).

    Dtypes, shapes and errors as layer_norm_forward's.
    """
    _norm.check("rms_norm", input, normalized_shape, weight)
    output, _, rstd = _norm.forward(input, normalized_shape, weight, None, eps, dtype, centered=False)
    return output, rstd


def rms_norm_backward(
    grad_output,
    saved,
    rstd,
    normalized_shape,
    weight,
    eps,
    memory_efficient=False,
    dtype=None,
    weight_gradients=True,
):
    """(grad_input, grad_weight), as layer_norm_backward."""
    return _norm.backward(
        grad_output, None, saved, None, rstd, normalized_shape, weight, None, eps, memory_efficient, dtype,
        weight_gradients, centered=False,
    )[:2]  # fmt: skip


def add_rms_norm_forward(
    input, residual, normalized_shape, weight=None, eps=1e-05, memory_efficient=False, dtype=None
):
    """(output, sum, rstd): the RMS norm of sum = input + residual, which has the input's dtype."""
    _norm.check("rms_norm", input, normalized_shape, weight)
    _norm.check_residual("rms_norm", input, residual)
    total = (input + residual).contiguous()
    output, _, rstd = _norm.forward(total, normalized_shape, weight, None, eps, dtype, centered=False)
    return output, total, rstd


def add_rms_norm_backward(
    grad_output,
    grad_sum,
    saved,
    rstd,
    normalized_shape,
    weight,
    eps,
    memory_efficient=False,
    dtype=None,
    weight_gradients=True,
):
    """As rms_norm_backward, of the sum; grad_sum, the sum's own gradient or None, is added to grad_input."""
    return _norm.backward(
        grad_output, grad_sum, saved, None, rstd, normalized_shape, weight, None, eps, memory_efficient, dtype,
        weight_gradients, centered=False,
    )[:2]  # fmt: skip
