"""Combined tensors: an optimizer's gradients, and for a fused optimizer its parameters, in flat buffers.

docs/combined_tensors.md has the user's side. The rest of amp calls what is below, and Combined by the interface of
apex.amp._policies alone.
"""

from __future__ import annotations

import types

from apex.amp._amp_state import maybe_print
from apex.amp._combined import access, ddp
from apex.amp._combined.policy import Combined
from apex.amp._errors import AmpUsageError
from apex.amp._properties import COMBINING

__all__ = ["check", "fit", "prepare"]


def _is_fused(optimizer):
    """Whether an optimizer updates combined tensors (CombinedAdam, NpuFusedAdam, ...)."""
    return bool(getattr(optimizer, "is_npu_fused_optimizer", False))


def check(optimizers, properties):
    """Raises AmpUsageError where tensors are to be combined that cannot be."""
    for optimizer in optimizers:
        _check_optimizer(optimizer, properties)
    if properties.combine_grad or any(map(_is_fused, optimizers)):
        held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
        if len(set(held)) < len(held):
            raise AmpUsageError(
                "two optimizers share a parameter, whose gradient can lie in one buffer only",
                remedy="leave combine_grad out, or give each parameter to one optimizer",
            )
    if properties.combine_ddp:
        ddp.check_distributed()


def _check_optimizer(optimizer, properties):
    """Combined tensors need a level with a float32 optimizer, and parameters of their own."""
    name = type(optimizer).__name__
    taken = [method for method in access.METHODS if hasattr(optimizer, method)]
    if taken:
        raise AmpUsageError(
            f"{name} has a method {taken[0]} already, which amp.initialize adds",
            remedy="rename the optimizer's own",
        )
    if _is_fused(optimizer) and properties.opt_level not in COMBINING:
        raise AmpUsageError(
            f"{name} works on combined tensors, which {properties.opt_level} does not make",
            remedy='opt_level="O1", "O2", "O4" or "O5"',
        )
    if not (properties.combine_grad or _is_fused(optimizer)):
        return
    if properties.opt_level in ("O2", "O5") and properties.master_weights is not True:
        raise AmpUsageError(
            f"combined tensors under {properties.opt_level} need master weights",
            found=f"master_weights={properties.master_weights}",
            remedy="leave master_weights out",
        )
    if properties.master_weights and getattr(optimizer, "materialize_master_grads", True) is False:
        raise AmpUsageError(
            f"{name}(materialize_master_grads=False) reads the model's gradients one by one",
            remedy="leave materialize_master_grads=False out, or combine_grad",
        )


def prepare(models, optimizers, properties):
    """Before models are cast: with combine_ddp every rank gets rank 0's weights."""
    if properties.combine_ddp:
        ddp.broadcast_models(models)
    if properties.check_combined_tensors and not (properties.combine_grad or any(map(_is_fused, optimizers))):
        maybe_print(
            "apex.amp: check_combined_tensors has no effect: nothing is combined without combine_grad", True
        )


def fit(policy, properties):
    """The gradient policy to use: the given one, or one that combines tensors around it.

    The optimizer gets the methods that read and clip combined tensors in any case.
    """
    optimizer = policy.optimizer
    for name, method in access.METHODS.items():
        setattr(optimizer, name, types.MethodType(method, optimizer))
    if not (properties.combine_grad or _is_fused(optimizer)):
        return policy
    reducer = None
    if properties.combine_ddp:
        device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
        reducer = ddp.Reducer(properties.ddp_replica_count, device)
    policy.state.combined = Combined(
        policy, _is_fused(optimizer), bool(properties.check_combined_tensors), reducer
    )
    return policy.state.combined
