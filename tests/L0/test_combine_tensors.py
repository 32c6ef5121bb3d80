"""apex.contrib.combine_tensors: where tensors lie, that both sides alias, what is refused."""

from __future__ import annotations

import lists
import pytest
import torch
from lists import BF16, F16, F32, F64

from apex.contrib.combine_tensors import (
    combine_npu,
    combine_tensors,
    get_aligned_storage_size,
    get_part_combined_tensor,
    is_combined_tensor_valid,
)

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def some(dtype=F32, device="cpu"):
    """Odd sizes, one without elements, one of channels_last, one transposed, one with gaps."""
    dense = lists.random(dtype, device, ((3,), (0,), (17, 5), (16,), (33,)))
    image = lists.random(dtype, device, ((2, 3, 5, 7),))[0].to(memory_format=torch.channels_last)
    matrix = lists.random(dtype, device, ((4, 9),))[0]
    return [*dense, image, matrix.t(), matrix[:, ::2]]


def test_both_names_are_one():
    assert combine_npu is combine_tensors


@pytest.mark.parametrize("numel, slot", [(0, 32), (1, 48), (16, 48), (17, 64), (1000, 1040)])
def test_slots(numel, slot):
    for dtype in (F32, F16, BF16):
        assert get_aligned_storage_size(torch.empty(numel, dtype=dtype, device="cpu")) == slot


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_layout(device, dtype):
    tensors = some(dtype, device)
    values, strides = lists.clones(tensors), [t.stride() for t in tensors]
    combined = combine_tensors(tensors)
    assert combined.dtype == dtype and combined.device == tensors[0].device and combined.dim() == 1
    assert combined.numel() == sum(map(get_aligned_storage_size, tensors))
    address = combined.data_ptr()
    for t in tensors:
        assert t.data_ptr() in (address, 0)
        address += get_aligned_storage_size(t) * t.element_size()
    lists.assert_same_bits(tensors, values)
    assert [t.stride() for t in tensors[:-1]] == strides[:-1] and tensors[-1].is_contiguous()
    assert combined.double().sum().item() == pytest.approx(sum(v.double().sum().item() for v in values))


def test_both_sides_alias(device):
    x, y, z = tensors = lists.random(F32, device, ((5,), (3, 7), (40,)))
    combined = combine_tensors(tensors)
    before = lists.clones(tensors)
    combined.add_(1)
    lists.assert_same_bits(tensors, [b + 1 for b in before])
    y.fill_(7)
    assert combined[48:69].eq(7).all()
    assert x.data_ptr() == combined.data_ptr() and y.data_ptr() - x.data_ptr() == 48 * 4


def test_values_can_be_left_behind(device):
    tensors = lists.random(F32, device, ((5,), (3, 7)))
    assert combine_tensors(tensors, require_copy_value=False).eq(0).all()
    assert all(t.eq(0).all() for t in tensors)


def test_parameters_train_where_they_lie(device):
    """Autograd, and the identity of parameters, are not disturbed."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4, dtype=F32, device="cpu"), torch.nn.Linear(4, 2, dtype=F32, device="cpu")
    ).to(device)
    params = list(model.parameters())
    combined = combine_tensors(params)
    assert list(map(id, model.parameters())) == list(map(id, params)) and all(p.is_leaf for p in params)
    model(torch.ones(5, 3, device=device, dtype=F32)).sum().backward()
    expected = [p.detach() - p.grad for p in params]
    torch.optim.SGD(params, lr=1.0).step()
    lists.assert_same_bits(params, expected)
    assert is_combined_tensor_valid(combined, params)


@pytest.mark.parametrize("keep", [True, False])
def test_a_graph_from_before(device, keep):
    """It goes on with the values that it saved, or is refused, where these are gone."""
    x = torch.full((5,), 3.0, dtype=F32, device=device, requires_grad=True)
    loss = (x * x).sum()
    combined = combine_tensors([x], require_copy_value=keep)
    if keep:
        loss.backward(retain_graph=True)
        assert x.grad.eq(6).all()
        combined.add_(1)
        torch.autograd.graph.increment_version([x])  # as the docstring says
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parts():
    tensors = lists.random(F32, "cpu", ((5,), (3, 7)))
    combined = combine_tensors(tensors)
    part = get_part_combined_tensor(combined, 48, 64)
    assert part.data_ptr() == tensors[1].data_ptr() and part.numel() == 64
    part.fill_(3)
    assert tensors[1].eq(3).all() and not tensors[0].eq(3).any()
    assert get_part_combined_tensor(None, 0, 5) is None
    assert get_part_combined_tensor(combined, 5, 0) is None
    for index, size in ((48, 65), (112, 1), (-1, 2)):
        with pytest.raises(RuntimeError, match="are not inside a combined tensor of 112"):
            get_part_combined_tensor(combined, index, size)


def test_validity():
    tensors = lists.random(F32, "cpu", ((5,), (0,), (3, 7)))
    combined = combine_tensors(tensors)
    assert is_combined_tensor_valid(combined, tensors) and is_combined_tensor_valid(None, [])
    assert not is_combined_tensor_valid(None, tensors)
    assert not is_combined_tensor_valid(combined, [*tensors, None])
    tensors[2].data = tensors[2].data.clone()
    assert not is_combined_tensor_valid(combined, tensors)


def test_nothing_to_combine():
    assert combine_tensors([]) is None


def test_what_is_refused():
    one = torch.ones(3, dtype=F32, device="cpu")
    cases = [
        (TypeError, "a list of tensors, not one", torch.ones(2, 3, dtype=F32, device="cpu")),
        (TypeError, "tensor 1 is int", [one, 3]),
        (TypeError, "tensor 0 is NoneType", [None]),
        (RuntimeError, "tensor 0 is torch.float64: a flat buffer holds", [one.to(F64)]),
        (RuntimeError, "tensor 1 is torch.float16 on cpu, but tensor 0 is torch.float32", [one, one.half()]),
        (RuntimeError, "tensor 1 is sparse", [one, torch.eye(3, dtype=F32, device="cpu").to_sparse()]),
        (RuntimeError, "tensor 2 is in the list twice", [one, torch.ones(2, dtype=F32, device="cpu"), one]),
    ]
    for error, words, tensors in cases:
        with pytest.raises(error, match=words):
            combine_tensors(tensors)
    assert one.eq(1).all() and one.untyped_storage().nbytes() == 12  # nothing was moved
