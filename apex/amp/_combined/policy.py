"""The gradient policy of combined tensors."""

from __future__ import annotations

import torch

from apex.amp._combined.buffers import Buffers, point
from apex.amp._policies.base import Policy
from apex.amp._policies.gradients import rescale


class Combined(Policy):
    """An optimizer's gradients, and for a fused optimizer its parameters, in flat buffers; around another policy.

    Autograd adds into the buffers, and what is done to gradients is one launch a buffer. The buffers are made when the
    first backward pass has left gradients: parameters without one stay out until they get one. Until then, and after
    whatever makes buffers useless (a new group, parameters that were moved), the policy inside treats gradients one by
    one, and buffers are made, with the values of that time, after the next backward pass.

    Args:
        inside: the policy.
        check: see Buffers.
        reducer: averages gradients over ranks (ddp.Reducer), or None.
    """

    moves_gradients = True

    def __init__(self, inside, fused, check=False, reducer=None):
        super().__init__(inside.optimizer, inside.state)
        self.inside, self.fused, self.reducer = inside, fused, reducer
        inside.at_once = self.at_once = False
        if reducer is not None:
            inside.keep_new_masters()  # they are of rank 0's weights already
        self.buffers = Buffers(inside, fused, check)
        self._delayed = False

    # What fused optimizers read:

    @property
    def parts(self):
        return self.buffers.parts

    @property
    def generation(self):
        return self.buffers.generation

    @property
    def check(self):
        return self.buffers.check

    # ---- parameters --------------------------------------------------------------------------------------------

    @property
    def uncombined(self):
        return self.inside

    def take_in(self, originals=None):
        self.inside.take_in(originals)

    def add_group(self, param_group):
        self._dissolve()
        self.inside.add_group(param_group)

    def masters(self):
        return self.inside.masters()

    def own(self):
        return self.inside.own()

    def written_by_autograd(self):
        return []  # not by themselves: as parts of buffers

    # ---- buffers -----------------------------------------------------------------------------------------------

    def _dissolve(self):
        if self.parts is not None and self.reducer is not None:
            self.reducer.detach()
        self.buffers.dissolve()

    def _build(self):
        self._dissolve()
        parts = self.buffers.build()
        if self.reducer is not None:
            try:
                self.reducer.attach(parts)
            except BaseException:
                self._dissolve()
                raise

    def _refuse_newcomers(self):
        if self.reducer is not None:
            self.reducer.refuse_late_gradient()

    # ---- a backward pass ---------------------------------------------------------------------------------------

    def before_backward(self):
        """Empties what autograd is about to add into."""
        self.inside.make_ready()
        if self.parts is not None and self.buffers.have_newcomers():
            self._refuse_newcomers()
            self._dissolve()
        if self.parts is None:
            self.inside.before_backward()
            return
        with torch.no_grad():
            self.buffers.restore("scale_loss")
            for part in self.parts:
                if part.models is None:
                    part.set_aside()
                else:
                    part.zero("model_grad")  # what it held is in its masters' gradients already

    def begin(self, delayed):
        """A pass whose unscaling is delayed is averaged over ranks with the one after it."""
        self._delayed = delayed
        if self.parts is not None and self.reducer is not None and not delayed:
            self.reducer.start()

    def rescale(self, ratio):
        if self.parts is None:
            self.inside.rescale(ratio)
            return
        newcomers = [p.grad for p in self.buffers.left_out if p.grad is not None]
        rescale([*(part.written for part in self.parts), *newcomers], ratio)

    def stop(self):
        if self.reducer is not None and not self._delayed:
            self.reducer.abandon()

    @torch.no_grad()
    def after_backward(self, scaler):
        """Averages over ranks if that is asked for, and unscales: one launch a buffer."""
        if self.parts is None:
            self._build()
            if self.reducer is not None:
                self.reducer.reduce_whole()
        elif self.buffers.have_newcomers():
            self._refuse_newcomers()
            self._build()
        else:
            self.buffers.restore("the end of a backward pass")
            if self.reducer is not None:
                self._average()
        self._unscale(scaler)

    def _average(self):
        try:
            self.reducer.finish()
        except BaseException:
            self.abandon()
            raise

    def _unscale(self, scaler):
        scaled = scaler.dynamic or scaler.loss_scale() != 1.0
        grads, targets, sums, stashed, results = [], [], [], [], []
        for part in self.parts or ():
            if part.models is not None and part.is_zero("grad"):
                grads.append(part.model_grad)
                targets.append(part.grad)
            elif part.models is not None:
                sums.append(part.model_grad)
                stashed.append(part.grad)
                results.append(part.grad)
            elif part.stashed:
                sums.append(part.grad)
                stashed.append(part.stash)
                results.append(part.grad)
            elif scaled:
                grads.append(part.grad)
                targets.append(part.grad)
            part.stashed = False
            for _, _, name in part.pairs():
                part.written_by_kernels(name)
        if grads:
            scaler.unscale(grads, targets, None, models_are_masters=False)
        if sums:
            scaler.unscale_with_stashed(sums, stashed, results)

    @torch.no_grad()
    def abandon(self):
        if self.parts is None:
            self.inside.abandon()
            return
        for part in self.parts:
            for params, views, _ in part.pairs():
                point(params, views)
            if part.models is not None:
                part.zero("model_grad")
            elif part.stashed:
                part.grad.copy_(part.stash)
                part.stashed = False
            else:
                part.zero("grad")

    # ---- steps -------------------------------------------------------------------------------------------------

    def skips_on_device(self):
        return self.optimizer.reads_found_inf if self.fused else self.inside.skips_on_device()

    def zero_grad(self, set_to_none=None):
        """Zeroes the buffers, one launch each."""
        if self.parts is None:
            self.inside.zero_grad(set_to_none)
            return
        with torch.no_grad():
            self.buffers.restore("zero_grad()", keep=False)
            for part in self.parts:
                for _, _, name in part.pairs():
                    part.zero(name)
                part.stashed = False
        for p in self.buffers.left_out:
            p.grad = None

    def gather(self):
        """Everything lies where it should when the optimizer, or who asks for buffers, uses it."""
        if self.parts is None:
            if self.fused:
                self._build()
        elif self.fused and self.buffers.have_newcomers():
            self._refuse_newcomers()
            self._build()
        elif self.fused or self.check:
            with torch.no_grad():
                self.buffers.restore("step()")

    def before_step(self):
        self.gather()
        self.inside.before_step()

    def after_step(self):
        """Masters' gradients are spent."""
        if self.parts is None:
            self.inside.after_step()
            return
        for part in self.parts:
            if part.models is not None:
                with torch.no_grad():
                    part.zero("grad")

    def update_models(self):
        self.inside.update_models()
