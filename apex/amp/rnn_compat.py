"""Recurrent networks, and their cells, are patched."""

import functools

import torch

from apex.amp import utils, wrap
from apex.amp._rnn_shim import RNN_NAMES, VariableFunctionsShim


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
