"""Trains a transformer encoder with JAX and Flax to say of a sentence which package of Python's library it documents.

The text is what Python ships: sentences of the docstrings of asyncio, email, importlib and logging; a tenth is held
out. Runs on a GPU if JAX sees one, else on the CPU, where FP8 is exact arithmetic on rounded numbers.

usage: python train.py [--use-fp8] [--epochs 8] [--lr 1e-3] [--seed 0]
needs: jax, flax, apex, rich; not torch
"""

import argparse
import ast
import importlib.util
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from rich.console import Console
from rich.progress import track

from apex.transformer_engine import jax as te
from apex.transformer_engine.jax import flax as layers

console = Console()
BATCH, LENGTH, WORDS = 64, 32, 2048
PACKAGES = ("asyncio", "email", "importlib", "logging")
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


class Encoder(nn.Module):
    """Words [batch, LENGTH] and which places are empty [batch, 1, LENGTH, LENGTH] -> logits [batch, packages]."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, words, mask, deterministic):
        x = nn.Embed(WORDS, self.width, dtype=jnp.bfloat16)(words)
        for _ in range(self.depth):
            x = layers.TransformerLayer(
                hidden_size=self.width,
                mlp_hidden_size=4 * self.width,
                num_attention_heads=4,
                hidden_dropout=0.1,
                attention_dropout=0.1,
                layer_type=layers.TransformerLayerType.ENCODER,
                self_attn_mask_type="padding",
                enable_relative_embedding=True,
                dtype=jnp.bfloat16,
            )(x, attention_mask=mask, deterministic=deterministic)
        there = 1 - mask[:, 0, 0, :, None].astype(x.dtype)
        x = (x * there).sum(1) / there.sum(1)
        return nn.Dense(len(PACKAGES))(x.astype(jnp.float32))  # too few outputs for FP8 products


def sentences(package):
    """The different sentences of its docstrings, of 4 to LENGTH words."""
    found = set()
    for path in Path(importlib.util.find_spec(package).origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            found.update(re.split(r"(?<=[.:])\s+", text or ""))
    return sorted(" ".join(words) for words in map(str.split, found) if 4 <= len(words) <= LENGTH)


def text(seed):
    """(words [n, LENGTH], empty places [n, 1, LENGTH, LENGTH], labels [n]) to learn from, and held out."""
    found = [(sentence, label) for label, name in enumerate(PACKAGES) for sentence in sentences(name)]
    words = np.zeros((len(found), LENGTH), np.int32)
    for row, (sentence, _) in zip(words, found, strict=True):
        # A word is its checksum: a vocabulary that needs no pass over the text.
        parts = re.findall(r"\w+|[^\w\s]", sentence.lower())[:LENGTH]
        row[: len(parts)] = [1 + zlib.crc32(part.encode()) % (WORDS - 1) for part in parts]
    mask = np.broadcast_to((words == 0)[:, None, None, :], (len(words), 1, LENGTH, LENGTH)).astype(np.uint8)
    labels = np.array([label for _, label in found], np.int32)
    order, split = np.random.default_rng(seed).permutation(len(found)), len(found) // 10
    parts = words[order], mask[order], labels[order]
    return [part[split:] for part in parts], [part[:split] for part in parts]


def train(network, data, asked):
    """The mean loss of the last epoch, and the accuracy on what is held out."""
    (words, mask, labels), held_out = data
    key, random = jax.random.key(asked.seed), np.random.default_rng(asked.seed)
    state = network.init({"params": key}, words[:1], mask[:1], True)
    state = {collection: state[collection] for collection in ("params", te.FP8_META) if collection in state}
    moments = [jax.tree.map(jnp.zeros_like, state["params"]) for _ in range(2)]

    @jax.jit
    def step(state, moments, words, mask, labels, key, number):
        def loss_of(state):
            logits = network.apply(state, words, mask, False, rngs={"dropout": key})
            return te.cross_entropy(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(state)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads["params"])
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], grads["params"])
        rate = asked.lr * jnp.sqrt(1 - 0.99**number) / (1 - 0.9**number)
        params = jax.tree.map(
            lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), state["params"], first, second
        )
        # The gradient of FP8's collection is what layers saw: the next scales are made of it.
        return loss, te.update_fp8_metas({**grads, "params": params}), [first, second]

    number = 0
    for _ in track(range(asked.epochs), "training", console=console):
        losses, rows = [], random.permutation(len(words))
        for begin in range(0, len(words) - BATCH + 1, BATCH):
            chosen, number = rows[begin : begin + BATCH], number + 1
            batch = words[chosen], mask[chosen], labels[chosen], jax.random.fold_in(key, number), number
            loss, state, moments = step(state, moments, *batch)
            losses.append(loss)
    apply = jax.jit(lambda words, mask: network.apply(state, words, mask, True).argmax(-1))
    return float(np.mean(losses)), float((apply(*held_out[:2]) == held_out[2]).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--use-fp8", action="store_true", help="products in FP8, else in bfloat16")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=64, help="of the layers; a multiple of 16")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.epochs < 1 or asked.layers < 1 or asked.width < 16 or asked.width % 16:
        parser.error("--epochs and --layers are 1 or more, --width a multiple of 16")
    data, network = text(asked.seed), Encoder(asked.width, asked.layers)
    console.print(f"on {jax.devices()[0].device_kind}, {len(data[0][0])} sentences")
    with te.fp8_autocast(enabled=asked.use_fp8, fp8_recipe=te.DelayedScaling(amax_history_len=16)):
        loss, accuracy = train(network, data, asked)
    name = "FP8" if asked.use_fp8 else "bfloat16"
    console.print(f"{name}: loss {loss:.4f}, accuracy on sentences that are held out {accuracy:.3f}")


if __name__ == "__main__":
    main()
