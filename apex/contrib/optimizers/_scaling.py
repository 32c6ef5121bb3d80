"""Norm, clipping and loss scale of gradients that lie in shards."""

from __future__ import annotations

import itertools

import torch
from torch.amp.grad_scaler import OptState


class ScaledGradients:
    """Mixin of ShardedOptimizer: nothing here touches a gradient; one factor, `_grad_scale`, is the step's."""

    def _shards_of_gradients(self, parameters=None):
        """This rank's parts of the gradients: of all, or of these parameters."""
        shards = self._gradients.shards()
        if parameters is None:
            return shards
        fragments = itertools.chain.from_iterable(self.state[p]["fragments"] for p in parameters)
        return [shards[f.bucket_id][slice(*f.shard_range)] for f in fragments if f.in_local_shard]

    def _subset(self, parameters, norm_type):
        """None for all parameters of the optimizer, else a list."""
        if float(norm_type) != 2.0:
            raise ValueError(f"apex.contrib.optimizers: norm_type must be 2, not {norm_type}")
        if parameters is None:
            return None
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(p not in self._place for p in parameters):
            raise RuntimeError(
                "apex.contrib.optimizers: a parameter that is not this optimizer's has no gradient here: pass its own"
            )
        chosen = set(parameters)
        return None if len(chosen) == len(self._place) else [p for p in self._place if p in chosen]

    @torch.no_grad()
    def _local_grad_norm(self, parameters=None, norm_type=2.0):
        """This rank's part of the squared norm, before _grad_scale: float32, on the device."""
        parameters = self._subset(parameters, norm_type)
        self.grad_sync()
        return self._square_sum(self._shards_of_gradients(parameters))

    def _square_sum(self, tensors):
        """The sum of the squares of all elements: float32, of no dimension, on the device."""
        by_dtype = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        squares = torch.zeros([], dtype=torch.float32, device=self.device)
        for of_dtype in by_dtype.values():
            norm = torch.zeros(1, dtype=torch.float32, device=self.device)
            torch.ops.apex.multi_tensor_l2norm(of_dtype, norm)
            squares += norm.square().view([])
        return squares

    @torch.no_grad()
    def grad_norm(self, parameters=None, norm_type=2.0, force=False):
        """The L2 norm of all gradients, over all ranks, as the step would take them: unscaled, and clipped.

        parameters: some of the optimizer's; None: all, whose norm is kept until gradients change. norm_type: 2.
        force: measure anew. Returns a float32 tensor of no dimension on the device. Every rank must call it.

        Raises ValueError for another norm_type, RuntimeError for parameters that are not the optimizer's.
        """
        subset = self._subset(parameters, norm_type)
        self.grad_sync()
        norm = self._grad_norm
        if force or subset is not None or norm is None:
            norm = self._local_grad_norm(subset)
            self._ranks.sum_over_shards(norm)
            norm = norm.sqrt_()
            if subset is None:
                self._grad_norm = norm
        return norm * self._grad_scale

    @torch.no_grad()
    def clip_grad_norm(self, max_norm, parameters=None, norm_type=2.0):
        """Scales gradients down by max_norm / norm if that is below 1. Returns the norm, as `grad_norm` does.

        Call it after unscale_grads, if at all: the threshold is that of the gradients as they are now. With
        `parameters` the norm is theirs, and all gradients are scaled: ranks of a tensor-parallel group, of which
        each leaves out other parameters, scale alike. The step does it.

        Raises ValueError unless max_norm > 0, and what `grad_norm` raises.
        """
        if not max_norm > 0:
            raise ValueError(f"apex.contrib.optimizers: max_norm must be positive: {max_norm}")
        norm = self.grad_norm(parameters=parameters, norm_type=norm_type)
        self._grad_scale.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    @torch.no_grad()
    def unscale_grads(self, *args, inv_scale=None, grad_scaler=None):
        """Undoes a loss scale, and finds overflows of any rank: in the place of GradScaler.unscale_.

        inv_scale: what gradients are multiplied by, a tensor of one element; or the first argument (those that
        follow are GradScaler's, for a scaler that calls this by itself). grad_scaler: a torch.amp.GradScaler,
        whose scale is taken and which then knows that gradients are unscaled.

        Returns {device: float32 tensor, 1 if a gradient is not finite}. Every rank must call it.

        Raises ValueError unless one of the two is given; RuntimeError where grad_scaler has unscaled, or
        stepped, since its last update().
        """
        if inv_scale is None and args:
            inv_scale = args[0]
        if grad_scaler is not None and not grad_scaler.is_enabled():
            grad_scaler = None
            inv_scale = torch.ones([], dtype=torch.float32, device="cpu") if inv_scale is None else inv_scale
        if (inv_scale is None) == (grad_scaler is None):
            raise ValueError("unscale_grads() takes either inv_scale or grad_scaler")
        stage = None
        if grad_scaler is not None:
            stage = grad_scaler._per_optimizer_states[id(self)]
            if stage["stage"] is not OptState.READY:
                raise RuntimeError(
                    "unscale_grads() was called after unscale_(), unscale_grads() or step() of the same iteration: "
                    "call it once, unscale_() never, and grad_scaler.update() at the end"
                )
            if grad_scaler._scale is None:
                raise RuntimeError(
                    "unscale_grads(): this GradScaler has scaled no loss yet: call "
                    "grad_scaler.scale(loss).backward() first"
                )
            inv_scale = grad_scaler._scale.double().reciprocal()
        found_inf = {self.device: torch.isfinite(self.grad_norm()).logical_not_().float()}
        self._grad_scale.mul_(inv_scale.to(self.device, torch.float32).view([]))
        self._unscaled = True
        if stage is not None:
            stage["found_inf_per_device"] = found_inf
            stage["stage"] = OptState.UNSCALED
        return found_inf

    def _found_inf(self, grad_scaler):
        """A float32 tensor, not 0 where this step is to be left out; None without a scaler."""
        if grad_scaler is None or not grad_scaler.is_enabled():
            return None
        stage = grad_scaler._per_optimizer_states[id(self)]
        if stage["stage"] is OptState.READY:
            self.unscale_grads(grad_scaler=grad_scaler)
        elif not self._unscaled:
            raise RuntimeError(
                "GradScaler.unscale_(optimizer) does not reach gradients of a sharded optimizer, which lie in "
                "buckets: call optimizer.unscale_grads(grad_scaler=scaler) in its place"
            )
        first, *others = stage["found_inf_per_device"].values()
        return sum(others, first).to(self.device, torch.float32).reshape(1)
