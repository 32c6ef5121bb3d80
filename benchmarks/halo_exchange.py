"""Times the exchanges of halos between GPUs: torchrun --nproc-per-node 2 benchmarks/halo_exchange.py

For each size: microseconds of an exchange with both neighbours, sustained, by each exchanger; the slowest rank's. A
replay of a CUDA graph of ten exchanges is beside it for peer memory, whose kernel a graph can hold.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from _overlap import without_multicast

from apex.contrib.bottleneck import HaloExchangerAllGather, HaloExchangerPeer, HaloExchangerSendRecv
from apex.contrib.peer_memory import PeerMemoryPool

SIZES = (8, 32, 128, 512, 2048)  # KiB of a halo
WIDTH, CHANNELS = 64, 64


def microseconds(run, count):
    """Of one `run`, the mean of `count` on the slowest rank."""
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    time = torch.tensor([begin.elapsed_time(end) * 1000 / count], dtype=torch.float64, device="cuda")
    dist.all_reduce(time, dist.ReduceOp.MAX)
    return time.item()


def graph_of(run, count):
    """A replay of `count` runs."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph.replay


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="exchanges a measurement")
    arguments = parser.parse_args()
    without_multicast()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    ranks, rank = list(range(dist.get_world_size())), dist.get_rank()
    pool = PeerMemoryPool(0, 0, timeout=60)
    exchangers = {
        "peer": HaloExchangerPeer(ranks, rank, pool, True),
        "send/recv": HaloExchangerSendRecv(ranks, rank),
        "all-gather": HaloExchangerAllGather(ranks, rank),
    }
    if rank == 0:
        print(f"{torch.cuda.get_device_name()}, {len(ranks)} ranks, torch {torch.__version__}: microseconds")
        print(
            "| halo | peer | peer in a graph | send/recv | all-gather | peer / send/recv |\n|---|---|---|---|---|---|"
        )
    for size in SIZES:
        shape = (1, size * 1024 // (2 * WIDTH * CHANNELS) or 1, WIDTH, CHANNELS)
        halos = [torch.full(shape, float(rank), dtype=torch.float16, device="cuda") for _ in range(4)]
        times = {}
        for name, exchanger in exchangers.items():
            times[name] = microseconds(partial(exchanger.left_right_halo_exchange, *halos), arguments.count)
        replay = graph_of(partial(exchangers["peer"].left_right_halo_exchange, *halos), 10)
        in_graph = microseconds(replay, max(arguments.count // 10, 1)) / 10
        pool.check()
        if rank == 0:
            row = [f"{size} KiB", times["peer"], in_graph, times["send/recv"], times["all-gather"]]
            cells = [x if isinstance(x, str) else f"{x:.1f}" for x in row]
            print("| " + " | ".join(cells) + f" | {times['peer'] / times['send/recv']:.2f} |")
    torch.cuda.synchronize()
    dist.barrier()
    pool.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
