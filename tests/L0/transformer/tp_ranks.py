"""What each rank of test_tensor_parallel_ranks.py runs, on gloo. A case takes the device mesh; it raises on failure."""

from __future__ import annotations

import datetime
import json
import os
import pathlib

import torch
import torch.distributed as dist
import tp_layer_uses
import tp_layers
import tp_losses
import tp_mappings
import tp_model
import tp_state

from apex.transformer import parallel_state, tensor_parallel

CASES = {
    **tp_state.CASES,
    **tp_mappings.CASES,
    **tp_layers.CASES,
    **tp_layer_uses.CASES,
    **tp_losses.CASES,
    **tp_model.CASES,
}


def run_and_end(rank, folder):
    """Two ranks, of which one ends before the other's calls. Writes what those say, by what was called."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    parallel_state.initialize_model_parallel(2)
    layer = tensor_parallel.RowParallelLinear(8, 8)
    column = tensor_parallel.ColumnParallelLinear(8, 8, gather_output=False)
    x = torch.ones(2, 1, 8, requires_grad=True)
    output, _ = column(x)
    if rank == 1:
        os._exit(0)
    told = {}
    for name, call in (
        ("forward", lambda: layer(x)),
        ("backward", lambda: output.sum().backward()),
        ("loss", lambda: tensor_parallel.vocab_parallel_cross_entropy(torch.ones(1, 4), torch.tensor([0]))),
        ("batch", lambda: tensor_parallel.broadcast_data(["a"], {"a": torch.ones(1)}, torch.float32)),
    ):
        try:
            call()
        except RuntimeError as error:
            told[name] = str(error)
    (pathlib.Path(folder) / "told.json").write_text(json.dumps(told))
    os._exit(0)
