"""The extension apex_C of public apex: dense tensors as one, and back."""

from __future__ import annotations

import lists
import pytest
import torch
from lists import F16, F32

from apex._legacy import apex_C
from apex._loader import registry


def test_names():
    """csrc/flatten_unflatten.cpp of both public trees."""
    assert set(apex_C.__all__) == {"flatten", "unflatten"}
    assert registry.extensions()["apex_C"].state == "complete"


@pytest.mark.parametrize("dtype", [F32, F16, torch.int64], ids=str)
def test_there_and_back(dtype):
    shapes = ((3, 4), (), (0,), (2, 1, 5), (7,))
    tensors = [
        torch.arange(torch.Size(s).numel(), dtype=torch.int64, device="cpu").reshape(s).to(dtype) + i
        for i, s in enumerate(shapes)
    ]
    flat = apex_C.flatten(tensors)
    assert flat.dtype == dtype and torch.equal(flat, torch.cat([t.reshape(-1) for t in tensors]))
    again = apex_C.unflatten(flat, tensors)
    assert isinstance(again, list) and [t.shape for t in again] == [torch.Size(s) for s in shapes]
    lists.assert_same_bits(again, tensors) if dtype.is_floating_point else None
    flat.zero_()
    assert not any(t.any() for t in again) and tensors[0].any()  # views of flat, which was a copy


def test_one_tensor_is_viewed():
    tensor = torch.arange(6.0, dtype=F32, device="cpu").view(2, 3)
    assert apex_C.flatten([tensor]).data_ptr() == tensor.data_ptr()
    assert torch.equal(apex_C.flatten([tensor.t()]), tensor.t().reshape(-1))


def test_any_iterable():
    tensors = [torch.ones(2, dtype=F32, device="cpu"), torch.zeros(3, dtype=F32, device="cpu")]
    assert apex_C.flatten(t for t in tensors).tolist() == [1, 1, 0, 0, 0]
    assert [
        t.tolist() for t in apex_C.unflatten(torch.arange(5, dtype=torch.int64, device="cpu"), tuple(tensors))
    ] == [[0, 1], [2, 3, 4]]
    with pytest.raises((RuntimeError, ValueError), match="non-empty list"):
        apex_C.flatten([])
