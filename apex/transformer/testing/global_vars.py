"""What a script keeps once for all of its process: arguments, microbatches, timers, a tensorboard writer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from apex.transformer.microbatches import NumMicroBatchesCalculator, build_num_microbatches_calculator
from apex.transformer.pipeline_parallel._timers import _Timers as Timers
from apex.transformer.testing.arguments import parse_args

_GLOBAL_ARGS: argparse.Namespace | None = None
_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
_GLOBAL_TENSORBOARD_WRITER: Any = None
_GLOBAL_ADLR_AUTORESUME: Any = None
_GLOBAL_TIMERS: Timers | None = None


def set_global_variables(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] = {},
    ignore_unknown_args: bool = False,
) -> None:
    """Parses the command line as `parse_args` does, and makes timers and writer.

    Raises RuntimeError where it was called before: `destroy_global_variables` forgets all; ValueError as parse_args.
    """
    global _GLOBAL_ARGS, _GLOBAL_TENSORBOARD_WRITER, _GLOBAL_ADLR_AUTORESUME, _GLOBAL_TIMERS
    if _GLOBAL_ARGS is not None:
        raise RuntimeError("the global arguments are set already: call destroy_global_variables first")
    args = parse_args(extra_args_provider, args_defaults, ignore_unknown_args)
    _GLOBAL_TENSORBOARD_WRITER, _GLOBAL_ADLR_AUTORESUME = _writer(args), _autoresume(args)
    _GLOBAL_TIMERS = Timers()
    _GLOBAL_ARGS = args


def destroy_global_variables() -> None:
    """Forgets what set_global_variables made."""
    global _GLOBAL_ARGS, _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    global _GLOBAL_TENSORBOARD_WRITER, _GLOBAL_ADLR_AUTORESUME, _GLOBAL_TIMERS
    _GLOBAL_ARGS = _GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    _GLOBAL_TENSORBOARD_WRITER = _GLOBAL_ADLR_AUTORESUME = _GLOBAL_TIMERS = None


def get_args() -> argparse.Namespace:
    """The arguments. Raises RuntimeError before set_global_variables."""
    return _made(_GLOBAL_ARGS, "arguments")


def get_num_microbatches() -> int:
    """Microbatches of a step, on each rank, by the arguments. Raises ValueError where they do not divide."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Samples of a step over all ranks. Raises as get_num_microbatches."""
    return _calculator().get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, *, consistency_check: bool = True) -> None:
    """Says how many samples were consumed so far; see NumMicroBatchesCalculator.update."""
    _calculator().update(consumed_samples, consistency_check)


def get_tensorboard_writer() -> Any:
    """The writer of the last rank, where --tensorboard-dir asks for one, or None."""
    return _GLOBAL_TENSORBOARD_WRITER


def get_adlr_autoresume() -> Any:
    """userlib.auto_resume.AutoResume, where --adlr-autoresume asks for it, or None."""
    return _GLOBAL_ADLR_AUTORESUME


def get_timers() -> Timers:
    """The timers. Raises RuntimeError before set_global_variables."""
    return _made(_GLOBAL_TIMERS, "timers")


def _calculator():
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        args = get_args()
        sizes = args.global_batch_size, args.micro_batch_size, args.data_parallel_size
        _GLOBAL_NUM_MICROBATCHES_CALCULATOR = build_num_microbatches_calculator(
            args.rank, args.rampup_batch_size, *sizes
        )
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def _made(value, what):
    if value is None:
        raise RuntimeError(f"there are no {what} yet: call set_global_variables first")
    return value


def _writer(args):
    if not args.tensorboard_dir or args.rank != args.world_size - 1:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        print(f"--tensorboard-dir: nothing is written; pip install {error.name}", flush=True)
        return None
    return SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)


def _autoresume(args):
    if not args.adlr_autoresume:
        return None
    sys.path.append(os.environ.get("SUBMIT_SCRIPTS", "."))
    from userlib.auto_resume import AutoResume

    return AutoResume
