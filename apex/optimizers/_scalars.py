"""Scalars of a step that may lie on the device."""

import torch


def learning_rate(group, device, kept_there=False):
    """lr and lr_tensor of an op. A tensor is read on the device where it lies there (a CPU's is a number), or where the
    optimizer keeps its scalars there, as a captured step needs it."""
    lr = group["lr"]
    lies_there = device.type != "cpu" and isinstance(lr, torch.Tensor) and lr.device == device
    if lies_there or (kept_there and isinstance(lr, torch.Tensor)):
        return dict(lr=0.0, lr_tensor=lr.detach().to(device, torch.float32))
    return dict(lr=float(lr), lr_tensor=None)
