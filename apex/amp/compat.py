"""Questions that public apex asks of very old torch; the answers of torch 2."""

import torch


def variable_is_tensor():
    return True


def tensor_is_variable():
    return False


def tensor_is_float_tensor():
    return False


def is_tensor_like(x):
    return isinstance(x, torch.Tensor)


def is_floating_point(x):
    return x.is_floating_point()


def scalar_python_val(x):
    """The number in a tensor of one element (waits for the device)."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module, attrs):
    """Those names that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
