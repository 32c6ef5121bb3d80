"""The schedule of one stage: each microbatch forward and backward, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from apex.parallel._failures import failing_together
from apex.transformer.pipeline_parallel.schedules.common import (
    Batch,
    FwdStepFunc,
    backward_step,
    forward_step,
)
from apex.transformer.pipeline_parallel.utils import (
    get_kth_microbatch,
    get_model_type,
    get_num_microbatches,
    listify_model,
)

__all__ = ["forward_backward_no_pipelining"]

placeholder_handler = contextlib.nullcontext


@failing_together()
def forward_backward_no_pipelining(
    forward_step_func: FwdStepFunc,
    batch: Batch | None,
    model: nn.Module | list[nn.Module],
    *,
    forward_only: bool,
    dtype: torch.dtype | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    disable_autocast: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs a step of a model that is on this rank alone. Gradients are added to what is there.

    Args:
        forward_step_func, dtype, disable_autocast: see common.forward_step.
        batch: of this step: see utils.get_kth_microbatch.
        model: one module, also in a list.
        forward_only: no backward passes.
        grad_scaler: scales the losses.
        custom_sync_context_handler: makes a context in which gradients are not reduced over data parallel ranks, for
            all microbatches but the last; None: no_sync of torch's DistributedDataParallel.
        kwargs: what other schedules take besides.

    Returns:
        What the loss function returned besides the loss, of each microbatch.

    Raises:
        RuntimeError: several modules.
    """
    model = one(model)
    if custom_sync_context_handler is None:
        wrapped = isinstance(model, DistributedDataParallel)
        custom_sync_context_handler = model.no_sync if wrapped else placeholder_handler
    losses: list[Any] = []

    def step(k):
        output = forward_step(
            *(forward_step_func, get_kth_microbatch(batch, k), model, None, losses, dtype, disable_autocast)
        )
        if not forward_only:
            backward_step(None, output, None, get_model_type(model), grad_scaler=grad_scaler)

    last = get_num_microbatches() - 1
    with custom_sync_context_handler():
        for k in range(last):
            step(k)
    step(last)
    return losses


def one(model: nn.Module | list[nn.Module]) -> nn.Module:
    """The module. Raises RuntimeError where there are others."""
    models = listify_model(model)
    if len(models) != 1:
        raise RuntimeError(f"one module is required, of {len(models)} parts: the schedule is not interleaved")
    return models[0]
