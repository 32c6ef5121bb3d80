"""What each rank of test_tensor_parallel_gpus.py runs: the cases of layers, mappings and models on GPUs, with NCCL."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import traceback

import torch
import torch.distributed as dist
import tp_layer_uses
import tp_layers
import tp_losses
import tp_mappings
import tp_model

CASES = {
    **tp_mappings.CASES,
    **tp_layers.CASES,
    **tp_layer_uses.CASES,
    **tp_losses.CASES,
    **tp_model.CASES,
}


def run(rank, ranks, folder):
    """One rank, on its GPU: every case, and a file that says how each ended ("" is well)."""
    home = torch.device("cuda", rank)
    torch.cuda.set_device(home)
    torch.set_default_device(home)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
        device_id=home,
    )
    results = {}
    for name, case in CASES.items():
        results[name] = ""
        try:
            case(None)
        except Exception:
            results[name] = traceback.format_exc()
    (pathlib.Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # as sharded_adam.run
