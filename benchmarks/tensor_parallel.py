"""A training step of GPT whose layers are split over ranks, beside the same model with torch's own tensor parallel.

usage: torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--compile] [--trace FILE] [--json FILE]
       torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --device cpu --layers 2 --width 64 --heads 4 \\
           --batch 2 --sequence 32 --words 128 --rounds 2 --count 1 --trace trace.json     # on gloo

GPT-2's smallest model (12 layers of 768), batch 8 x 1,024, parameters in bfloat16, forward and backward, with sequence
parallelism. apex: the model of examples/gpt. torch: nn.Linear, nn.LayerNorm, nn.Embedding with parallelize_module
(ColwiseParallel, RowwiseParallel, SequenceParallel) and loss_parallel. Both have the same layout [sequence, batch,
width], the same attention (scaled_dot_product_attention), and the same weights: before anything is timed, their losses
and the gradients of all split weights must agree, to 2 % in half precision and 1e-4 in float32. Gradients that ranks
have of their part of the sequence (norms, biases) apex's step sums at its end; torch's sums those of biases, and leaves
the others for the optimizer to sum.

CUDA_DEVICE_MAX_CONNECTIONS is 1 for all of them unless it is set, as docs/tensor_parallel.md advises.
Times: median over rounds, in which the models take turns, of the slowest rank. To reach: apex / torch at most 0.9.

--trace: one backward pass under torch.profiler, and which part of its collectives' time runs beside products: with
sequence parallelism, without it (the input's gradient is then all-reduced beside the weight's), and of torch's model.
FILE receives the first of these, as a Chrome trace of the first rank. The time of a collective includes its waiting for
the other rank. Where kernels end before the host has started the next ones, as with small layers, there is nothing that
a collective could run beside: `--layers 2 --width 4096 --heads 32` keeps the GPU busy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _overlap import Overlap, traced, without_multicast
from _report import Table, source
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from apex.transformer import parallel_state

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples/gpt"))
from model import GPT

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TorchBlock(nn.Module):
    """As the block of examples/gpt, of torch's modules."""

    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, 3 * self.size))
        q, k, v = qkv.permute(1, 2, 0, 3).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class TorchGPT(nn.Module):
    """As the model of examples/gpt: parameters have the same names."""

    def __init__(self, arguments):
        super().__init__()
        width = arguments.width
        self.words = nn.Embedding(arguments.words, width)
        self.positions = nn.Parameter(torch.empty(arguments.sequence, 1, width))
        self.blocks = nn.ModuleDict(
            {str(i): TorchBlock(width, arguments.heads) for i in range(arguments.layers)}
        )
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, arguments.words, bias=False)

    def split(self, mesh):
        """Over the ranks of the mesh, with sequence parallelism; logits have the weight of the words."""
        ranks, rank = mesh.size(), mesh.get_local_rank()
        part = self.positions.shape[0] // ranks
        self.own = slice(rank * part, (rank + 1) * part)
        sequence = SequenceParallel(sequence_dim=0)
        styles = {"norm_1": sequence, "norm_2": sequence}
        styles |= {name: ColwiseParallel(input_layouts=Shard(0)) for name in ("qkv", "up")}
        styles |= {name: RowwiseParallel(output_layouts=Shard(0)) for name in ("out", "down")}
        for block in self.blocks.values():
            parallelize_module(block, mesh, styles)
        styles = {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": sequence,
            "logits": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(self, mesh, styles)
        self.logits.weight = self.words.weight
        return self

    def forward(self, text):
        """The logits [sequence, batch, words] of text [sequence, batch], split over words."""
        x = self.words(text) + self.positions[self.own]
        for block in self.blocks.values():
            x = block(x)
        return self.logits(self.norm(x))


def apex_gpt(arguments, sequence_parallel=True):
    model = GPT(
        True, True, seed=0, words=arguments.words, hidden=arguments.width, heads=arguments.heads,
        layers=arguments.layers, context=arguments.sequence, sequence_parallel=sequence_parallel, recompute=False,
    )  # fmt: skip
    return model.to(arguments.device, arguments.dtype)


def torch_gpt(arguments, mesh, weights):
    """With these weights, split over the mesh."""
    with torch.device(arguments.device):
        model = TorchGPT(arguments).to(arguments.dtype)
    model.load_state_dict({**weights, "logits.weight": weights["words.weight"]})
    return model.split(mesh)


@torch.no_grad()
def whole_weights(model):
    """{name: the weight of all ranks} of a model of examples/gpt."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach()
        if getattr(p, "tensor_model_parallel", False):
            parts = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, p.detach().contiguous())
            found[name] = torch.cat(parts, p.partition_dim)
    return found


class Training:
    """Steps of a model: forward() leaves `loss`, backward() the gradients, sum_shared() all of those."""

    def __init__(self, model, text, following):
        self.model, self.text, self.following = model, text, following
        self.parameters, self.loss = list(model.parameters()), None

    def forward(self):
        for p in self.parameters:
            p.grad = None
        if isinstance(self.model, TorchGPT):
            with loss_parallel():
                logits = self.model(self.text.t()).flatten(0, 1)
                self.loss = F.cross_entropy(logits, self.following.t().flatten())
        else:
            self.loss = self.model(self.text, self.following).mean()

    def backward(self):
        if isinstance(self.model, TorchGPT):
            with loss_parallel():
                self.loss.backward()
        else:
            self.loss.backward()

    @torch.no_grad()
    def sum_shared(self):
        """In one collective, as examples/gpt does in many."""
        shared = [p.grad for p in self.parameters if getattr(p, "sequence_parallel_enabled", False)]
        if shared:
            flat = torch.cat([gradient.flatten() for gradient in shared])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in shared])
            torch._foreach_copy_(shared, [part.view_as(g) for part, g in zip(parts, shared, strict=True)])

    def step(self):
        self.forward()
        self.backward()
        self.sum_shared()

    def value(self):
        loss = self.loss.detach()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    def gradients(self):
        """{name: this rank's part of the gradient} of the split weights."""
        found = {}
        for name, p in self.model.named_parameters():
            if isinstance(p, DTensor):
                if p.placements[0].is_shard():
                    found[name] = p.grad.to_local().float()
            elif getattr(p, "tensor_model_parallel", False):
                found[name] = p.grad.float()
        return found


def check_alike(first, second, tolerance):
    """Prints how far losses and gradients of two Trainings are from each other, and ends the program beyond that."""
    for training in (first, second):
        training.step()
    losses = first.value(), second.value()
    worst = [abs(losses[0] - losses[1]) / losses[1]]
    theirs = second.gradients()
    for name, gradient in first.gradients().items():
        worst.append(((gradient - theirs[name]).norm() / theirs[name].norm()).item())
    found = torch.tensor(max(worst), dtype=torch.float64, device=first.text.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(
            f"losses {losses[0]:.5f} and {losses[1]:.5f}, {len(worst) - 1} gradients: at most {found.item():.1e} apart"
        )
    if not found.item() <= tolerance:
        sys.exit(f"the models are not the same: {found.item():.1e} apart, at most {tolerance:.0e} is right")


def milliseconds(step, count, device):
    """Of one `step`, the mean of `count` of them on the slowest rank."""
    on_gpu = device == "cuda"
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if on_gpu:
        end.record()
        end.synchronize()
    taken = begin.elapsed_time(end) if on_gpu else 1e3 * (time.perf_counter() - start)
    time_of_all = torch.tensor([taken / count], dtype=torch.float64, device=device)
    dist.all_reduce(time_of_all, dist.ReduceOp.MAX)
    return time_of_all.item()


@dataclass
class Row:
    implementation: str
    milliseconds: float
    ratio: float


def measure(trainings, arguments, table):
    """Adds a row for each of {implementation: Training}, the first of which is apex."""
    times = {name: [] for name in trainings}
    for training in trainings.values():
        for _ in range(3):
            training.step()
    for _ in range(arguments.rounds):
        for name, training in trainings.items():
            times[name].append(milliseconds(training.step, arguments.count, arguments.device))
    median = {name: statistics.median(found) for name, found in times.items()}
    own = next(iter(median.values()))
    for name, found in median.items():
        if table:
            table.add(Row(name, found, own / found), (name, f"{found:.2f}", f"{own / found:.3f}"))


def show_overlap(trainings, path):
    """Prints what the collectives of a backward pass run beside, for each of {description: Training}."""
    for training in trainings.values():
        training.step()
    for name, training in trainings.items():
        first = dist.get_rank() == 0
        found = traced(training.backward, path if first else None, before=training.forward)
        if first:
            print(f"{name}: backward's {Overlap.of(found)}", flush=True)
        path = None


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--words", type=int, default=50304, help="of the vocabulary; the ranks divide it")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--count", type=int, default=5, help="steps of a round")
    parser.add_argument("--compile", action="store_true", help="torch's model with its blocks compiled, too")
    parser.add_argument("--trace", metavar="FILE", help="show what backward's collectives run beside")
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after each row")
    arguments = parser.parse_args()
    arguments.dtype = DTYPES[arguments.dtype]
    return arguments


def main():
    arguments = parse()
    without_multicast()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")  # which connects groups when they are used; most of them never are
    else:
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    mesh = init_device_mesh(arguments.device, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    shape = arguments.batch, arguments.sequence + 1
    words = torch.randint(arguments.words, shape, generator=generator, dtype=torch.int64, device="cpu")
    text, following = (x.contiguous().to(arguments.device) for x in (words[:, :-1], words[:, 1:]))
    training = partial(Training, text=text, following=following)
    own = apex_gpt(arguments)
    weights = whole_weights(own)
    trainings = {"apex": training(own), "torch DTensor": training(torch_gpt(arguments, mesh, weights))}
    tolerance = 1e-4 if arguments.dtype == torch.float32 else 2e-2
    check_alike(*trainings.values(), tolerance)
    if arguments.compile:
        compiled = torch_gpt(arguments, mesh, weights)  # block by block, as torchtitan does
        for block in compiled.blocks.values():
            block.compile()
        trainings["torch DTensor, compiled blocks"] = training(compiled)
    table, name = None, torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    if dist.get_rank() == 0:
        title = f"{name}, {dist.get_world_size()} ranks, torch {torch.__version__}: forward and backward"
        facts = {"card": name, "torch": torch.__version__, "ranks": dist.get_world_size(), "source": source()}
        table = Table(title, ("implementation", "ms", "apex / it"), (32,), arguments.json, facts)
    measure(trainings, arguments, table)
    if arguments.trace:
        shown = {
            "apex, sequence parallel": trainings["apex"],
            "apex, without it": training(apex_gpt(arguments, sequence_parallel=False)),
            "torch DTensor, sequence parallel": trainings["torch DTensor"],
        }
        show_overlap(shown, arguments.trace)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
