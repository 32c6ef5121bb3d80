"""Without master weights."""

from __future__ import annotations

from apex.amp._policies.base import Policy, sorted_parameters
from apex.amp._policies.gradients import Gradients


class Plain(Policy):
    """The optimizer updates what the model computes with: gradients are unscaled in place."""

    def _clear_lists(self):
        state = self.state
        state.all_fp16_params, state.all_fp32_params = [], []
        state.all_fp16_grad_stash, state.all_fp32_grad_stash = [], []

    def _take_group(self, group, originals=None):
        state = self.state
        half, full = sorted_parameters(group)
        state.all_fp16_params += half
        state.all_fp32_params += full
        state.all_fp16_grad_stash += [None] * len(half)
        state.all_fp32_grad_stash += [None] * len(full)

    def own(self):
        return [*self.state.all_fp16_params, *self.state.all_fp32_params]

    def before_backward(self):
        if not self._set_aside_at_once():
            self._set_aside()

    def after_backward(self, scaler):
        if self._unscale_at_once(scaler):
            return
        found = Gradients(scaler)
        for params, grads in self.stashes():
            found.add(params, grads)
        found.unscale(scaler)
