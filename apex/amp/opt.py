"""The optimizer wrapper of the first public releases: `optimizer = handle.wrap_optimizer(optimizer)`."""

import contextlib

import torch

from apex._gradients import writable_gradients
from apex.amp._amp_state import maybe_print
from apex.amp._casts import disable_casts
from apex.amp._errors import AmpUsageError
from apex.amp.scaler import LossScaler, skipping


class OptimWrapper:
    """An optimizer with `scale_loss`, once for each of its losses before a step.

    Args:
        optimizer: any torch optimizer.
        amp_handle: what amp.init returned.
        num_loss: losses a step, each with a dynamic scale of its own.
    """

    def __init__(self, optimizer, amp_handle, num_loss):
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._skip_next = [False] * num_loss
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    @contextlib.contextmanager
    def scale_loss(self, loss):
        """Gives the scaled loss to a with statement; gradients of several losses add up, each unscaled."""
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise AmpUsageError(
                f"more than num_loss={self._num_loss} losses before a step",
                remedy=f"handle.wrap_optimizer(optimizer, num_loss={self._loss_idx + 1})",
            )
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        scaler = self._loss_scaler[self._loss_idx]
        try:
            yield scaler.scaled(loss)
            self._skip_next[self._loss_idx] = unscale_in_place(scaler, self._optimizer)
        except BaseException:
            for p, grad in zip(params, before, strict=True):
                p.grad = grad
            raise
        self._loss_idx += 1
        with torch.no_grad():
            for p, grad in zip(params, before, strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad.add_(grad)

    def step(self, closure=None):
        """The optimizer's step, unless a gradient overflowed."""
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure=closure)
        if closure is not None:
            raise NotImplementedError("a wrapped optimizer takes no closure: call scale_loss, then step()")
        self._loss_idx = 0
        self._amp_handle._clear_cache()
        if any(self._skip_next):
            first = self._skip_next.index(True)
            maybe_print(skipping(first, self._loss_scaler[first].loss_scale()))
            self._skip_next = [False] * self._num_loss
            return None
        with disable_casts():
            return self._optimizer.step()

    def __getattr__(self, name):
        if name == "_optimizer":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self):
        return repr(self._optimizer)

    def state_dict(self):
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict):
        return self._optimizer.load_state_dict(state_dict)

    def zero_grad(self, *args, **kwargs):
        return self._optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group):
        return self._optimizer.add_param_group(param_group)


def unscale_in_place(scaler, optimizer):
    """Unscales the gradients of a bare optimizer; returns whether its step is to be skipped."""
    grads = writable_gradients([p for group in optimizer.param_groups for p in group["params"]])
    scaler.clear_overflow_state()
    scaler.unscale(grads, grads, scaler.loss_scale())
    return scaler.update_scale()


def skip_next_step(optimizer, message):
    """The next call of a bare optimizer's step does nothing but print."""
    own, step = "step" in vars(optimizer), optimizer.step

    def skip_step(closure=None):
        maybe_print(message)
        if own:
            optimizer.step = step
        else:
            del optimizer.step

    optimizer.step = skip_step
