"""Which other tensors hold a parameter's weight: float32 masters of amp, FP16_Optimizer and the fused optimizers."""

from __future__ import annotations

import torch


def masters_of(optimizer, param):
    """The master weights that `optimizer` keeps of `param`, each once; none where it updates the parameter itself."""
    from apex.amp._amp_state import _amp_state

    found = [_amp_state.masters.get(param)]
    halves = getattr(optimizer, "all_fp16_params", ())
    masters = getattr(optimizer, "all_fp32_from_fp16_params", ())
    found += [master for half, master in zip(halves, masters, strict=False) if half is param]
    state = getattr(optimizer, "state", {})
    found += [state[p].get("master_param") for p in (param, *found) if p is not None and p in state]
    unique = {id(master): master for master in found if torch.is_tensor(master) and master is not param}
    return [master for master in unique.values() if master.shape == param.shape]
