"""scaled_masked_softmax: csrc/bindings/scaled_masked_softmax.h in Python."""

from __future__ import annotations

import torch

from apex._portable import fast, interface, tensors
from apex._portable.functional import kernel
from apex._portable.tensors import CODES, address
from apex.reference.scaled_masked_softmax import _check

_OP = "scaled_masked_softmax"
_forward = interface.layout("SoftmaxForward").packer(
    "input",
    "mask",
    "output",
    "rows",
    "keys",
    "heads",
    "queries",
    "mask_batch",
    "mask_head",
    "mask_query",
    "type",
    "causal",
)
_backward = interface.layout("SoftmaxBackward").packer(
    "grad_output", "output", "grad_input", "rows", "keys", "queries", "type", "causal"
)
_c_forward, _c_backward = (
    interface.function(f"apex_{_OP}_forward"),
    interface.function(f"apex_{_OP}_backward"),
)
_empty_like, _contiguous = torch.empty_like, torch.contiguous_format
_DTYPES = frozenset(CODES)


def _shape(x):
    """(rows, heads, queries, keys); dimensions before the last three are batches."""
    shape = x.shape
    n, keys = len(shape), shape[-1]
    rows = x.numel() // keys if keys else shape[:-1].numel()
    return rows, shape[-3] if n > 2 else 1, shape[-2] if n > 1 else 1, keys


def _mask(m, x, heads, queries, keys):
    """The mask and its strides by batch, head and query: 0 where it is broadcast."""
    n = max(4, x.dim())
    if m.dim() < n:
        m = m[(None,) * (n - m.dim())]
    if x.dim() > 4:
        m = m.expand(x.shape).reshape(-1, heads, queries, keys)
    if m.shape[3] != keys or (m.stride(3) != 1 and keys > 1):
        m = m.expand(*m.shape[:3], keys).contiguous()
    return m, *(0 if m.shape[d] == 1 else m.stride(d) for d in range(3))


def _quick_forward(input, mask, scale, causal):
    if mask is not None:
        return None
    output = _empty_like(input)
    status = fast.module.softmax_forward(bool(causal), scale, input, output)
    if status is None or (status and tensors.must_use_reference(status, _OP)):
        return None
    return output


def _quick_backward(grad_output, output, scale, causal):
    found = _empty_like(output)
    status = fast.module.softmax_backward(bool(causal), scale, grad_output, output, found)
    if status is None or (status and tensors.must_use_reference(status, _OP)):
        return None
    return found


@kernel(quick=_quick_forward)
def scaled_masked_softmax_forward(input, mask, scale, causal):
    if mask is not None or input.dtype not in _DTYPES or input.dim() < (2 if causal else 1):
        if input.dtype not in _DTYPES:
            tensors.code_of(_OP, input.dtype)
        _check(input, mask, causal)
    place = tensors.place_of(input)
    if place is None:
        return None
    x = input.contiguous()
    output = _empty_like(x, memory_format=_contiguous)
    rows, heads, queries, keys = _shape(x)
    m, *strides = (None, 0, 0, 0) if mask is None else _mask(mask, x, heads, queries, keys)
    packed = _forward(
        x.data_ptr(),
        address(m),
        output.data_ptr(),
        rows,
        keys,
        heads,
        queries,
        *strides,
        CODES[x.dtype],
        causal,
    )
    status = _c_forward(place, packed, scale)
    return None if status and tensors.must_use_reference(status, _OP) else output


@kernel(quick=_quick_backward)
def scaled_masked_softmax_backward(grad_output, output, scale, causal):
    if output.dtype not in _DTYPES or output.dim() < (2 if causal else 1):
        tensors.code_of(_OP, output.dtype)
        _check(output, None, causal)
    if grad_output.shape != output.shape or grad_output.device != output.device:
        raise ValueError(
            f"{_OP}: the gradient must have the output's shape {list(output.shape)} and be on its device, "
            f"{output.device}"
        )
    if grad_output.dtype is not output.dtype:
        name = tensors.dtype_name(output.dtype)
        raise TypeError(f"{_OP}: the gradient must have the output's dtype {name}")
    place = tensors.place_of(output)
    if place is None:
        return None
    dy, y = grad_output.contiguous(), output.contiguous()
    found = _empty_like(y, memory_format=_contiguous)
    rows, _, queries, keys = _shape(y)
    packed = _backward(
        dy.data_ptr(), y.data_ptr(), found.data_ptr(), rows, keys, queries, CODES[y.dtype], causal
    )
    status = _c_backward(place, packed, scale)
    return None if status and tensors.must_use_reference(status, _OP) else found
