"""Layer norm to FP8 in plain PyTorch."""

from apex.reference import _fp8_norm

NO_DERIVATIVE = True


def fp8_layer_norm(input, weight, bias, eps, scale, amax, dtype, zero_centered_gamma=False):
    """(output, mean, rstd): the layer norm of the last dimension times scale, in FP8.

    input: [..., columns] float32, float16 or bfloat16. weight, bias: [columns] or None, of one of these dtypes, both of
    the same; zero_centered_gamma: rows are multiplied by 1 + weight. scale: float32, one element; amax likewise, or
    None, becomes max(amax, max |y|) of the norm y, which is rounded to no other dtype. output: the input's shape in
    `dtype`; mean, rstd: float32 [rows]. Raises ValueError, TypeError, RuntimeError where the input asks for a gradient.
    """
    return _fp8_norm.forward(
        "fp8_layer_norm", input, weight, bias, eps, scale, amax, dtype, zero_centered_gamma, True
    )
