"""How many microbatches make a global batch, also while its size ramps up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from apex.transformer.log_util import get_transformer_logger
from apex.transformer.utils import divide

_logger = get_transformer_logger(__name__)


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> NumMicroBatchesCalculator:
    """A calculator for these sizes.

    Args:
        rank: rank 0 logs them.
        rampup_batch_size: (size of the first batches, what is added at a time, samples until all is added), or None.
        global_batch_size: samples of a step over all ranks, in the end.
        micro_batch_size: samples of a microbatch.
        data_parallel_size: ranks that train on different samples.

    Raises:
        ValueError: sizes that are not positive or do not divide.
    """
    sizes = global_batch_size, micro_batch_size, data_parallel_size
    if rampup_batch_size is None:
        constant = ConstantNumMicroBatches(*sizes)
        if rank == 0:
            _logger.info(f"{constant.get()} microbatches a step")
        return constant
    if len(rampup_batch_size) != 3:
        raise ValueError(f"rampup_batch_size {rampup_batch_size!r}: (start, increment, samples) is required")
    start, increment, samples = map(int, rampup_batch_size)
    if rank == 0:
        _logger.info(
            f"global batch size from {start} to {global_batch_size} by {increment} over {samples} samples"
        )
    return RampupBatchsizeNumMicroBatches(start, increment, samples, *sizes)


class NumMicroBatchesCalculator(ABC):
    """What the calculators have in common.

    Attributes:
        num_micro_batches: microbatches of a step, on each rank.
        current_global_batch_size: samples of a step over all ranks.
    """

    num_micro_batches: int
    current_global_batch_size: int

    def get(self) -> int:
        """Microbatches of a step, on each rank."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self.current_global_batch_size

    @abstractmethod
    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Says how many samples were consumed so far.

        consistency_check: raise ValueError where microbatches of all ranks do not divide the global batch.
        """


class ConstantNumMicroBatches(NumMicroBatchesCalculator):
    """The same number at any time. Raises ValueError where sizes are not positive or do not divide."""

    def __init__(self, global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> None:
        _check_positive(global_batch_size, micro_batch_size, data_parallel_size)
        self.micro_batch_size = micro_batch_size
        self.current_global_batch_size = global_batch_size
        self.num_micro_batches = _microbatches(global_batch_size, micro_batch_size, data_parallel_size)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Changes nothing."""


class RampupBatchsizeNumMicroBatches(NumMicroBatchesCalculator):
    """A global batch that grows by equal increments, each after as many samples.

    Args:
        start_batch_size: samples of the first global batches.
        batch_size_increment: what is added at a time.
        ramup_samples: samples after which all is added.
        global_batch_size: samples of a global batch from then on.
        micro_batch_size, data_parallel_size: as of build_num_microbatches_calculator.

    Raises:
        ValueError: sizes that are not positive, or increments that do not lead from the first size to the last.
    """

    def __init__(
        self,
        start_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
    ) -> None:
        _check_positive(global_batch_size, micro_batch_size, data_parallel_size)
        _check_positive(start_batch_size, batch_size_increment)
        if ramup_samples < 0 or start_batch_size > global_batch_size:
            raise ValueError(
                f"a batch cannot grow from {start_batch_size} to {global_batch_size} over {ramup_samples} samples"
            )
        increments = divide(global_batch_size - start_batch_size, batch_size_increment)
        self.start_batch_size, self.batch_size_increment = start_batch_size, batch_size_increment
        self.ramup_samples, self.global_batch_size = ramup_samples, global_batch_size
        self.micro_batch_size, self.data_parallel_size = micro_batch_size, data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.rampup_samples_per_increment = ramup_samples / increments if increments else 0.0
        self.update(0, False)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """See NumMicroBatchesCalculator."""
        size = self.global_batch_size
        if consumed_samples < self.ramup_samples and self.rampup_samples_per_increment:
            steps = int(consumed_samples / self.rampup_samples_per_increment)
            size = self.start_batch_size + steps * self.batch_size_increment
        if consistency_check:
            _microbatches(size, self.micro_batch_size, self.data_parallel_size)
        self.current_global_batch_size = size
        self.num_micro_batches = size // self.micro_batch_times_data_parallel_size


def _check_positive(*sizes):
    if min(sizes) <= 0:
        raise ValueError(f"batch and data parallel sizes must be positive: {', '.join(map(str, sizes))}")


def _microbatches(batch, micro_batch, ranks):
    if batch % (micro_batch * ranks):
        raise ValueError(
            f"the global batch size {batch} is not divisible by micro batch size x data parallel size, "
            f"{micro_batch} x {ranks}"
        )
    return batch // (micro_batch * ranks)
