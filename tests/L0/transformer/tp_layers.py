"""Cases of the layers. Weights and inputs are small integers: sums are exact, and each split gives the same bits."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_common import collectives, equal, integers, of_group, raises, raises_everywhere, split, tensor_sizes

from apex.transformer import _collectives, parallel_state
from apex.transformer.tensor_parallel import _linear, layers
from apex.transformer.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

SEQUENCE, BATCH, INPUTS, OUTPUTS = 8, 3, 16, 24


def fill(weight):
    """An init_method: the same integers on every rank."""
    weight.copy_(integers(weight.shape, 5, weight.dtype, limit=2))


def _reference(dtype=torch.float32, bias=True):
    """(input, gradient of the output, then output, gradients of input, weight, bias), whole."""
    x = integers((SEQUENCE, BATCH, INPUTS), 1, dtype, 2).requires_grad_()
    grad = integers((SEQUENCE, BATCH, OUTPUTS), 2, dtype, 2)
    layer = nn.Linear(INPUTS, OUTPUTS, dtype=dtype)
    with torch.no_grad():
        fill(layer.weight)
        layer.bias.copy_(integers((OUTPUTS,), 6, dtype) * bias)
    y = layer(x)
    y.backward(grad)
    return x.detach(), grad, y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def _set_bias(layer, rank, size, split_outputs):
    bias = integers((OUTPUTS,), 6, layer.bias.dtype)
    with torch.no_grad():
        layer.bias.copy_(bias.chunk(size)[rank] if split_outputs else bias)


def _give_main_grad(weight, dtype):
    weight.main_grad = integers(weight.shape, 7, dtype)
    return weight.main_grad.clone()


def _check_weight(weight, before, wanted):
    if before is None:
        equal(weight.grad, wanted)
    else:
        assert weight.grad is None
        equal(weight.main_grad, (before.double() + wanted.double()).to(before.dtype))


def _options():
    """Of the column parallel layer, by what they are for."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for gather in (False, True):
            yield dtype, dict(gather_output=gather)
        yield dtype, dict(gather_output=False, no_async_tensor_model_parallel_allreduce=True)
        yield dtype, dict(gather_output=False, gradient_accumulation_fusion=True)
        sequence = dict(no_async_tensor_model_parallel_allreduce=True, sequence_parallel_enabled=True)
        yield dtype, dict(gather_output=False, **sequence)
        yield dtype, dict(gather_output=False, gradient_accumulation_fusion=True, **sequence)
    yield (
        torch.bfloat16,
        dict(gather_output=False, gradient_accumulation_fusion=True, accumulation_in_fp16=True),
    )


def _column(mesh):
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for dtype, options in _options():
                sequence = options.get("sequence_parallel_enabled") and size > 1
                if options.get("sequence_parallel_enabled") and not sequence:
                    continue
                x, grad, y, of_x, of_weight, of_bias = _reference(dtype)
                layer = ColumnParallelLinear(INPUTS, OUTPUTS, init_method=fill, params_dtype=dtype, **options)
                _set_bias(layer, rank, size, True)
                half = options.get("accumulation_in_fp16") or dtype == torch.float64
                before = None
                if options.get("gradient_accumulation_fusion"):
                    before = _give_main_grad(layer.weight, dtype if half else torch.float32)
                mine = (x.chunk(size)[rank] if sequence else x).clone().requires_grad_()
                found, bias = layer(mine)
                assert bias is None and found.is_contiguous()
                gathered = options["gather_output"]
                equal(found.detach(), y if gathered else y.chunk(size, -1)[rank])
                found.backward(grad if gathered else grad.chunk(size, -1)[rank])
                equal(mine.grad, of_x.chunk(size)[rank] if sequence else of_x)
                _check_weight(layer.weight, before, of_weight.chunk(size)[rank])
                equal(layer.bias.grad, of_bias.chunk(size)[rank])


def _row(mesh):
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                for parallel, sequence, fusion in (
                    *((False, False, False), (True, False, False), (True, True, False)),
                    *((True, False, True), (True, True, True)),
                ):
                    x, grad, y, of_x, of_weight, of_bias = _reference(dtype)
                    layer = RowParallelLinear(
                        *(INPUTS, OUTPUTS, True, parallel, fill),
                        params_dtype=dtype,
                        sequence_parallel_enabled=sequence,
                        gradient_accumulation_fusion=fusion,
                    )
                    _set_bias(layer, rank, size, False)
                    assert layer.bias.sequence_parallel_enabled == sequence
                    wide = dtype if dtype == torch.float64 else torch.float32
                    before = _give_main_grad(layer.weight, wide) if fusion else None
                    mine = (x.chunk(size, -1)[rank] if parallel else x).clone().requires_grad_()
                    found, _ = layer(mine)
                    equal(found.detach(), y.chunk(size)[rank] if sequence else y)
                    found.backward(grad.chunk(size)[rank] if sequence else grad)
                    equal(mine.grad, of_x.chunk(size, -1)[rank] if parallel else of_x)
                    _check_weight(layer.weight, before, of_weight.chunk(size, 1)[rank])
                    whole = layer.bias.grad.clone()
                    if sequence:
                        dist.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
                    equal(whole, of_bias)


def _skipped_bias_and_none(mesh):
    for size in tensor_sizes():
        with split(size) as (rank, _):
            x, _, y, *_ = _reference(bias=False)
            for layer, wanted in (
                (
                    ColumnParallelLinear(INPUTS, OUTPUTS, True, False, fill, skip_bias_add=True),
                    y.chunk(size, -1)[rank],
                ),
                (RowParallelLinear(INPUTS, OUTPUTS, True, False, fill, skip_bias_add=True), y),
            ):
                found, bias = layer(x)
                equal(found.detach(), wanted)
                assert bias is layer.bias
            for layer in (
                *(
                    ColumnParallelLinear(INPUTS, OUTPUTS, False, True, fill),
                    RowParallelLinear(INPUTS, OUTPUTS, False, False, fill),
                ),
            ):
                equal(layer(x)[0].detach(), y)
                assert layer.bias is None and "bias" in dict(layer._parameters)


def _embedding(mesh):
    words = torch.randint(0, 32, (5, 7), generator=torch.Generator().manual_seed(3))
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for dtype in (torch.float32, torch.bfloat16):
                whole = nn.Embedding(32, 6, dtype=dtype)
                with torch.no_grad():
                    fill(whole.weight)
                ours = VocabParallelEmbedding(32, 6, fill, params_dtype=dtype)
                assert (ours.vocab_start_index, ours.vocab_end_index) == (
                    rank * 32 // size,
                    (rank + 1) * 32 // size,
                )
                grad = integers((5, 7, 6), 8, dtype, 2)
                for index in (words, words.int()):
                    whole.weight.grad = ours.weight.grad = None
                    kept = index.clone()
                    y = whole(words)
                    found = ours(index)
                    equal(found.detach(), y.detach())
                    equal(index, kept)
                    y.backward(grad)
                    found.backward(grad)
                    equal(ours.weight.grad, whole.weight.grad.chunk(size)[rank])
            for wrong in (-1, 32):
                with raises_everywhere(IndexError):
                    ours(torch.tensor([wrong]))


def _same_weights_at_any_split(mesh):
    """Whatever the method, in whatever pieces: those of one rank."""

    def make(on_cpu, method):
        torch.manual_seed(11)
        options = dict(init_method=method, use_cpu_initialization=on_cpu)
        return (
            (
                ColumnParallelLinear(INPUTS, OUTPUTS, stride=3, keep_master_weight_for_test=True, **options),
                0,
                3,
            ),
            (RowParallelLinear(INPUTS, OUTPUTS, keep_master_weight_for_test=True, **options), 1, 1),
            (RowParallelLinear(INPUTS, OUTPUTS, params_dtype=torch.bfloat16, **options), 1, 1),
            (VocabParallelEmbedding(64, 8, **options), 0, 1),
        )

    for method in (nn.init.xavier_normal_, nn.init.kaiming_uniform_):
        with split(1):
            whole = [layer.weight.detach() for layer, *_ in make(False, method)]
        for size in tensor_sizes():
            with split(size) as (rank, _):
                for on_cpu in (False, True):
                    for (layer, dim, stride), wanted in zip(make(on_cpu, method), whole, strict=True):
                        pieces = wanted.chunk(size * stride, dim)
                        equal(layer.weight.detach(), torch.cat(pieces[rank::size], dim))
                        weight = layer.weight
                        assert weight.tensor_model_parallel and weight.partition_dim == dim
                        assert weight.partition_stride == stride
                        if getattr(layer, "master_weight", None) is not None:
                            equal(layer.master_weight, wanted)


def _the_sum_runs_beside_the_product(mesh):
    """The input's gradient is on its way before the weight's is computed, and waited for behind it."""
    calls = []
    started, weight = {}, _linear._of_weight
    for name in ("start_all_reduce", "start_reduce_scatter"):
        started[name] = getattr(_collectives, name)

    class Noted:
        def __init__(self, pending):
            self.pending = pending

        def wait(self):
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
    x, grad, y, of_x, of_weight, _ = _reference(bias=False)
    with split(size) as (rank, _):
        for fusion in (False, True):
            layer = ColumnParallelLinear(
                INPUTS, OUTPUTS, gather_output=False, init_method=fill, gradient_accumulation_fusion=fusion
            )
            before = _give_main_grad(layer.weight, torch.float32) if fusion else None
            mine = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                found, _ = layer(mine)
            assert found.dtype == torch.bfloat16
            equal(found.detach().float(), y.chunk(size, -1)[rank])
            found.backward(grad.chunk(size, -1)[rank].bfloat16())
            assert mine.grad.dtype == torch.float32
            equal(mine.grad, of_x)
            _check_weight(layer.weight, before, of_weight.chunk(size)[rank])


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
                x = _reference()[0].requires_grad_()
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


def _embedding_like_torch(mesh):
    """One rank alone is torch's embedding."""
    with split(1):
        ours = VocabParallelEmbedding(16, 4)
        index = torch.tensor([[3, 15], [0, 3]])
        equal(ours(index), F.embedding(index, ours.weight))
        with raises(IndexError, "out of range"):
            ours(torch.tensor([16]))


CASES = {
    "column parallel": _column,
    "row parallel": _row,
    "biases": _skipped_bias_and_none,
    "embedding": _embedding,
    "embedding of one rank": _embedding_like_torch,
    "weights at any split": _same_weights_at_any_split,
    "overlap": _the_sum_runs_beside_the_product,
    "autocast": _under_autocast,
    "frozen": _frozen,
    "layers twice": _twice,
    "wrong layers": _wrong,
    "attributes": _attributes,
    "copies": _copies,
}
