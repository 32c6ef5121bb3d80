"""Cases of pipelines of other kinds: encoder and decoder, several tensors a stage, stages without work or gradients,
loss scales, autocast, memory that is given up, when gradients are reduced."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from pp_model import MICRO, SAMPLES, grads_of, losses_of, pipeline
from torch import nn
from tp_common import equal, integers, raises_everywhere

from apex.transformer import parallel_state
from apex.transformer.amp import GradScaler
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils
from apex.transformer.pipeline_parallel.schedules.fwd_bwd_pipelining_without_interleaving import (
    get_tensor_shapes,
)

F32, F64 = torch.float32, torch.float64
WIDTH, LONG, SHORT = 6, 4, 2


def _layer(number, dtype=F64):
    torch.manual_seed(number)
    return nn.Linear(WIDTH, WIDTH, dtype=dtype, device="cpu")


class Translator(nn.Module):
    """Four layers of an encoder, four of a decoder that also look at the encoder's mean, over as many stages."""

    def __init__(self, *, pre_process, post_process, add_encoder, add_decoder):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        stages, stage = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        split = parallel_state.get_pipeline_model_parallel_split_rank()
        if stages == 1:
            encoder = decoder = range(4)
            assert add_encoder and add_decoder and pre_process and post_process
        else:
            assert add_encoder != add_decoder and add_encoder == (stage < split)
            assert pre_process == (stage in (0, split)) and post_process == (stage in (split - 1, stages - 1))
            encoder = _share(4, split, stage) if add_encoder else ()
            decoder = _share(4, stages - split, stage - split) if add_decoder else ()
        self.encoder = nn.ModuleDict({f"e{i}": _layer(i) for i in encoder})
        self.decoder = nn.ModuleDict({f"d{i}": _layer(10 + i) for i in decoder})

    def set_input_tensor(self, tensors):
        self.inputs = tensors

    def forward(self, source, target):
        """[sequence, batch, hidden] each."""
        x = source if self.inputs[0] is None else self.inputs[0]
        memory = self.inputs[-1]
        for layer in self.encoder.values():
            x = torch.tanh(layer(x)) + x
        if not self.decoder:
            return x
        if self.pre_process:
            memory, x = (x if self.encoder else memory), target
        for layer in self.decoder.values():
            x = torch.tanh(layer(x + memory.mean(0))) + x
        return x


def _share(layers, stages, stage):
    size = layers // stages
    return range(stage * size, (stage + 1) * size)


def _translated(batch, model):
    source, target = (x.transpose(0, 1) for x in batch)
    output = model(source, target)
    return output, lambda x: (x.square().mean(), x.detach().square().mean())


def _encoder_and_decoder(mesh):
    """Of other lengths, at each split rank, equal to one stage to rounding."""
    batch = [integers((SAMPLES, length, WIDTH), length, F64) / 4 for length in (LONG, SHORT)]
    options = dict(
        forward_only=False, tensor_shape=(LONG, MICRO, WIDTH), decoder_sequence_length=SHORT, dtype=F64
    )

    def run(stages, split, **more):
        with pipeline(1, stages, pipeline_model_parallel_split_rank_=split):
            data = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
            share = SAMPLES // data[1]
            models = build_model(Translator, data[1] > 1, None, ModelType.encoder_and_decoder)
            assert all(utils.get_model_type(model) is ModelType.encoder_and_decoder for model in models)
            mine = [x[data[0] * share : (data[0] + 1) * share] for x in batch]
            found = get_forward_backward_func(None, stages)(_translated, mine, models, **options, **more)
            return losses_of(found), grads_of(models)

    wanted = run(1, None)
    assert len(wanted[1]) == 16 and all(grad.abs().max() > 0 for grad in wanted[1].values())
    world = dist.get_world_size()
    for stages, split in ((2, 1), (4, 2)):
        if world % stages == 0:
            for more in ({}, {"async_comm": True, "deallocate_pipeline_outputs": True}):
                torch.testing.assert_close(run(stages, split, **more), wanted, rtol=1e-12, atol=1e-14)
    with pipeline(1, world), raises_everywhere(RuntimeError, "pass pipeline_model_parallel_split_rank_"):
        build_model(Translator, False, None, ModelType.encoder_and_decoder)
    with (
        pipeline(1, world, 2, pipeline_model_parallel_split_rank_=1),
        raises_everywhere(RuntimeError, "no interleaved schedule"),
    ):
        build_model(Translator, False, 2, ModelType.encoder_and_decoder)


def _shapes(mesh):
    """What stages send: the decoder's two tensors, parts of the sequence, each refused where it does not fit."""
    both, one = ModelType.encoder_and_decoder, ModelType.encoder_or_decoder
    world = dist.get_world_size()
    with pipeline(world // 2, 2, pipeline_model_parallel_split_rank_=1):
        ranks = world // 2
        given = dict(tensor_shape=(8, 2, 6), decoder_sequence_length=4)
        assert get_tensor_shapes(0, one, **given) == get_tensor_shapes(0, both, **given) == [(8, 2, 6)]
        assert get_tensor_shapes(1, both, **given) == [(4, 2, 6), (8, 2, 6)]
        given["sequence_parallel_enabled"] = True
        assert get_tensor_shapes(1, both, **given) == [(4 // ranks, 2, 6), (8 // ranks, 2, 6)]
        if ranks > 1:
            with raises_everywhere(ValueError, "not divisible"):
                get_tensor_shapes(0, one, tensor_shape=(3, 2, 6), sequence_parallel_enabled=True)
        with raises_everywhere(RuntimeError, "decoder_sequence_length is required"):
            get_tensor_shapes(1, both, tensor_shape=(8, 2, 6))


class Pair(nn.Module):
    """A stage that takes two tensors of other shapes, and gives two; the last one a loss of both."""

    def __init__(self, *, pre_process, post_process):
        super().__init__()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        names = [f"l{i}" for i in _share(4, stages, stage)]
        self.layers = nn.ModuleDict({name: _layer(int(name[1:])) for name in names})

    def set_input_tensor(self, tensors):
        self.inputs = tensors

    def forward(self, x):
        x, y = (x, x.mean(0, keepdim=True)) if self.inputs[0] is None else self.inputs
        for layer in self.layers.values():
            x, y = torch.tanh(layer(x) + y), torch.sigmoid(y) + x.sum(0, keepdim=True)
        return [x, y]


def _several_tensors(mesh):
    """tensor_shape as a list of shapes."""
    batch = [integers((SAMPLES, LONG, WIDTH), 5, F64) / 4]

    def pair_step(batch, model):
        return model(batch[0].transpose(0, 1)), lambda xy: (
            xy[0].sum() + xy[1].square().mean(),
            xy[1].detach().sum(),
        )

    def run(stages, **more):
        with pipeline(1, stages):
            share = SAMPLES // parallel_state.get_data_parallel_world_size()
            first = parallel_state.get_data_parallel_rank() * share
            models = build_model(Pair, parallel_state.get_data_parallel_world_size() > 1)
            found = get_forward_backward_func(None, stages)(
                *(pair_step, [x[first : first + share] for x in batch], models),
                forward_only=False,
                tensor_shape=[(LONG, MICRO, WIDTH), (1, MICRO, WIDTH)],
                dtype=F64,
                **more,
            )
            return losses_of(found), grads_of(models)

    wanted = run(1)
    for stages in (2, 4):
        if dist.get_world_size() % stages == 0:
            for more in ({}, {"async_comm": True}, {"deallocate_pipeline_outputs": True}):
                torch.testing.assert_close(run(stages, **more), wanted, rtol=1e-12, atol=1e-14)


class Chain(nn.Module):
    """A layer on each stage of the world, but for stages that `without` says; a frozen one where `frozen` says."""

    def __init__(self, *, pre_process, post_process, without=(), frozen=(), dtype=F64):
        super().__init__()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        mine = range(dist.get_world_size()) if stages == 1 else (stage,)
        self.layers = nn.ModuleDict({f"l{i}": _layer(i, dtype) for i in mine if i not in without})
        for i in set(frozen) & set(mine):
            self.layers[f"l{i}"].requires_grad_(False)

    def set_input_tensor(self, tensors):
        self.input = tensors[0]

    def forward(self, x):
        x = x if self.input is None else self.input
        for layer in self.layers.values():
            x = torch.tanh(layer(x)) * 3
        return x


def _chains(stages, *variants):
    """[(losses, gradients or None by name)] of chains over so many stages, one for each dict of options, everywhere."""
    with pipeline(1, stages):
        return [_chain(stages, **options) for options in variants]


def _chain(stages, kind=Chain, samples=SAMPLES, layers=F64, **options):
    """One of them; options of the model, and of the schedule."""
    given = {name: options.pop(name) for name in ("without", "frozen") if name in options}
    utils._reconfigure_microbatch_calculator(0, None, samples, MICRO, 1)
    models = build_model(kind, False, dtype=layers, **given)
    batch = [integers((samples, LONG, WIDTH), 5, layers) / 4]

    def chain_step(batch, model):
        return model(batch[0].transpose(0, 1)), lambda x: (
            x.float().square().mean(),
            x.detach().double().sum(),
        )

    options = dict(forward_only=False, tensor_shape=(LONG, MICRO, WIDTH), dtype=F64) | options
    found = get_forward_backward_func(None, stages)(chain_step, batch, models, **options)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found, {name: p.grad for name, p in models[0].named_parameters()}))
    losses = next(losses for losses, _ in reversed(everyone) if losses)
    return losses, {name: grad for _, part in everyone for name, grad in part.items()}


def _stages_without_work(mesh):
    """Without a layer, or with a frozen one: all else is as of one stage. Fewer microbatches than stages, and more."""
    world = dist.get_world_size()
    places = [{kind: (stage,)} for stage in range(world) for kind in ("without", "frozen")]
    # All but the last one frozen: what the others send needs no gradients.
    places.append({"frozen": tuple(range(world - 1))})
    counts = [{"samples": MICRO * microbatches} for microbatches in range(1, world + 2)]
    wanted = _chains(1, *places, *counts)
    frugal = {"deallocate_pipeline_outputs": True, "async_comm": True}
    equal(_chains(world, *places, *counts), wanted)
    equal(_chains(world, *(place | frugal for place in places), *counts), wanted)
    for place, (_, grads) in zip(places, wanted[: len(places)], strict=True):
        frozen = place.get("frozen", ())
        for name, grad in grads.items():
            assert (grad is None) == (int(name.split(".")[1][1:]) in frozen), name
        assert len(grads) == 2 * (world - len(place.get("without", ())))
    assert [len(losses) for losses, _ in wanted[len(places) :]] == list(range(1, world + 2))


def _forward_only(mesh):
    """No gradients, nothing kept, the same losses, also under no_grad and inference_mode."""
    world = dist.get_world_size()
    ((wanted, _),) = _chains(world, {})
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            found = _chains(
                world, *({"forward_only": True, "async_comm": lazily} for lazily in (False, True))
            )
        for losses, grads in found:
            # torch multiplies in another order where nothing needs gradients
            torch.testing.assert_close([loss.clone() for loss in losses], wanted, rtol=1e-12, atol=1e-12)
            assert not any(grad is not None for grad in grads.values())


def _loss_scale(mesh):
    """Gradients are scaled by a power of two, once, and losses that are returned are not."""
    scale = {"grad_scaler": GradScaler(init_scale=2.0**4)}
    for stages in (dist.get_world_size(), 1):
        (wanted, wanted_grads), (losses, grads) = _chains(stages, {}, scale)
        equal(losses, wanted)
        for name, grad in grads.items():
            equal(grad, wanted_grads[name] * 2**4)


class Halves(Chain):
    """float32 layers that take what comes in halves."""

    products: list[torch.dtype] = []

    def forward(self, x):
        x = x if self.input is None else self.input
        for layer in self.layers.values():
            product = layer(x.to(F32))
            self.products.append(product.dtype)
            x = torch.tanh(product.to(F32)) * 3
        return x


def _autocast(mesh):
    """float32 weights: products are of the dtype that is named, unless autocast is off, and so are messages."""
    for disabled, product in ((False, torch.bfloat16), (True, F32)):
        Halves.products.clear()
        options = dict(kind=Halves, layers=F32, dtype=torch.bfloat16, disable_autocast=disabled)
        ((losses, grads),) = _chains(dist.get_world_size(), options)
        assert set(Halves.products) == {product}
        ((wanted, wanted_grads),) = _chains(1, options)
        # One stage sends nothing, and so rounds less.
        torch.testing.assert_close(torch.stack(losses), torch.stack(wanted), rtol=3e-2, atol=0.3)
        for name, grad in grads.items():
            scale = wanted_grads[name].abs().max().item()
            torch.testing.assert_close(grad, wanted_grads[name], rtol=0, atol=3e-2 * scale)


CASES = {
    "encoder and decoder": _encoder_and_decoder,
    "shapes of messages": _shapes,
    "several tensors a stage": _several_tensors,
    "stages without work": _stages_without_work,
    "forward only": _forward_only,
    "a loss scale": _loss_scale,
    "autocast": _autocast,
}
