"""Which other tensors hold a parameter's weight or go with it: masters and averages of amp, FP16_Optimizer and the
fused optimizers, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from apex.contrib.sparsity._fixed import why_fixed


def chain_of(optimizer: Any) -> list:
    """The optimizer and those that it wraps, as LARC, FP16_Optimizer and ZeroRedundancyOptimizer do."""
    found: list = []
    while optimizer is not None and not any(optimizer is other for other in found):
        found.append(optimizer)
        own = getattr(optimizer, "__dict__", {})
        optimizer = own.get("optimizer", own.get("optim"))
    return found


def _pairs(optimizer) -> Iterator[tuple]:
    """(parameter, its master or average) of the lists that wrappers and FusedAdamSWA keep."""
    for one in chain_of(optimizer):
        yield from zip(
            getattr(one, "all_fp16_params", ()), getattr(one, "all_fp32_from_fp16_params", ()), strict=False
        )
        groups = [(getattr(one, "fp16_groups", ()), getattr(one, "fp32_groups", ()))]
        copies = getattr(one, "compute_param_groups", None)
        if copies:
            copied = [copies[0]["params"]] * 2
            groups.append((copied, [one.param_groups[0]["params"], one.swa_param_groups[0]["params"]]))
        for halves, wholes in groups:
            for half, whole in zip(halves, wholes, strict=False):
                yield from zip(half, whole, strict=False)


def pairs_of(optimizer: Any) -> dict[int, list]:
    """{id of a parameter: its masters and averages in such lists}."""
    found: dict[int, list] = {}
    for param, master in _pairs(optimizer):
        found.setdefault(id(param), []).append(master)
    return found


def _states(optimizer, tensor):
    """The states of a tensor in the optimizer and those that it wraps, each once."""
    states = [getattr(one, "state", None) for one in chain_of(optimizer)]
    found = [state[tensor] for state in states if isinstance(state, dict) and tensor in state]
    return list({id(state): state for state in found}.values())


def _all_masters(optimizer, param, pairs):
    from apex.amp._amp_state import _amp_state

    found = [_amp_state.masters.get(param)]
    found += (pairs_of(optimizer) if pairs is None else pairs).get(id(param), [])
    known = [param, *(master for master in found if master is not None)]
    found += [state.get("master_param") for tensor in known for state in _states(optimizer, tensor)]
    unique = {id(master): master for master in found if torch.is_tensor(master) and master is not param}
    return list(unique.values())


def masters_of(optimizer: Any, param: torch.Tensor, pairs: dict[int, list] | None = None) -> list:
    """The master weights and averages that `optimizer` keeps of `param`, each once; none where it updates the parameter
    itself. pairs: what pairs_of gives, where many parameters are asked for."""
    return [m for m in _all_masters(optimizer, param, pairs) if m.shape == param.shape]


def _state_tensors(optimizer, tensor):
    """States with more than one element, but for masters."""
    for state in _states(optimizer, tensor):
        for name, value in state.items():
            if torch.is_tensor(value) and value.numel() > 1 and name != "master_param":
                yield value


def _goes_along(state, tensor):
    """Whether a state has the parameter's shape, or 1 in the place of some sizes, as sums over them have."""
    sizes = zip(state.shape, tensor.shape, strict=False)
    return state.dim() == tensor.dim() and all(a in (1, b) for a, b in sizes)


def followers_of(optimizer: Any, tensor: torch.Tensor, pairs: dict[int, list] | None = None) -> list:
    """What is reordered with a parameter: gradient, masters, averages and their states."""
    masters = masters_of(optimizer, tensor, pairs)
    found = [t.grad for t in (tensor, *masters) if t.grad is not None] + masters
    found += [state for t in (tensor, *masters) for state in _state_tensors(optimizer, t)]
    return [t.detach() for t in {id(t): t for t in found}.values()]


def _why_none_is_followed(optimizer):
    chain = chain_of(optimizer)
    name = type(chain[0]).__name__
    if not any(getattr(one, "param_groups", None) for one in chain):
        return f"{name} has no param_groups, so that its masters and states are not known"
    if any(base.__name__ == "ShardedOptimizer" for one in chain for base in type(one).__mro__):
        return f"{name} keeps its weights and states in shards"
    for one in chain:
        found = getattr(one, "state", None)
        states = [s for s in found.values() if isinstance(s, dict)] if isinstance(found, dict) else []
        lists = any(isinstance(v, (list, tuple, dict)) and v for state in states for v in state.values())
        if lists or (isinstance(one, torch.optim.LBFGS) and states):
            return f"{name} keeps lists of states, or states of all parameters in one"
    return None


def unfollowed(optimizer: Any, tensors: list) -> dict[tuple, str]:
    """{(id, None): why} of a model's tensors with masters, states or gradients that cannot be reordered with them;
    (id, "rows"): where parts of the first dimension had orders of their own."""
    if optimizer is None:
        return {}
    why = _why_none_is_followed(optimizer)
    if why is not None:
        return {(id(tensor), None): why for tensor in tensors}
    pairs = pairs_of(optimizer)
    masters = {id(t): _all_masters(optimizer, t, pairs) for t in tensors}
    updated = {
        id(p) for one in chain_of(optimizer) for g in getattr(one, "param_groups", ()) for p in g["params"]
    }
    foreign = updated - set(masters) - {id(m) for found in masters.values() for m in found}
    found: dict[tuple, str] = {}
    for tensor in tensors:
        own = masters[id(tensor)]
        if foreign and tensor.requires_grad and updated.isdisjoint(id(t) for t in (tensor, *own)):
            found[id(tensor), None] = f"{type(optimizer).__name__} may have masters of it that are not known"
        _check_followers(optimizer, tensor, own, found)
    return found


def _check_followers(optimizer, tensor, masters, found):
    states = [s for t in (tensor, *masters) for s in _state_tensors(optimizer, t)]
    if not all(m.shape == tensor.shape for m in masters) or not all(_goes_along(s, tensor) for s in states):
        found[id(tensor), None] = f"{type(optimizer).__name__} has masters or states of it of another shape"
    grads = [t.grad for t in (tensor, *masters) if t.grad is not None]
    for follower in (*masters, *states, *grads):
        why = why_fixed(follower)
        if why:
            found[id(tensor), None] = f"what goes with it {why}"
    if any(s.shape[:1] != tensor.shape[:1] for s in states):
        found[id(tensor), "rows"] = "an optimizer's state has one row for all groups"
