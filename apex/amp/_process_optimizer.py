"""What amp does to an optimizer: master weights, gradients before and after a backward pass, guarded steps.

An optimizer that went through `_process_optimizer` has `_amp_stash` (AmpOptimizerState), and methods of ours
in the place of step, zero_grad and add_param_group.
"""

from __future__ import annotations

import inspect
import types
import warnings

import torch

from apex._loader import bindings
from apex._plain import writable_gradient
from apex._sharding import is_sharded, local
from apex.amp import _combined_access
from apex.amp._amp_state import _amp_state, maybe_print
from apex.amp._combined import Combination, is_fused
from apex.amp._combined_ddp import Reducer
from apex.amp._convert import HALVES, unrounded
from apex.amp._errors import AmpTypeError, AmpUsageError, AmpWarning
from apex.amp.handle import disable_casts
from apex.amp.scaler import _op
from apex.optimizers import FusedSGD
from apex.optimizers._fused_optimizer import FusedOptimizer
from apex.optimizers._model_copies import ModelCopies

FULL = (torch.float32, torch.float64)


class AmpOptimizerState:
    """What amp knows of one optimizer.

    Attributes:
        lazy_init_called: the lists below are made.
        already_patched: the host decided that the next step is skipped.
        params_have_scaled_gradients: a backward pass with delay_unscale was the last.
        scaled_by: the loss_id of that pass.
        open: inside scale_loss.
        unscaled: gradients went through scale_loss since the last step.
        passes: _amp_state.scaled_passes at the last step or zero_grad.
        warned: of scaled gradients, which is done once.
        found_inf: device tensor that decides about the next step, or None.
        skipped: the message for a step that the host skips.
        frozen: [(index of group, its list of parameters, index in that)] of parameters that did not require
            gradients when amp met them.
        made: [(parameter, its master weight, the version of that)] of masters that were made since the last
            backward pass.
        methods: the optimizer's own step, zero_grad and add_param_group.
        combined: Combination of its gradients in flat buffers, or None.
        aside: _C.AmpGradients that keeps gradients from before the backward pass, or None: the stashes have them.

    With master weights: fp16_groups, fp32_from_fp16_groups, fp32_from_fp32_groups (by group: the model's half
    parameters, their masters, full-precision parameters) and the same flat, with stashes of gradients:
    all_fp16_params, all_fp32_from_fp16_params, all_fp32_from_fp32_params, all_fp16_grad_stash,
    all_fp32_from_fp32_grad_stash. Without: all_fp16_params, all_fp32_params and their stashes.
    """

    def __init__(self):
        self.lazy_init_called = False
        self.already_patched = False
        self.params_have_scaled_gradients = False
        self.scaled_by = None
        self.open = False
        self.unscaled = False
        self.passes = _amp_state.scaled_passes
        self.warned = False
        self.found_inf = None
        self.skipped = ""
        self.frozen = []
        self.made = []
        self.master_weights = False
        self.combined = None
        self.aside = None
        self._native = None

    def native(self):
        """_C.AmpGradients of all parameters; None where there is no binding, or one of them is no plain tensor."""
        own = self._own()
        sizes = len(self.all_fp16_params), len(own)
        if self._native is None or self._native[0] != sizes:
            self._native = sizes, self._make_native(own)
        return self._native[1]

    def _own(self):
        """Parameters that the optimizer updates themselves, in the order of their stashes."""
        if hasattr(self, "all_fp32_params"):
            return [*self.all_fp16_params, *self.all_fp32_params]
        return self.all_fp32_from_fp32_params

    def with_gradients(self):
        """Parameters that get their gradients by backward passes, and not as parts of flat buffers."""
        if self.combined is not None:
            return []
        return [*self.all_fp16_params, *self._own()] if self.masters() else self._own()

    def _make_native(self, own):
        module, masters = bindings.load().module, list(self.masters())
        models = list(self.all_fp16_params) if masters else []
        if (
            not hasattr(module, "AmpGradients")
            or self.combined is not None
            or any(map(is_sharded, (*models, *own)))
        ):
            return None
        return module.AmpGradients(models, masters, list(own))

    def put_back(self):
        """What was set aside goes to the stashes."""
        if self.aside is not None:
            kept, self.aside = iter(self.aside.take_stash()), None
            for params, grads in self._stashes():
                if params is not self.all_fp16_params or not self.masters():
                    for i, grad in zip(range(len(grads)), kept, strict=False):
                        grads[i] = grad

    def stashes(self):
        """[(parameters, stash of their gradients)]."""
        self.put_back()
        return self._stashes()

    def _stashes(self):
        names = ("all_fp16", "all_fp32", "all_fp32_from_fp32")
        pairs = ((name + "_params", name + "_grad_stash") for name in names)
        return [(getattr(self, p), getattr(self, g)) for p, g in pairs if hasattr(self, g)]

    def masters(self):
        """Master weights of half-precision parameters."""
        return getattr(self, "all_fp32_from_fp16_params", ())


# ---- lists of parameters ---------------------------------------------------------------------------------


def lazy_init_with_master_weights(self, originals=None):
    """Puts float32 masters into the optimizer's groups in the place of half-precision parameters.

    originals: WeakIdKeyDictionary parameter -> its float32 data from before the model was cast, if there are.
    """
    stash = self._amp_stash
    stash.fp16_groups, stash.fp32_from_fp16_groups, stash.fp32_from_fp32_groups = [], [], []
    stash.all_fp16_params, stash.all_fp32_from_fp16_params, stash.all_fp32_from_fp32_params = [], [], []
    stash.all_fp16_grad_stash, stash.all_fp32_from_fp32_grad_stash = [], []
    for group in self.param_groups:
        _adopt_group(self, group, originals)
    for param in (*stash.all_fp32_from_fp16_params, *stash.all_fp32_from_fp32_params):
        param.grad = None
    _recast_states(self)


def lazy_init_no_master_weights(self):
    """Lists the optimizer's parameters by precision."""
    stash = self._amp_stash
    stash.all_fp16_params, stash.all_fp32_params = [], []
    stash.all_fp16_grad_stash, stash.all_fp32_grad_stash = [], []
    for group in self.param_groups:
        _list_group(self, group)
    _recast_states(self)


def _recast_states(self):
    """States from before the model was cast get their parameters' dtype, as load_state_dict has it."""
    if any(self.state.values()):
        self.load_state_dict(self.state_dict())


def _adopt_group(self, group, originals=None):
    stash = self._amp_stash
    stash.fp16_groups.append([])
    stash.fp32_from_fp16_groups.append([])
    stash.fp32_from_fp32_groups.append([])
    index = len(stash.fp16_groups) - 1
    for i, param in enumerate(group["params"]):
        if holds_no_gradient(param):
            continue
        if param.requires_grad:
            _adopt(self, index, group["params"], i, originals)
        else:
            stash.frozen.append((index, group["params"], i))


def _adopt(self, index, params, i, originals=None):
    stash, param = self._amp_stash, params[i]
    if param.dtype in FULL:
        stash.fp32_from_fp32_groups[index].append(param)
        stash.all_fp32_from_fp32_params.append(param)
        stash.all_fp32_from_fp32_grad_stash.append(None)
        return
    master = _make_master(param, originals)
    params[i] = master
    if param in self.state:
        self.state[master] = self.state.pop(param)
    stash.fp16_groups[index].append(param)
    stash.all_fp16_params.append(param)
    stash.all_fp16_grad_stash.append(None)
    stash.fp32_from_fp16_groups[index].append(master)
    stash.all_fp32_from_fp16_params.append(master)
    stash.made.append((param, master, master._version))


def _make_master(param, originals):
    master = _amp_state.masters.get(param)
    if master is None:  # else another optimizer has it already
        data = None if originals is None else originals.get(param)
        if data is None:
            data = param.detach().to(torch.float32)
        master = torch.nn.Parameter(data)
        vars(master).update(vars(param))  # marks of parallel training, that clipping reads
        _amp_state.masters[param] = master
    return master


def _list_group(self, group):
    stash = self._amp_stash
    for param in group["params"]:
        if holds_no_gradient(param):
            continue
        half = param.dtype in HALVES
        (stash.all_fp16_params if half else stash.all_fp32_params).append(param)
        (stash.all_fp16_grad_stash if half else stash.all_fp32_grad_stash).append(None)


def holds_no_gradient(param):
    """Whether it never will: integers and booleans. Raises AmpTypeError for gradients that amp cannot unscale."""
    if not (param.is_floating_point() or param.is_complex()):
        return True
    if param.dtype not in (*HALVES, *FULL):
        raise AmpTypeError(
            "a parameter of an optimizer is neither half nor full precision",
            wanted="float16, bfloat16, float32 or float64",
            found=str(param.dtype),
            remedy="leave it out: SGD((p for p in model.parameters() if p.dtype == torch.float32), lr)",
        )
    return False


def _thaw(self):
    """Takes in parameters that require gradients by now."""
    stash = self._amp_stash
    if any(params[i].requires_grad for _, params, i in stash.frozen):
        stash.put_back()
        still = []
        for index, params, i in stash.frozen:
            if params[i].requires_grad:
                _adopt(self, index, params, i)
            else:
                still.append((index, params, i))
        stash.frozen = still


@torch.no_grad()
def _follow_models(stash):
    """Before the first backward pass: new masters take what was written into their models since.

    Data parallelism sends rank 0's weights around after amp.initialize, in half precision. Rank 0 cannot know of that,
    so on several ranks each master becomes what its model holds, the same on all. A master that was written itself is
    left as it is: load_state_dict and apex.parallel give masters values of their own.
    """
    made = [(param, master) for param, master, version in stash.made if master._version == version]
    stash.made = []
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    alone = not distributed or torch.distributed.get_world_size() == 1
    for param, master in made:
        master.copy_(unrounded(param) if alone else param)


# ---- before and after a backward pass --------------------------------------------------------------------


def _set_aside(params, stash):
    """Gradients that were there before go to the stash; autograd then has nothing to add to."""
    for i, param in enumerate(params):
        stash[i] = param.grad
        param.grad = None


def post_backward_models_are_masters(scaler, params, stashed_grads, scale_override=None):
    """Unscales the gradients of `params` in place and adds those that were set aside.

    scale_override: (scale of the gradients, of the stashed ones, of the result), floats.
    """
    found = _Gradients(scaler, params, stashed_grads)
    if found.fresh:
        override = None if scale_override is None else scale_override[0] / scale_override[2]
        scaler.unscale(found.fresh, found.fresh, None, models_are_masters=True, scale_override=override)
    if found.sums:
        scaler.unscale_with_stashed(found.sums, found.stashed, found.sums, scale_override)
    found.finish()


class _Gradients:
    """Gradients of a backward pass, sorted; the stash is emptied when all is done.

    Attributes:
        fresh: those to unscale in place.
        sums, stashed: those that go on top of a stashed one.
    """

    def __init__(self, scaler, params=(), stashed_grads=()):
        self._take = scaler._take
        self.fresh, self.sums, self.stashed = [], [], []
        self._sparse = []  # (parameter, its gradient before): unscaled in place, then added
        self._stashes = []
        if params:
            self.add(params, stashed_grads)

    def add(self, params, stashed_grads):
        self._stashes.append(stashed_grads)
        for param, before in zip(params, stashed_grads, strict=True):
            grad = dense_gradient(param)
            if grad is None:
                param.grad = before
            elif not self._take(grad):
                continue
            elif before is None:
                self.fresh.append(grad)
            elif grad.layout != torch.strided or before.layout != torch.strided:
                self.fresh.append(grad)
                self._sparse.append((param, before))
            else:
                self.sums.append(grad)
                self.stashed.append(laid_out_as(grad, before))

    def finish(self):
        for param, before in self._sparse:
            param.grad = param.grad + before
        for stashed_grads in self._stashes:
            stashed_grads[:] = [None] * len(stashed_grads)


def dense_gradient(owner):
    """owner.grad; where somebody put one of another layout there, which may overlap itself, a copy in the owner's."""
    grad = writable_gradient(owner)
    if grad is not None and grad.layout == torch.strided and grad.stride() != owner.stride():
        grad = owner.grad = laid_out_as(torch.empty_like(owner), grad)
    return grad


def laid_out_as(like, tensor):
    if tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous()):
        return tensor
    return torch.empty_like(like).copy_(tensor)


def _set_aside_at_once(stash):
    """Before a backward pass; False where that is to be done one by one."""
    stash.aside = stash.native()
    if stash.aside is None:
        return False
    stash.aside.set_aside()
    return True


def _unscale_at_once(stash, scaler):
    """After a backward pass; False, and nothing done, where that is to be done one by one."""
    native, params = stash.aside, stash.all_fp16_params or stash._own()
    if native is not None and params and scaler.unscales_all(native, params[0].device):
        stash.aside = None
        return True
    stash.put_back()
    return False


def _ready_masters(self):
    self._amp_lazy_init()
    _thaw(self)
    _check_devices(self._amp_stash)
    if self._amp_stash.made:
        _follow_models(self._amp_stash)


def prepare_backward_with_master_weights(self):
    stash = self._amp_stash
    _ready_masters(self)
    if _set_aside_at_once(stash):
        return
    for param in stash.all_fp16_params:
        param.grad = None  # what it held is in its master's gradient already
    _set_aside(stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash)


def _check_devices(stash):
    if stash.all_fp16_params and stash.all_fp16_params[0].device != stash.masters()[0].device:
        raise AmpUsageError(
            "the model was moved after amp.initialize",
            found=f"weights on {stash.all_fp16_params[0].device}, masters on {stash.masters()[0].device}",
            remedy="move first: model.to(device); model, optimizer = amp.initialize(model, optimizer, ...)",
        )


def post_backward_with_master_weights(self, scaler):
    """Master gradients get the model's, unscaled, on top of what they hold: one launch for each pair of
    dtypes."""
    stash = self._amp_stash
    self._amp_lazy_init()
    if _unscale_at_once(stash, scaler):
        return
    scaled = scaler.dynamic or scaler.loss_scale() != 1.0
    grads, targets, sums, stashed, results, new = [], [], [], [], [], []
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
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
    full = _Gradients(scaler, stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash)
    if scaled:
        grads += full.fresh
        targets += full.fresh
    if grads:
        scaler.unscale(grads, targets, None, models_are_masters=False)
    if sums or full.sums:
        scaler.unscale_with_stashed(sums + full.sums, stashed + full.stashed, results + full.sums)
    for master, grad in new:
        master.grad = grad
    full.finish()


def prepare_backward_no_master_weights(self):
    stash = self._amp_stash
    self._amp_lazy_init()
    if _set_aside_at_once(stash):
        return
    for params, grads in stash.stashes():
        _set_aside(params, grads)


def post_backward_no_master_weights(self, scaler):
    stash = self._amp_stash
    self._amp_lazy_init()
    if _unscale_at_once(stash, scaler):
        return
    found = _Gradients(scaler)
    for params, grads in stash.stashes():
        found.add(params, grads)
    if found.fresh:
        scaler.unscale(found.fresh, found.fresh, None, models_are_masters=True)
    if found.sums:
        scaler.unscale_with_stashed(found.sums, found.stashed, found.sums)
    found.finish()


def prepare_backward_combined(self):
    stash = self._amp_stash
    self._amp_lazy_init()
    masters = hasattr(stash, "fp16_groups")
    if masters:
        _ready_masters(self)
    if not stash.combined.before_backward():
        (prepare_backward_with_master_weights if masters else prepare_backward_no_master_weights)(self)


def post_backward_combined(self, scaler):
    self._amp_lazy_init()
    self._amp_stash.combined.after_backward(scaler)


# FusedSGD with materialize_master_grads=False reads the model's scaled gradients: what is accumulated stays
# scaled, and step() is told by how much.


def prepare_backward_with_master_weights_FusedSGD(self):
    if self.materialize_master_grads:
        prepare_backward_with_master_weights(self)
        return
    stash = self._amp_stash
    _ready_masters(self)
    for params, grads in stash.stashes():
        _set_aside(params, grads)


def post_backward_with_master_weights_FusedSGD(self, scaler):
    if self.materialize_master_grads:
        post_backward_with_master_weights(self, scaler)
        return
    stash = self._amp_stash
    self._amp_lazy_init()
    scale = out_scale = scaler.loss_scale()
    if self.scale_set_by_backward:
        out_scale = min(scale, self.most_recent_scale)
    for params, grads in stash.stashes():
        post_backward_models_are_masters(scaler, params, grads, (scale, self.most_recent_scale, out_scale))
    self.most_recent_scale = out_scale
    self.scale_set_by_backward = True


prepare_backward_no_master_weights_FusedSGD = prepare_backward_no_master_weights
post_backward_no_master_weights_FusedSGD = post_backward_no_master_weights


def abandon_backward(self):
    """After a backward pass that raised: gradients are what they were before it."""
    combined = self._amp_stash.combined
    if combined is not None and combined.abandon():
        return
    for params, grads in self._amp_stash.stashes():
        for i, param in enumerate(params):
            param.grad, grads[i] = grads[i], None


def _master_params_to_model_params(self):
    """The model's half-precision parameters become the roundings of their masters."""
    stash = self._amp_stash
    if stash.all_fp16_params:
        if stash.native() is not None:
            stash.native().update_models()
            return
        with torch.no_grad():
            _copy(stash.all_fp32_from_fp16_params, stash.all_fp16_params)


def _copy(sources, targets):
    by_device = {}
    for source, target in zip(map(local, sources), map(local, targets), strict=True):
        columns = by_device.get(target.device)
        if columns is None:
            columns = by_device[target.device] = ([], [])
        columns[0].append(source)
        columns[1].append(target)
    bindings.load()
    for columns in by_device.values():
        _op("multi_tensor_scale", None, list(columns), 1.0, None)


# ---- who decides about a step ----------------------------------------------------------------------------


def skips_on_device(optimizer):
    """Whether step() itself leaves everything as it is where the tensor `found_inf` says so."""
    if isinstance(optimizer, FusedSGD) and hasattr(optimizer._amp_stash, "fp32_from_fp16_groups"):
        return optimizer.materialize_master_grads
    if isinstance(optimizer, FusedOptimizer) or is_fused(optimizer):
        return optimizer.reads_found_inf
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if isinstance(optimizer, torch.optim.SGD) and any(g["momentum"] for g in optimizer.param_groups):
        return False  # torch's first fused step leaves momentum buffers unwritten when it is skipped
    return "grad_scaler" not in inspect.signature(optimizer._amp_stash.methods["step"]).parameters


# ---- the optimizer's methods -----------------------------------------------------------------------------


def _amp_lazy_init(self):
    stash = self._amp_stash
    if not stash.lazy_init_called:
        stash.lazy_init_called = True
        self._lazy_init_maybe_master_weights()


def amp_step(self, closure=None, *args, **kwargs):
    """The optimizer's step, unless a gradient overflowed; then master weights go to the model."""
    stash = self._amp_stash
    _check_step(stash)
    step, loss = stash.methods["step"], None
    if closure is not None:
        if isinstance(self, torch.optim.LBFGS):
            _check_lbfgs(stash)
            args = (closure, *args)
        else:  # before it is known whether the step is skipped
            with torch.enable_grad():
                loss = closure()
            _check_step(stash)
    if stash.combined is not None:
        stash.combined.before_step()
    if not stash.unscaled:
        _warn_of_lost_gradients(self)
        _warn_of_scaled_gradients(self)
    self._opt_called = True  # a skipped step counts too, for learning rate schedulers
    if stash.already_patched:
        maybe_print(stash.skipped)
        if hasattr(self, "most_recent_scale"):
            self.most_recent_scale, self.scale_set_by_backward = 1.0, False
    else:
        with disable_casts():
            returned = _step_with(self, stash.found_inf, step, args, kwargs)
        loss = returned if loss is None else loss
        if stash.masters() and not (isinstance(self, ModelCopies) and self.writes_models()):
            self._master_params_to_model_params()
    stash.already_patched, stash.found_inf, stash.unscaled = False, None, False
    stash.passes = _amp_state.scaled_passes
    if stash.combined is None or not stash.combined.after_step():
        _drop_master_gradients(stash)  # model.zero_grad() would not reach them
    return loss


def _warn_of_lost_gradients(self):
    """Gradients that came without scale_loss are the model's, and no master's. Waits for the device to see them."""
    stash = self._amp_stash
    if isinstance(self, FusedSGD) and not self.materialize_master_grads:
        return
    if not stash.masters() or any(p.grad is not None for p in stash.masters()):
        return
    grads = [local(p.grad) for p in stash.all_fp16_params if p.grad is not None]
    if any(grad.layout != torch.strided or grad.any() for grad in grads):
        warnings.warn(
            "optimizer.step() updates nothing: the model has gradients, but its master weights have none, as these "
            "come with scale_loss\n  remedy:    with amp.scale_loss(loss, optimizer) as scaled_loss: "
            "scaled_loss.backward()",
            AmpWarning,
            stacklevel=4,
        )


def _warn_of_scaled_gradients(self):
    """A scale_loss that named other optimizers leaves the gradients of this one's parameters scaled."""
    stash = self._amp_stash
    if stash.warned or stash.passes == _amp_state.scaled_passes:
        return
    if any(p.grad is not None for p in stash._own()):
        stash.warned = True
        warnings.warn(
            f"step() of {type(self).__name__}, which no scale_loss named since its last step, though others were: "
            "gradients that its parameters got there are scaled still\n  remedy:    "
            "with amp.scale_loss(loss, [optimizer, ...]) as scaled_loss: every optimizer whose parameters the "
            "loss reaches",
            AmpWarning,
            stacklevel=4,
        )


def _drop_master_gradients(stash):
    if stash.native() is not None:
        stash.native().drop_master_gradients()
        return
    for master in stash.masters():
        master.grad = None


def _step_with(self, found_inf, step, args, kwargs):
    if found_inf is None:
        return step(*args, **kwargs)
    self.found_inf, self.grad_scale = found_inf, None
    try:
        return step(*args, **kwargs)
    finally:
        del self.found_inf, self.grad_scale


def _check_step(stash):
    if stash.open:
        raise AmpUsageError(
            "optimizer.step() was called inside amp.scale_loss, where gradients are still scaled",
            remedy="call it after the with statement",
        )
    if stash.params_have_scaled_gradients:
        raise AmpUsageError(
            "optimizer.step() was called after delay_unscale=True: gradients are still scaled",
            remedy="with amp.scale_loss(loss, optimizer): for the last backward pass before a step",
        )


def _check_lbfgs(stash):
    if stash.masters() or any(scaler.dynamic for scaler in _amp_state.loss_scalers):
        raise AmpUsageError(
            "LBFGS calls its closure many times a step, and cannot skip one of them",
            remedy='amp.initialize(model, optimizer, opt_level="O1", loss_scale=1.0), or opt_level="O4"',
        )


def amp_zero_grad(self, set_to_none=None):
    """Drops or zeroes the model's gradients, drops those of master weights and what was set aside.

    Combined gradients are always zeroed.
    """
    stash = self._amp_stash
    stash.params_have_scaled_gradients, stash.scaled_by = False, None
    stash.passes = _amp_state.scaled_passes
    stash.already_patched, stash.found_inf = False, None  # what was decided about gradients that go
    if stash.combined is not None and stash.combined.zero_grad():
        return
    _drop_master_gradients(stash)
    if set_to_none is None:
        stash.methods["zero_grad"]()
        set_to_none = getattr(self, "set_grad_none", True)
    else:
        stash.methods["zero_grad"](set_to_none=set_to_none)
    _clear_model_gradients(stash, set_to_none)
    for _, grads in stash.stashes():
        grads[:] = [None] * len(grads)


def _clear_model_gradients(stash, set_to_none):
    """Of those parameters that have masters, which the optimizer's own zero_grad() does not know."""
    if not stash.masters():
        return
    native = stash.native()
    if native is not None:
        (native.drop_model_gradients if set_to_none else native.zero_model_gradients)()
        return
    for param in stash.all_fp16_params:
        if param.grad is not None:
            param.grad = None if set_to_none else param.grad.detach().zero_()


def amp_add_param_group(self, param_group):
    """Adds a group; its half-precision parameters get master weights where the others have them."""
    stash = self._amp_stash
    self._amp_lazy_init()
    stash.put_back()
    if stash.combined is not None:
        stash.combined.dissolve()
    stash.methods["add_param_group"](param_group)
    group = self.param_groups[-1]
    if hasattr(stash, "fp32_from_fp16_groups"):
        _adopt_group(self, group)
    else:
        _list_group(self, group)


METHODS = {"step": amp_step, "zero_grad": amp_zero_grad, "add_param_group": amp_add_param_group}


def _process_optimizer(optimizer, properties, originals=None):
    """Fits an optimizer to amp, in place, and returns it. originals: see lazy_init_with_master_weights."""
    stash = optimizer._amp_stash = AmpOptimizerState()
    stash.master_weights = bool(properties.master_weights)
    stash.methods = {name: getattr(optimizer, name) for name in METHODS}
    if properties.combine_grad or is_fused(optimizer):
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
        reducer = Reducer(properties.ddp_replica_count, device) if properties.combine_ddp else None
        stash.combined = Combination(optimizer, bool(properties.check_combined_tensors), reducer)
    for name, method in METHODS.items():
        setattr(optimizer, name, types.MethodType(method, optimizer))
    if hasattr(stash.methods["step"], "_wrapped_by_lr_sched"):
        # A scheduler that was made before counts calls through this mark, and warns for ever without it.
        optimizer.step = types.MethodType(_marked_step, optimizer)

    suffix = "_FusedSGD" if isinstance(optimizer, FusedSGD) else ""
    kind = "with_master_weights" if properties.master_weights else "no_master_weights"
    lazy_init = lazy_init_with_master_weights if properties.master_weights else lazy_init_no_master_weights
    own = {
        "_lazy_init_maybe_master_weights": lazy_init,
        "_master_params_to_model_params": _master_params_to_model_params,
        "_prepare_amp_backward": globals()[f"prepare_backward_{kind}{suffix}"],
        "_post_amp_backward": globals()[f"post_backward_{kind}{suffix}"],
        "_amp_lazy_init": _amp_lazy_init,
    }
    if stash.combined is not None:
        own["_prepare_amp_backward"] = prepare_backward_combined
        own["_post_amp_backward"] = post_backward_combined
    for name, method in (own | _combined_access.METHODS).items():
        setattr(optimizer, name, types.MethodType(method, optimizer))
    stash.lazy_init_called = True
    if properties.master_weights:
        lazy_init_with_master_weights(optimizer, originals)
        if properties.combine_ddp:
            stash.made = []  # of rank 0's weights already
    else:
        lazy_init_no_master_weights(optimizer)
    return optimizer


def _marked_step(self, closure=None, *args, **kwargs):
    return amp_step(self, closure, *args, **kwargs)


_marked_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
