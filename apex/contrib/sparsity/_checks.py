"""What ASP is given, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from apex.contrib.sparsity._fixed import why_fixed

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_model(model: Any) -> None:
    """Raises TypeError for what is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"ASP prunes a torch.nn.Module, not {type(model).__name__}")


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError for what has no step()."""
    if not callable(getattr(optimizer, "step", None)):
        raise TypeError(f"ASP masks the step() of an optimizer, and {type(optimizer).__name__} has none")


def set_of_names(what: str, names: Any, model: nn.Module) -> set[str] | None:
    """A list or iterator of names of the model's modules as a set; None for None. Raises TypeError, ValueError."""
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{what} is a list of names of modules, not {names!r}: write [{names!r}]")
    chosen = set(names)
    unknown = chosen - {name for name, _ in model.named_modules()}
    if unknown:
        raise ValueError(
            f"{what}: the model has no module {', '.join(sorted(map(repr, unknown)))}; its names are those of "
            "model.named_modules()"
        )
    return chosen


def check_types(whitelist: Any, custom: dict, known: dict) -> tuple[type, ...]:
    """The types of layers to prune. Raises TypeError for what is no type, or one that ASP knows no parameters of."""
    if isinstance(whitelist, type) or not isinstance(whitelist, Iterable):
        raise TypeError(f"whitelist is a list of types of layers, not {whitelist!r}: write [{whitelist!r}]")
    types_ = (*whitelist, *custom)
    for kind in types_:
        if not isinstance(kind, type):
            raise TypeError(
                f"whitelist and custom_layer_dict name types of layers, such as nn.Linear, not {kind!r}"
            )
        if kind not in known:
            raise TypeError(
                f"ASP does not know which parameters of {kind.__name__} to prune: name them in "
                "custom_layer_dict={type: [names]}"
            )
    return types_


def check_custom(custom: dict, modules: list[nn.Module]) -> None:
    """Raises TypeError, ValueError for custom_layer_dict's lists that are none, or name what no such layer has."""
    for kind, names in custom.items():
        if isinstance(names, str) or not isinstance(names, (list, tuple, set, frozenset)):
            raise TypeError(
                f"custom_layer_dict[{kind.__name__}] is a list of names of parameters, not {names!r}"
            )
        layers = [module for module in modules if isinstance(module, kind)]
        there = {name for layer in layers for name, _ in layer.named_parameters()}
        missing = [name for name in names if name not in there] if layers else []
        if missing:
            raise ValueError(
                f"custom_layer_dict: {kind.__name__} layers of the model have no parameter "
                f"{', '.join(map(repr, missing))}; they have {', '.join(sorted(there))}"
            )


def check_weight(name: str, weight: torch.Tensor) -> None:
    """Raises TypeError for a weight that cannot be pruned in place."""
    why = why_fixed(weight)
    if why is None and weight.dtype not in _DTYPES:
        why = f"is {weight.dtype}, which is not pruned"
    if why is None and weight.device.type == "meta":
        why = "is on the meta device, where it has no values"
    if why is not None:
        raise TypeError(f"ASP cannot prune {name}: it {why}. disallowed_layer_names leaves its layer out")


def checked_mask(name: str, weight: torch.Tensor, mask: Any) -> torch.Tensor:
    """What a function gave for a weight, as bool. Raises TypeError, ValueError for what is no mask of it."""
    if not torch.is_tensor(mask):
        raise TypeError(f"the mask of {name} is a tensor of zeros and ones, not {type(mask).__name__}")
    if mask.shape != weight.shape:
        raise ValueError(
            f"the mask of {name} has the shape {tuple(mask.shape)}, not its weight's, {tuple(weight.shape)}"
        )
    kept = mask.detach().bool()
    if mask.dtype != torch.bool and not torch.equal(mask.detach(), kept.to(mask.dtype)):
        raise ValueError(f"the mask of {name} has other values than 0 and 1")
    return kept.to(weight.device)
