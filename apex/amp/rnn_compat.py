"""Recurrent networks: torch.nn.modules.rnn gets an object of ours in the place of torch's _VF, for functions
of a C module cannot be patched one by one."""

import functools
import types

import torch

from apex.amp import utils, wrap

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


class VariableFunctionsShim(types.ModuleType):
    """Has what torch._VF has; the functions of recurrent networks are attributes of its own. A module: TorchScript
    takes those alone."""

    def __init__(self):
        super().__init__(torch._VF.__name__)
        for name in RNN_NAMES:
            for function in (name, name + "_cell"):
                if hasattr(torch._VF, function):
                    setattr(self, function, getattr(torch._VF, function))

    def __getattr__(self, name):
        return getattr(torch._VF, name)


def has_old_rnns():
    return False


def whitelist_rnn_cells(cast_fn, handle, verbose):
    """Patches the cells of torch.nn.modules.rnn to run in cast_fn's dtype."""
    mod = torch.nn.modules.rnn._VF
    assert isinstance(mod, VariableFunctionsShim)
    for name in RNN_NAMES:
        wrap.cached_cast(mod, name + "_cell", cast_fn, handle, try_caching=True, verbose=verbose)


def patch(cast_fn, handle, verbose):
    """Patches recurrent networks and their cells; `handle` takes it all back."""
    utils.set_func_save(handle, torch.nn.modules.rnn, "_VF", VariableFunctionsShim())
    for name in RNN_NAMES:
        wrap.new_rnn_cast(name.upper(), cast_fn, handle, verbose)
    _patch_check_input(handle)
    whitelist_rnn_cells(cast_fn, handle, verbose)


def _patch_check_input(handle):
    """torch.nn refuses inputs of another dtype than the weights, which come to be cast only later."""
    check_input = torch.nn.RNNBase.check_input

    @functools.wraps(check_input)
    def check_shape(self, input, batch_sizes):
        if handle.is_active() and input.is_floating_point() and utils.on_cast_device(input):
            input = input.to(device="meta", dtype=self._flat_weights[0].dtype)
        return check_input(self, input, batch_sizes)

    utils.set_func_save(handle, torch.nn.RNNBase, "check_input", check_shape)
