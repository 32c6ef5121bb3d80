"""Prunes a ResNet-50 bottleneck and a BERT-large layer to 2:4 sparsity with ASP, and runs them through torch's sparse
kernels.

Random weights stand for trained ones, and "accuracy" is how far a block's outputs are from those of the dense block, as
a part of their norm: after pruning, and after it was trained on to give the same outputs. Then, on a GPU with sparse
tensor cores (sm_80 or newer), times of the pruned block in half precision: as dense matrices, and with every Linear and
1x1 convolution as torch.sparse.to_sparse_semi_structured's, and how far these two are apart; and of each of these
layers by itself. The results of torch's sparse products lie transposed, which what comes after them pays for.

usage: python blocks.py [--steps 200] [--batch 128] [--device cuda]
       python blocks.py --steps 5 --batch 2 --device cpu       # prunes and trains alone
needs: torch, apex
"""

import argparse
import copy
import statistics
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from apex.contrib.sparsity import ASP
from apex.optimizers import FusedAdam


class Bottleneck(nn.Module):
    """Of ResNet-50's third stage: 1,024 channels, 256 in between."""

    def __init__(self, channels=1024, width=256):
        super().__init__()
        self.reduce = nn.Conv2d(channels, width, 1, bias=False)
        self.middle = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.expand = nn.Conv2d(width, channels, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, channels))

    def forward(self, x):
        y = self.norms[0](self.reduce(x)).relu()
        y = self.norms[1](self.middle(y)).relu()
        return (x + self.norms[2](self.expand(y))).relu()

    @staticmethod
    def batch(size, **options):
        return torch.randn(size, 1024, 14, 14, **options).contiguous(memory_format=torch.channels_last)


class BertLayer(nn.Module):
    """Of BERT-large: 1,024 wide, 16 heads."""

    def __init__(self, width=1024, heads=16):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(attended))
        return self.norms[1](x + self.down(F.gelu(self.up(x))))

    @staticmethod
    def batch(size, **options):
        return torch.randn(size // 2, 128, 1024, **options)


class SparseConv1x1(nn.Module):
    """A 1x1 convolution of channels-last images: a product of pixels and weights."""

    def __init__(self, convolution):
        super().__init__()
        self.weight = nn.Parameter(sparse(convolution.weight.flatten(1)), requires_grad=False)

    def forward(self, x):
        n, _, h, w = x.shape
        pixels = x.permute(0, 2, 3, 1).flatten(0, 2)
        return F.linear(pixels, self.weight).view(n, h, w, -1).permute(0, 3, 1, 2)


def sparse(weight):
    return torch.sparse.to_sparse_semi_structured(weight.contiguous())


def products(block):
    """Name and layer of each Linear and 1x1 convolution, which are children of the block."""
    for name, layer in block.named_children():
        if isinstance(layer, nn.Linear) or getattr(layer, "kernel_size", None) == (1, 1):
            yield name, layer


def with_sparse_kernels(block):
    block = copy.deepcopy(block)
    for name, layer in list(products(block)):
        if isinstance(layer, nn.Conv2d):
            setattr(block, name, SparseConv1x1(layer))
        else:
            layer.weight = nn.Parameter(sparse(layer.weight), requires_grad=False)
    return block


def inputs_of_products(block, x):
    """{name: input} of the products in a forward pass."""
    found = {}
    for name, layer in products(block):
        layer.register_forward_pre_hook(lambda _, inputs, name=name: found.update({name: inputs[0]}))
    block(x)
    return found


def error(found, wanted):
    return (
        torch.linalg.vector_norm(found.float() - wanted.float()) / torch.linalg.vector_norm(wanted.float())
    ).item()


def prune_and_train(block, teacher, options):
    """Returns the errors after pruning, and after training on."""
    optimizer = FusedAdam(block.parameters(), lr=3e-4)
    ASP.init_model_for_pruning(block, verbosity=0, allow_permutation=False)
    ASP.init_optimizer_for_pruning(optimizer)
    ASP.compute_sparse_masks()
    held_out = block.batch(options.batch, device=options.device)
    with torch.no_grad():
        wanted = teacher(held_out)
        errors = [error(block(held_out), wanted)]
    for _ in range(options.steps):
        x = block.batch(options.batch, device=options.device)
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        F.mse_loss(block(x), target).backward()
        optimizer.step()
    with torch.no_grad():
        errors.append(error(block(held_out), wanted))
    ASP.reset()
    return errors


def milliseconds(call, runs=20):
    """GPU time, in a CUDA graph: torch plans a sparse product anew at every call, which takes a millisecond."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    times = []
    for _ in range(runs + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


@torch.no_grad()
def compare_kernels(name, block, options):
    dense = block.half()
    other = with_sparse_kernels(dense)
    x = block.batch(options.batch, device=options.device).half()
    apart = error(other(x), dense(x))
    times = [milliseconds(partial(one, x)) for one in (dense, other)]
    print(
        f"{name}: dense kernels {times[0]:.3f} ms, sparse {times[1]:.3f} ms, {times[0] / times[1]:.2f} x; "
        f"{apart:.1e} apart"
    )
    for layer, given in inputs_of_products(copy.deepcopy(dense), x).items():
        calls = [partial(getattr(one, layer), given) for one in (dense, other)]
        times = [1e3 * milliseconds(call) for call in calls]
        print(f"    {layer}: dense {times[0]:.1f} us, sparse {times[1]:.1f} us, {times[0] / times[1]:.2f} x")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    for name, kind in (("ResNet bottleneck", Bottleneck), ("BERT layer", BertLayer)):
        torch.manual_seed(0)
        block = kind().to(options.device).eval()
        if kind is Bottleneck:
            block = block.to(memory_format=torch.channels_last)
        teacher = copy.deepcopy(block)
        pruned, trained = prune_and_train(block, teacher, options)
        print(f"{name}: outputs off by {pruned:.3f} after pruning, {trained:.3f} after training on")
        if on_gpu and torch.cuda.get_device_capability() >= (8, 0):
            compare_kernels(name, block, options)
    if not on_gpu:
        print("sparse kernels need a GPU")


if __name__ == "__main__":
    main()
