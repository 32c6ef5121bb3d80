"""What is looked at before ranks begin to speak: options, parameters, and that all ranks have the same."""

from __future__ import annotations

import numbers
import warnings
import zlib

import torch
import torch.distributed as dist

from apex.parallel._flat import flat_dist_call
from apex.parallel._waiting import CALLS, waiting


def check_initialized(who):
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{who} needs a process group: call torch.distributed.init_process_group first "
            "(python -m apex.parallel.multiproc script.py starts the processes)"
        )


def check_options(message_size, delay_allreduce, shared_param, triggers, streams, communicators, predivide):
    """Raises what DistributedDataParallel's docstring tells of options; the last one is the factor, by either name."""
    if shared_param is not None:
        raise ValueError(
            "shared_param is gone: parameters may be shared without it. Leave it out, or write "
            f"delay_allreduce={bool(shared_param)} to reduce at the end of the backward pass"
        )
    if delay_allreduce and streams > 1:
        raise ValueError("num_allreduce_streams > 1 has nothing to overlap with delay_allreduce=True")
    if delay_allreduce and triggers is not None:
        raise ValueError("allreduce_trigger_params has nothing to trigger with delay_allreduce=True")
    if not isinstance(message_size, numbers.Real):
        raise TypeError(f"message_size must be a number of elements, not {message_size!r}")
    if not isinstance(streams, int):
        raise TypeError(f"num_allreduce_streams must be a whole number, not {streams!r}")
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor must be above 0, not {predivide}")
    if communicators is not None:
        _check_communicators(communicators, streams)


def factor_of(predivide, split):
    """The factor that gradients are divided by before the sum; `split` is its name of 2018."""
    if split is None:
        return predivide
    warnings.warn(
        "gradient_average_split_factor is called gradient_predivide_factor now",
        DeprecationWarning,
        stacklevel=3,
    )
    return split


def _check_communicators(communicators, count):
    lengths = [len(part) for part in communicators]
    if count < 2 or lengths != [count, count]:
        raise ValueError(
            "allreduce_communicators is (process groups, streams), num_allreduce_streams of each and more than "
            f"1; got {' and '.join(map(str, lengths)) or 'none'} with num_allreduce_streams={count}"
        )


def check_parameters(module):
    for name, p in module.named_parameters():
        if torch.nn.parameter.is_lazy(p):
            raise RuntimeError(f"{name} has no shape yet: run the module once before it is wrapped")
        if p.device.type == "cpu" and dist.get_backend() == "nccl":
            raise RuntimeError(
                f"{name} is on the CPU, which the NCCL backend cannot reach: move the module before it is "
                'wrapped, or use init_process_group("gloo")'
            )


def check_same_on_all_ranks(kinds, device, what, advice=""):
    """Raises RuntimeError, on every rank, unless all ranks have the same `kinds`, anything that has a repr.

    advice: how `what` differs and what to do, at the end of the sentence.
    """
    checksum = zlib.crc32(repr(kinds).encode())
    largest = torch.tensor([checksum, -checksum], dtype=torch.int64, device=device)
    with waiting("what is compared over ranks", CALLS) as wait:
        wait.run(dist.all_reduce, largest, op=dist.ReduceOp.MAX)
    if largest[0] != -largest[1]:
        raise RuntimeError(
            f"{what} of rank {dist.get_rank()} ({len(kinds)}) differ from another rank's{advice}"
        )


def broadcast_parameters(module):
    """Rank 0's parameters, and amp's master weights of them, on every rank, once all are known to hold the same."""
    from apex.amp._amp_state import _amp_state  # all of amp comes with it

    params = list(module.parameters())
    if not params:
        return
    masters = [master for master in map(_amp_state.masters.get, params) if master is not None]
    kinds = [(p.dtype, tuple(p.shape), p.requires_grad) for p in (*params, *masters)]
    advice = " in number, shape, dtype or requires_grad: build the same module on every rank"
    check_same_on_all_ranks(kinds, params[0].device, "the parameters", advice)
    flat_dist_call([p.data for p in params], dist.broadcast, (0,))
    if masters:
        flat_dist_call([p.detach() for p in masters], dist.broadcast, (0,))
