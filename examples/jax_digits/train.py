"""Trains a transformer on scikit-learn's handwritten digits with JAX and Flax, in bfloat16 and in FP8, side by side.

1,797 real images of 8 x 8 pixels, a quarter of them held out; an image is a sequence of its 8 rows. Runs on a GPU if
JAX sees one, else on the CPU, where FP8 is exact arithmetic on rounded numbers. Each takes about half a minute there.
Prints both losses and test accuracies and draws them.

usage: python train.py [--epochs 10] [--width 64] [--layers 2] [--seed 0] [--plot losses.png]
needs: jax, flax, apex, scikit-learn, matplotlib, rich; not torch
"""

import argparse
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from flax import linen as nn
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from apex.transformer_engine import jax as te
from apex.transformer_engine.jax import flax as layers

matplotlib.use("Agg")
from matplotlib import pyplot

console = Console()
BATCH = 64


class Network(nn.Module):
    """Rows of pixels [batch, 8, 8] -> logits [batch, 10], by transformer layers that see all rows."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, rows, deterministic):
        x = layers.DenseGeneral(features=self.width, dtype=jnp.bfloat16)(rows)
        for _ in range(self.depth):
            x = layers.TransformerLayer(
                hidden_size=self.width,
                mlp_hidden_size=4 * self.width,
                num_attention_heads=4,
                mlp_activations=("gelu", "linear"),
                self_attn_mask_type="no_mask",
                dtype=jnp.bfloat16,
            )(x, deterministic=deterministic)
        x = layers.LayerNorm(dtype=jnp.bfloat16)(x).mean(1)
        return nn.Dense(10)(x.astype(jnp.float32))  # 10 outputs: too narrow for FP8 products


def digits(seed):
    """(train rows, train labels), (test rows, test labels): float32 [n, 8, 8] in [0, 1], int32 [n]."""
    data = load_digits()
    images, labels = (data.images / 16).astype(np.float32), data.target.astype(np.int32)
    split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train_x, test_x, train_y, test_y = map(jnp.asarray, split)
    return (train_x, train_y), (test_x, test_y)


def train(network, data, epochs, seed, name):
    """The mean loss of each epoch, and the test accuracy at the end; in FP8 where fp8_autocast is on."""
    (x, y), (test_x, test_y) = data
    key = jax.random.key(seed)
    state = network.init({"params": key}, x[:1], True)
    state = {collection: state[collection] for collection in ("params", te.FP8_META) if collection in state}
    moments = jax.tree.map(jnp.zeros_like, state["params"])

    @jax.jit
    def step(state, moments, x, y, key):
        def loss_of(state):
            logits = network.apply(state, x, False, rngs={"dropout": key})
            return te.cross_entropy(logits, y, smoothing=0.05).mean()

        loss, grads = jax.value_and_grad(loss_of)(state)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads["params"])
        params = jax.tree.map(lambda p, m: p - 0.02 * m, state["params"], moments)
        # The gradient of FP8's collection is what layers saw: the next scales are made of it.
        return loss, te.update_fp8_metas({**grads, "params": params}), moments

    losses, order = [], np.random.default_rng(seed)
    for epoch in track(range(epochs), f"training in {name}", console=console):
        seen = []
        rows = order.permutation(len(x))
        for first in range(0, len(x) - BATCH + 1, BATCH):
            chosen = rows[first : first + BATCH]
            key = jax.random.fold_in(key, epoch)
            loss, state, moments = step(state, moments, x[chosen], y[chosen], key)
            seen.append(loss)
        losses.append(float(np.mean(seen)))
    right = network.apply(state, test_x, True).argmax(-1) == test_y
    return losses, float(right.mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=64, help="of the layers; a multiple of 16")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default="losses.png", help="where the curves are saved")
    asked = parser.parse_args()
    if asked.epochs < 1 or asked.layers < 1 or asked.width < 16 or asked.width % 16:
        parser.error("--epochs and --layers are 1 or more, --width a multiple of 16")
    data, network = digits(asked.seed), Network(asked.width, asked.layers)
    console.print(f"on {jax.devices()[0].device_kind}")
    for enabled, name in ((False, "bfloat16"), (True, "FP8")):
        start = time.perf_counter()
        with te.fp8_autocast(enabled=enabled, fp8_recipe=te.DelayedScaling(amax_history_len=16)):
            losses, accuracy = train(network, data, asked.epochs, asked.seed, name)
        took = time.perf_counter() - start
        console.print(f"{name}: loss {losses[-1]:.4f}, test accuracy {accuracy:.3f}, {took:.0f} s")
        pyplot.plot(range(1, asked.epochs + 1), losses, label=name)
    pyplot.xlabel("epoch")
    pyplot.ylabel("training loss")
    pyplot.legend()
    pyplot.savefig(asked.plot, dpi=120)
    console.print(f"curves: {asked.plot}")


if __name__ == "__main__":
    main()
