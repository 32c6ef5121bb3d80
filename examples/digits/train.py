"""Trains a small convolutional network on scikit-learn's handwritten digits with apex.optimizers.FusedAdam.

1,797 real images of 8 x 8 pixels, a quarter of them held out. Runs on a GPU if torch sees one, else on the CPU,
in well under a minute. Prints which variant served each op, how fast the optimizer's step is against the
reference, and the test accuracy.

usage: python train.py [--epochs 30] [--device cpu] [--seed 0]
needs: torch, apex, scikit-learn, rich
"""

import argparse
import os
import statistics
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import apex
from apex.optimizers import FusedAdam

console = Console()


def digits(device, seed):
    """(train images, train labels), (test images, test labels): float32 (N, 1, 8, 8) in [0, 1], int64 (N,)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train_x, test_x, train_y, test_y = (part.to(device) for part in split)
    return (train_x, train_y), (test_x, test_y)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(model, optimizer, images, labels, epochs, batch=64):
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("epochs", total=epochs, loss=float("nan"))
        model.train()
        for _ in range(epochs):
            order = torch.randperm(len(images), device=images.device)
            for picked in order.split(batch):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images[picked]), labels[picked])
                loss.backward()
                optimizer.step()
            progress.update(task, advance=1, loss=loss.item())


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    return (model(images).argmax(1) == labels).double().mean().item()


def seconds_per_step(optimizer, device, steps=50):
    """Median wall time of one step(), the device's work included."""
    times = []
    for _ in range(steps + 5):
        start = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:])


def show_variants(model, device):
    """Times the step as it was chosen, and once more on the reference."""
    from apex._loader import library

    served = apex.served()
    fused = seconds_per_step(FusedAdam(model.parameters()), device)
    before = os.environ.get("APEX_VARIANT")
    os.environ["APEX_VARIANT"] = "reference"
    library.forget()
    try:
        reference = seconds_per_step(FusedAdam(model.parameters()), device)
    finally:
        if before is None:
            del os.environ["APEX_VARIANT"]
        else:
            os.environ["APEX_VARIANT"] = before
        library.forget()
    table = Table("op", "device", "served by", "µs a step", "reference", "speedup")
    for (where, op), variant in sorted(served.items()):
        timed = op == "multi_tensor_adam"
        figures = (f"{fused * 1e6:.0f}", f"{reference * 1e6:.0f}", f"{reference / fused:.1f} x")
        table.add_row(op, where, variant, *(figures if timed else ("", "", "")))
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)

    train_set, test_set = digits(device, arguments.seed)
    model = network().to(device)
    optimizer = FusedAdam(model.parameters(), lr=2e-3, weight_decay=1e-2)
    train(model, optimizer, *train_set, arguments.epochs)
    result = accuracy(model, *test_set)
    show_variants(model, device)
    print(f"test accuracy: {result:.4f} on {len(test_set[0])} images")


if __name__ == "__main__":
    main()
