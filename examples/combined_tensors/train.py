"""Trains on scikit-learn's handwritten digits under apex.amp: as always, with combined gradients, and with a combined
optimizer. The three curves agree; the last column is the time of a step's overhead (zero_grad and step).

usage: python train.py [--opt-level O2] [--epochs 3] [--device cpu]
       torchrun --nproc-per-node 2 train.py          # data parallel by combine_ddp
needs: torch, apex, scikit-learn
"""

import argparse
import os
import time
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn

from apex import amp
from apex.optimizers import CombinedAdamW

RUNS = {
    "torch.optim.AdamW": (torch.optim.AdamW, False),
    "  combine_grad": (torch.optim.AdamW, True),
    "CombinedAdamW": (CombinedAdamW, True),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def batches(device, epochs, rank, ranks, size=64):
    """The same shuffled digits for every run; each rank its share of a batch."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(data.target, device=device)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for picked in torch.randperm(len(labels), generator=generator).split(size):
            if len(picked) == size:
                picked = picked[rank::ranks].to(device)
                yield images[picked], labels[picked]


def train(make, combine, options, device, epochs, rank, ranks):
    """(mean loss of each epoch, seconds of zero_grad and step by step)."""
    model = network().to(device)
    optimizer = make(model.parameters(), lr=2e-3, eps=1e-6)
    model, optimizer = amp.initialize(
        model, optimizer, verbosity=0, combine_grad=combine, combine_ddp=combine and ranks > 1, **options
    )
    if ranks > 1 and not combine:
        model = nn.parallel.DistributedDataParallel(model)
    losses, seconds = [], []
    for images, labels in batches(device, epochs, rank, ranks):
        begun = time.perf_counter()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        loss = nn.functional.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        begun = time.perf_counter()
        optimizer.step()
        seconds[-1] += time.perf_counter() - begun
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if ranks > 1:
        torch.distributed.all_reduce(losses)
    means = (losses / ranks).reshape(epochs, -1).mean(1).tolist()
    return means, sorted(seconds)[len(seconds) // 2]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--opt-level", default="O2", choices=["O1", "O2", "O4", "O5"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    warnings.filterwarnings(
        "ignore", "amp.initialize is called again", amp.AmpWarning
    )  # three runs, one process
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if ranks > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if rank == 0:
        epochs = "".join(f"  epoch {epoch}" for epoch in range(1, arguments.epochs + 1))
        print(f"{arguments.opt_level} on {ranks} x {device.type:<12}{epochs}   step")
    for name, (make, combine) in RUNS.items():
        options = dict(opt_level=arguments.opt_level, loss_scale=128.0)
        losses, seconds = train(make, combine, options, device, arguments.epochs, rank, ranks)
        if rank == 0:
            print(f"{name:<22}" + "".join(f"{loss:>9.4f}" for loss in losses) + f"{1e3 * seconds:>8.2f} ms")
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
