"""Layer norm, and layer norm of a sum, in plain PyTorch."""

from apex.reference import _norm

PAIRS = (
    _norm.Pair("layer_norm", centered=True, residual=False),
    _norm.Pair("add_layer_norm", centered=True, residual=True),
)


def layer_norm_forward(
    input, normalized_shape, weight=None, bias=None, eps=1e-05, memory_efficient=False, dtype=None
):
    """(output, mean, rstd) of (input - mean) * rstd * weight + bias over the last dimensions.

    input: float16, bfloat16, float32 or float64, ending in normalized_shape. weight, bias: of that shape, of
    any of these dtypes but float64, which goes with itself alone. dtype: the output's, by default the
    input's. mean, rstd: float32 (float64 for float64), one element a row; rstd is 1 / sqrt(variance + eps).
    memory_efficient changes what autograd keeps, not the result. Raises ValueError and TypeError.
    """
    _norm.check("layer_norm", input, normalized_shape, weight, bias)
    return _norm.forward(input, normalized_shape, weight, bias, eps, dtype, centered=True)


def layer_norm_backward(
    grad_output,
    saved,
    mean,
    rstd,
    normalized_shape,
    weight,
    bias,
    eps,
    memory_efficient=False,
    dtype=None,
    weight_gradients=True,
):
    """(grad_input, grad_weight, grad_bias); the last two have no element where not wanted or not there.

    saved: the forward's input or, with memory_efficient, its output: then `mean` is not read, and weights
    nearer to 0 than eps count as eps. dtype: the input's, by default that of `saved`.
    """
    return _norm.backward(
        grad_output, None, saved, mean, rstd, normalized_shape, weight, bias, eps, memory_efficient, dtype,
        weight_gradients, centered=True,
    )  # fmt: skip


def add_layer_norm_forward(
    input, residual, normalized_shape, weight=None, bias=None, eps=1e-05, memory_efficient=False, dtype=None
):
    """(output, sum, mean, rstd): the layer norm of sum = input + residual, which has the input's dtype."""
    _norm.check("layer_norm", input, normalized_shape, weight, bias)
    _norm.check_residual("layer_norm", input, residual)
    total = (input + residual).contiguous()
    output, mean, rstd = _norm.forward(total, normalized_shape, weight, bias, eps, dtype, centered=True)
    return output, total, mean, rstd


def add_layer_norm_backward(
    grad_output,
    grad_sum,
    saved,
    mean,
    rstd,
    normalized_shape,
    weight,
    bias,
    eps,
    memory_efficient=False,
    dtype=None,
    weight_gradients=True,
):
    """As layer_norm_backward, of the sum; grad_sum, the sum's own gradient or None, is added to grad_input."""
    return _norm.backward(
        grad_output, grad_sum, saved, mean, rstd, normalized_shape, weight, bias, eps, memory_efficient,
        dtype, weight_gradients, centered=True,
    )  # fmt: skip
