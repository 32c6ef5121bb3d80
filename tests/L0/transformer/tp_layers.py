"""Cases of the layers. Weights and inputs are small integers: sums are exact, and each split gives the same bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tp_common
from torch import nn
from tp_common import equal, integers, raises, raises_everywhere, split, tensor_sizes

from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.tensor_parallel import layers
from apex.transformer.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

SEQUENCE, BATCH, INPUTS, OUTPUTS = 8, 3, 16, 24


def fill(weight):
    """An init_method: the same integers on every rank."""
    weight.copy_(integers(weight.shape, 5, weight.dtype, limit=2))


def reference(dtype=torch.float32, bias=True):
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


def give_main_grad(weight, dtype):
    weight.main_grad = integers(weight.shape, 7, dtype)
    return weight.main_grad.clone()


def check_weight(weight, before, wanted):
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
                x, grad, y, of_x, of_weight, of_bias = reference(dtype)
                layer = ColumnParallelLinear(INPUTS, OUTPUTS, init_method=fill, params_dtype=dtype, **options)
                _set_bias(layer, rank, size, True)
                half = options.get("accumulation_in_fp16") or dtype == torch.float64
                before = None
                if options.get("gradient_accumulation_fusion"):
                    before = give_main_grad(layer.weight, dtype if half else torch.float32)
                mine = (x.chunk(size)[rank] if sequence else x).clone().requires_grad_()
                found, bias = layer(mine)
                assert bias is None and found.is_contiguous()
                gathered = options["gather_output"]
                equal(found.detach(), y if gathered else y.chunk(size, -1)[rank])
                found.backward(grad if gathered else grad.chunk(size, -1)[rank])
                equal(mine.grad, of_x.chunk(size)[rank] if sequence else of_x)
                check_weight(layer.weight, before, of_weight.chunk(size)[rank])
                equal(layer.bias.grad, of_bias.chunk(size)[rank])


def _row(mesh):
    for size in tensor_sizes():
        with split(size) as (rank, _):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                for parallel, sequence, fusion in (
                    *((False, False, False), (True, False, False), (True, True, False)),
                    *((True, False, True), (True, True, True)),
                ):
                    x, grad, y, of_x, of_weight, of_bias = reference(dtype)
                    layer = RowParallelLinear(
                        *(INPUTS, OUTPUTS, True, parallel, fill),
                        params_dtype=dtype,
                        sequence_parallel_enabled=sequence,
                        gradient_accumulation_fusion=fusion,
                    )
                    _set_bias(layer, rank, size, False)
                    assert layer.bias.sequence_parallel_enabled == sequence
                    wide = dtype if dtype == torch.float64 else torch.float32
                    before = give_main_grad(layer.weight, wide) if fusion else None
                    mine = (x.chunk(size, -1)[rank] if parallel else x).clone().requires_grad_()
                    found, _ = layer(mine)
                    equal(found.detach(), y.chunk(size)[rank] if sequence else y)
                    found.backward(grad.chunk(size)[rank] if sequence else grad)
                    equal(mine.grad, of_x.chunk(size, -1)[rank] if parallel else of_x)
                    check_weight(layer.weight, before, of_weight.chunk(size, 1)[rank])
                    whole = layer.bias.grad.clone()
                    if sequence:
                        dist.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
                    equal(whole, of_bias)


def _skipped_bias_and_none(mesh):
    for size in tensor_sizes():
        with split(size) as (rank, _):
            x, _, y, *_ = reference(bias=False)
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
    words = tp_common.words(32, (5, 7), 3)
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
            for wrong in (-1, 32) if tp_common.on_cpu() else ():
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
                        equal(layer.weight.detach().cpu(), torch.cat(pieces[rank::size], dim).cpu())
                        weight = layer.weight
                        assert weight.tensor_model_parallel and weight.partition_dim == dim
                        assert weight.partition_stride == stride
                        if getattr(layer, "master_weight", None) is not None:
                            equal(layer.master_weight, wanted.cpu())


def _weights_of_callers(mesh):
    """What fills a caller's own weight: a part of the whole one, or numbers that differ between ranks."""
    for size in tensor_sizes():
        with split(size):
            torch.manual_seed(11)
            layer = ColumnParallelLinear(INPUTS, OUTPUTS, stride=3, init_method=nn.init.normal_)
            for dtype in (torch.float32, torch.bfloat16):
                weight = torch.zeros_like(layer.weight, dtype=dtype).detach()
                torch.manual_seed(11)
                whole = layers._initialize_affine_weight_cpu(
                    *(weight, OUTPUTS, INPUTS, OUTPUTS // size, 0, nn.init.normal_, 3, True),
                    params_dtype=dtype,
                )
                equal(weight, layer.weight.detach().to(dtype))
                assert whole.shape == (OUTPUTS, INPUTS) and whole.dtype == dtype
                assert weight.tensor_model_parallel and weight.partition_stride == 3
            own = torch.zeros_like(layer.weight).detach()
            tensor_parallel.model_parallel_cuda_manual_seed(3)
            layers._initialize_affine_weight_gpu(own, nn.init.normal_, 0)
            assert own.partition_dim == 0
            assert len(set(tp_common.of_group(own.sum().item()))) == size


def _embedding_like_torch(mesh):
    """One rank alone is torch's embedding."""
    with split(1):
        ours = VocabParallelEmbedding(16, 4)
        index = torch.tensor([[3, 15], [0, 3]])
        equal(ours(index), F.embedding(index, ours.weight))
        if tp_common.on_cpu():
            with raises(IndexError, "out of range"):
                ours(torch.tensor([16]))


def _without_elements(mesh):
    """Layers of no inputs or outputs, a vocabulary of no words, and tensors of no columns: on every rank alike."""
    for size in tensor_sizes():
        with split(size):
            x = torch.ones(2, 3)
            for column, row in ((0, 4), (4, 0)):
                y, _ = ColumnParallelLinear(3, column, gather_output=True)(x)
                z, _ = RowParallelLinear(row, column)(torch.ones(2, row))
                assert y.shape == (2, column) and z.shape == (2, column)
            assert VocabParallelEmbedding(0, 4)(torch.zeros(0, dtype=torch.int64)).shape == (0, 4)
            assert len(tensor_parallel.split_tensor_along_last_dim(torch.ones(2, 0), size)) == size


CASES = {
    "column parallel": _column,
    "row parallel": _row,
    "biases": _skipped_bias_and_none,
    "embedding": _embedding,
    "embedding of one rank": _embedding_like_torch,
    "weights at any split": _same_weights_at_any_split,
    "weights of callers": _weights_of_callers,
    "without elements": _without_elements,
}
