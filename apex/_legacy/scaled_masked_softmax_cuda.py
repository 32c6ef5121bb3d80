"""The functions of public apex's scaled_masked_softmax_cuda."""

from apex._legacy import _softmax
from apex._legacy._raw import raw as _raw

__all__ = ["backward", "forward", "get_batch_per_block"]


@_raw
def forward(input, mask, scale_factor):
    """softmax(scale_factor * input) of (batch, heads, queries, keys), without the keys where the mask is true."""
    _softmax.check("input", input, 4)
    _softmax.check("mask", mask, 4)
    return _softmax.forward(input, mask, scale_factor)


@_raw
def backward(output_grads, softmax_results, scale_factor):
    """The gradient of the input, a fresh tensor; both tensors as `forward` gives."""
    _softmax.check("output_grads", output_grads, 4)
    _softmax.check("softmax_results", softmax_results, 4)
    return _softmax.backward(output_grads, softmax_results, scale_factor)


def get_batch_per_block(query_seq_len, key_seq_len, batches, attn_heads):
    """1: callers ask whether queries, or batches times heads, are a multiple of it, and here they may be any number."""
    return 1
