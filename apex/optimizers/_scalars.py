"""Scalars of a step that may lie on the device."""

import torch


def learning_rate(group, device):
    """lr and lr_tensor of an op: a learning rate that is a tensor on the device is read there."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device == device and device.type != "cpu":
        return dict(lr=0.0, lr_tensor=lr.detach().to(torch.float32))
    return dict(lr=float(lr), lr_tensor=None)


def rate_on_device(group, device):
    """The same for optimizers that keep it there: any tensor is read on the device."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor):
        return dict(lr=0.0, lr_tensor=lr.detach().to(device, torch.float32))
    return dict(lr=float(lr), lr_tensor=None)
