"""Where the parameters of a sharded optimizer lie: their places in buckets, and the buffers behind these."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from apex import _loader
from apex.contrib import nccl_allocator
from apex.contrib.optimizers import _contiguous, _options
from apex.contrib.optimizers._buckets import ParameterFragment
from apex.contrib.optimizers._gradients import GradientBucket
from apex.contrib.optimizers._parameters import Places
from apex.contrib.optimizers._states import model_shard, scale_states, store_parameters


def name_of(group, place):
    """What errors call a parameter."""
    return f"apex.contrib.optimizers: parameter {place} of group {group}"


class Placement:
    """Mixin of ShardedOptimizer, which makes these attributes."""

    device: Any
    state: Any
    param_groups: list[dict[str, Any]]
    dtype: torch.dtype
    grad_sync_dtype: torch.dtype
    param_sync_dtype: torch.dtype
    contiguous_grad_buffer: bool
    nccl_ub: bool
    distributed_process_group: Any
    _pool: Any
    store_params: bool
    store_param_remainders: bool
    with_scaled_states: bool
    param_sync: Any
    _listen: Any
    _layout: Any
    _gradients: Any
    _grad_buffers: list[torch.Tensor]
    _place: dict[torch.Tensor, tuple[int, int]]  # parameter -> (group, place in the group)
    _strides: dict[torch.Tensor, tuple[int, ...]]  # what they were when elements were placed
    _places: list[Places]  # of each bucket

    def parameters(self) -> Iterator[torch.Tensor]:
        """An iterator over the parameters of all groups."""
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def parameter(self, *args: Any) -> torch.Tensor:
        """The parameter of a ParameterFragment; or of two ints: the group, and the place in the group."""
        if len(args) == 1 and isinstance(args[0], ParameterFragment):
            args = args[0].param_group_id, args[0].param_id
        if len(args) != 2 or not all(isinstance(arg, int) for arg in args):
            raise TypeError(
                "parameter() takes a ParameterFragment, or two ints, not "
                f"{', '.join(type(arg).__name__ for arg in args)}"
            )
        return self.param_groups[args[0]]["params"][args[1]]

    def init_params(
        self,
        params: Iterable[torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """Places parameters in buckets, in this order; those that have their place already are left out.

        Without it, the first gradient places all of them, the last ones first: as gradients come. When the last
        parameter has its place, the optimizer takes the values that all have.

        params: parameters, or one; None: all. dtype, grad_sync_dtype, param_sync_dtype: of these parameters, in
        the place of the optimizer's; dtype must be that. Every rank must call it alike.
        """
        if params is None:
            params = reversed(list(self.parameters()))
        for p in [params] if isinstance(params, torch.Tensor) else params:
            if p in self._place and "fragments" not in self.state[p]:
                group, place = self._place[p]
                self._init_param_state(
                    p,
                    group,
                    place,
                    dtype=dtype,
                    grad_sync_dtype=grad_sync_dtype,
                    param_sync_dtype=param_sync_dtype,
                )
        if all("fragments" in self.state[p] for p in self._place):
            self._allocate()

    def init_params_bucket(
        self,
        params: Iterable[torch.Tensor],
        dtype: torch.dtype | None = None,
        grad_sync_dtype: torch.dtype | None = None,
        param_sync_dtype: torch.dtype | None = None,
    ) -> None:
        """Places parameters in buckets of their own, which are reduced together when all have their gradients.

        Arguments are those of `init_params`.
        """
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        params = [p for p in params if p in self._place and "fragments" not in self.state[p]]
        with self._layout.together([self._place[p] for p in params]):
            self.init_params(
                params, dtype=dtype, grad_sync_dtype=grad_sync_dtype, param_sync_dtype=param_sync_dtype
            )

    def _init_param_state(
        self, param, param_group_id, param_id, dtype=None, grad_sync_dtype=None, param_sync_dtype=None
    ):
        dtypes = (
            dtype or self.dtype,
            grad_sync_dtype or self.grad_sync_dtype,
            param_sync_dtype or self.param_sync_dtype,
        )
        _options.check_placement(name_of(param_group_id, param_id), param, self, dtypes)
        usual = dtypes[2] == self.param_sync_dtype
        self.state[param]["fragments"] = self._layout.place(
            param_group_id,
            param_id,
            param.numel(),
            dtypes,
            store_params=self.store_params or not usual,
            store_param_remainders=self.store_param_remainders and usual,
        )

    def _materialize(self):
        """Every parameter has its place, and its state is there."""
        if not self._complete:
            self.init_params()
            self._allocate()

    @torch.no_grad()
    def _allocate(self):
        """Makes the state of the buckets that have none."""
        if self._complete:
            return
        self._complete = True
        self._listen()
        _loader.load()
        self._check_strides()
        self._strides.update((p, p.stride()) for p in self._place)
        new = self._layout.close()
        parts = [None] * len(new)
        if self.contiguous_grad_buffer:
            with self._registered():
                buffers, parts = _contiguous.gradient_buffers(new, self.device)
            self._grad_buffers += buffers
        for bucket in new:
            bucket.allocate(self.device)
            if self.with_scaled_states:
                scale_states(bucket, self.device)
            store_parameters(bucket, model_shard(bucket, self.parameter, torch.float32))
            self._places.append(Places(bucket, [*map(self.parameter, bucket.fragments)]))
        self._gradients.append(
            [GradientBucket(bucket, bucket.waits_for, part) for bucket, part in zip(new, parts, strict=True)],
            self._gradient_order(),
        )

    def _check_strides(self):
        """Elements lie in buckets as they lay in memory: raises RuntimeError where they lie otherwise by now."""
        for p, strides in self._strides.items():
            if p.stride() != strides:
                raise RuntimeError(
                    f"{name_of(*self._place[p])} had strides {strides} when its state was made and has {p.stride()}: "
                    "change memory formats before that, or make another optimizer and give it state_dict() of this "
                    "one from before the change"
                )

    def _gradient_order(self):
        """Numbers of the buckets as gradients come: those of the last parameters first, the same on all ranks."""
        number = {place: i for i, place in enumerate(self._place.values())}
        last = [max(number[place] for place in bucket.waits_for) for bucket in self.state["buckets"]]
        return sorted(range(len(last)), key=lambda i: (-last[i], i))

    # ---- contiguous buffers ----------------------------------------------------------------------------

    def _registered(self):
        """Memory that is allocated within is registered with the ranks' NCCL, if that is asked for."""
        if not self.nccl_ub:
            return contextlib.nullcontext()
        if self._pool is None:
            self._pool = nccl_allocator.create_nccl_mem_pool()
        return nccl_allocator.nccl_mem(self._pool, device=self.device, group=self.distributed_process_group)

    @torch.no_grad()
    def init_param_buffer(self) -> None:
        """Makes parameters views of large buffers, as contiguous_param_buffer=True does at the first step.

        Raises RuntimeError where a parameter's dtype is not that in which it is gathered.
        """
        self.contiguous_param_buffer = True
        self._materialize()
        self.param_sync()
        firsts = [(p, *self.state[p]["fragments"][:1]) for p in self._place if p.numel()]
        buckets = self.state["buckets"]
        for p, first in firsts:
            _contiguous.check_can_move(p, buckets[first.bucket_id])
        with self._registered():
            self._param_buffers = _contiguous.parameter_buffers(buckets, self.device)
        for p, first in firsts:
            _contiguous.move(p, first, _contiguous.part_of(self._param_buffers, buckets[first.bucket_id]))

    def grad_buffer_view(self, param: torch.Tensor) -> torch.Tensor:
        """The part of the contiguous gradient buffer that holds a parameter's gradient, shaped like it.

        What is written there is reduced with the parameter's bucket. Raises RuntimeError without
        contiguous_grad_buffer.
        """
        if not self.contiguous_grad_buffer:
            raise RuntimeError(
                "apex.contrib.optimizers: there is no gradient buffer to view: pass contiguous_grad_buffer=True"
            )
        self._materialize()
        if not param.numel():
            return torch.empty_like(param, dtype=self.grad_sync_dtype, requires_grad=False)
        first = self.state[param]["fragments"][0]
        return _contiguous.view_of(self._gradients.buckets[first.bucket_id].buffer, first, param)
