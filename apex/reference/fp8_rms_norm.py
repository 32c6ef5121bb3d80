"""RMS norm to FP8 in plain PyTorch."""

from apex.reference import _fp8_norm

NO_DERIVATIVE = True


def fp8_rms_norm(input, weight, eps, scale, amax, dtype, zero_centered_gamma=False):
    """(output, rstd): the RMS norm of the last dimension times scale, in FP8; arguments are those of fp8_layer_norm."""
    output, _, rstd = _fp8_norm.forward(
        "fp8_rms_norm", input, weight, None, eps, scale, amax, dtype, zero_centered_gamma, False
    )
    return output, rstd
