"""What the cases of the tp_*.py files share: splits, tensors whose sums are exact, what is asserted over all ranks."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from apex.transformer import parallel_state

CPU = torch.device("cpu")


@contextlib.contextmanager
def split(*sizes, **options):
    """Groups within."""
    parallel_state.initialize_model_parallel(*sizes, **options)
    try:
        yield parallel_state.get_tensor_model_parallel_rank(), (sizes or (1,))[0]
    finally:
        parallel_state.destroy_model_parallel()


def tensor_sizes():
    """Tensor parallel sizes that divide the world; on GPUs all of it alone, since NCCL takes its time for groups."""
    if not on_cpu():
        return [dist.get_world_size()]
    return [size for size in (1, 2, 4) if dist.get_world_size() % size == 0]


def integers(shape, seed, dtype=torch.float32, limit=4):
    """The same on every rank; small enough that products and sums of them are exact in any order and dtype."""
    drawn = torch.randint(-limit, limit + 1, shape, generator=seeded(seed), device=CPU)
    return drawn.to(torch.get_default_device(), dtype)


def words(count, shape, seed):
    """The same on every rank."""
    drawn = torch.randint(0, count, shape, generator=seeded(seed), device=CPU)
    return drawn.to(torch.get_default_device())


def seeded(seed):
    return torch.Generator(CPU).manual_seed(seed)


def on_cpu():
    """Whether tensors of a rank lie there."""
    return torch.get_default_device().type == "cpu"


def gathered(value):
    """What every rank of the world says."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def of_group(value, group=None):
    """What every rank of this rank's tensor parallel group says."""
    group = group or parallel_state.get_tensor_model_parallel_group()
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


@contextlib.contextmanager
def raises(kind, *words):
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


@contextlib.contextmanager
def raises_everywhere(kind, *words):
    """On every rank, which is then told of the others."""
    error = None
    try:
        with raises(kind, *words):
            yield
    except Exception as caught:
        error = repr(caught)
    assert not any(gathered(error)), gathered(error)


def equal(found, wanted):
    """To the last bit."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@contextlib.contextmanager
def collectives():
    """The names of the collectives that run within."""
    calls, kept = [], {}
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_gather_into_tensor"):
        kept[name] = getattr(dist, name)

        def note(*args, _name=name, **kwargs):
            calls.append(_name)
            return kept[_name](*args, **kwargs)

        setattr(dist, name, note)
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
