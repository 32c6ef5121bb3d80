"""Master weights: float32 copies of the model's half-precision parameters, which the optimizer updates."""

from __future__ import annotations

import torch

from apex._sharding import local
from apex.amp._amp_state import _amp_state
from apex.amp._convert import unrounded
from apex.amp._errors import AmpUsageError, warn
from apex.amp._policies.base import Policy
from apex.amp._policies.gradients import FULL, Gradients, copy, dense_gradient, holds_no_gradient, set_aside


class Masters(Policy):
    """Masters stand in the optimizer's groups; their gradients are the model's, unscaled, on top of what they hold."""

    moves_gradients = True

    def __init__(self, optimizer, state):
        super().__init__(optimizer, state)
        # (index of group, its list of parameters, index in that) of those that require no gradient yet
        self._frozen = []
        # (parameter, its master, the version of that) of masters that were made since the last backward pass
        self._made = []

    # ---- parameters --------------------------------------------------------------------------------------------

    def take_in(self, originals=None):
        """Puts float32 masters into the optimizer's groups in the place of half-precision parameters."""
        super().take_in(originals)
        for param in (*self.masters(), *self.own()):
            param.grad = None

    def _refuse_known(self, param_group):
        params = param_group["params"]
        if not isinstance(params, (torch.Tensor, set)):
            params = param_group["params"] = list(params)  # may be a generator
        given = [params] if isinstance(params, torch.Tensor) else params
        given = {id(p[1] if isinstance(p, tuple) else p) for p in given}
        if any(id(p) in given for p in self.state.all_fp16_params):
            raise ValueError("some parameters appear in more than one parameter group")

    def _clear_lists(self):
        state = self.state
        state.fp16_groups, state.fp32_from_fp16_groups, state.fp32_from_fp32_groups = [], [], []
        state.all_fp16_params, state.all_fp32_from_fp16_params, state.all_fp32_from_fp32_params = [], [], []
        state.all_fp16_grad_stash, state.all_fp32_from_fp32_grad_stash = [], []

    def _take_group(self, group, originals=None):
        state, params = self.state, group["params"]
        state.fp16_groups.append([])
        state.fp32_from_fp16_groups.append([])
        state.fp32_from_fp32_groups.append([])
        index = len(state.fp16_groups) - 1
        for i, param in enumerate(params):
            if holds_no_gradient(param):
                continue
            if param.requires_grad:
                self._take(index, params, i, originals)
            else:
                self._frozen.append((index, params, i))

    def _take(self, index, params, i, originals=None):
        state, param = self.state, params[i]
        if param.dtype in FULL:
            state.fp32_from_fp32_groups[index].append(param)
            state.all_fp32_from_fp32_params.append(param)
            state.all_fp32_from_fp32_grad_stash.append(None)
            return
        master = _master_of(param, originals)
        params[i] = master
        if param in self.optimizer.state:
            self.optimizer.state[master] = self.optimizer.state.pop(param)
        state.fp16_groups[index].append(param)
        state.all_fp16_params.append(param)
        state.all_fp16_grad_stash.append(None)
        state.fp32_from_fp16_groups[index].append(master)
        state.all_fp32_from_fp16_params.append(master)
        self._made.append((param, master, master._version))

    def _thaw(self):
        """Takes in parameters that require gradients by now."""
        if any(params[i].requires_grad for _, params, i in self._frozen):
            self.put_back()
            still = []
            for index, params, i in self._frozen:
                if params[i].requires_grad:
                    self._take(index, params, i)
                else:
                    still.append((index, params, i))
            self._frozen = still

    def masters(self):
        return self.state.all_fp32_from_fp16_params

    def own(self):
        return self.state.all_fp32_from_fp32_params

    def written_by_autograd(self):
        return [*self.state.all_fp16_params, *self.own()]

    def keep_new_masters(self):
        self._made = []

    @torch.no_grad()
    def _follow_models(self):
        """Before the first backward pass: new masters take what was written into their models since.

        Data parallelism sends rank 0's weights around after amp.initialize, in half precision. Rank 0 cannot know of
        that, so on several ranks each master becomes what its model holds, the same on all. A master that was written
        itself is left as it is: load_state_dict and apex.parallel give masters values of their own.
        """
        made = [(param, master) for param, master, version in self._made if master._version == version]
        self._made = []
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        alone = not distributed or torch.distributed.get_world_size() == 1
        for param, master in made:
            master.copy_(unrounded(param) if alone else param)

    # ---- a backward pass ---------------------------------------------------------------------------------------

    def make_ready(self):
        """Every parameter that a pass may reach has its master, and that the model's value."""
        self._thaw()
        models = self.state.all_fp16_params
        if models and models[0].device != self.masters()[0].device:
            raise AmpUsageError(
                "the model was moved after amp.initialize",
                found=f"weights on {models[0].device}, masters on {self.masters()[0].device}",
                remedy="move first: model.to(device); model, optimizer = amp.initialize(model, optimizer, ...)",
            )
        if self._made:
            self._follow_models()

    def before_backward(self):
        self.make_ready()
        if self._set_aside_at_once():
            return
        for param in self.state.all_fp16_params:
            param.grad = None  # what it held is in its master's gradient already
        set_aside(self.own(), self.state.all_fp32_from_fp32_grad_stash)

    def after_backward(self, scaler):
        """One launch for each pair of dtypes."""
        if self._unscale_at_once(scaler):
            return
        grads, targets, sums, stashed, results, new = [], [], [], [], [], []
        for param, master in zip(self.state.all_fp16_params, self.masters(), strict=True):
            if param.grad is None or not scaler._take(param.grad):
                continue
            if master.grad is None:
                new.append((master, torch.empty_like(master)))
                grads.append(param.grad)
                targets.append(new[-1][1])
            else:
                sums.append(param.grad)
                stashed.append(dense_gradient(master))
                results.append(master.grad)
        full = Gradients(scaler, self.own(), self.state.all_fp32_from_fp32_grad_stash)
        if scaler.dynamic or scaler.loss_scale() != 1.0:
            grads += full.fresh
            targets += full.fresh
        if grads:
            scaler.unscale(grads, targets, None, models_are_masters=False)
        if sums or full.sums:
            scaler.unscale_with_stashed(sums + full.sums, stashed + full.stashed, results + full.sums)
        for master, grad in new:
            master.grad = grad
        full.finish()

    # ---- a step ------------------------------------------------------------------------------------------------

    def before_step(self):
        if not self.state.unscaled:
            self._warn_of_lost_gradients()
        super().before_step()

    def _warn_of_lost_gradients(self):
        """Gradients that came without scale_loss are the model's, and no master's. Waits for the device to see them."""
        if not self.masters() or any(p.grad is not None for p in self.masters()):
            return
        grads = [local(p.grad) for p in self.state.all_fp16_params if p.grad is not None]
        if any(grad.layout != torch.strided or grad.any() for grad in grads):
            warn(
                "optimizer.step() updates nothing: the model has gradients, but its master weights have none, as these "
                "come with scale_loss\n  remedy:    with amp.scale_loss(loss, optimizer) as scaled_loss: "
                "scaled_loss.backward()"
            )

    def after_step(self):
        self._drop_master_gradients()  # model.zero_grad() would not reach them

    def update_models(self):
        models = self.state.all_fp16_params
        if models and self.native() is not None:
            self.native().update_models()
        elif models:
            with torch.no_grad():
                copy(self.masters(), models)

    # ---- gradients that go -------------------------------------------------------------------------------------

    def _drop_master_gradients(self):
        if self.native() is not None:
            self.native().drop_master_gradients()
            return
        for master in self.masters():
            master.grad = None

    def zero_grad(self, set_to_none=None):
        """Masters' gradients are dropped in any case; the model's go as the others do."""
        self._drop_master_gradients()
        super().zero_grad(set_to_none)
        if self.masters():
            self._clear_model_gradients(
                getattr(self.optimizer, "set_grad_none", True) if set_to_none is None else set_to_none
            )

    def _clear_model_gradients(self, set_to_none):
        """The optimizer's own zero_grad() does not know them."""
        native = self.native()
        if native is not None:
            (native.drop_model_gradients if set_to_none else native.zero_model_gradients)()
            return
        for param in self.state.all_fp16_params:
            if param.grad is not None:
                param.grad = None if set_to_none else param.grad.detach().zero_()


def _master_of(param, originals):
    master = _amp_state.masters.get(param)
    if master is None:  # else another optimizer has it already
        data = None if originals is None else originals.get(param)
        if data is None:
            data = param.detach().to(torch.float32)
        master = torch.nn.Parameter(data)
        vars(master).update(vars(param))  # marks of parallel training, that clipping reads
        _amp_state.masters[param] = master
    return master
