"""Cases of standalone models as pipelines: schedules of any split give the losses and gradients of one rank."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from pp_model import pipeline
from standalone_common import BATCH, HIDDEN, SEQUENCE, WORDS, arguments, padding, token_types
from tp_common import raises, words
from tp_model import _whole

from apex.transformer import parallel_state
from apex.transformer.amp import GradScaler
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func
from apex.transformer.testing.standalone_bert import bert_model_provider
from apex.transformer.testing.standalone_gpt import gpt_model_provider

SAMPLES = 4 * BATCH
# (tensor, pipeline, virtual, options) by ranks.
SPLITS = {
    2: [
        (1, 2, 1, ""),
        (1, 2, 2, "--recompute-granularity full --recompute-method uniform"),
        (1, 2, 1, "--standalone-embedding-stage"),
    ],
    4: [(2, 2, 1, ""), (2, 2, 2, "--sequence-parallel"), (1, 4, 1, ""), (1, 2, 2, "")],
}


def _batch(samples, first=0):
    text = words(WORDS, (SAMPLES, SEQUENCE + 1), 1)
    return [text[first : first + samples]]


def _gpt_step(batch, model):
    tokens, labels = batch[0][:, :-1], batch[0][:, 1:]
    positions = torch.arange(SEQUENCE, dtype=torch.int64, device=tokens.device).expand_as(tokens)

    def loss_of(losses):
        loss = losses.mean()
        return loss, loss.detach()

    return model(tokens, positions, None, labels=labels), loss_of


def _bert_step(batch, model):
    tokens, labels = batch[0][:, :-1].contiguous(), batch[0][:, 1:].contiguous()

    def loss_of(outputs):
        losses, binary = outputs
        loss = losses[padding().t().bool()].mean() + binary.square().sum()
        return loss, loss.detach()

    return model(tokens, padding(), token_types(tokens), lm_labels=labels), loss_of


def _gradients(parts):
    """By name, layers by their numbers in the whole model."""
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if match := re.match(r"(.*\.layers\.\d+)(\..*)", name):
                layer = part.get_submodule(match[1])
                name = f"language_model.encoder.layers.{layer.layer_number - 1}{match[2]}"
            found[name] = _whole(parameter, parameter.grad)
    return found


def _run(provider, forward_step, tensor, stages, chunks, options):
    """(mean loss, on every rank; this rank's gradients, the last stage's copy of the embeddings' apart)."""
    world = dist.get_world_size()
    split = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {stages}"
    with (
        pipeline(tensor, stages, chunks, BATCH, SAMPLES),
        arguments(f"--num-layers 4 {split} {options}", world, dist.get_rank()) as args,
    ):
        torch.manual_seed(7)
        virtual = chunks if chunks > 1 else None
        data, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        parts = build_model(provider, False, virtual)
        run = get_forward_backward_func(virtual, stages)
        samples = SAMPLES // data
        losses = run(
            forward_step,
            _batch(samples, rank * samples),
            parts,
            forward_only=False,
            tensor_shape=(SEQUENCE, BATCH, HIDDEN),
            sequence_parallel_enabled=args.sequence_parallel,
        )
        total = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float32)
        dist.all_reduce(total)
        grads = _gradients(parts)
        for grad in grads.values():
            dist.all_reduce(grad, group=parallel_state.get_data_parallel_group())
            grad /= data
        copies = [grads.pop("word_embeddings.weight")] if "word_embeddings.weight" in grads else []
        words = copies or [grads.get("language_model.embedding.word_embeddings.weight")]
        if stages > 1 and words[0] is not None:
            dist.all_reduce(words[0], group=parallel_state.get_embedding_group())
            grads["language_model.embedding.word_embeddings.weight"] = words[0]
        return total * stages / world, grads


def _any_pipeline(provider, forward_step):
    def case(mesh):
        wanted, gradients = _run(provider, forward_step, 1, 1, 1, "")
        for split in SPLITS[dist.get_world_size()]:
            loss, found = _run(provider, forward_step, *split)
            torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
            assert found
            for name, grad in found.items():
                off = torch.linalg.vector_norm(grad - gradients[name])
                assert off <= 1e-4 * torch.linalg.vector_norm(gradients[name]), f"{split}: {name}"

    return case


def _scaled(mesh):
    """Stages that have no loss unscale, step and lower the scale as the last one does, from the first step on."""
    weights = []
    for scaler in (None, GradScaler(2.0**10)):
        with (
            pipeline(1, 2, 1, BATCH, 2 * BATCH),
            arguments("--pipeline-model-parallel-size 2", dist.get_world_size()),
        ):
            torch.manual_seed(7)
            (model,) = build_model(gpt_model_provider, False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run = get_forward_backward_func(None, 2)
            shape = (SEQUENCE, BATCH, HIDDEN)
            options = dict(forward_only=False, tensor_shape=shape, grad_scaler=scaler)
            run(_gpt_step, _batch(2 * BATCH), model, **options)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == 2.0**10
                wrong = GradScaler(2.0)
                if (
                    parallel_state.is_pipeline_last_stage()
                ):  # who has a loss is still told of a scale that was left out
                    with raises(AssertionError, "_scale is None"):
                        wrong.step(optimizer)
            weights.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-7)


CASES = {
    "a scaler of stages": _scaled,
    "GPT as a pipeline": _any_pipeline(gpt_model_provider, _gpt_step),
    "BERT as a pipeline": _any_pipeline(bert_model_provider, _bert_step),
}
