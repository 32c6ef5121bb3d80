"""What each rank of test_standalone_ranks.py runs, on gloo. A case takes the device mesh; it raises on failure."""

from __future__ import annotations

import itertools

import standalone_pipelines
import torch
import torch.distributed as dist
import tp_common
from standalone_common import (
    BATCH,
    CHECKPOINTS,
    SEQUENCE,
    arguments,
    bert_loss,
    bert_losses,
    gpt_losses,
    plain_bert,
    plain_gpt,
    text,
)
from tp_common import equal, gathered, of_group, raises_everywhere, split, tensor_sizes
from tp_model import _whole

from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.enums import AttnMaskType, ModelType
from apex.transformer.testing.standalone_bert import BertModel, bert_model_provider
from apex.transformer.testing.standalone_gpt import gpt_model_provider
from apex.transformer.testing.standalone_transformer_lm import get_language_model

# Of the norm of what a loss or gradient is off, to its own: sums of ranks' parts, and roundings of a few layers.
BOUNDS = {"": 1e-5, "--bf16": 6e-2, "--fp16": 1e-2}


def _gpt():
    torch.manual_seed(7)
    return gpt_model_provider()


def _bert():
    torch.manual_seed(7)
    return bert_model_provider()


def _gpt_loss(model):
    return gpt_losses(model).mean()


def _bert_loss(model):
    losses, binary = bert_losses(model)
    return bert_loss(losses, binary.float())


def _run(model, loss_of):
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: _whole(p, p.grad) for name, p in model.named_parameters()}


def _near(found, wanted, bound):
    off = torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted)
    assert off <= bound, f"off by {off:.1e}"


def _plain(made, plain, options):
    """(the losses and all gradients in plain torch and float64, of the weights of one rank)."""
    with split(1), arguments(options):
        model = made()
        state = {name: value.detach().double().requires_grad_() for name, value in model.state_dict().items()}
        found = plain(state)
        loss = found.mean() if plain is plain_gpt else bert_loss(*found)
        loss.backward()
        return loss.detach(), {name: value.grad for name, value in state.items()}


def _options(size):
    """Every combination at a tensor parallel size."""
    sequences = ("", "--sequence-parallel") if size > 1 else ("",)
    yield from itertools.product(sequences, CHECKPOINTS)
    if size > 1:
        yield "", CHECKPOINTS[2] + " --distribute-saved-activations"
        yield "--async-tensor-model-parallel-allreduce", ""


def _any_split(made, loss_of, plain):
    def case(mesh):
        for dtype, bound in BOUNDS.items():
            loss, grads = _plain(made, plain, dtype)
            for size in tensor_sizes():
                first = {}
                for sequence, checkpoint in _options(size):
                    options = f"--tensor-model-parallel-size {size} {dtype} {sequence} {checkpoint}"
                    with split(size), arguments(options, dist.get_world_size(), dist.get_rank()):
                        found, found_grads = _run(made(), loss_of)
                        _near(found, loss, bound)
                        assert {*found_grads} == {*grads}
                        for name, grad in found_grads.items():
                            _near(grad, grads[name], bound)
                        assert len({str(said) for said in gathered(found.item())}) == 1
                        # The same sums: what runs again changes no bit, and nothing here one of the loss.
                        equal(found, first.setdefault("loss", found))
                        equal(found_grads, first.setdefault(sequence, found_grads))

    return case


def _options_of_the_model(mesh):
    """Other functions than the fused ones, other residuals and logits, by the same weights: near each other."""
    size = tensor_sizes()[-1]
    same = "--no-bias-gelu-fusion --openai-gelu", "--no-masked-softmax-fusion", "--no-query-key-layer-scaling"
    with split(size), arguments(f"--tensor-model-parallel-size {size}", dist.get_world_size()):
        wanted = _run(_gpt(), _gpt_loss)
    on_cpu = ("--use-cpu-initialization",) if tp_common.on_cpu() else ()
    for options in (*same, "--cpu-offload", *on_cpu):
        options = f"--tensor-model-parallel-size {size} {options}"
        with split(size), arguments(options, dist.get_world_size()):
            torch.testing.assert_close(_run(_gpt(), _gpt_loss), wanted, rtol=1e-4, atol=1e-6)
    for options in ("--no-bias-gelu-fusion", "--apply-residual-connection-post-layernorm"):
        with split(size), arguments(f"--tensor-model-parallel-size {size} {options}", dist.get_world_size()):
            assert abs(_gpt_loss(_gpt()) - wanted[0]) > 1e-5, options
    with split(size), arguments("--bf16 --fp32-residual-connection", dist.get_world_size()):
        model = _gpt()
        tokens, positions, _ = text()
        model.language_model.encoder.post_layer_norm = False
        assert model.language_model(tokens, positions, None).dtype == torch.float32
        model.language_model.encoder.post_layer_norm = True
        _near(
            _gpt_loss(model), _plain(_gpt, plain_gpt, "--bf16")[0] if size == 1 else wanted[0].double(), 8e-2
        )


def _gathers_logits(mesh):
    """Logits without labels, split by words or gathered; they give the losses."""
    size = tensor_sizes()[-1]
    tokens, positions, labels = text()
    with split(size), arguments(f"--tensor-model-parallel-size {size}", dist.get_world_size()):
        model = _gpt()
        losses, part = gpt_losses(model), model(tokens, positions, None)
        model.parallel_output = False
        whole = model(tokens, positions, None)
        assert part.shape[-1] * size == whole.shape[-1]
        wanted = torch.nn.functional.cross_entropy(
            whole.flatten(0, 1), labels.t().flatten(), reduction="none"
        )
        torch.testing.assert_close(losses.flatten(), wanted)


def _dropout(mesh):
    """What all ranks hold drops out alike, heads of each rank for themselves; what runs again draws the same."""
    size = tensor_sizes()[-1]
    dropout = f"--tensor-model-parallel-size {size} --hidden-dropout 0.5 --attention-dropout 0.5"
    for sequence in ("", "--sequence-parallel") if size > 1 else ("",):
        first = None
        for checkpoint in CHECKPOINTS:
            with split(size), arguments(f"{dropout} {sequence} {checkpoint}", dist.get_world_size()):
                model = _gpt()
                tensor_parallel.model_parallel_cuda_manual_seed(5)
                found = _run(model, _gpt_loss)
                assert len({str(said) for said in of_group(found[0].item())}) == 1
                first = first or found
                equal(found, first)
                model.eval()
                equal(_gpt_loss(model), _gpt_loss(model))


def _encoder_and_decoder(mesh):
    """A model with both gives the same hidden states at any tensor size, and as two stages of a pipeline."""
    tokens, positions, _ = text()
    causal = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)

    def stage(**place):
        torch.manual_seed(7)
        return get_language_model(0, False, AttnMaskType.padding, **place)[0]

    inputs = (
        tokens,
        positions,
        torch.zeros_like(causal),
        tokens.flip(0),
        positions,
        causal,
        torch.zeros_like(causal),
    )
    found = []
    for size in tensor_sizes():
        with split(size), arguments(f"--tensor-model-parallel-size {size}", dist.get_world_size()) as args:
            args.model_type = ModelType.encoder_and_decoder
            found.append(stage(add_decoder=True)(*inputs))
            torch.testing.assert_close(found[-1], found[0], rtol=1e-4, atol=1e-4)
    options = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 1"
    with (
        split(1, 2, pipeline_model_parallel_split_rank_=1),
        arguments(options, dist.get_world_size()) as args,
    ):
        args.model_type = ModelType.encoder_and_decoder
        begins = parallel_state.is_pipeline_stage_before_split()
        model = stage(add_encoder=begins, add_decoder=not begins)
        model.set_input_tensor([found[0][1].detach()] if not begins else [None])
        output = model(*inputs)
        torch.testing.assert_close(
            output if begins else output[0], found[0][0 if not begins else 1], rtol=1e-4, atol=1e-4
        )


def _stages(mesh):
    """Stages of a pipeline, one after the other by hand, give the losses of one rank; word embeddings are tied."""
    two = "--pipeline-model-parallel-size 2"
    for options, virtual in ((two, None), (two, 1), (f"{two} --standalone-embedding-stage", None)):
        for made, loss_of in ((_gpt, _gpt_loss), (_bert, _bert_loss)):
            with split(1), arguments():
                wanted = loss_of(made())
            with split(1, 2, virtual), arguments(options, dist.get_world_size()):
                _pass_on(made, loss_of, wanted)


def _pass_on(made, loss_of, wanted):
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    torch.manual_seed(7)
    provider = gpt_model_provider if made is _gpt else bert_model_provider
    model = provider(pre_process=first, post_process=last)
    tokens, positions, labels = text()
    hidden = torch.empty(SEQUENCE, BATCH, 16, dtype=torch.float32, device=tokens.device)
    if first:
        hidden = (gpt_losses if made is _gpt else bert_losses)(model).detach().contiguous()
        dist.send(hidden, parallel_state.get_pipeline_model_parallel_next_rank())
    else:
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor([hidden])
        torch.testing.assert_close(loss_of(model), wanted, rtol=1e-5, atol=1e-6)
    said = of_group(model.word_embeddings_weight().sum().item(), parallel_state.get_embedding_group())
    assert said[0] == said[1] != 0


def _refusals(mesh):
    """On every rank, before anything waits."""
    ranks = dist.get_world_size()
    with split(ranks), arguments(f"--tensor-model-parallel-size {ranks}", ranks) as args:
        args.padded_vocab_size = 33
        with raises_everywhere(ValueError, "33 is not divisible"):
            _gpt()
        args.padded_vocab_size, args.num_attention_heads = 32, ranks + 1
        args.kv_channels = 4
        with raises_everywhere(ValueError, "not divisible"):
            BertModel()
        args.num_attention_heads, args.num_experts = 4, 2
        with raises_everywhere(ValueError, "--num-experts"):
            _gpt()
    with split(1, ranks), arguments(f"--pipeline-model-parallel-size {ranks}", ranks) as args:
        args.num_layers = ranks + 1
        with raises_everywhere(ValueError, "not divisible"):
            _gpt()


CASES = {
    "GPT at any split": _any_split(_gpt, _gpt_loss, plain_gpt),
    "BERT at any split": _any_split(_bert, _bert_loss, plain_bert),
    "options of the model": _options_of_the_model,
    "logits": _gathers_logits,
    "dropout": _dropout,
    "encoder and decoder": _encoder_and_decoder,
    "stages": _stages,
    "refusals": _refusals,
    **standalone_pipelines.CASES,
}
