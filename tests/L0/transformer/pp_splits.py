"""Cases of models at any split: tensor, pipeline, virtual and data parallel, along the sequence, checkpointed."""

from __future__ import annotations

import functools
import itertools

import torch
import torch.distributed as dist
from pp_model import reference, run_split
from tp_common import equal

# Of losses and gradients, to the largest of each.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 6e-2}


def splits(world):
    """(tensor, pipeline, virtual) that leave 1 or 2 data parallel ranks."""
    return [
        (tensor, stages, chunks)
        for tensor, stages, data, chunks in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2))
        if tensor * stages * data == world and (stages > 1 or chunks == 1)
    ]


@functools.cache
def _exact(dtype):
    return reference(dtype)


def check(dtype, sizes, known, **options):
    """Near the float64 one, and equal to what was `known` of the same sums: gradients of any pipeline's sizes are those
    of one stage, and a checkpoint changes no bit."""
    losses, grads = run_split(dtype, sizes, **options)
    bound, (exact, exact_grads) = BOUNDS[dtype], _exact(dtype)
    torch.testing.assert_close(losses, exact, rtol=bound, atol=bound)
    assert set(grads) == set(exact_grads)
    for name, grad in grads.items():
        wanted = exact_grads[name]
        scale = wanted.abs().max().item()
        torch.testing.assert_close(grad.double(), wanted, rtol=0, atol=bound * scale, msg=f"{name}: {sizes}")
    data = dist.get_world_size() // (sizes[0] * sizes[1])
    equal(
        (losses, grads),
        known.setdefault((dtype, sizes[0], data, options.get("sequence", False)), (losses, grads)),
    )


def whole_table(mesh):
    """Each split of this world, with each option."""
    known = {}
    for dtype, sizes in itertools.product(BOUNDS, splits(dist.get_world_size())):
        for sequence, checkpointed in itertools.product((False, True), repeat=2):
            if not sequence or sizes[0] > 1:
                check(dtype, sizes, known, sequence=sequence, checkpointed=checkpointed)


def sample(mesh):
    """Each split of this world once, and each option once."""
    known = {}
    for number, sizes in enumerate(splits(dist.get_world_size())):
        dtype = list(BOUNDS)[number % 2]
        check(
            dtype,
            sizes,
            known,
            sequence=sizes[0] > 1,
            checkpointed=number % 3 == 0,
            async_comm=number % 2 == 1,
        )
    last = splits(dist.get_world_size())[-1]
    check(torch.float32, last, known, deallocate_pipeline_outputs=True)
    check(torch.float32, last, known, scatter_gather_tensors_in_pipeline=True)


CASES = {"a model at any split": sample}
WHOLE = {"the whole table": whole_table}
