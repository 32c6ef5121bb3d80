"""Models in half precision, and float32 copies of their parameters: master weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from apex._legacy import apex_C
from apex.amp._convert import convert_module, convert_network, to_type
from apex.contrib.clip_grad import clip_grad_norm_ as clip_grad_norm
from apex.fp16_utils.loss_scaler import to_python_float

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "backwards_debug_hook",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


class tofp16(torch.nn.Module):
    """input.half() as a layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Casts the batch norms of a module to float32, in place, and returns it.

    They take half-precision inputs all the same, and their statistics need float32.
    """
    for child in module.modules():
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm):
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """A model that casts its input to float16 and runs `network`, cast in place, but for its batch norms."""
    return torch.nn.Sequential(tofp16(), convert_network(network, torch.float16))


class FP16Model(torch.nn.Module):
    """Runs a network in float16, but for its batch norms.

    The network is cast in place. Floating-point inputs are cast; outputs are float16.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any) -> Any:
        return self.network(*(to_type(torch.float16, t) for t in inputs))


def backwards_debug_hook(grad: torch.Tensor) -> None:
    """Hook for a tensor that no backward pass must reach: raises RuntimeError."""
    raise RuntimeError("a master parameter got a gradient in the backward pass: the model computes with it")


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(model parameters, master parameters): those that require gradients, and copies of them in float32.

    flat_master: one master of one dimension holds all of them, and has a gradient of zeros from the start.
    The parameters must be of one dtype then, else TypeError.
    """
    model_params = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        masters = [p.detach().clone().float() for p in model_params]
        return model_params, [master.requires_grad_() for master in masters]
    dtypes = {p.dtype for p in model_params}
    if len(dtypes) != 1:
        found = ", ".join(sorted(map(str, dtypes))) or "none that requires gradients"
        raise TypeError(
            f"flat_master=True needs parameters of one dtype; the model has {found}. Use flat_master=False, "
            "or FP16_Optimizer"
        )
    flat = torch.cat([p.detach().reshape(-1) for p in model_params]).float()
    master = torch.nn.Parameter(flat)
    master.grad = torch.zeros_like(flat)
    return model_params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copies gradients of the lists that `prep_param_lists` made from the model to the masters.

    A master whose parameter has no gradient has none afterwards, or zeros in its part of a flat one.
    """
    if flat_master:
        parts = _parts(master_params[0].grad, model_params)
        pairs = [(p.grad, part) for p, part in zip(model_params, parts, strict=True)]
        for grad, part in pairs:
            if grad is None:
                part.zero_()
        _copy([grad for grad, _ in pairs if grad is not None], [t for grad, t in pairs if grad is not None])
        return
    sources, targets = [], []
    for model, master in zip(model_params, master_params, strict=True):
        if model.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        sources.append(model.grad)
        targets.append(master.grad)
    _copy(sources, targets)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copies the values of the lists that `prep_param_lists` made from the masters to the model."""
    sources = _parts(master_params[0].detach(), model_params) if flat_master else master_params
    _copy([t.detach() for t in sources], [p.detach() for p in model_params])


def _parts(flat, like):
    return [part.view(t.shape) for part, t in zip(apex_C.unflatten(flat, like), like, strict=True)]


def _copy(sources, targets):
    if len(sources) != len(targets):
        raise ValueError(f"the lists of prep_param_lists belong together: {len(sources)} and {len(targets)}")
    if sources:
        torch._foreach_copy_(targets, sources)
