"""Data parallel training with sharded optimizer state: one iteration, its memory, the step, and what runs beside what.

usage: torchrun --nproc-per-node 2 benchmarks/distributed_optimizers.py [--layers 24] [--width 2048] [--rows 4096]
       python benchmarks/distributed_optimizers.py                  # one process
       --only GPT-2 [--kernels] [--public FOLDER]                   # the second part alone
       --device cpu --layers 2 --width 64 --rows 8 --gpt 2 64 256 --tokens 2 16      # on gloo

First a stack of bfloat16 linear layers, float32 optimizer state. Beside DistributedFusedAdam: torch's
DistributedDataParallel with ZeroRedundancyOptimizer, and FSDP2 that keeps parameters whole between passes, which is
ZeRO-2 as well.

Then GPT-2 355M (24 layers of 1,024, 50,257 words, 1,024 positions) in half precision, gradients and parameters sent in
it, state in float32. By torch.profiler, on the first rank: the time of the step's kernels that are no collectives,
beside the floor of the rank's shard; and of backward's collectives, which part of their time any other kernel runs.
--public: a folder that holds public apex's apex/contrib/optimizers/distributed_fused_adam.py, or this file itself: its
class runs beside ours, on our kernels.

Floors, bytes an element of the shard, each tensor counted as often as an algorithm must move it. Adam: gradient 2,
parameter and both averages read and written 24, copy of the parameter that is sent 2: 28. LAMB: gradient 2, parameter
and both averages read and the averages and the update written 24; then, as the rate depends on norms over all of it,
update and parameter read and the parameter written 12, its copy 2: 40. The gradients' norm is computed before the step.
The step's kernels also copy what was gathered into the parameters, unless these are views of the buffer ("views").

To reach: LAMB's step at least 85 % of its floor.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _measure import copy_bandwidth
from _models import GPT2
from _overlap import Overlap, longest, traced, without_multicast
from _report import Table, source
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from apex.contrib.optimizers import DistributedFusedAdam, DistributedFusedLAMB

ADAM = dict(lr=1e-4, weight_decay=0.1)
LAMB = dict(lr=1e-4, weight_decay=0.01, max_grad_norm=1.0)
HALF, STATE = torch.bfloat16, torch.float32
PUBLIC = "public_distributed_fused_adam"
OF_ITS_KERNELS = "amp_C", "distributed_adam_cuda", "fused_adam_cuda"


# ---- models and their optimizers: functions of the arguments that give (model, optimizer) -------------------------


def stack(arguments, dtype=HALF):
    torch.manual_seed(0)
    layers = [nn.Linear(arguments.width, arguments.width, dtype=dtype) for _ in range(arguments.layers)]
    return nn.Sequential(*layers).to(arguments.device)


def sharded(optimizer=DistributedFusedAdam, model=stack, **options):
    def make(arguments):
        made = model(arguments)
        all_options = dict(grad_sync_dtype=HALF, param_sync_dtype=HALF, bucket_cap_mb=64, **ADAM) | options
        if optimizer != PUBLIC:
            return made, optimizer(made.parameters(), **all_options)
        if "overlap_param_sync" in options:
            touch_before_use(made)
        return made, public_class(arguments.public)(made.parameters(), **all_options)

    return make


def touch_before_use(model):
    """Public apex's class waits for a parameter where Python reads an attribute of it, as torch's modules do not."""

    def touch(module, _):
        for p in module.parameters(recurse=False):
            p.data_ptr()

    for module in model.modules():
        module.register_forward_pre_hook(touch)


def torch_zero(arguments):
    model = nn.parallel.DistributedDataParallel(stack(arguments), gradient_as_bucket_view=True)
    fused = dict(fused=True) if arguments.device == "cuda" else {}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **fused, **ADAM)
    return model, optimizer


def torch_fsdp(arguments):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = stack(arguments, torch.float32)
    for module in (*model, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(HALF, HALF), reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), fused=arguments.device == "cuda", **ADAM)


def gpt(arguments, dtype=HALF):
    torch.manual_seed(0)
    layers, width, words = arguments.gpt
    with torch.device(arguments.device):
        return GPT2(layers, width, width // 64, words, 1024).to(dtype)


def lamb(dtype, **options):
    def make(arguments):
        model = gpt(arguments, dtype)
        return model, DistributedFusedLAMB(model.parameters(), **LAMB, **options)

    return make


def public_class(folder):
    """DistributedFusedAdam of public apex's file, whose imports are resolved by this apex."""
    path = Path(folder) / "apex/contrib/optimizers/distributed_fused_adam.py"
    spec = importlib.util.spec_from_file_location(PUBLIC, path if path.exists() else Path(folder, path.name))
    for name in OF_ITS_KERNELS:
        if name not in sys.modules and importlib.util.find_spec(name) is None:  # this apex is no wheel
            sys.modules[name] = importlib.import_module(f"apex._legacy.{name}")
    sys.modules[PUBLIC] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DistributedFusedAdam


def adam_bytes(half=HALF):
    """Of an element of a shard, read and written by a step."""
    return half.itemsize + 6 * STATE.itemsize + half.itemsize


def lamb_bytes(half=HALF):
    moments = half.itemsize + 6 * STATE.itemsize
    return moments + 3 * STATE.itemsize + half.itemsize


OVERLAP, VIEWS = dict(overlap_param_sync=True), dict(set_param_views_to_flat_buffer=True)
STACKS = {
    "apex": sharded(),
    "apex, parameters overlap": sharded(**OVERLAP),
    "apex, contiguous": sharded(contiguous_param_buffer=True, contiguous_grad_buffer=True, **OVERLAP),
    "apex, remainders": sharded(store_params=False, store_param_remainders=True),
    "torch DDP + ZeroRedundancyOptimizer (bfloat16 state)": torch_zero,
    "torch FSDP2 + fused AdamW": torch_fsdp,
}
# With the bytes of an element.
GPTS = {
    "GPT-2, LAMB, bfloat16": (lamb(torch.bfloat16), lamb_bytes()),
    "GPT-2, LAMB, bfloat16, views": (lamb(torch.bfloat16, **VIEWS), lamb_bytes()),
    "GPT-2, LAMB, float16, views": (lamb(torch.float16, **VIEWS), lamb_bytes(torch.float16)),
    "GPT-2, Adam": (sharded(model=gpt), adam_bytes()),
    "GPT-2, Adam, parameters overlap": (sharded(model=gpt, **OVERLAP), adam_bytes()),
    "GPT-2, public Adam": (sharded(PUBLIC, gpt), adam_bytes()),
    "GPT-2, public Adam, parameters overlap": (sharded(PUBLIC, gpt, **OVERLAP), adam_bytes()),
}


# ---- measuring ----------------------------------------------------------------------------------------------------


class Training:
    """What an iteration consists of."""

    def __init__(self, model, optimizer, x):
        self.model, self.optimizer, self.x, self.loss = model, optimizer, x, None

    def forward(self):
        self.optimizer.zero_grad()
        self.loss = self.model(self.x).float().square().sum(-1).mean()

    def backward(self):
        self.loss.backward()
        if isinstance(self.optimizer, DistributedFusedLAMB):
            self.optimizer.complete_reductions()

    def step(self):
        self.optimizer.step()

    def passes(self):
        self.forward()
        self.backward()


@dataclass
class Row:
    """Times in ms of an iteration, of its step on the host, of the step's kernels and of their floor; GiB at most;
    which part of the time of backward's collectives other kernels run. None: not measured."""

    case: str
    iteration: float
    host: float
    gib: float | None = None
    kernels: float | None = None
    floor: float | None = None
    beside: float | None = None

    HEADINGS = ("case", "iter. ms", "host ms", "GiB", "step ms", "floor ms", "of floor", "beside")

    def cells(self):
        numbers = (self.iteration, self.host, self.gib, self.kernels, self.floor)
        parts = (self.floor / self.kernels if self.kernels else None, self.beside)
        return (
            self.case,
            *("-" if x is None else f"{x:.2f}" for x in numbers),
            *("-" if x is None else f"{100 * x:.0f} %" for x in parts),
        )


def measure(case, training, arguments):
    """A Row of the iteration, its step on the host, and GiB at most."""
    on_gpu = arguments.device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    whole, host = [], []
    for _ in range(arguments.repeats + 3):
        synchronize()
        dist.barrier()
        begin = time.perf_counter()
        training.passes()
        before = time.perf_counter()
        training.step()
        host.append(time.perf_counter() - before)
        synchronize()
        whole.append(time.perf_counter() - begin)
    median = [1e3 * statistics.median(times[3:]) for times in (whole, host)]
    return Row(case, *median, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None)


def trace(row, training, nbytes, bandwidth):
    """Adds to the row what the profiler sees of a GPU. Returns the kernels of {"step": ..., "backward": ...}."""
    found = {
        "step": traced(training.step, before=training.passes),
        "backward": traced(training.backward, before=training.forward, after=training.step),
    }
    step, backward = map(Overlap.of, found.values())
    if step.others:
        shard = sum(p.numel() for p in training.model.parameters()) / training.optimizer.distributed_size
        row.kernels, row.floor = step.others / 1e3, 1e3 * nbytes * shard / bandwidth
    if backward.collectives:
        row.beside = backward.beside_any / backward.collectives
    return found


def cases(arguments):
    """(case, function that makes model and optimizer, input, bytes of an element or None) of those wanted."""
    x = torch.randn(arguments.rows, arguments.width, device=arguments.device, dtype=HALF)
    tokens = torch.randint(arguments.gpt[2], arguments.tokens, device=arguments.device, dtype=torch.int64)
    found = [(name, make, x, None) for name, make in STACKS.items()]
    found += [(name, make, tokens, nbytes) for name, (make, nbytes) in GPTS.items()]
    for case in found:
        if arguments.only in case[0] and ("public" not in case[0] or arguments.public):
            yield case


def run(arguments, table):
    """All cases; table: None on ranks that write nothing."""
    bandwidth = copy_bandwidth() if arguments.device == "cuda" else None
    for name, make, x, nbytes in cases(arguments):
        gc.collect()  # the case before: its hooks and buckets refer to each other
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        training = Training(*make(arguments), x)
        row = measure(name, training, arguments)
        # On a CPU there are no kernels, and a message of gloo that ends after the profiler's end crashes torch.
        found = trace(row, training, nbytes, bandwidth) if nbytes and bandwidth else {}
        if table:
            table.add(row, row.cells())
            for what, kernels in found.items():
                print(f"  {what}: {Overlap.of(kernels)}", flush=True)
            if arguments.kernels and found:
                print("  the step's kernels:", *longest(found["step"]), sep="\n  ", flush=True)
        del training  # before the next one is made


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument(
        "--gpt", type=int, nargs=3, default=(24, 1024, 50257), metavar="N", help="layers, width, words"
    )
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=(8, 512), metavar="N", help="sequences, their length"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--kernels", action="store_true", help="show which kernels of a step take longest")
    parser.add_argument("--public", metavar="FOLDER", help="public apex's class as well")
    parser.add_argument("--json", metavar="FILE", help="write the figures here, after each row")
    return parser.parse_args()


def main():
    arguments = parse()
    without_multicast()
    on_gpu = arguments.device == "cuda"
    backend, name = ("nccl", torch.cuda.get_device_name()) if on_gpu else ("gloo", "CPU")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    table = None
    if dist.get_rank() == 0:
        facts = {"card": name, "torch": torch.__version__, "ranks": dist.get_world_size(), "source": source()}
        title = f"{name}, {dist.get_world_size()} ranks, torch {torch.__version__}"
        title += "; public apex's class runs on our kernels" if arguments.public else ""
        table = Table(title, Row.HEADINGS, (54,), arguments.json, facts)
    run(arguments, table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
