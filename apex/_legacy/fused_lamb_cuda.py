"""The function of public apex's extension fused_lamb_cuda."""

from __future__ import annotations

import torch

from apex._legacy import amp_C
from apex._legacy._raw import raw

__all__ = ["lamb"]


@raw
def lamb(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: float,
    max_grad_norm: float,
) -> None:
    """One LAMB step on [gradients, parameters, exp_avgs, exp_avg_sqs]; gradients become the updates.

    As amp_C.multi_tensor_lamb, but global_grad_norm is a number. chunk_size and noop_flag are not read.
    max_grad_norm 0: gradients are not clipped (public apex makes them 0).
    """
    if not tensor_lists[0]:
        return
    norm = torch.full((1,), global_grad_norm, dtype=torch.float32, device=tensor_lists[0][0].device)
    amp_C.multi_tensor_lamb(
        chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, bias_correction, weight_decay,
        grad_averaging, mode, norm, max_grad_norm,
    )  # fmt: skip
