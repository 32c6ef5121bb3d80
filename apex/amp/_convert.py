"""Casting a model's weights, its inputs and outputs, and what its state dicts hold."""

import collections
import copy
from collections.abc import Mapping

import torch

from apex.amp._amp_state import _amp_state
from apex.amp._errors import AmpUsageError

HALVES = (torch.float16, torch.bfloat16)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)


# ---- values ----------------------------------------------------------------------------------------------


def to_type(dtype, t):
    """t in `dtype` if it is a floating-point tensor; other tensors stay; t.to(dtype) of what is none."""
    if isinstance(t, torch.Tensor) and not t.is_floating_point():
        return t
    return t.to(dtype)


def applier(value, fn):
    """fn of every tensor and every object with a method `to`, in nested containers, which keep their types.

    Strings, numbers, arrays and modules stay what they are.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (str, bytes, torch.nn.Module, type)):
        return value
    if hasattr(value, "to"):  # a batch of the user's own class
        return fn(value)
    if type(value) is dict:
        return {k: applier(v, fn) for k, v in value.items()}
    if isinstance(value, Mapping):
        return _like_mapping(value, {k: applier(v, fn) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(applier(v, fn) for v in value))
    if isinstance(value, _CONTAINERS):
        return type(value)(applier(v, fn) for v in value)
    return value


def _like_mapping(value, items):
    try:
        new = copy.copy(value)  # keeps attributes: outputs of transformers, default dicts
        for k, v in items.items():
            new[k] = v
        return new
    except TypeError:  # read-only
        return items


class CastForward:
    """A module's forward with its inputs and outputs cast.

    An object and no closure: a copy or a pickle of the module gets one that calls the copy.

    Args:
        module: whose forward it is.
        inputs, outputs: dtypes, or None to leave them.
    """

    def __init__(self, module, inputs, outputs):
        self.module = module
        self.inputs = inputs
        self.outputs = outputs
        self.forward = vars(module).get("forward")  # of the module itself, where somebody replaced it

    @property
    def __wrapped__(self):
        return self.forward or type(self.module).forward.__get__(self.module)

    @property
    def __code__(self):  # torch.export asks where the forward of a module is written
        return self.__wrapped__.__code__

    def __call__(self, *args, **kwargs):
        if self.inputs is not None:
            args = applier(args, self._cast_input)
            kwargs = applier(kwargs, self._cast_input)
        if self.forward is not None:
            output = self.forward(*args, **kwargs)
        else:
            output = type(self.module).forward(self.module, *args, **kwargs)
        return output if self.outputs is None else applier(output, self._cast_output)

    def _cast_input(self, t):
        return to_type(self.inputs, t)

    def _cast_output(self, t):
        return to_type(self.outputs, t)


def innermost(model):
    """The module that torch.compile wraps; any other as it is."""
    return getattr(model, "_orig_mod", model)


def patch_forward(model, inputs, outputs):
    """Casts what goes into model.forward and what comes out; dtypes or None."""
    model = innermost(model)
    model.forward = CastForward(model, inputs, outputs)


# ---- weights ---------------------------------------------------------------------------------------------


def is_loss(module):
    return isinstance(module, torch.nn.modules.loss._Loss)


def convert_module(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters, gradients and buffers that a module holds itself."""
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            if grad is not None:
                param.grad = grad.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)  # in place: modules may share it


def convert_network(
    network: torch.nn.Module, dtype: torch.dtype, keep_batchnorm: bool = True
) -> torch.nn.Module:
    """Casts a network to dtype, in place, and returns it.

    Batch norms with weights stay as they are with keep_batchnorm; those without are cast, as in public apex.
    """
    for module in network.modules():
        if keep_batchnorm and isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
    return network


def convert_model(model, dtype, keep_batchnorm):
    """`convert_network` for amp: loss modules (and their class weights) stay float32, and see float32."""
    model = innermost(model)
    losses = [m for m in model.modules() if is_loss(m)]
    inside = {id(m) for loss in losses for m in loss.modules()}
    for module in model.modules():
        kept = keep_batchnorm and isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if kept or (id(module) in inside and dtype in HALVES):
            convert_module(module, torch.float32)  # float64 too, which halves do not go with
        else:
            convert_module(module, dtype)
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()
    if dtype in HALVES:
        for loss in losses:
            patch_forward(loss, torch.float32, None)


# ---- state dicts -----------------------------------------------------------------------------------------


def keep_state_dicts_in_float32(model):
    """From now on the model's state dicts are float32, and loading one reaches the master weights."""
    for module in innermost(model).modules():
        module._register_state_dict_hook(O2StateDictHook())
        module._register_load_state_dict_pre_hook(load_masters, with_module=True)


class O2StateDictHook:
    """Puts float32 into the state dict in the place of a module's own half-precision weights.

    A weight that is the rounding of its master weight is saved as that master, so that a run continues bit
    for bit; one that was changed behind amp's back is saved as it is, in float32. `fn` is public apex's.
    """

    def __init__(self, fn=None):
        self.fn = fn

    def __call__(self, module, state_dict, prefix, local_metadata):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            key = prefix + name
            if tensor is not None and tensor.dtype in HALVES and key in state_dict:
                state_dict[key] = unrounded(tensor)


def _holds_halves(module):
    return any(p is not None and p.dtype in HALVES for p in module._parameters.values())


@torch.no_grad()
def unrounded(tensor):
    """A weight of the model in float32: its master's elements, and its own where those were changed."""
    value = tensor.detach().to(torch.float32)
    master = _amp_state.masters.get(tensor)
    if master is None:
        return value
    master = master.detach().to(value.device)
    return torch.where(master.to(tensor.dtype) == tensor, master, value)


@torch.no_grad()
def load_masters(module, state_dict, prefix, metadata=None, *_):
    """Before a module loads its state: master weights get the values unrounded.

    Raises AmpUsageError for load_state_dict(assign=True), which would leave the optimizer other parameters.
    """
    if (metadata or {}).get("assign_to_params_buffers") and _holds_halves(module):
        del metadata["assign_to_params_buffers"]  # torch keeps it with the state dict, for the next call too
        raise AmpUsageError(
            "load_state_dict(assign=True) puts float32 parameters in the place of those that amp.initialize cast "
            "and the optimizer updates",
            remedy="model.load_state_dict(state_dict), or assign before amp.initialize",
        )
    for name, param in module._parameters.items():
        master = None if param is None else _amp_state.masters.get(param)
        value = state_dict.get(prefix + name)
        if master is not None and isinstance(value, torch.Tensor) and value.shape == master.shape:
            master.copy_(value)
