"""`optimizer._amp_stash`: what amp knows of one optimizer, by the names of public apex, which user code reads."""

from __future__ import annotations

from apex.amp._amp_state import _amp_state


class _Stash:
    """A list of gradients from before a backward pass, which a policy may have put into C++ meanwhile: who looks here
    finds them here."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, state, owner=None):
        if state is None:
            return self
        if self.name not in vars(state):
            raise AttributeError(f"{type(state).__name__!r} object has no attribute {self.name!r}")
        if state.policy is not None:
            state.policy.put_back()
        return vars(state)[self.name]

    def __set__(self, state, value):
        vars(state)[self.name] = value


class AmpOptimizerState:
    """What amp knows of one optimizer.

    Attributes:
        policy: what is done to its gradients (apex.amp._policies).
        combined: the same, if it keeps combined tensors, which fused optimizers read; else None.
        methods: the optimizer's own step, zero_grad and add_param_group.
        lazy_init_called: the lists below are made.
        already_patched: the host decided that the next step is skipped; skipped: the message for it.
        found_inf: device tensor that decides about the next step, or None.
        params_have_scaled_gradients: a backward pass with delay_unscale was the last; scaled_by: its loss_id;
            scaled_with: its scale, as LossScaler.present has it.
        open: inside scale_loss.
        unscaled: gradients went through scale_loss since the last step.
        passes: _amp_state.scaled_passes at the last step or zero_grad.
        warned: of scaled gradients, which is done once.

    With master weights: fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups (by group: the model's half
    parameters, their masters, full-precision parameters) and the same flat, with stashes of gradients:
    all_fp16_params, all_fp32_from_fp16_params, all_fp32_from_fp32_params, all_fp16_grad_stash,
    all_fp32_from_fp32_grad_stash. Without: all_fp16_params, all_fp32_params and their stashes.
    """

    all_fp16_grad_stash = _Stash()
    all_fp32_grad_stash = _Stash()
    all_fp32_from_fp32_grad_stash = _Stash()

    def __init__(self):
        self.policy = self.combined = None
        self.methods = {}
        self.lazy_init_called = False
        self.already_patched = False
        self.skipped = ""
        self.found_inf = None
        self.params_have_scaled_gradients = False
        self.scaled_by = self.scaled_with = None
        self.open = False
        self.unscaled = False
        self.passes = _amp_state.scaled_passes
        self.warned = False

    def forget_decision(self):
        """What was decided about gradients that are used up, or gone."""
        self.already_patched, self.found_inf = False, None
        self.passes = _amp_state.scaled_passes
