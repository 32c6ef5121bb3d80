"""The interface of gradient policies, and what all of them do."""

from __future__ import annotations

import inspect

import torch

from apex._gradients import writable_gradients
from apex._loader import bindings
from apex._sharding import is_sharded
from apex.amp._amp_state import _amp_state
from apex.amp._convert import HALVES
from apex.amp._errors import warn
from apex.amp._policies.gradients import holds_no_gradient, rescale, set_aside
from apex.optimizers._fused_optimizer import FusedOptimizer

_NAMES = ("all_fp16", "all_fp32", "all_fp32_from_fp32")
_STASHES = [(f"{name}_params", f"{name}_grad_stash") for name in _NAMES]


class Policy:
    """What amp does to the gradients of one optimizer.

    | method | when amp calls it |
    |---|---|
    | take_in | amp.initialize |
    | before_backward | scale_loss is entered, unless gradients of a pass before wait to be unscaled |
    | begin | after that, each time it is entered |
    | rescale | before that, where gradients wait to be unscaled and the scale has changed meanwhile |
    | abandon | what is inside raised, or unscaling did: gradients are what they were before |
    | after_backward | scale_loss is left, unless it was given delay_unscale |
    | before_step, after_step | around the optimizer's own step, also where that is skipped on the host |
    | update_models | after a step that did not write the model's weights itself |
    | zero_grad | optimizer.zero_grad() |
    | add_group | optimizer.add_param_group() |

    Args:
        optimizer: whose gradients these are.
        state: its _amp_stash, which holds the lists of parameters.

    Attributes:
        moves_gradients: a pass needs it at a scale of 1, too.
        at_once: gradients are set aside and unscaled by one call into C++, where they are plain tensors.
    """

    moves_gradients = False

    def __init__(self, optimizer, state):
        self.optimizer, self.state = optimizer, state
        self.at_once = True
        self._native = None
        self._aside = (
            None  # _C.AmpGradients that keeps gradients from before the pass, or None: the stashes have them
        )

    @property
    def uncombined(self):
        """The policy inside, for what goes through parameters one by one."""
        return self

    # ---- parameters --------------------------------------------------------------------------------------------

    def take_in(self, originals=None):
        """Lists the parameters of all groups. originals: parameter -> its float32 data from before it was cast."""
        self._clear_lists()
        for group in self.optimizer.param_groups:
            self._take_group(group, originals)
        self.recast_states()

    def _clear_lists(self):
        raise NotImplementedError

    def _take_group(self, group, originals=None):
        raise NotImplementedError

    def recast_states(self):
        """States from before the model was cast get their parameters' dtype, as load_state_dict has it."""
        if any(self.optimizer.state.values()):
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def add_group(self, param_group):
        self._refuse_known(param_group)
        self.put_back()
        self.state.methods["add_param_group"](param_group)
        self._take_group(self.optimizer.param_groups[-1])

    def _refuse_known(self, param_group):
        """Raises the ValueError of torch's optimizers, which do not know the parameters behind master weights."""

    def masters(self):
        """Master weights of half-precision parameters (state.all_fp16_params), in their order."""
        return ()

    def own(self):
        """Parameters that the optimizer updates themselves, in the order of their stashes."""
        raise NotImplementedError

    def written_by_autograd(self):
        """Parameters whose .grad a backward pass makes."""
        return self.own()

    def make_ready(self):
        """Parameters that a pass may reach are taken in."""

    def keep_new_masters(self):
        """Masters hold what they are to hold, though other ranks are there."""

    # ---- gradients from before a pass --------------------------------------------------------------------------

    def native(self):
        """_C.AmpGradients of all parameters; None where there is no binding, or one of them is no plain tensor."""
        if not self.at_once:
            return None
        own = self.own()
        sizes = len(self.state.all_fp16_params), len(own)
        if self._native is None or self._native[0] != sizes:
            self._native = sizes, self._make_native(own)
        return self._native[1]

    def _make_native(self, own):
        module, masters = bindings.load().module, list(self.masters())
        models = list(self.state.all_fp16_params) if masters else []
        if not hasattr(module, "AmpGradients") or any(map(is_sharded, (*models, *own))):
            return None
        return module.AmpGradients(models, masters, list(own))

    def stashes(self):
        """[(parameters, stash of their gradients)]."""
        self.put_back()
        return self._stashes()

    def _stashes(self):
        lists = vars(self.state)  # past what calls put_back
        return [(lists[params], lists[grads]) for params, grads in _STASHES if grads in lists]

    def put_back(self):
        """What C++ keeps aside goes to the stashes."""
        if self._aside is not None:
            kept, self._aside = iter(self._aside.take_stash()), None
            for params, grads in self._stashes():
                if params is not self.state.all_fp16_params or not self.masters():
                    for i, grad in zip(range(len(grads)), kept, strict=False):
                        grads[i] = grad

    def _set_aside_at_once(self):
        """Before a backward pass; False where that is to be done one by one."""
        self._aside = self.native()
        if self._aside is None:
            return False
        self._aside.set_aside()
        return True

    def _unscale_at_once(self, scaler):
        """After a backward pass; False, and nothing done, where that is to be done one by one."""
        params = self.state.all_fp16_params or self.own()
        if self._aside is not None and params and scaler.unscales_all(self._aside, params[0].device):
            self._aside = None
            return True
        self.put_back()
        return False

    def _set_aside(self):
        for params, grads in self.stashes():
            set_aside(params, grads)

    # ---- a backward pass ---------------------------------------------------------------------------------------

    def before_backward(self):
        raise NotImplementedError

    def begin(self, delayed):
        """delayed: scale_loss got delay_unscale."""

    def rescale(self, ratio):
        """Multiplies what backward passes have left; ratio: a float, or a tensor without dimensions."""
        rescale(writable_gradients(self.written_by_autograd()), ratio)

    def after_backward(self, scaler):
        raise NotImplementedError

    def stop(self):
        """A pass raised; `abandon` comes next, unless gradients of a pass before wait to be unscaled."""

    def abandon(self):
        """Gradients are what they were before the pass."""
        for params, grads in self.stashes():
            for i, param in enumerate(params):
                param.grad, grads[i] = grads[i], None

    def zero_grad(self, set_to_none=None):
        """set_to_none: None for what the optimizer's own zero_grad() does."""
        own = self.state.methods["zero_grad"]
        own() if set_to_none is None else own(set_to_none=set_to_none)
        for _, grads in self.stashes():
            grads[:] = [None] * len(grads)

    # ---- a step ------------------------------------------------------------------------------------------------

    def skips_on_device(self):
        """Whether step() itself leaves everything as it is where the tensor `found_inf` says so."""
        optimizer = self.optimizer
        if isinstance(optimizer, FusedOptimizer):
            return optimizer.reads_found_inf
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        if isinstance(optimizer, torch.optim.SGD) and any(g["momentum"] for g in optimizer.param_groups):
            return False  # torch's first fused step leaves momentum buffers unwritten when it is skipped
        return "grad_scaler" not in inspect.signature(self.state.methods["step"]).parameters

    def before_step(self):
        if not self.state.unscaled:
            self._warn_of_scaled_gradients()

    def _warn_of_scaled_gradients(self):
        """A scale_loss that named other optimizers leaves the gradients of this one's parameters scaled."""
        state = self.state
        if state.warned or state.passes == _amp_state.scaled_passes:
            return
        if any(p.grad is not None for p in self.own()):
            state.warned = True
            warn(
                f"step() of {type(self.optimizer).__name__}, which no scale_loss named since its last step, though "
                "others were: gradients that its parameters got there are scaled still\n  remedy:    "
                "with amp.scale_loss(loss, [optimizer, ...]) as scaled_loss: every optimizer whose parameters the "
                "loss reaches"
            )

    def after_step(self):
        """Gradients are used up."""

    def update_models(self):
        """The model's half-precision parameters become the roundings of their masters."""


def sorted_parameters(group):
    """(half-precision, full-precision) parameters of a group, those that can have gradients."""
    params = [p for p in group["params"] if not holds_no_gradient(p)]
    return [p for p in params if p.dtype in HALVES], [p for p in params if p.dtype not in HALVES]
