"""Trains a network of Transformer Engine's layers on scikit-learn's handwritten digits, in bfloat16 and in FP8.

Both runs begin with the same weights and see the same batches. Prints their losses side by side and the accuracy on a
quarter of the 1,797 images that is held out, and saves a plot. On the CPU, and on cards without FP8 products, FP8 is
emulated: the same numbers, slower; a minute on two cores. With --use-fp8-infer, what was trained in bfloat16 is tried
in FP8, too: one pass over the training images records magnitudes, of which scales are made.

usage: python train.py [--epochs 20] [--recipe delayed|current|blocks] [--use-fp8-infer] [--device cpu] [--seed 0]
                       [--plot losses.png]
needs: torch, apex, scikit-learn, matplotlib, rich
"""

import argparse

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import apex.transformer_engine.pytorch as te
from apex.optimizers import FusedAdam
from apex.transformer_engine.common import recipe

matplotlib.use("Agg")
from matplotlib import pyplot

console = Console()
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=16),
    "current": recipe.Float8CurrentScaling(),
    "blocks": recipe.Float8BlockScaling(),
}


def digits(device, seed):
    """(train images, train labels), (test images, test labels): bfloat16 (N, 64) in [0, 1], int64 (N,)."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.bfloat16) / 16, torch.tensor(data.target)
    split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train_x, test_x, train_y, test_y = (part.to(device) for part in split)
    return (train_x, train_y), (test_x, test_y)


def network(device, seed):
    torch.manual_seed(seed)
    options = dict(params_dtype=torch.bfloat16, device=device, init_method=nn.init.xavier_uniform_)
    return nn.Sequential(
        te.Linear(64, 128, **options),
        te.LayerNormMLP(
            128, 256, activation="swiglu", output_layer_init_method=nn.init.xavier_uniform_, **options
        ),
        te.LayerNormLinear(128, 10, **options),
    )


def train(model, of, images, labels, epochs, seed, batch=64):
    """The mean loss of each epoch. of: the recipe, or None for bfloat16."""
    optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    generator, losses = torch.Generator().manual_seed(seed), []
    model.train()
    for _ in range(epochs):
        total = 0.0
        for picked in torch.randperm(len(images), generator=generator).split(batch):
            picked = picked.to(images.device)
            optimizer.zero_grad()
            with te.fp8_autocast(enabled=of is not None, fp8_recipe=of):
                output = model(images[picked])
            loss = nn.functional.cross_entropy(output.float(), labels[picked])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(picked)
        losses.append(total / len(images))
    return losses


@torch.no_grad()
def accuracy(model, of, images, labels):
    model.eval()
    with te.fp8_autocast(enabled=of is not None, fp8_recipe=of):
        return (model(images).argmax(1) == labels).double().mean().item()


@torch.no_grad()
def calibrate(model, of, images):
    """Records the magnitudes of one pass in bfloat16."""
    model.train()  # in which layers record
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=of):
        model(images)


def show(results, accuracies):
    table = Table("epoch", *results)
    for epoch, row in enumerate(zip(*results.values(), strict=True), 1):
        table.add_row(str(epoch), *(f"{loss:.4f}" for loss in row))
    console.print(table)
    for name, value in accuracies.items():
        print(f"test accuracy, {name}: {value:.4f}")


def plot(results, path):
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, losses in results.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name)
    axes.set(xlabel="epoch", ylabel="training loss", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    parser.add_argument("--use-fp8-infer", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default="losses.png")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    train_set, test_set = digits(device, arguments.seed)
    served = te.served(device)
    print(f"FP8: {served['formats']} formats, products: {served['products']}, recipe: {arguments.recipe}")
    results, accuracies = {}, {}
    for name, of in (("bf16", None), ("fp8", RECIPES[arguments.recipe])):
        model = network(device, arguments.seed)
        results[name] = train(model, of, *train_set, arguments.epochs, arguments.seed)
        accuracies[name] = accuracy(model, of, *test_set)
        if of is None and arguments.use_fp8_infer:
            calibrate(model, RECIPES[arguments.recipe], train_set[0])
            accuracies["bf16, then fp8"] = accuracy(model, RECIPES[arguments.recipe], *test_set)
    show(results, accuracies)
    plot(results, arguments.plot)


if __name__ == "__main__":
    main()
