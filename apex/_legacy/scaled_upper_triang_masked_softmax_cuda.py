"""The functions of public apex's scaled_upper_triang_masked_softmax_cuda."""

from apex._legacy import _softmax
from apex._legacy._raw import raw as _raw

__all__ = ["backward", "forward"]


@_raw
def forward(input, scale_factor):
    """Causal softmax(scale_factor * input) of (attention batches, queries, keys)."""
    _softmax.check("input", input, 3)
    return _softmax.forward(input, None, scale_factor, causal=True)


@_raw
def backward(output_grads, softmax_results, scale_factor):
    """The gradient of the input, a fresh tensor; both tensors as `forward` gives."""
    _softmax.check("output_grads", output_grads, 3)
    _softmax.check("softmax_results", softmax_results, 3)
    return _softmax.backward(output_grads, softmax_results, scale_factor, causal=True)
