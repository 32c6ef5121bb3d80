"""Scalars of a step that may lie on the device: learning rates, and what a GradScaler leaves behind."""

import torch


def learning_rate(group, device):
    """lr and lr_tensor of an op: a learning rate that is a tensor on the device is read there."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device == device and device.type != "cpu":
        return dict(lr=0.0, lr_tensor=lr.detach().to(torch.float32))
    return dict(lr=float(lr), lr_tensor=None)


def loss_scaling(optimizer, device):
    """inv_scale and found_inf of an op, as torch.amp.GradScaler sets them on the optimizer."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return dict(
        inv_scale=None if scale is None else scale.to(device, torch.float32).reciprocal(),
        found_inf=None if found_inf is None else found_inf.to(device, torch.float32),
    )
