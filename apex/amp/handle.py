"""`scale_loss`, `disable_casts`, and the handle of patched functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from apex._gradients import separate_gradients
from apex._loader import reference
from apex.amp import _compiling
from apex.amp._amp_state import INITIALIZE, AmpState, _amp_state
from apex.amp._casts import disable_casts
from apex.amp._errors import AmpTypeError, AmpUsageError, AmpValueError, warn
from apex.amp.opt import OptimWrapper, skip_next_step, unscale_in_place
from apex.amp.scaler import LossScaler, skipping

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]


@contextlib.contextmanager
def scale_loss(
    loss: Any,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Gives the scaled loss to a with statement; on leaving it, gradients are unscaled for optimizer.step().

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    Gradients that were there before are added to, so several passes may come before one step. With master
    weights the unscaled gradients are theirs (`amp.master_params`), and the model's stay scaled. What raises inside
    leaves gradients as they were before (but for those of a pass with delay_unscale: call zero_grad()).

    If a gradient is inf or nan and the scale is dynamic, the next step() of these optimizers is skipped and
    the scale reduced. Fused optimizers find that out on the device; for others the host waits once.

    Args:
        loss: tensor; computed in float32 from here on.
        optimizers: every optimizer whose parameters get gradients here; one, or a list.
        loss_id: which of amp.initialize's `num_losses` loss scalers.
        model: unused, as in public apex.
        delay_unscale: leave gradients scaled; a later pass without it must come before step().
        delay_overflow_check: do not adapt the scale or skip; the caller asks the scaler's update_scale().

    Raises:
        AmpUsageError (a RuntimeError): before amp.initialize; an optimizer that did not go through it; none at
            all; an optimizer that is inside another scale_loss.
        AmpTypeError: loss is no tensor.
        AmpValueError: no such loss_id.
    """
    properties = getattr(_amp_state, "opt_properties", None)
    if properties is None:
        raise AmpUsageError("amp.scale_loss was called before amp.initialize", remedy=INITIALIZE)
    if not properties.enabled:
        yield loss
        return
    if not isinstance(loss, torch.Tensor):
        raise AmpTypeError(
            f"the loss is no tensor, but {type(loss).__name__}",
            remedy="with amp.scale_loss(loss, optimizer): the loss itself, of which loss.item() is the number",
        )
    optimizers = _checked(optimizers, loss_id)
    scaler = _amp_state.loss_scalers[loss_id]

    # What an optimizer needs was settled when it was initialized, maybe under other options than today's.
    moves = any(optimizer._amp_stash.policy.moves_gradients for optimizer in optimizers)
    if not (moves or scaler.dynamic or scaler.loss_scale() != 1.0):
        try:
            yield loss.float()
        finally:
            _clear_cache()
        return

    with _backward_pass(optimizers, delay_unscale, scaler):
        yield scaler.scaled(loss)

    policies = [optimizer._amp_stash.policy for optimizer in optimizers]
    separate_gradients([p for policy in policies for p in policy.written_by_autograd()])
    if delay_unscale:
        for optimizer in optimizers:
            optimizer._amp_stash.params_have_scaled_gradients = True
            optimizer._amp_stash.scaled_by = loss_id
            optimizer._amp_stash.scaled_with = scaler.present()
        return
    scaler.clear_overflow_state()
    _unscale(scaler, optimizers)
    if not delay_overflow_check:
        _decide(scaler, optimizers, loss_id)


@contextlib.contextmanager
def _backward_pass(optimizers, delayed, scaler):
    """Around what makes gradients; where that raises, gradients are what they were before."""
    states, prepared = [optimizer._amp_stash for optimizer in optimizers], []
    try:
        for optimizer in optimizers:
            if optimizer._amp_stash.params_have_scaled_gradients:
                _keep_one_scale(optimizer._amp_stash, scaler)
            else:
                optimizer._prepare_amp_backward()
                prepared.append(optimizer)
        for state in states:
            state.open = True
            state.policy.begin(delayed)
        yield
    except BaseException:
        for state in states:
            state.policy.stop()
        for optimizer in prepared:
            optimizer._amp_stash.policy.abandon()
        raise
    finally:
        for state in states:
            state.open = False
        _amp_state.scaled_passes += 1
        _clear_cache()


def _keep_one_scale(state, scaler):
    """Gradients that wait to be unscaled get the scale of those that come: another pass may have changed it."""
    ratio = scaler.ratio_to(state.scaled_with)
    if isinstance(ratio, torch.Tensor) or ratio != 1.0:
        state.policy.rescale(ratio)
    state.scaled_with = scaler.present()


def _unscale(scaler, optimizers):
    """After a backward pass; where that raises, the gradients of what is not done are what they were before it."""
    scaler._taken = set() if len(optimizers) > 1 else None
    waiting = list(optimizers)
    try:
        while waiting:
            state = waiting[0]._amp_stash
            waiting[0]._post_amp_backward(scaler)
            state.params_have_scaled_gradients, state.scaled_by, state.unscaled = False, None, True
            del waiting[0]
    finally:
        scaler._taken = None
        for optimizer in waiting:
            if not optimizer._amp_stash.params_have_scaled_gradients:
                optimizer._amp_stash.policy.abandon()


def _checked(optimizers, loss_id):
    """The list of optimizers, if all is as it must be."""
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise AmpValueError(
            "there is no such loss scaler",
            wanted=f"loss_id={loss_id}",
            available=range(len(_amp_state.loss_scalers)),
            remedy="amp.initialize(..., num_losses=N) makes N of them",
        )
    optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not optimizers or optimizers[0] is None:
        raise AmpUsageError(
            "amp.scale_loss needs the optimizers whose gradients it is to unscale",
            remedy="with amp.scale_loss(loss, optimizer) as scaled_loss:",
        )
    for optimizer in optimizers:
        _check_optimizer(optimizer, loss_id)
    return optimizers


def _check_optimizer(optimizer, loss_id):
    if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
        raise AmpTypeError(
            f"amp.scale_loss takes optimizers, not {type(optimizer).__name__}",
            remedy="with amp.scale_loss(loss, optimizer) as scaled_loss:",
        )
    stash = getattr(optimizer, "_amp_stash", None)
    if stash is None:
        raise AmpUsageError(
            f"amp.scale_loss was given an optimizer, {type(optimizer).__name__}, that did not go through "
            "amp.initialize",
            remedy="pass all at once: models, optimizers = amp.initialize(models, [optimizer, ...], ...)",
        )
    if stash.open:
        raise AmpUsageError(
            "amp.scale_loss was entered again for an optimizer that is inside it already",
            remedy="leave the first with statement before the second; gradients add up all the same",
        )
    if stash.params_have_scaled_gradients and stash.scaled_by != loss_id:
        raise AmpUsageError(
            f"gradients wait to be unscaled by loss scaler {stash.scaled_by}, but this pass is for {loss_id}",
            remedy="leave out delay_unscale=True in the pass before",
        )


def _decide(scaler, optimizers, loss_id):
    """Whether the next step of each optimizer is skipped: on the device if all of them read it there."""
    if scaler.dynamic and all(optimizer._amp_stash.policy.skips_on_device() for optimizer in optimizers):
        found = scaler.update_scale_on_device().reshape(())  # as torch.amp.GradScaler has it
        for optimizer in optimizers:
            state = optimizer._amp_stash
            before = state.found_inf
            state.found_inf = found if before is None else torch.maximum(before, found)
        scaler.tell_of_overflow(loss_id)
    elif scaler.update_scale():
        for optimizer in optimizers:
            optimizer._amp_stash.already_patched = True
            optimizer._amp_stash.skipped = skipping(loss_id, scaler.loss_scale())


def _clear_cache():
    handle = getattr(_amp_state, "handle", None)
    if handle is not None:
        handle._clear_cache()


class AmpHandle:
    """What patched functions ask: whether casts are on, and for casts of weights that were made already.

    Its scale_loss and wrap_optimizer are the interface of the first public releases.
    """

    def __init__(self, loss_scale="dynamic", enable_caching=True, verbose=False):
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache = {}
        self._default_scaler = LossScaler(loss_scale)
        self._is_active = True
        self._suspended = []  # one element for each _disable_casts that is open, in whatever thread
        self._all_wrappers = []
        self._step_hook = None
        self.key = ""  # of all that decides about casts

    def is_active(self):
        # A graph is traced under a mode, which is seen sooner than the tracing itself. Dynamo looks in here, too.
        if not torch.compiler.is_dynamo_compiling():
            if reference.wants_plain_torch():
                return False
            if torch._C._len_torch_dispatch_stack():
                _compiling.note_casts(self)
        return self.is_active_now()

    def is_active_now(self):
        """The same, of no consequence for a graph that is being made."""
        return self._is_active and not self._suspended

    @contextlib.contextmanager
    def _disable_casts(self):
        self._suspended.append(None)
        try:
            yield
        finally:
            self._suspended.pop()

    def wrap_optimizer(self, optimizer, num_loss=1):
        """An optimizer with a scale_loss of its own, for num_loss losses a step."""
        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss, optimizer):
        """As amp.scale_loss, for a bare optimizer."""
        warn(
            f"handle.scale_loss is of old; write: {INITIALIZE}; with amp.scale_loss(loss, optimizer)",
            DeprecationWarning,
        )
        if not self.is_active():
            yield loss
            return
        if self._default_scaler is None:
            raise AmpUsageError(
                "this handle's optimizers are wrapped",
                remedy="with optimizer.scale_loss(loss) as scaled_loss:",
            )
        scaler = self._default_scaler
        yield scaler.scaled(loss)
        if unscale_in_place(scaler, optimizer):
            skip_next_step(optimizer, skipping(0, scaler.loss_scale()))
        self._clear_cache()

    def _clear_cache(self):
        self._cache.clear()

    def _clear_after_steps(self):
        """Weights that any optimizer changed are cast anew; fused ones leave no mark on what they change."""
        self._step_hook = register_optimizer_step_post_hook(lambda *_: self._clear_cache())

    def _save_func(self, mod, fn, func):
        self._all_wrappers.append((mod, fn, func))

    def _deactivate(self):
        """Takes back all patches, the last one first."""
        for mod, fn, func in reversed(self._all_wrappers):
            if func is None:  # was inherited
                delattr(mod, fn)
            else:
                setattr(mod, fn, func)
        self._all_wrappers = []
        if self._step_hook is not None:
            self._step_hook.remove()
        self._is_active = False
        self._clear_cache()
        _compiling.tell_caches(None)
        _compiling.note_methods()

    @property
    def has_cache(self):
        return self._enable_caching

    @property
    def cache(self):
        return self._cache

    def remove_cache(self, param):
        """Forgets the casts of one parameter."""
        for key in [key for key in self._cache if key[0] == id(param)]:
            del self._cache[key]

    @property
    def verbose(self):
        return self._verbose


class NoOpHandle:
    """The handle of amp.init(enabled=False)."""

    has_cache = False
    verbose = False

    def is_active(self):
        return False

    @contextlib.contextmanager
    def _disable_casts(self):
        yield

    def wrap_optimizer(self, optimizer, num_loss=1):
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss, optimizer):
        yield loss

    def _clear_cache(self):
        pass

    def _deactivate(self):
        pass


AmpState.handle = AmpState.no_handle = NoOpHandle()
