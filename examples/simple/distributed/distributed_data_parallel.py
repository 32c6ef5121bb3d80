"""Mixed precision and data parallel training, in one file: amp and apex.parallel.DistributedDataParallel.

Classifies scikit-learn's 1,797 handwritten digits, in one process or in several, on GPUs or on the CPU; the lines
that several processes need say FOR DISTRIBUTED. Saves the curve of the loss as a PNG.

usage: python distributed_data_parallel.py [--opt-level O1] [--epochs 20] [--out FOLDER]
       WORLD_SIZE=2 python -m apex.parallel.multiproc distributed_data_parallel.py      # or torchrun
needs: torch, apex, scikit-learn, matplotlib, rich
"""

import argparse
import os
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel

matplotlib.use("Agg")
from matplotlib import pyplot


def digits(device):
    """(images, labels) to train on and to test on: float32 (N, 64) in [0, 1], int64 (N,)."""
    data = load_digits()
    parts = train_test_split(
        data.data / 16, data.target, test_size=0.25, random_state=0, stratify=data.target
    )
    train_x, test_x, train_y, test_y = (torch.tensor(part, device=device) for part in parts)
    return (train_x.float(), train_y), (test_x.float(), test_y)


def draw(losses, path):
    pyplot.figure(layout="constrained")
    pyplot.plot(range(1, len(losses) + 1), losses)
    pyplot.xlabel("epoch")
    pyplot.ylabel("training loss")
    pyplot.yscale("log")
    pyplot.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O1", help="O0 to O5")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the curve (default: out)")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", arguments.local_rank) if cuda else torch.device("cpu")
    rank, ranks = 0, int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        # FOR DISTRIBUTED: each process has a device of its own, and finds the others by its environment.
        if cuda:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if cuda else "gloo")
        rank = dist.get_rank()

    (train_x, train_y), (test_x, test_y) = digits(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = FusedAdam(model.parameters(), lr=2e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=arguments.opt_level, verbosity=0)
    if ranks > 1:
        # FOR DISTRIBUTED: after amp.initialize. torch.nn.parallel.DistributedDataParallel is fine, too.
        model = DistributedDataParallel(model)

    losses = []
    with Progress(disable=rank != 0) as progress:
        for epoch in progress.track(range(arguments.epochs), description="training"):
            order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
            # FOR DISTRIBUTED: the same order everywhere, of which each process takes its own part.
            order = order[: len(order) // ranks * ranks][rank::ranks].to(device)
            total = 0.0
            for picked in order.split(arguments.batch_size):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(train_x[picked]), train_y[picked])
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                total += loss.detach() * len(picked) / len(order)
            if ranks > 1:
                dist.all_reduce(total)
            losses.append(float(total) / ranks)

    if rank == 0:
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).double().mean().item()
        arguments.out.mkdir(parents=True, exist_ok=True)
        draw(losses, arguments.out / "loss.png")
        print(
            f"{ranks} process(es) on {device.type}: final loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}"
        )
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
