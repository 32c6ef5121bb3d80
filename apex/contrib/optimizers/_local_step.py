"""Adam on this rank's shards: one launch a group for all buckets whose state is float32."""

from __future__ import annotations

import typing

import torch

from apex import _loader
from apex._bits import split_remainders
from apex.contrib.optimizers import _states
from apex.contrib.optimizers._flat import copy_lists
from apex.optimizers._scalars import learning_rate

# Gradient and copy of the parameter that multi_tensor_adam takes beside float32 parameters.
_FUSED_COPIES = {(torch.float32, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
_FUSED_COPIES |= {(dtype, dtype) for dtype in (torch.float16, torch.bfloat16)}


class Runs(typing.NamedTuple):
    """Which parts of a bucket's shard are updated.

    Attributes:
        parts: [(group, first, one past the last element)]. Neighbours of one group are one part: between them
            there are zeros, which stay.
        complete: whether every parameter's part is among them.
    """

    parts: list
    complete: bool


def runs_of(bucket, is_updated):
    """The Runs of a bucket. is_updated: fragment -> whether its parameter is."""
    parts, complete, touches = [], True, False
    for fragment in bucket.local_fragments:
        first, last = fragment.shard_range
        if not is_updated(fragment):
            complete = touches = False
        elif touches and parts[-1][0] == fragment.param_group_id:
            parts[-1] = (fragment.param_group_id, parts[-1][1], last)
        else:
            parts.append((fragment.param_group_id, first, last))
            touches = True
    return Runs(parts, complete)


def _is_plain(bucket):
    """Whether the step works on the states themselves."""
    return bucket.dtype == torch.float32 and bucket.params_shard is not None


class LocalStep:
    """One step of all buckets.

    Args:
        groups: parameter groups of the optimizer.
        device: where they are.
        parameter_of: fragment -> parameter.
        adam_w_mode: decoupled weight decay, or an L2 penalty.
        step: the step's number, from 1; or an int32 tensor on the device.
        grad_scale: float32 tensor: gradients are multiplied by it.
        found_inf: float32 tensor or None: not 0: nothing is to change.
    """

    def __init__(self, groups, device, parameter_of, adam_w_mode, step, grad_scale, found_inf):
        _loader.load()
        self._device, self._parameter_of = device, parameter_of
        self._mode = 1 if adam_w_mode else 0
        counted = isinstance(step, torch.Tensor)
        self._step, self._step_tensor = (0, step) if counted else (step, None)
        self._grad_scale, self._found_inf = grad_scale, found_inf
        self._columns = {}  # (group, whether it has copies) -> columns of tensors
        # Of all groups, on every rank: what raises does so before anything is updated, and on all ranks alike.
        self._options = [self._options_of(group) for group in groups]

    def update(self, work):
        """Updates buckets, and returns this rank's shard of each as it is to be sent.

        work: [(StateBucket, its Runs, its shard of gradients, where the shard of parameters goes or None)].
        """
        copies = [self._plan(*of_bucket) if _is_plain(of_bucket[0]) else None for of_bucket in work]
        self._launch()
        return [
            self._sent(of_bucket[0], of_bucket[3], copy)
            if _is_plain(of_bucket[0])
            else self._update_through_float32(*of_bucket)
            for of_bucket, copy in zip(work, copies, strict=True)
        ]

    def _plan(self, bucket, runs, gradients, target):
        """Notes what is to be launched. Returns where that writes a copy of the parameters, or None."""
        values = bucket.params_shard
        copies = self._copies(bucket, runs, target)
        for group, first, last in runs.parts:
            part = slice(first, last)
            row = [gradients[part], values[part], bucket.exp_avg_shard[part], bucket.exp_avg_sq_shard[part]]
            self._note(group, row if copies is None else [*row, copies[part]])
        return copies

    def _copies(self, bucket, runs, target):
        """Where the step writes a copy of parameters, if it can: what the runs leave out it does not write."""
        if target is None and bucket.param_sync_dtype == bucket.dtype:
            return None
        skips = self._found_inf is not None and target is None
        if (
            not runs.complete
            or skips
            or (bucket.grad_sync_dtype, bucket.param_sync_dtype) not in _FUSED_COPIES
        ):
            return None
        if target is not None:
            return target
        return bucket.params_shard.new_empty(bucket.shard_size, dtype=bucket.param_sync_dtype)

    def _sent(self, bucket, target, copies):
        return self._to_send(bucket, bucket.params_shard, target) if copies is None else copies

    def _update_through_float32(self, bucket, runs, gradients, target):
        values = _states.load_parameters(bucket, self._parameter_of)
        moments = [_states.load_moment(bucket, name) for name in _states.MOMENTS]
        for group, first, last in runs.parts:
            self._note(group, [t[first:last] for t in (gradients, values, *moments)])
        self._launch()
        _states.store_parameters(bucket, values)
        for name, moment in zip(_states.MOMENTS, moments, strict=True):
            kept = getattr(bucket, name + "_shard")
            if moment is not kept:
                _states.store_moment(bucket, name, moment)
        if bucket.param_remainders_shard is not None:
            values = split_remainders(values)[0]
        elif not bucket.param_sync_dtype.is_floating_point and bucket.state_scales is None:
            values = values.to(bucket.dtype)  # whose leading bytes are sent
        return self._to_send(bucket, values, target)

    @staticmethod
    def _to_send(bucket, values, target):
        if target is None and values.dtype == bucket.param_sync_dtype:
            return values
        if target is None:
            target = values.new_empty(bucket.shard_size, dtype=bucket.param_sync_dtype)
        copy_lists([values], [target])
        return target

    def _note(self, group, row):
        columns = self._columns.setdefault((group, len(row)), [[] for _ in row])
        for column, tensor in zip(columns, row, strict=True):
            column.append(tensor)

    def _launch(self):
        calls = [self._call(group, columns) for (group, _), columns in self._columns.items()]
        for (
            arguments
        ) in calls:  # once all of them are there: an option that raises leaves every group as it was
            torch.ops.apex.multi_tensor_adam(*arguments)
        self._columns = {}

    def _options_of(self, group):
        beta1, beta2 = group["betas"]
        rate = learning_rate(group, self._device)
        numbers = (rate["lr"], float(beta1), float(beta2), float(group["eps"]))
        return *numbers, bool(group["bias_correction"]), float(group["weight_decay"]), rate["lr_tensor"]

    def _call(self, group_id, columns):
        """The arguments of multi_tensor_adam for one group."""
        lr, beta1, beta2, eps, bias_correction, weight_decay, lr_tensor = self._options[group_id]
        return (
            *columns[:4],
            columns[4] if len(columns) > 4 else [],
            lr,
            beta1,
            beta2,
            eps,
            self._step,
            self._mode,
            bias_correction,
            weight_decay,
            lr_tensor,
            self._step_tensor,
            False,
            self._grad_scale,
            self._found_inf,
            None,
        )
