"""What each rank of test_a_rank_that_ends and test_a_rank_that_is_late runs."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import time

import torch
import torch.distributed as dist
from pp_model import MICRO, batch_of, forward_step, make, pipeline
from sharded_adam import shorten
from tp_model import HIDDEN, SEQUENCE

from apex.transformer.pipeline_parallel import get_forward_backward_func

TIMEOUT = 8  # seconds


def run(rank, folder):
    """Two pipelines: 0 and 2, of which 2 ends amid a step, and 1 and 3, of which 3 is late. Writes what is said."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4, timeout=timeout)
    dist.barrier()  # ranks of a busy machine come here many seconds after each other
    if rank % 2:
        shorten(dist.group.WORLD, TIMEOUT)
    told = ""
    with pipeline(1, 2):
        calls = []

        def leaving(batch, model):
            calls.append(1)
            if len(calls) == 3 and rank == 2:
                os._exit(0)
            if len(calls) == 3 and rank == 3:
                time.sleep(2 * TIMEOUT)
            return forward_step(batch, model)

        try:
            get_forward_backward_func(None, 2)(
                *(leaving, batch_of(rank % 2, 2), make(torch.float32, wrap=False)),
                forward_only=False,
                tensor_shape=(SEQUENCE, MICRO, HIDDEN),
            )
        except RuntimeError as error:
            told = str(error)
        (pathlib.Path(folder) / f"told{rank}.json").write_text(json.dumps(told))
        os._exit(0)
