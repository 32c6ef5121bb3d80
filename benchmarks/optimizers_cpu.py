"""FusedAdam on the CPU beside torch's fused AdamW, on the same threads.

usage: python benchmarks/optimizers_cpu.py [--threads N]

Cases: one large model (50 tensors of 2^20 float32 elements, 28 bytes a parameter), and 161 tensors of
1,024 elements. Wall time of one step(), median of rounds that alternate between the two.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import apex
from apex.optimizers import FusedAdam


def rounds(steps, count):
    """Median seconds of each function, measured in turns."""
    times = [[] for _ in steps]
    for r in range(count + 2):
        for step, found in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            if r >= 2:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"{torch.backends.cpu.get_cpu_capability()}, {arguments.threads} threads, torch {torch.__version__}"
    )
    for label, shapes, count in (("50 x 2^20", [1 << 20] * 50, 15), ("161 x 1024", [1024] * 161, 200)):
        for dtype in (torch.float32, torch.bfloat16):
            params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in shapes]
            for p in params:
                p.grad = torch.randn_like(p)
            peers = {
                "apex FusedAdam": FusedAdam(params, weight_decay=0.1),
                "torch fused AdamW": torch.optim.AdamW(params, fused=True, weight_decay=0.1),
            }
            found = rounds([peer.step for peer in peers.values()], count)
            for name, seconds in zip(peers, found, strict=True):
                print(f"{label:12s} {str(dtype):16s} {name:18s} {seconds * 1e6:10.0f} µs", flush=True)
    print("served by", apex.served())


if __name__ == "__main__":
    main()
