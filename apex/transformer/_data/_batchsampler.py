"""Samplers that give each data parallel rank its part of every global batch, for `DataLoader(batch_sampler=)`.

`local_minibatch_size`, a rank's samples of a global batch, may be set while one is iterated: the next batch has it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["MegatronPretrainingRandomSampler", "MegatronPretrainingSampler"]


class _Base:
    """What the samplers have in common. Raises ValueError for sizes that are not positive, and a rank out of range."""

    def __init__(
        self, total_samples, consumed_samples, local_minibatch_size, data_parallel_rank, data_parallel_size
    ):
        for name, value in (("total_samples", total_samples), ("data_parallel_size", data_parallel_size)):
            if value <= 0:
                raise ValueError(f"{name} {value}: a positive number is required")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data_parallel_rank {data_parallel_rank} is none of 0 to {data_parallel_size - 1}"
            )
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.local_minibatch_size = local_minibatch_size

    def __len__(self) -> int:
        """Samples of all ranks, as in public apex; not batches."""
        return self.total_samples

    @property
    def local_minibatch_size(self) -> int:
        """This rank's samples of a global batch."""
        return self._local_minibatch_size

    @local_minibatch_size.setter
    def local_minibatch_size(self, new_local_minibatch_size: int) -> None:
        if new_local_minibatch_size <= 0:
            raise ValueError(
                f"local_minibatch_size {new_local_minibatch_size}: a positive number is required"
            )
        self._local_minibatch_size = new_local_minibatch_size

    @property
    def local_minibatch_times_data_parallel_size(self) -> int:
        """Samples of a global batch."""
        return self.local_minibatch_size * self.data_parallel_size


class MegatronPretrainingSampler(_Base):
    """Samples in their order, from the first that was not consumed.

    Args:
        total_samples: samples of the data set.
        consumed_samples: of them, those of earlier batches, over all ranks.
        local_minibatch_size: this rank's samples of a global batch.
        data_parallel_rank, data_parallel_size: which of how many ranks this one is.
        drop_last: False: what is left behind the last whole global batch is given out, too: the ranks' parts are then
            smaller, and may be empty.

    Raises:
        ValueError: sizes that are not positive, a rank out of range, no sample left.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        super().__init__(
            *(total_samples, consumed_samples, local_minibatch_size, data_parallel_rank, data_parallel_size)
        )
        if consumed_samples >= total_samples:
            raise ValueError(f"no samples left: {consumed_samples} of {total_samples} were consumed")
        self.drop_last = drop_last

    def get_start_end_idx(self) -> tuple[int, int]:
        """Where this rank's part of a global batch begins, and ends."""
        first = self.data_parallel_rank * self.local_minibatch_size
        return first, first + self.local_minibatch_size

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(self.consumed_samples, self.total_samples):
            batch.append(index)
            if len(batch) >= self.local_minibatch_times_data_parallel_size:
                yield self._mine(batch)
                batch = []
        if batch and not self.drop_last:
            yield self._mine(batch)

    def _mine(self, batch):
        return batch[slice(*self.get_start_end_idx())]


class MegatronPretrainingRandomSampler(_Base):
    """Samples in a random order, another one each epoch; each rank draws from a part of the data set of its own.

    The order follows from the epoch, and the epoch from `consumed_samples`, which grows with each batch.

    Args:
        total_samples: samples of the data set. What is behind the last whole global batch is left out.
        consumed_samples: those of earlier batches, over all ranks and epochs.
        local_minibatch_size: this rank's samples of a global batch.
        data_parallel_rank, data_parallel_size: which of how many ranks this one is.

    Raises:
        ValueError: sizes that are not positive, a rank out of range; when it is iterated, fewer samples than one
            global batch.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        local_minibatch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        super().__init__(
            *(total_samples, consumed_samples, local_minibatch_size, data_parallel_rank, data_parallel_size)
        )

    @property
    def last_batch_size(self) -> int:
        """Samples behind the last whole global batch."""
        return self.total_samples % self.local_minibatch_times_data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.total_samples // self.local_minibatch_times_data_parallel_size
        if batches == 0:
            raise ValueError(
                f"{self.total_samples} samples are fewer than one global batch of "
                f"{self.local_minibatch_times_data_parallel_size}"
            )
        self.epoch, consumed = divmod(self.consumed_samples, self.total_samples - self.last_batch_size)
        size = batches * self.local_minibatch_size
        generator = torch.Generator("cpu").manual_seed(self.epoch)
        order = torch.randperm(size, generator=generator, dtype=torch.int64, device="cpu")
        first = self.data_parallel_rank * size
        batch: list[int] = []
        for index in order[consumed // self.data_parallel_size :].tolist():
            batch.append(first + index)
            if len(batch) >= self.local_minibatch_size:
                self.consumed_samples += len(batch) * self.data_parallel_size
                yield batch
                batch = []
