"""What amp.initialize puts on an optimizer: methods in the place of its own, and a policy for its gradients.

| method | does |
|---|---|
| step | is refused while gradients are scaled, and skipped after an overflow; then the model gets its weights |
| zero_grad | the policy's |
| add_param_group | the policy's |
| _prepare_amp_backward, _post_amp_backward | scale_loss calls them: the policy's before_backward, after_backward |
| _master_params_to_model_params | step calls it: the policy's update_models |
| _amp_lazy_init, _lazy_init_maybe_master_weights | public apex's; the lists are made by amp.initialize already |

User code, ONNX Runtime for one, puts its own in the place of some of these, and reads `_amp_stash`; it calls the
functions of public apex below.
"""

from __future__ import annotations

import types

import torch

from apex.amp import _combined
from apex.amp._amp_state import _amp_state, maybe_print
from apex.amp._casts import disable_casts
from apex.amp._errors import AmpUsageError
from apex.amp._policies import Masters, Plain, ScaledModel, choose
from apex.amp._policies.gradients import Gradients
from apex.amp._policies.state import AmpOptimizerState
from apex.optimizers._model_copies import ModelCopies

# ---- the optimizer's methods -----------------------------------------------------------------------------


def amp_step(self, closure=None, *args, **kwargs):
    """The optimizer's step, unless a gradient overflowed; then master weights go to the model."""
    state = self._amp_stash
    _check_step(state)
    loss = None
    if closure is not None:
        if isinstance(self, torch.optim.LBFGS):
            _check_lbfgs(state)
            args = (closure, *args)
        else:  # before it is known whether the step is skipped
            with torch.enable_grad():
                loss = closure()
            _check_step(state)
    state.policy.before_step()
    self._opt_called = True  # a skipped step counts too, for learning rate schedulers
    if state.already_patched:
        maybe_print(state.skipped)
    else:
        with disable_casts():
            returned = _step_with(self, state.found_inf, args, kwargs)
        loss = returned if loss is None else loss
        if state.policy.masters() and not (isinstance(self, ModelCopies) and self.writes_models()):
            self._master_params_to_model_params()
    state.forget_decision()
    state.unscaled = False
    state.policy.after_step()
    return loss


def _step_with(self, found_inf, args, kwargs):
    step = self._amp_stash.methods["step"]
    if found_inf is None:
        return step(*args, **kwargs)
    self.found_inf, self.grad_scale = found_inf, None
    try:
        return step(*args, **kwargs)
    finally:
        del self.found_inf, self.grad_scale


def _check_step(state):
    if state.open:
        raise AmpUsageError(
            "optimizer.step() was called inside amp.scale_loss, where gradients are still scaled",
            remedy="call it after the with statement",
        )
    if state.params_have_scaled_gradients:
        raise AmpUsageError(
            "optimizer.step() was called after delay_unscale=True: gradients are still scaled",
            remedy="with amp.scale_loss(loss, optimizer): for the last backward pass before a step",
        )


def _check_lbfgs(state):
    if state.policy.masters() or any(scaler.dynamic for scaler in _amp_state.loss_scalers):
        raise AmpUsageError(
            "LBFGS calls its closure many times a step, and cannot skip one of them",
            remedy='amp.initialize(model, optimizer, opt_level="O1", loss_scale=1.0), or opt_level="O4"',
        )


def _marked_step(self, closure=None, *args, **kwargs):
    return amp_step(self, closure, *args, **kwargs)


# A scheduler that was made before counts calls through this mark, and warns for ever without it.
_marked_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def amp_zero_grad(self, set_to_none=None):
    """Drops or zeroes the model's gradients, drops those of master weights and what was set aside.

    Combined gradients are always zeroed.
    """
    state = self._amp_stash
    state.params_have_scaled_gradients, state.scaled_by = False, None
    state.forget_decision()
    state.policy.zero_grad(set_to_none)


def amp_add_param_group(self, param_group):
    """Adds a group; its half-precision parameters get master weights where the others have them."""
    self._amp_stash.policy.add_group(param_group)


def _prepare_amp_backward(self):
    self._amp_stash.policy.before_backward()


def _post_amp_backward(self, scaler):
    self._amp_stash.policy.after_backward(scaler)


def _master_params_to_model_params(self):
    """The model's half-precision parameters become the roundings of their masters."""
    self._amp_stash.policy.update_models()


def _lazy_init_maybe_master_weights(self):
    self._amp_stash.policy.uncombined.take_in()


def _amp_lazy_init(self):
    if not self._amp_stash.lazy_init_called:
        self._amp_stash.lazy_init_called = True
        self._lazy_init_maybe_master_weights()


REPLACED = {"step": amp_step, "zero_grad": amp_zero_grad, "add_param_group": amp_add_param_group}
ADDED = (
    _prepare_amp_backward,
    _post_amp_backward,
    _master_params_to_model_params,
    _lazy_init_maybe_master_weights,
    _amp_lazy_init,
)


def _process_optimizer(optimizer, properties, originals=None):
    """Fits an optimizer to amp, in place, and returns it.

    originals: WeakIdKeyDictionary parameter -> its float32 data from before the model was cast, if there are.
    """
    state = optimizer._amp_stash = AmpOptimizerState()
    state.methods = {name: getattr(optimizer, name) for name in REPLACED}
    policy = choose(optimizer, properties.master_weights)(optimizer, state)
    for name, method in REPLACED.items():
        setattr(optimizer, name, types.MethodType(method, optimizer))
    if hasattr(state.methods["step"], "_wrapped_by_lr_sched"):
        optimizer.step = types.MethodType(_marked_step, optimizer)
    for method in ADDED:
        setattr(optimizer, method.__name__, types.MethodType(method, optimizer))
    policy.take_in(originals)
    state.policy, state.lazy_init_called = _combined.fit(policy, properties), True
    return optimizer


# ---- functions of public apex, by its names --------------------------------------------------------------


def _uncombined(optimizer):
    return optimizer._amp_stash.policy.uncombined


def lazy_init_with_master_weights(self):
    _uncombined(self).take_in()


def lazy_init_no_master_weights(self):
    _uncombined(self).take_in()


def post_backward_models_are_masters(scaler, params, stashed_grads, scale_override=None):
    """Unscales the gradients of `params` in place and adds those that were set aside.

    scale_override: (scale of the gradients, of the stashed ones, of the result), floats.
    """
    Gradients(scaler, params, stashed_grads).unscale(scaler, scale_override)


def prepare_backward_with_master_weights(self):
    Masters.before_backward(_uncombined(self))


def post_backward_with_master_weights(self, scaler):
    Masters.after_backward(_uncombined(self), scaler)


def prepare_backward_no_master_weights(self):
    Plain.before_backward(_uncombined(self))


def post_backward_no_master_weights(self, scaler):
    Plain.after_backward(_uncombined(self), scaler)


def prepare_backward_with_master_weights_FusedSGD(self):
    ScaledModel.before_backward(_uncombined(self))


def post_backward_with_master_weights_FusedSGD(self, scaler):
    ScaledModel.after_backward(_uncombined(self), scaler)


prepare_backward_no_master_weights_FusedSGD = prepare_backward_no_master_weights
post_backward_no_master_weights_FusedSGD = post_backward_no_master_weights
