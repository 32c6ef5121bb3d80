"""FusedSGD, which may read the model's gradients themselves."""

from __future__ import annotations

from apex.amp._policies.gradients import Gradients
from apex.amp._policies.masters import Masters


class ScaledModel(Masters):
    """With materialize_master_grads=False masters get no gradients: step() reads the model's, scaled as they are.

    What is accumulated stays scaled, and step() is told by how much (most_recent_scale).
    """

    def before_backward(self):
        if self.optimizer.materialize_master_grads:
            super().before_backward()
        else:
            self.make_ready()
            self._set_aside()

    def after_backward(self, scaler):
        optimizer = self.optimizer
        if optimizer.materialize_master_grads:
            super().after_backward(scaler)
            return
        scale = out_scale = scaler.loss_scale()
        if optimizer.scale_set_by_backward:
            out_scale = min(scale, optimizer.most_recent_scale)
        for params, grads in self.stashes():
            Gradients(scaler, params, grads).unscale(scaler, (scale, optimizer.most_recent_scale, out_scale))
        optimizer.most_recent_scale = out_scale
        optimizer.scale_set_by_backward = True

    def skips_on_device(self):
        return self.optimizer.materialize_master_grads

    def _warn_of_lost_gradients(self):
        if self.optimizer.materialize_master_grads:
            super()._warn_of_lost_gradients()

    def after_step(self):
        super().after_step()
        self.optimizer.most_recent_scale, self.optimizer.scale_set_by_backward = 1.0, False
