"""Small standalone GPT and BERT models for tests, and what they are to compute, in plain torch."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from unittest import mock

import torch
import torch.nn.functional as F
from tp_common import words

from apex.transformer.testing import global_vars

WORDS, HIDDEN, HEADS, SEQUENCE, BATCH, LAYERS = 32, 16, 4, 8, 2, 2
SIZES = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQUENCE} "
    f"--max-position-embeddings {SEQUENCE} --micro-batch-size {BATCH} --hidden-dropout 0 --attention-dropout 0 "
    "--init-method-std 0.2 "
)
# Recomputation and what belongs to it, by options.
CHECKPOINTS = (
    "",
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform",
    "--recompute-granularity full --recompute-method block",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
)


@contextlib.contextmanager
def arguments(options="", world=1, rank=0, dtype=None):
    """The global arguments within, those of SIZES and these. dtype: of the parameters, in place of what options say."""
    environment = {"WORLD_SIZE": str(world), "RANK": str(rank)}
    with (
        mock.patch.object(sys, "argv", ["test", *(SIZES + options).split()]),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        global_vars.set_global_variables()
    args = global_vars.get_args()
    args.padded_vocab_size = WORDS
    args.params_dtype = dtype or args.params_dtype
    try:
        yield args
    finally:
        global_vars.destroy_global_variables()


def text(seed=1):
    """(words, their positions, the words that follow), [batch, sequence] each."""
    drawn = words(WORDS, (BATCH, SEQUENCE + 1), seed)
    positions = torch.arange(SEQUENCE, dtype=torch.int64, device=drawn.device).expand(BATCH, SEQUENCE)
    return drawn[:, :-1].contiguous(), positions, drawn[:, 1:].contiguous()


def padding():
    """int64 [batch, sequence]: the last sample ends early."""
    present = torch.ones(BATCH, SEQUENCE, dtype=torch.int64, device=torch.get_default_device())
    present[-1, -3:] = 0
    return present


def _linear(state, name, x):
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def _norm(state, name, x):
    return F.layer_norm(x, (HIDDEN,), state[f"{name}.weight"], state[f"{name}.bias"])


def hidden_states(state, tokens, positions, mask, tokentypes=None):
    """[batch, sequence, hidden], of a model's state_dict; mask: bool, true where a key is seen."""
    embedding = "language_model.embedding"
    x = state[f"{embedding}.word_embeddings.weight"][tokens]
    x = x + state[f"{embedding}.position_embeddings.weight"][positions]
    if tokentypes is not None:
        x = x + state[f"{embedding}.tokentype_embeddings.weight"][tokentypes]
    for number in range(LAYERS):
        layer = f"language_model.encoder.layers.{number}"
        mixed = _linear(
            state, f"{layer}.self_attention.query_key_value", _norm(state, f"{layer}.input_layernorm", x)
        )
        q, k, v = mixed.unflatten(-1, (HEADS, 3 * HIDDEN // HEADS)).transpose(1, 2).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(HIDDEN / HEADS)
        context = scores.masked_fill(~mask, -10000.0).softmax(-1) @ v
        x = x + _linear(state, f"{layer}.self_attention.dense", context.transpose(1, 2).flatten(2))
        up = _linear(
            state, f"{layer}.mlp.dense_h_to_4h", _norm(state, f"{layer}.post_attention_layernorm", x)
        )
        x = x + _linear(state, f"{layer}.mlp.dense_4h_to_h", F.gelu(up, approximate="tanh"))
    return _norm(state, "language_model.encoder.final_layernorm", x)


def _losses(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels).t()


def plain_gpt(state):
    """The losses [sequence, batch] of `text`."""
    tokens, positions, labels = text()
    causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).tril()
    hidden = hidden_states(state, tokens, positions, causal)
    return _losses(hidden @ state["language_model.embedding.word_embeddings.weight"].t(), labels)


def plain_bert(state):
    """(the losses, binary logits) of `text` and `padding`; the second half of each sample is of token type 1."""
    tokens, positions, labels = text()
    present = padding().bool()
    mask = (present.unsqueeze(1) & present.unsqueeze(2)).unsqueeze(1)
    hidden = hidden_states(state, tokens, positions, mask, token_types(tokens))
    pooled = torch.tanh(_linear(state, "language_model.pooler.dense", hidden[:, 0]))
    head = _norm(state, "lm_head.layernorm", F.gelu(_linear(state, "lm_head.dense", hidden)))
    logits = head @ state["language_model.embedding.word_embeddings.weight"].t() + state["lm_head.bias"]
    return _losses(logits, labels), _linear(state, "binary_head", pooled)


def bert_loss(losses, binary):
    """One number of both. Padding counts nothing: rows without keys are zeros in the fused softmax alone."""
    return losses[padding().t().bool()].mean() + binary.square().sum()


def token_types(tokens):
    types = torch.zeros_like(tokens)
    types[:, SEQUENCE // 2 :] = 1
    return types


def gpt_losses(model):
    tokens, positions, labels = text()
    return model(tokens, positions, None, labels=labels)


def bert_losses(model):
    tokens, _, labels = text()
    return model(tokens, padding(), token_types(tokens), lm_labels=labels)
