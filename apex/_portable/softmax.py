"""The softmax ops: csrc/bindings/{scaled_masked_softmax,masked_softmax_dropout}.h in Python."""

from __future__ import annotations

import functools

import torch

from apex._portable import fast, interface, tensors
from apex._portable.checks import like, seed_for, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import CODES, address, contiguous, dtype_name
from apex.reference import scaled_masked_softmax as _reference

_check = functools.partial(_reference._check, name_of=dtype_name)
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
    """The mask and its strides in bytes by batch, head and query: 0 where it is broadcast."""
    n = max(4, x.dim())
    if m.dim() < n:
        m = m[(None,) * (n - m.dim())]
    if x.dim() > 4:
        m = m.expand(x.shape).reshape(-1, heads, queries, keys)
    if m.shape[3] != keys or (m.stride(3) != 1 and keys > 1):
        m = m.expand(*m.shape[:3], keys).contiguous()
    return m, *(0 if m.shape[d] == 1 else m.stride(d) * m.element_size() for d in range(3))


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
    like(_OP, "the gradient", grad_output, output.shape, output.dtype, "the output's ")
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


# ---- with dropout ----------------------------------------------------------------------------------------------------

_DROPOUT = "masked_softmax_dropout"
_dropout = interface.layout("SoftmaxForward").packer(
    "input", "mask", "output", "rows", "keys", "heads", "queries", "mask_batch", "mask_head", "mask_query", "type",
    "additive", "seed", "softmax", "kept",
)  # fmt: skip
_dropout_back = interface.layout("SoftmaxBackward").packer(
    "grad_output", "output", "grad_input", "rows", "keys", "queries", "type", "seed", "kept"
)
_c_dropout, _c_dropout_back = (
    interface.function(f"apex_{_DROPOUT}_forward"),
    interface.function(f"apex_{_DROPOUT}_backward"),
)


def _check_dropout(dropout, seed, input):
    value(
        0 <= dropout <= 1,
        "{}: the dropout probability must be between 0 and 1, not {}", _DROPOUT, float(dropout),
    )  # fmt: skip
    seed_for(_DROPOUT, dropout, seed, input)


@kernel
def masked_softmax_dropout_forward(input, mask, dropout, seed, keep_mask):
    tensors.code_of(_DROPOUT, input.dtype)
    _check(input, mask, False, op=_DROPOUT, added=True)
    _check_dropout(dropout, seed, input)
    place = tensors.place_of(input)
    if place is None:
        return None
    x = input.contiguous()
    output = _empty_like(x, memory_format=_contiguous)
    softmax = _empty_like(x, memory_format=_contiguous) if dropout > 0 else x.new_empty(0)
    fill = torch.empty_like if dropout > 0 else torch.ones_like
    kept = fill(x, dtype=torch.uint8) if keep_mask else x.new_empty(0, dtype=torch.uint8)
    rows, heads, queries, keys = _shape(x)
    m, *strides = (None, 0, 0, 0)
    additive = mask is not None and mask.is_floating_point()
    if mask is not None:
        m, *strides = _mask(mask.to(x.dtype) if additive else mask, x, heads, queries, keys)
    key = seed.contiguous() if dropout > 0 else None
    packed = _dropout(
        x.data_ptr(), address(m), output.data_ptr(), rows, keys, heads, queries, *strides, CODES[x.dtype], additive,
        address(key), softmax.data_ptr() if dropout > 0 else 0, kept.data_ptr() if keep_mask and dropout > 0 else 0,
    )  # fmt: skip
    status = _c_dropout(place, packed, dropout)
    del m, key
    return None if status and tensors.must_use_reference(status, _DROPOUT) else (output, softmax, kept)


def _check_kept(kept, softmax):
    like(_DROPOUT, "the mask of what was kept", kept, softmax.shape)
    type_(
        kept.dtype in (torch.uint8, torch.bool),
        "{}: the mask of what was kept is uint8 or bool, not {}", _DROPOUT, kept.dtype,
    )  # fmt: skip


@kernel
def masked_softmax_dropout_backward(grad_output, softmax, kept_mask, dropout, seed, grad_softmax):
    tensors.code_of(_DROPOUT, softmax.dtype)
    _check(softmax, None, False, op=_DROPOUT)
    like(_DROPOUT, "the gradient", grad_output, softmax.shape, softmax.dtype, "the output's ")
    if kept_mask is not None:
        _check_kept(kept_mask, softmax)
    if grad_softmax is not None and grad_softmax.numel():
        like(_DROPOUT, "the gradient", grad_softmax, softmax.shape, softmax.dtype, "the output's ")
    _check_dropout(0.0 if kept_mask is not None and 0 <= dropout <= 1 else dropout, seed, softmax)
    place = tensors.place_of(softmax)
    if place is None:
        return None
    dy, y, bits = grad_output.contiguous(), softmax.contiguous(), contiguous(kept_mask)
    key = seed.contiguous() if dropout > 0 and kept_mask is None else None
    found = _empty_like(y, memory_format=_contiguous)
    rows, _, queries, keys = _shape(y)
    packed = _dropout_back(
        dy.data_ptr(),
        y.data_ptr(),
        found.data_ptr(),
        rows,
        keys,
        queries,
        CODES[y.dtype],
        address(key),
        address(bits),
    )
    status = _c_dropout_back(place, packed, dropout)
    del key
    if status and tensors.must_use_reference(status, _DROPOUT):
        return None
    if (
        grad_softmax is not None and grad_softmax.numel()
    ):  # linear in the gradients, and none is dropped before it
        second = masked_softmax_dropout_backward(grad_softmax, softmax, None, 0.0, None, None)
        return None if second is None else found.add_(second)
    return found
