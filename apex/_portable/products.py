"""What ops that multiply matrices share: csrc/bindings/products.h in Python."""

from __future__ import annotations

import ctypes
import sys
import warnings

import torch

from apex._loader import library
from apex._loader.errors import SlowPathWarning
from apex._portable import interface, tensors

_name = interface.function("apex_blas_name")
_ALLOWED = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}


def place_of(input):
    """The apex_place where the vendor's BLAS may be asked; None where torch's products are to serve.

    What the user tells torch of products holds here: on HIP hipBLASLt is asked only where it is torch's preferred BLAS;
    and who forbids sums in reduced precision gets torch's products, which know of it.
    """
    if not input.is_cuda:
        return None
    if torch.version.hip and torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:
        return None
    option = _ALLOWED.get(input.dtype)
    allowed = option is None or getattr(torch.backends.cuda.matmul, option)
    return tensors.place_of(input) if allowed else None


def workspace(size, like):
    """`size` bytes beside a tensor; None where the device has no room: torch's own products may do with less."""
    try:
        return like.new_empty(size, dtype=torch.uint8)
    except torch.OutOfMemoryError:
        return None


_said: set[str] = set()


def was_refused(place, status, op):
    """Whether torch's products must serve; a vendor's library that is there and refuses is named once a process."""
    if not status or not tensors.must_use_reference(status, op):
        return False
    text = library.load().last_error()
    if (
        not _said
        and _name(int.from_bytes(place[:4], sys.byteorder), ctypes.create_string_buffer(64), 64) == 0
    ):
        _said.add(text)
        warnings.warn(f"apex {op} is multiplied by torch where {text}", SlowPathWarning, stacklevel=2)
    return True


def has_dense_rows(matrix):
    """Whether elements of a matrix's rows lie one behind another, and rows apart."""
    rows, columns = matrix.shape
    return (columns <= 1 or matrix.stride(1) == 1) and (rows <= 1 or matrix.stride(0) >= columns)


def rows_of(tensor):
    """[rows, the last dimension], such a matrix, of any number of dimensions."""
    rows = tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)
    return rows if has_dense_rows(rows) else rows.contiguous()


def leading(rows):
    """Elements from a row's first to the next one's."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
