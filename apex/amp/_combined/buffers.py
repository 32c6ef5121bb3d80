"""The flat buffers of one optimizer: they are made of what has a gradient, and looked after while they last."""

from __future__ import annotations

import operator

import torch

from apex._flat import DTYPES, addresses, alias, check_tensors
from apex._sharding import is_sharded
from apex.amp._combined.parts import Part
from apex.amp._convert import HALVES
from apex.amp._errors import AmpUsageError, warn

BEFORE_A_PASS = "zero_grad()", "scale_loss"  # whose gradients must not go elsewhere


class Buffers:
    """Part of an optimizer's parameters by kind.

    Args:
        policy: the gradient policy for tensors one by one, which knows the parameters and holds stashed gradients.
        fused: the optimizer updates flat buffers, so that parameters lie in some, too.
        check: look at every address at every entrance, rather than at what costs nothing to see.

    Attributes:
        parts: list of Part, masters first; None while nothing is combined.
        generation: how often it was built.
        left_out: parameters that are in no buffer, for want of a gradient.
    """

    def __init__(self, policy, fused, check):
        self.policy, self.optimizer = policy, policy.optimizer
        self.fused, self.check = fused, check
        self.parts, self.generation, self.left_out = None, 0, []

    def have_newcomers(self):
        """Whether a parameter that was left out has a gradient by now."""
        return any(p.grad is not None for p in self.left_out)

    # ---- building ------------------------------------------------------------------------------------------

    def dissolve(self):
        """Back to tensors one by one; they keep their values, and their places in the old buffers."""
        for part in self.parts or ():
            if part.stashed:
                for i, p in enumerate(part.owners):
                    self._stash_of(p, part.layout.view(part.stash, i))
        self.parts = None

    def _stash_of(self, param, value):
        for params, grads in self.policy.stashes():
            for i, p in enumerate(params):
                if p is param:
                    grads[i] = value

    @torch.no_grad()
    def build(self):
        """Makes the buffers of what has a gradient, and moves values there; returns the list of them."""
        self.dissolve()
        rows, self.left_out = self._collect()
        stashed = {}
        for params, grads in self.policy.stashes():
            stashed.update({id(p): g for p, g in zip(params, grads, strict=True) if g is not None})
            grads[:] = [None] * len(grads)
        parts = []
        for (_, masters), groups in rows.items():
            owners = [owner for group in groups for owner, _ in group]
            models = [model for group in groups for _, model in group] if masters else None
            bounds, last = [], 0
            for group in groups:
                bounds.append((last, last + len(group)))
                last += len(group)
            part = Part(owners, models, bounds, getattr(self.optimizer, "combines_rows", False))
            self._fill(part, stashed)
            parts.append(part)
        parts.sort(key=lambda part: (part.models is None, part.owners[0].dtype != torch.float32))
        self.parts = parts or None
        self.generation += 1
        return parts

    def _collect(self):
        """({(dtype, masters?): one list of (owner, model) a group}, what has no gradient)."""
        optimizer, policy = self.optimizer, self.policy
        masters = policy.masters()
        model_of = {id(m): p for m, p in zip(masters, policy.state.all_fp16_params, strict=False)}
        waiting = {id(p) for ps, gs in policy.stashes() for p, g in zip(ps, gs, strict=True) if g is not None}
        rows, left_out = {}, []
        for index, group in enumerate(optimizer.param_groups):
            for owner in group["params"]:
                model = model_of.get(id(owner))
                source = owner if model is None else model
                if source.grad is None and owner.grad is None and id(owner) not in waiting:
                    left_out.append(source)
                    continue
                self._check(owner, source, index)
                key = (source.dtype, model is not None)
                groups = rows.setdefault(key, [[] for _ in optimizer.param_groups])
                groups[index].append((owner, model))
        devices = {o.device for groups in rows.values() for group in groups for o, _ in group}
        if len(devices) > 1:
            raise AmpUsageError(
                f"{type(optimizer).__name__}: parameters to combine lie on several devices",
                found=", ".join(sorted(map(str, devices))),
                remedy="one optimizer a device: models, [first, second] = amp.initialize(models, [...], ...)",
            )
        return rows, left_out

    def _check(self, owner, source, group):
        problem = None
        if is_sharded(owner):
            problem = "is sharded over ranks"
        elif any(g is not None and g.layout != torch.strided for g in (source.grad, owner.grad)):
            problem = "has a sparse gradient"
        elif owner.dtype not in DTYPES:
            problem = f"is {owner.dtype}"
        elif self.fused and owner.dtype in HALVES:
            problem = f"is {owner.dtype}, and fused optimizers over combined tensors update float32"
        if problem:
            raise AmpUsageError(
                f"a parameter of group {group} of {type(self.optimizer).__name__}, of shape {tuple(owner.shape)}, "
                f"{problem}: it cannot be combined",
                remedy="leave combine_grad out"
                if not self.fused
                else "another optimizer for this parameter: torch.optim.SparseAdam for a sparse gradient, "
                "apex.optimizers.FusedAdam for another dtype",
            )

    def _fill(self, part, stashed):
        for params, views, name in part.pairs():
            if not _move_gradients(params, views):
                part.zero(name)
        held = [(i, stashed[id(p)]) for i, p in enumerate(part.owners) if id(p) in stashed]
        if held:
            part.stash = torch.zeros_like(part.grad)
            for i, value in held:
                part.layout.view(part.stash, i).copy_(value)
            part.stashed = True
        if self.fused:
            part.combine_params()

    # ---- aliases -------------------------------------------------------------------------------------------

    def restore(self, when, keep=True):
        """Gradients that are not the buffers' views any more become so, with their values if `keep`.

        A gradient that was set to None is zero. Anything else is reported.
        """
        broken = []
        for part in self.parts:
            for params, views, name in part.pairs():
                grads = [p.grad for p in params]
                if not all(map(operator.is_, grads, views)):
                    broken += _restore_replaced(part, params, views, name, keep)
                if (self.check or when in BEFORE_A_PASS) and addresses(views) != part.places[name]:
                    broken += _restore_moved(part, params, views, name, keep)
            if self.fused and (self.check or when == "step()") and addresses(part.owners) != part.addresses:
                broken += self._restore_params(part)
        if broken:
            self._report(broken, when)

    def _restore_params(self, part):
        broken = []
        views = part.layout.views(part.param)
        for i, (p, view) in enumerate(zip(part.owners, views, strict=True)):
            if p.data_ptr() == part.addresses[i]:
                continue
            broken.append(("parameter", p))
            _check_alike("parameter", p, view)
            with torch.no_grad():
                view.copy_(p)
            alias(p, view)
        return broken

    def _report(self, broken, when):
        kind, tensor = broken[0]
        group = self._group_of(tensor)
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        warn(
            f"combined tensors were destroyed and are recombined: at {when}, the {kind} of a parameter of shape "
            f"{tuple(tensor.shape)} in group {group}{more} did not lie in its buffer; please check what replaces "
            ".grad or .data (data_ptr, size, format), and write in place instead: p.grad.copy_(...)"
        )

    def _group_of(self, tensor):
        state = self.policy.state
        updated = [group["params"] for group in self.optimizer.param_groups]
        for groups in (updated, getattr(state, "fp16_groups", ())):
            for index, group in enumerate(groups):
                if any(p is tensor for p in group):
                    return index
        return "?"


def _check_alike(kind, now, before):
    """Raises where what replaced a combined tensor cannot take its place."""
    if now.dtype != before.dtype or now.device != before.device or now.shape != before.shape:
        raise AmpUsageError(
            f"a combined {kind} was {before.dtype}, {tuple(before.shape)} on {before.device}, and is {now.dtype}, "
            f"{tuple(now.shape)} on {now.device}",
            remedy="move and cast models before amp.initialize",
        )


def point(params, views):
    for p, view in zip(params, views, strict=True):
        if p.grad is not view:
            p.grad = view


def _move_gradients(params, views):
    """Gradients become these views of a zeroed buffer, with the values that they had; whether there were any."""
    check_tensors([p.grad for p in params if p.grad is not None], "gradient")
    held = [(view, p.grad) for p, view in zip(params, views, strict=True) if p.grad is not None]
    if held:
        torch._foreach_copy_([view for view, _ in held], [grad.detach() for _, grad in held])
    point(params, views)
    return bool(held)


def _restore_replaced(part, params, views, name, keep):
    broken = []
    none = [view for p, view in zip(params, views, strict=True) if p.grad is None]
    if len(none) == len(params):
        part.zero(name)
    elif none and keep:
        torch._foreach_zero_(none)
    for p, view in zip(params, views, strict=True):
        if p.grad is view:
            continue
        if p.grad is not None:
            broken.append(("gradient", p))
            if keep:
                view.copy_(p.grad.to_dense() if p.grad.layout != torch.strided else p.grad)
        p.grad = view
    return broken


def _restore_moved(part, params, views, name, keep):
    """Gradients whose .data was replaced: by the user, or as a module is cast or moved."""
    flat, broken = getattr(part, name), []
    for i, (p, view, place) in enumerate(zip(params, views, part.places[name], strict=True)):
        if view.data_ptr() != place:
            whole = part.layout.view(flat, i)
            _check_alike("gradient", view, whole)
            if keep:
                whole.copy_(view)
            views[i] = whole
            p.grad = views[i]
            broken.append(("gradient", p))
    return broken
