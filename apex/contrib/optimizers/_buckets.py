"""Which part of which parameter lies where: buckets, cut into one shard a rank."""

from __future__ import annotations

import contextlib
import dataclasses

import torch


@dataclasses.dataclass
class ParameterFragment:
    """Part of a parameter that lies in one bucket; ranges are (first, one past the last) elements.

    Attributes:
        param_group_id, param_id: its parameter: group, and place in the group.
        bucket_id: its bucket.
        param_range: in the parameter's elements, as they lie in memory.
        bucket_range: in the bucket.
        in_local_shard: whether any of it lies in this rank's shard. If not, what follows is None:
        shard_range: that part, in the shard.
        shard_bucket_range: in the bucket.
        shard_param_range: in the parameter.
    """

    param_group_id: int
    param_id: int
    bucket_id: int
    param_range: tuple[int, int]
    bucket_range: tuple[int, int]
    in_local_shard: bool = False
    shard_range: tuple[int, int] | None = None
    shard_bucket_range: tuple[int, int] | None = None
    shard_param_range: tuple[int, int] | None = None

    def cut(self, rank, shard_size):
        """Finds the part that lies in the shard of `rank`."""
        first, last = (min(max(end - rank * shard_size, 0), shard_size) for end in self.bucket_range)
        self.in_local_shard = first < last
        if self.in_local_shard:
            in_bucket = rank * shard_size
            in_param = in_bucket - self.bucket_range[0] + self.param_range[0]
            self.shard_range = (first, last)
            self.shard_bucket_range = (first + in_bucket, last + in_bucket)
            self.shard_param_range = (first + in_param, last + in_param)


class StateBucket:
    """Parameters that are reduced, updated and gathered together, and this rank's shard of their state.

    Attributes:
        bucket_size, shard_size: elements; of the bucket only the first `filled_size` are used.
        dtype, grad_sync_dtype, param_sync_dtype: of the state, of gradients and of parameters under way.
        able_to_fill: whether another parameter may be placed here.
        contiguous_buffer_offset: where the bucket begins in the contiguous buffers.
        fragments: [ParameterFragment], in order.
        waits_for: (group, place) of all parameters without which the bucket is not reduced.
        params_shard, exp_avg_shard, exp_avg_sq_shard: tensors of shard_size elements, or None.
        param_remainders_shard: int16: what float32 parameters have beyond bfloat16, or None.
        state_scales: {name of a state: float32, what each local fragment was divided by}, or None.
        scaled_lengths: int64: elements of the shard that go with each of these.
    """

    def __init__(self, shard_size, ranks, dtypes, store_params, store_param_remainders):
        self.shard_size = shard_size
        self.bucket_size = shard_size * ranks
        self.dtype, self.grad_sync_dtype, self.param_sync_dtype = dtypes
        self.store_params = store_params
        self.store_param_remainders = store_param_remainders
        self.filled_size = 0
        self.able_to_fill = True
        self.contiguous_buffer_offset = 0
        self.fragments = []
        self.waits_for = set()
        self.params_shard = None
        self.param_remainders_shard = None
        self.exp_avg_shard = None
        self.exp_avg_sq_shard = None
        self.state_scales = self.scaled_lengths = None

    def dtypes(self):
        """(of the state, of gradients under way, of parameters under way)"""
        return self.dtype, self.grad_sync_dtype, self.param_sync_dtype

    @property
    def local_fragments(self):
        return [fragment for fragment in self.fragments if fragment.in_local_shard]

    def allocate(self, device):
        """Makes the state, all zeros."""
        names = ["exp_avg_shard", "exp_avg_sq_shard"] + ["params_shard"] * self.store_params
        for name in names:
            setattr(self, name, torch.zeros(self.shard_size, dtype=self.dtype, device=device))
        if self.store_param_remainders:
            self.param_remainders_shard = torch.zeros(self.shard_size, dtype=torch.int16, device=device)


class Layout:
    """Places parameters in buckets, one after the other.

    Buckets stay open until `close`: then each shrinks to what it holds, its shards are cut, and nothing moves
    any more. Parameters that are placed later get buckets of their own.

    Args:
        buckets: the list that buckets are appended to.
        ranks, rank: how many shards, and which is this rank's.
        capacity: elements that a shard has at most.
        alignment: elements; fragments and shards begin at multiples of it.
    """

    def __init__(self, buckets, ranks, rank, capacity, alignment):
        self.buckets = buckets
        self._ranks, self._rank = ranks, rank
        self._capacity, self._alignment = max(capacity // alignment, 1) * alignment, alignment
        self._closed = 0  # buckets from here on are open
        self._together = ()
        self._offsets = {}  # where the next bucket of these dtypes begins in contiguous buffers

    @contextlib.contextmanager
    def together(self, places):
        """What is placed within gets buckets of its own, all of which wait for the parameters `places`."""
        self._seal()
        self._together = places
        try:
            yield
        finally:
            self._together = ()
            self._seal()

    def _seal(self):
        for bucket in self.buckets[self._closed :]:
            bucket.able_to_fill = False

    def place(self, group_id, param_id, numel, dtypes, **stores):
        """The fragments of a parameter; buckets are added as needed. stores: of StateBucket."""
        fragments, first = [], 0
        while first < numel:
            bucket_id = self._open_bucket(dtypes, stores)
            bucket = self.buckets[bucket_id]
            start = _round_up(bucket.filled_size, self._alignment)
            count = min(numel - first, bucket.bucket_size - start)
            fragment = ParameterFragment(
                group_id, param_id, bucket_id, (first, first + count), (start, start + count)
            )
            fragments.append(fragment)
            bucket.fragments.append(fragment)
            bucket.waits_for.add((group_id, param_id))
            bucket.filled_size = start + count
            first += count
        return fragments

    def _open_bucket(self, dtypes, stores):
        for bucket_id in range(len(self.buckets) - 1, self._closed - 1, -1):
            bucket = self.buckets[bucket_id]
            if bucket.dtypes() == dtypes:
                if (
                    bucket.able_to_fill
                    and _round_up(bucket.filled_size, self._alignment) < bucket.bucket_size
                ):
                    return bucket_id
                break
        self.buckets.append(StateBucket(self._capacity, self._ranks, dtypes, **stores))
        self.buckets[-1].waits_for.update(self._together)
        return len(self.buckets) - 1

    def close(self):
        """Closes the open buckets, and returns them: their sizes and shards are final from here on."""
        self._seal()
        closing = self.buckets[self._closed :]
        for bucket in closing:
            bucket.shard_size = _round_up(-(-bucket.filled_size // self._ranks), self._alignment)
            bucket.bucket_size = bucket.shard_size * self._ranks
            bucket.contiguous_buffer_offset = self._offsets.get(bucket.dtypes(), 0)
            self._offsets[bucket.dtypes()] = bucket.contiguous_buffer_offset + bucket.bucket_size
            for fragment in bucket.fragments:
                fragment.cut(self._rank, bucket.shard_size)
        self._closed = len(self.buckets)
        return closing


def _round_up(number, multiple):
    return -(-number // multiple) * multiple
