"""Cases of how layers are used: overlap, autocast, frozen, twice differentiated, copied, and wrongly."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from tp_common import collectives, equal, integers, of_group, raises, raises_everywhere, split, tensor_sizes
from tp_layers import BATCH, INPUTS, OUTPUTS, SEQUENCE, check_weight, fill, give_main_grad, reference

from apex.transformer import _collectives
from apex.transformer.tensor_parallel import _linear, layers
from apex.transformer.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


def _the_sum_runs_beside_the_product(mesh):
    """The input's gradient is on its way before the weight's is computed, and waited for behind it."""
    calls = []
    started, weight = {}, _linear._of_weight
    for name in ("start_all_reduce", "start_reduce_scatter"):
        started[name] = getattr(_collectives, name)

    class Noted:
        def __init__(self, pending):
            self.pending = pending

        def wait(self, timeout=None):
            calls.append("wait")
            return self.pending.wait()

    def note(name):
        def start(*args, **kwargs):
            calls.append(name)
            return Noted(started[name](*args, **kwargs))

        return start

    def of_weight(*args):
        calls.append("weight")
        return weight(*args)

    size = dist.get_world_size()
    with split(size) as (rank, _):
        for options, name in (
            ({}, "start_all_reduce"),
            (
                dict(no_async_tensor_model_parallel_allreduce=True, sequence_parallel_enabled=True),
                "start_reduce_scatter",
            ),
        ):
            layer = ColumnParallelLinear(INPUTS, OUTPUTS, gather_output=False, **options)
            y, _ = layer(torch.ones(SEQUENCE, BATCH, INPUTS, requires_grad=True))
            for key in started:
                setattr(_collectives, key, note(key))
            _linear._of_weight = of_weight
            try:
                y.sum().backward()
            finally:
                for key, function in started.items():
                    setattr(_collectives, key, function)
                _linear._of_weight = weight
            assert calls[0] == name and calls.index("weight") < calls.index("wait"), calls
            calls.clear()


def _under_autocast(mesh):
    size = dist.get_world_size()
    x, grad, y, of_x, of_weight, _ = reference(bias=False)
    with split(size) as (rank, _):
        for fusion in (False, True):
            layer = ColumnParallelLinear(
                INPUTS, OUTPUTS, gather_output=False, init_method=fill, gradient_accumulation_fusion=fusion
            )
            before = give_main_grad(layer.weight, torch.float32) if fusion else None
            mine = x.clone().requires_grad_()
            with torch.autocast(x.device.type, torch.bfloat16):
                found, _ = layer(mine)
            assert found.dtype == torch.bfloat16
            equal(found.detach().float(), y.chunk(size, -1)[rank])
            found.backward(grad.chunk(size, -1)[rank].bfloat16())
            assert mine.grad.dtype == torch.float32
            equal(mine.grad, of_x)
            check_weight(layer.weight, before, of_weight.chunk(size)[rank])


def _frozen(mesh):
    """What needs no gradient gets none, and costs no message."""
    size = dist.get_world_size()
    with split(size):
        layer = ColumnParallelLinear(INPUTS, OUTPUTS, gather_output=False)
        x = torch.ones(SEQUENCE, BATCH, INPUTS)
        with collectives() as calls:
            layer(x)[0].sum().backward()
        assert not calls and layer.weight.grad is not None
        layer.weight.requires_grad_(False)
        layer.weight.grad = None
        x.requires_grad_()
        layer(x)[0].sum().backward()
        assert layer.weight.grad is None and x.grad is not None
        with torch.no_grad():
            layer(x)


def _wrong(mesh):
    size = dist.get_world_size()
    sequence = dict(sequence_parallel_enabled=True)
    with split(size):
        for make in (
            lambda: ColumnParallelLinear(4, size + 1),
            lambda: RowParallelLinear(size + 1, 4),
            lambda: VocabParallelEmbedding(size + 1, 4),
            lambda: ColumnParallelLinear(4, 2 * size, stride=3),
        ):
            with raises_everywhere(ValueError, "is not divisible by"):
                make()
        with raises_everywhere(RuntimeError, "no_async_tensor_model_parallel_allreduce=True"):
            ColumnParallelLinear(4, 4, gather_output=False, **sequence)
        with raises_everywhere(RuntimeError, "gather_output=False"):
            ColumnParallelLinear(4, 4, no_async_tensor_model_parallel_allreduce=True, **sequence)
        with raises_everywhere(RuntimeError, "input_is_parallel=True"):
            RowParallelLinear(4, 4, **sequence)
        layer = ColumnParallelLinear(8, 8, gradient_accumulation_fusion=True)
        with raises_everywhere(ValueError, "weight.main_grad = torch.zeros_like"):
            layer(torch.ones(4, 1, 8))
        with raises_everywhere(ValueError):
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            layer(torch.ones(4, 1, 9))
        with raises_everywhere(TypeError, "one dtype is required"):
            layer(torch.ones(4, 1, 8, dtype=torch.bfloat16))
        arguments = torch.ones(1, 8, requires_grad=True), layer.weight, None
        with raises_everywhere(ValueError, "exclude each other"):
            layers.linear_with_grad_accumulation_and_async_allreduce(*arguments, False, True, True)
        found = layers.linear_with_grad_accumulation_and_async_allreduce(*arguments, True, True, False)
        with raises_everywhere(RuntimeError, "create_graph=True"):
            torch.autograd.grad(found.sum(), arguments[0], create_graph=True)
        layer.weight.main_grad.zero_()
        found.sum().backward()
        assert layer.weight.main_grad.eq(1).all()


def _twice(mesh):
    """The gradient of a gradient's square, against that of one rank."""
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for sequence in (False, True) if size > 1 else (False,):
                x = reference()[0].requires_grad_()
                whole = nn.Linear(INPUTS, OUTPUTS, bias=False)
                with torch.no_grad():
                    fill(whole.weight)
                (first,) = torch.autograd.grad(whole(x).square().sum(), x, create_graph=True)
                first.square().sum().backward()
                layer = ColumnParallelLinear(
                    *(INPUTS, OUTPUTS, False, False, fill),
                    sequence_parallel_enabled=sequence,
                    no_async_tensor_model_parallel_allreduce=sequence,
                )
                mine = (x.detach().chunk(size)[rank] if sequence else x.detach()).clone().requires_grad_()
                (first,) = torch.autograd.grad(layer(mine)[0].square().sum(), mine, create_graph=True)
                first.square().sum().backward()
                equal(mine.grad, x.grad.chunk(size)[rank] if sequence else x.grad)
                equal(layer.weight.grad, whole.weight.grad.chunk(size)[rank])


def _attributes(mesh):
    with split(dist.get_world_size()) as (rank, _):
        weight = ColumnParallelLinear(8, 8).weight
        other, plain = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        layers.copy_tensor_model_parallel_attributes(other, weight)
        assert (other.tensor_model_parallel, other.partition_dim, other.partition_stride) == (True, 0, 1)
        with raises(ValueError, "set already"):
            layers.set_tensor_model_parallel_attributes(other, True, 0, 1)
        layers.set_defaults_if_not_set_tensor_model_parallel_attributes(plain)
        layers.set_defaults_if_not_set_tensor_model_parallel_attributes(weight)
        assert (plain.tensor_model_parallel, plain.partition_dim, weight.partition_dim) == (False, -1, 0)
        assert layers.param_is_not_tensor_parallel_duplicate(weight)
        assert layers.param_is_not_tensor_parallel_duplicate(plain) == (rank == 0)


def _copies(mesh):
    """Copies, pickles and checkpoints of layers work on their own."""
    with split(dist.get_world_size()):
        x = integers((4, 2, 8), 1)
        for layer in (*(ColumnParallelLinear(8, 8), RowParallelLinear(8, 8), VocabParallelEmbedding(8, 8)),):
            index = torch.arange(8) if isinstance(layer, VocabParallelEmbedding) else x
            for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
                other.load_state_dict(layer.state_dict())
                found, wanted = other(index), layer(index)
                equal(*(t[0] if isinstance(t, tuple) else t for t in (found, wanted)))
            assert "8, 8" in repr(layer)
        assert len({*of_group(repr(layer))}) == 1


CASES = {
    "overlap": _the_sum_runs_beside_the_product,
    "autocast": _under_autocast,
    "frozen": _frozen,
    "layers twice": _twice,
    "wrong layers": _wrong,
    "attributes": _attributes,
    "copies": _copies,
}
