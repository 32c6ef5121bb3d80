"""What each rank of test_tensor_parallel_gpus.py runs: the cases of layers, mappings and models on GPUs, with NCCL."""

from __future__ import annotations

import sharded_adam
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
    """One rank, on its GPU. NCCL connects a group when it is first used: most of the many here never are."""
    sharded_adam.start_nccl(rank, ranks, folder)
    sharded_adam.run_cases(__name__, None, rank, folder)
