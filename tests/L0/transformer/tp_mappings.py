"""Cases of the mappings: forward, backward, and the backward's own, against tables of what each rank holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tp_common import collectives, equal, integers, raises_everywhere, split, tensor_sizes

from apex.transformer import utils
from apex.transformer.tensor_parallel import mappings

LAST, FIRST = -1, 0


def _part(tensor, rank, ranks, dim):
    return tensor.chunk(ranks, dim)[rank].contiguous()


def _cases(size, rank):
    """(mapping, this rank's input, output, gradient of the output, gradient of the input), of all ranks."""
    whole = [integers((4, 3, 8), 10 + r) for r in range(size)]
    grads = [integers((4, 3, 8), 20 + r) for r in range(size)]

    def part(tensors, dim):
        return _part(tensors[rank], rank, size, dim)

    def parts(tensors, dim):
        return [_part(tensors[r], r, size, dim) for r in range(size)]

    total, total_grad = sum(whole), sum(grads)
    m = mappings
    return [
        (m.copy_to_tensor_model_parallel_region, whole[rank], whole[rank], grads[rank], total_grad),
        (m.reduce_from_tensor_model_parallel_region, whole[rank], total, grads[rank], grads[rank]),
        (
            *(m.scatter_to_tensor_model_parallel_region, whole[rank], part(whole, LAST), part(grads, LAST)),
            torch.cat(parts(grads, LAST), LAST),
        ),
        (
            *(
                m.gather_from_tensor_model_parallel_region,
                part(whole, LAST),
                torch.cat(parts(whole, LAST), LAST),
            ),
            *(grads[rank], part(grads, LAST)),
        ),
        (
            *(m.scatter_to_sequence_parallel_region, whole[rank], part(whole, FIRST), part(grads, FIRST)),
            torch.cat(parts(grads, FIRST), FIRST),
        ),
        (
            *(
                m.gather_from_sequence_parallel_region,
                part(whole, FIRST),
                torch.cat(parts(whole, FIRST), FIRST),
            ),
            *(grads[rank], _part(total_grad, rank, size, FIRST)),
        ),
        (
            lambda x: m.gather_from_sequence_parallel_region(x, to_model_parallel=False),
            *(part(whole, FIRST), torch.cat(parts(whole, FIRST), FIRST), grads[rank], part(grads, FIRST)),
        ),
        (
            *(m.reduce_scatter_to_sequence_parallel_region, whole[rank], _part(total, rank, size, FIRST)),
            *(part(grads, FIRST), torch.cat(parts(grads, FIRST), FIRST)),
        ),
    ]


def _forward_and_backward(mesh):
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                for mapping, *tensors in _cases(size, rank):
                    x, wanted, grad, wanted_grad = (t.to(dtype) for t in tensors)
                    kept, kept_grad = x.clone(), grad.clone()
                    x.requires_grad_()
                    y = mapping(x)
                    equal(y, wanted)
                    (found,) = torch.autograd.grad(y, x, grad)
                    equal(found, wanted_grad)
                    equal(x.detach(), kept)
                    equal(grad, kept_grad)


def _twice(mesh):
    """Each is linear, so the gradient's own gradient is the mapping again."""
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for mapping, x, wanted, grad, _ in _cases(size, rank):
                x.requires_grad_()
                grad.requires_grad_()
                (first,) = torch.autograd.grad(mapping(x), x, grad, create_graph=True)
                (second,) = torch.autograd.grad(first, grad, x.detach())
                equal(second, wanted)


def _whose_bytes_are_not_their_values(mesh):
    """Views with gaps, negative ones, expanded ones, and without elements."""
    for size in tensor_sizes():
        with split(size) as (rank, _):
            whole = [integers((4, 3, 8), 10 + r) for r in range(size)]
            strange = [
                lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
                lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
            ]
            for make in strange:
                for mapping, x, wanted, grad, wanted_grad in _cases(size, rank):
                    y = mapping(make(x).requires_grad_())
                    equal(y.detach(), wanted)
                    x = x.clone().requires_grad_()
                    mapping(x).backward(make(grad))
                    equal(x.grad, wanted_grad)
            one = torch.tensor([float(rank)]).expand(4, 3, 8)
            equal(mappings._reduce(one), torch.full((4, 3, 8), float(sum(range(size)))))
            assert one.stride() == (0, 0, 0) and len(whole) == size
            for mapping in {case[0] for case in _cases(size, rank)}:
                assert mapping(torch.empty(0, 3, 8)).numel() == 0


def _of_integers(mesh):
    for size in tensor_sizes():
        with split(size) as (rank, _):
            equal(mappings._reduce(torch.full((3,), 50)), torch.full((3,), 50 * size))
            equal(mappings._gather_along_last_dim(torch.tensor([rank])), torch.arange(size))


def _one_rank_says_nothing(mesh):
    with split(1), collectives() as calls:
        for mapping, x, _, grad, _ in _cases(1, 0):
            mapping(x.requires_grad_()).backward(grad)
        assert not calls


def _sizes_that_do_not_divide(mesh):
    size = dist.get_world_size()
    with split(size):
        x = torch.ones(size + 1, size + 1)
        for mapping in (
            *(mappings.scatter_to_tensor_model_parallel_region, mappings.scatter_to_sequence_parallel_region),
            mappings.reduce_scatter_to_sequence_parallel_region,
        ):
            with raises_everywhere(ValueError, f"{size + 1} is not divisible by {size}"):
                mapping(x)
        with raises_everywhere(ValueError, "not divisible"):
            utils.split_tensor_into_1d_equal_chunks(x)


def _chunks(mesh):
    for size in tensor_sizes():
        with split(size) as (rank, _):
            x = integers((4, 3, 8), 1)
            part = utils.split_tensor_into_1d_equal_chunks(x)
            equal(part, x.view(-1).chunk(size)[rank])
            equal(utils.gather_split_1d_tensor(part).view(4, 3, 8), x)
            equal(
                utils.split_tensor_into_1d_equal_chunks(x.transpose(0, 1)),
                x.mT.mT.transpose(0, 1).reshape(-1).chunk(size)[rank],
            )


CASES = {
    "mappings": _forward_and_backward,
    "mappings twice": _twice,
    "mappings of strange tensors": _whose_bytes_are_not_their_values,
    "mappings of integers": _of_integers,
    "mappings of one rank": _one_rank_says_nothing,
    "mappings that do not divide": _sizes_that_do_not_divide,
    "chunks": _chunks,
}
