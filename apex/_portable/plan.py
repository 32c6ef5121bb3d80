"""A plan: how a set of tensor lists is laid out for launches over lists; csrc/bindings/tensor_plan.cpp in Python.

Making one sorts the tensors into buckets (one device and one combination of dtypes: one launch each) and cuts them into
chunks. Each use checks every tensor against it and re-reads its address; nothing is ever launched on sizes that no
longer hold.

A list of tensors here is a column. None in the first is left out of this call (a parameter without gradient); None in
the last of three or more is none that the op needs there (a parameter without model copy).
"""

from __future__ import annotations

import torch

from apex import _plain
from apex._loader import library
from apex._portable import interface, tensors
from apex._portable.bucket import Bucket

_write_table = interface.function("apex_tensor_table_write")
_scratch_bytes = interface.function("apex_reduction_scratch_bytes")
_resolve = interface.function("apex_resolve")


def _strides_unless_contiguous(tensor):
    return () if tensor.is_contiguous() else tensor.stride()


def is_dense(tensor):
    """Whether the tensor fills its memory: no gaps, no element twice."""
    if tensor.layout != torch.strided:
        return False
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


class Launch:
    """One bucket for an op to launch on. `members`: which indices of the lists it holds (for a reference: those with a
    gradient); `tensors`: how many the lists have; `table`: whether a kernel runs."""

    def __init__(self, bucket, tensor_count, members=None, table=False, check_only=False, lists=None):
        self.device, self.first, self.last = bucket.device, bucket.first, bucket.last
        self.members, self.tensors = bucket.members if members is None else members, tensor_count
        self.place = tensors.place_of_device(bucket.device)
        self.list_count, self.table, self.check_only, self.lists = len(bucket.kinds), table, check_only, lists


class TensorPlan:
    """names: what errors call each list. written: bit k is set if the op writes list k. columns: the lists. owners: the
    parameters whose .grad the first list is; None where it is none.

    Raises TypeError or ValueError, naming list and index, for tensors that cannot go together.
    """

    def __init__(self, names, written, columns, owners=None):
        self.names, self.written, self.owners = list(names), written, owners
        self.tensors = len(columns[0])
        self._where = [None] * self.tensors  # (bucket, position)
        self._buckets = []
        by_kind = {}
        for i in range(self.tensors):
            self._add(i, columns, by_kind)
        # Buckets without elements come first: the last launch does what is done once, and must take place.
        for bucket in by_kind.values():
            bucket.lay_out()
        self._buckets = sorted(by_kind.values(), key=lambda bucket: bucket.chunks > 0)
        if self._buckets:
            self._buckets[0].first = self._buckets[-1].last = True
        self._spans_devices = len({bucket.device for bucket in self._buckets}) > 1
        self._outputs_are_apart = False
        self._checked_for = None

    def buckets_with_elements(self):
        return sum(bucket.chunks > 0 for bucket in self._buckets)

    # ---- making it

    def _describe(self, k, i):
        return f"{self.names[k]}[{i}]"

    def _describe_model(self, i):
        return self._describe(1, i) if len(self.names) > 1 else "its parameter"

    def _model(self, i, columns):
        """A tensor of the index's size and device that is always there."""
        return columns[1][i] if len(columns) > 1 else columns[0][i] if self.owners is None else self.owners[i]

    def _add(self, i, columns, by_kind):
        model = self._model(i, columns)
        if model is None:
            raise ValueError(f"{self._describe(0, i)} is undefined")
        kinds = []
        for k, column in enumerate(columns):
            tensor = column[i]
            if tensor is None:
                if k > 1 and k + 1 == len(columns):
                    break
                if k:
                    raise ValueError(f"{self._describe(k, i)} is undefined")
                kinds.append(model.dtype)
                continue
            self._check(k, i, tensor, model)
            kinds.append(tensor.dtype)
        key = (model.device, *kinds)
        if key not in by_kind:
            by_kind[key] = Bucket(model.device, kinds)
        bucket = by_kind[key]
        self._where[i] = (bucket, len(bucket.members))
        bucket.members.append(i)
        bucket.numels.append(model.numel())
        bucket.strides.append(_strides_unless_contiguous(model))

    def _check(self, k, i, tensor, model):
        where, of_model = self._describe(k, i), self._describe_model(i)
        if tensor.is_complex() or not tensors.has_plain_copy(tensor, self.written >> k & 1):
            tensors.refuse_unless_plain(tensor, where)
        if tensor.device != model.device:
            raise ValueError(f"{where} is on {tensor.device} but {of_model} is on {model.device}")
        if tensor.numel() != model.numel():
            raise ValueError(f"{where} has {tensor.numel()} elements but {of_model} has {model.numel()}")
        if tensor.dtype not in tensors.CODES:
            name = tensors.dtype_name(tensor.dtype)
            raise TypeError(f"{where} is {name}; float32, float16, bfloat16 or float64 is required")
        if k == 0 and (len(self.names) > 1 or self.owners is not None):
            return
        if not is_dense(tensor):
            raise ValueError(
                f"{where} overlaps itself or has gaps (sizes {list(tensor.shape)}, strides {list(tensor.stride())}); "
                "pass a contiguous tensor"
            )
        alike = tensor.stride() == model.stride() or (tensor.is_contiguous() and model.is_contiguous())
        if tensor.numel() > 1 and not alike:
            raise ValueError(
                f"{where} has strides {list(tensor.stride())} but {of_model} has {list(model.stride())}"
            )

    # ---- using it

    def read_quickly(self, others):
        """Re-reads all columns but the first by the module in C. False: it does not take some, and `run` must look."""
        one = len(self._buckets) == 1
        for bucket in self._buckets:
            if bucket.words is None or len(bucket.kinds) != len(others) + 1:
                return False
            for k, column in enumerate(others, 1):
                mine = column if one else [column[i] for i in bucket.members]
                addresses = bucket.fast_addresses(k, mine)
                if addresses is None or self._without_memory(bucket, k, mine, addresses):
                    return False
                self._store(bucket, k, addresses)
        return True

    @torch.no_grad()
    def run(self, op, columns, others_are_read=False):
        """Checks and re-reads all tensors, runs the op on every bucket, and counts its writes in torch's version
        counters. False, and nothing done: something but the addresses changed, make a new plan.

        others_are_read: `read_quickly` has just read all columns but the first.
        """
        written = self.written | bool(op.gradients_written)
        copies = {}
        if not self._refresh(columns, written, copies, others_are_read):
            return False
        if self._spans_devices or self._checked_for != op.name:
            for bucket in self._buckets:
                launch = Launch(bucket, self.tensors, check_only=True, lists=bucket.lists(check_only=1))
                status = op.launch(launch) if launch.place is not None else 0
                if status:
                    tensors.must_use_reference(status, op.name)
            self._checked_for = op.name
        for bucket in self._buckets:
            self._run_bucket(op, bucket, columns, written, copies)
        for k, column in enumerate(columns):
            if written >> k & 1:
                _bump_versions(column)
        return True

    def _refresh(self, columns, written, copies, others_are_read):
        one = len(self._buckets) == 1
        for bucket in self._buckets:
            lists = len(bucket.kinds)
            mine = columns if one else [[column[i] for i in bucket.members] for column in columns]
            if lists < len(columns) and any(t is not None for t in mine[lists]):
                return False
            # Backwards, for written lists come last: one that shares memory with what is read, copy-on-write, first
            # gets its own.
            for k in reversed(range(1 if others_are_read else lists)):
                if not self._read(bucket, k, mine[k], written, copies):
                    return False
        if not self._outputs_are_apart:
            self._refuse_shared_outputs()
        self._outputs_are_apart = True
        return True

    def _read(self, bucket, k, column, written, copies):
        """Reads list k's addresses; False: a new plan is needed."""
        addresses = None
        try:
            if bucket.words is not None:
                addresses = bucket.fast_addresses(k, column)
            if addresses is None:
                addresses = bucket.quick_addresses(k, column)
        except (RuntimeError, TypeError):  # a wrapper, a sparse tensor or None was asked for its address
            pass
        if addresses is None:
            addresses = self._closely(bucket, k, column, written, copies)
            if addresses is None:
                return False
        else:
            for position in self._without_memory(bucket, k, column, addresses):
                tensors.refuse_unless_plain(column[position], self._describe(k, bucket.members[position]))
        self._store(bucket, k, addresses)
        return True

    def _without_memory(self, bucket, k, column, addresses):
        """What lies where it lay before was found to have memory then, unless that was freed, which has address 0."""
        kept = bucket.addresses[k]
        if addresses == kept:
            return ()
        moved = [i for i, (old, new) in enumerate(zip(kept, addresses, strict=True)) if old != new]
        return [i for i in moved if column[i] is not None and not _plain.has_memory(column[i])]

    def _store(self, bucket, k, addresses):
        if bucket.store(k, addresses) and self._is_output(k):
            self._outputs_are_apart = False

    def _closely(self, bucket, k, column, written, copies):
        """As quick_addresses, tensor by tensor: copies for those that lie otherwise; None: a new plan is needed."""
        addresses = []
        for position, tensor in enumerate(column):
            i, numel, strides = bucket.members[position], bucket.numels[position], bucket.strides[position]
            if tensor is None:
                if k:
                    return None
                addresses.append(0)
                continue
            if (
                tensor.numel() != numel
                or tensor.dtype is not bucket.kinds[k]
                or tensor.device != bucket.device
            ):
                return None
            foreign = tensors.foreign_keys(tensor)
            if foreign & ~tensors._LAZY or tensor.layout != torch.strided:
                return None
            same = tensor.is_contiguous() if not strides else tensor.stride() == strides
            if (same or numel <= 1) and not foreign:
                if not _plain.has_memory(tensor):
                    tensors.refuse_unless_plain(tensor, self._describe(k, i))
                addresses.append(tensor.data_ptr())
                continue
            gradients = k == 0 and (len(self.names) > 1 or self.owners is not None)
            if not (gradients or foreign) or not tensors.has_plain_copy(tensor, written >> k & 1):
                return None
            if written >> k & 1:
                tensors.refuse_overlap(tensor, self._describe(k, i))
            copies[k, i] = _copy(tensor, strides)
            addresses.append(copies[k, i].data_ptr())
        return addresses

    def _is_output(self, k):
        """Of what shares no memory. Gradients that are read from their parameters are no outputs."""
        return self.written >> k & 1 and not (k == 0 and self.owners is not None)

    def _refuse_shared_outputs(self):
        """Those of one index may be one tensor: a parameter without a rounded copy."""
        ranges = []
        for bucket in self._buckets:
            for k, kind in enumerate(bucket.kinds):
                if not self._is_output(k):
                    continue
                for i, begin, numel in zip(bucket.members, bucket.addresses[k], bucket.numels, strict=True):
                    if numel and begin:
                        ranges.append((begin, begin + numel * kind.itemsize, k, i))
        tensors.refuse_shared(ranges, self._describe)

    def _run_bucket(self, op, bucket, columns, written, copies):
        place, status = tensors.place_of_device(bucket.device), tensors.USE_REFERENCE
        kept = []  # memory of this call; torch's allocator is ordered by streams
        if place is not None:
            launch = self._prepare(op, bucket, place, kept)
            if launch is not None:
                status = op.launch(launch)
        if status and tensors.must_use_reference(status, op.name):
            self._run_reference(op, bucket, columns, copies)
        for (k, i), copy in copies.items():
            if written >> k & 1 and self._where[i][0] is bucket:
                columns[k][i].copy_(copy)

    def _prepare(self, op, bucket, place, kept):
        """The launch, with table and scratch where a variant needs them; None: the table cannot be written here."""
        platform, index = place[0], bucket.device.index or 0
        variant = _resolve(platform, index, op.unit)
        table = scratch = 0
        if variant in (library.KERNEL, library.CPU):
            capturing = tensors.is_capturing(place, op.name) if platform else 0
            if variant == library.KERNEL:
                table = self._table(bucket, place, capturing, kept)
                if not table:
                    return None
            if op.reductions:
                scratch = self._scratch(op, bucket, place, capturing, kept)
        return Launch(
            bucket, self.tensors, table=bool(table), lists=bucket.lists(table, scratch, variant=variant)
        )

    def _table(self, bucket, place, capturing, kept):
        """The address of the device's copy of the image, brought up to date; 0: it cannot be written here. Inside a
        graph capture it is a temporary that the graph itself fills, so that a replay never depends on what was launched
        in between."""
        words = len(bucket.image)
        known = None if capturing else bucket.tables.get(place)
        if known is None and not capturing:
            memory = tensors.StreamMemory(place, words * 8, False, "multi_tensor_table")
            if memory.address:
                known = bucket.tables[place] = [memory, None]
        if known is None:
            temporary = torch.empty(words, dtype=torch.int64, device=bucket.device)
            kept.append(temporary)
            address, (first, count) = temporary.data_ptr(), (0, words)
        else:
            now, address = bytes(bucket.image), known[0].address
            if now == known[1]:
                return address
            first, count = _difference(known[1], now)
            known[1] = None  # until the write is queued, the table is not to be trusted
        status = _write_table(place, bucket.lists(address), first, count)
        if status and tensors.must_use_reference(status, "multi_tensor_table"):
            return 0
        if known is not None:
            known[1] = now
        return address

    def _scratch(self, op, bucket, place, capturing, kept):
        """Kernels leave the scratch as they found it, zeroed where it must be, so it is zeroed once; inside a capture
        the graph does that itself, at every replay."""
        size = _scratch_bytes(bucket.lists(), op.reductions)
        key = (place, op.reductions)
        if not capturing and key not in bucket.scratches:
            memory = tensors.StreamMemory(place, size, True, "multi_tensor_scratch")
            if memory.address:
                bucket.scratches[key] = memory
        if not capturing and key in bucket.scratches:
            return bucket.scratches[key].address
        kept.append(torch.zeros(size, dtype=torch.uint8, device=bucket.device))
        return kept[-1].data_ptr()

    def _run_reference(self, op, bucket, columns, copies):
        present = [i for i in bucket.members if columns[0][i] is not None]
        lists = [[copies.get((k, i), columns[k][i]) for i in present] for k in range(len(bucket.kinds))]
        op.reference(lists, Launch(bucket, self.tensors, members=present))


def _copy(tensor, strides):
    """Elements are matched by position in memory, so the copy has the strides of the parameter."""
    made = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if not strides
        else torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    )
    return made.copy_(tensor)


def _difference(before, now):
    """The first word that differs, and how many from there to the last that does."""
    if before is None:
        return 0, len(now) // 8
    differing = [at for at in range(0, len(now), 8) if before[at : at + 8] != now[at : at + 8]]
    return differing[0] // 8, (differing[-1] - differing[0]) // 8 + 1


def _bump_versions(column):
    try:
        torch.autograd.graph.increment_version(column)
    except (RuntimeError, TypeError):  # tensors of inference mode have no version, None neither
        for tensor in column:
            if tensor is not None:
                tensors.bump_version(tensor)
