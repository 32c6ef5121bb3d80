"""The functions of public apex's scaled_softmax_cuda."""

from apex._legacy import _softmax
from apex._legacy._raw import raw as _raw

__all__ = ["backward", "forward"]


@_raw
def forward(input, scale_factor):
    """softmax(scale_factor * input) of (batch, heads, queries, keys)."""
    _softmax.check("input", input, 4)
    return _softmax.forward(input, None, scale_factor)


@_raw
def backward(output_grads, softmax_results, scale_factor):
    """The gradient of the input, a fresh tensor; both tensors as `forward` gives."""
    _softmax.check("output_grads", output_grads, 4)
    _softmax.check("softmax_results", softmax_results, 4)
    return _softmax.backward(output_grads, softmax_results, scale_factor)
