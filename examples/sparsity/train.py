"""Trains a small network on scikit-learn's handwritten digits, prunes it to 2:4 sparsity with ASP, and trains it on.

1,797 real images of 8 x 8 pixels, a quarter of them held out. Prints the test accuracy of the dense model, after
pruning with and without reordered channels, and after it was trained on; in under a minute on a CPU.

usage: python train.py [--epochs 20] [--device cpu] [--seed 0] [--sparse]
needs: torch, apex, scikit-learn; --sparse: a GPU with sparse tensor cores (sm_80 or newer), where the pruned layers run
       through torch.sparse.to_sparse_semi_structured, and are timed beside the dense ones
"""

import argparse
import copy
import statistics

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from apex.contrib.sparsity import ASP
from apex.optimizers import FusedAdam


def digits(device, seed):
    """(train images, test images, train labels, test labels): float32 (N, 64) in [0, 1], int64 (N,)."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    return [part.to(device) for part in split]


class Residual(nn.Module):
    """x + a dense layer twice as wide, normalised."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def network(width=64):
    return nn.Sequential(nn.Linear(64, width), Residual(width), Residual(width), nn.Linear(width, 10))


def train(model, optimizer, images, labels, epochs, batch=64):
    model.train()
    for _ in range(epochs):
        for picked in torch.randperm(len(images), device=images.device).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[picked]), labels[picked]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    return (model(images).argmax(1) == labels).double().mean().item()


def pruned(model, reordered):
    """A copy that was pruned: its magnitude, and itself."""
    model = copy.deepcopy(model)
    ASP.init_model_for_pruning(model, verbosity=0, allow_permutation=reordered)
    ASP.compute_sparse_masks()
    ASP.reset()
    return sum(
        layer.weight.abs().sum().item() for layer in model.modules() if isinstance(layer, nn.Linear)
    ), model


def milliseconds(call, runs=50):
    times = []
    for _ in range(runs + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


@torch.no_grad()
def run_sparse(model, images, labels):
    """The pruned layers through torch's sparse kernels: accuracy in half precision, and the speed of a large layer."""
    from torch.sparse import to_sparse_semi_structured

    dense, rows = copy.deepcopy(model).half(), len(images) // 64 * 64
    sparse = copy.deepcopy(dense)
    for layer in sparse.modules():
        if hasattr(layer, "__weight_mma_mask") and min(layer.weight.shape) >= 64:
            layer.weight = nn.Parameter(to_sparse_semi_structured(layer.weight), requires_grad=False)
    x, y = images[:rows].half(), labels[:rows]
    print(f"half, dense kernels: {accuracy(dense, x, y):.4f}; sparse kernels: {accuracy(sparse, x, y):.4f}")
    large = nn.Linear(8192, 8192, bias=False, dtype=torch.half, device=x.device)
    ASP.init_model_for_pruning(large, verbosity=0, allow_permutation=False)
    ASP.compute_sparse_masks()
    ASP.reset()
    batch = torch.randn(4096, 8192, dtype=torch.half, device=x.device)
    times = [milliseconds(lambda: large(batch))]
    large.weight = nn.Parameter(to_sparse_semi_structured(large.weight), requires_grad=False)
    times.append(milliseconds(lambda: large(batch)))
    print(
        f"4096 x 8192 x 8192: dense {times[0]:.3f} ms, sparse {times[1]:.3f} ms, {times[0] / times[1]:.2f} x"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sparse", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    train_x, test_x, train_y, test_y = digits(options.device, options.seed)
    model = network().to(options.device)
    train(model, FusedAdam(model.parameters(), lr=2e-3), train_x, train_y, options.epochs)
    print(f"dense: accuracy {accuracy(model, test_x, test_y):.4f}")
    for reordered in (False, True):
        magnitude, copied = pruned(model, reordered)
        name = "reordered and pruned" if reordered else "pruned"
        print(f"{name}: accuracy {accuracy(copied, test_x, test_y):.4f}, magnitude kept {magnitude:.1f}")
    optimizer = FusedAdam(model.parameters(), lr=2e-3)
    ASP.init_model_for_pruning(model, verbosity=0)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    train(model, optimizer, train_x, train_y, options.epochs)
    print(
        f"trained on: accuracy {accuracy(model, test_x, test_y):.4f}, still sparse: {ASP.is_sparsity_enabled()}"
    )
    if options.sparse:
        run_sparse(model, test_x, test_y)


if __name__ == "__main__":
    main()
