"""Combined tensors: an optimizer's gradients, and for a fused optimizer its parameters, in flat buffers.

Autograd then adds into the buffers, and what amp does to gradients is one launch a buffer. The buffers are made when
the first backward pass has left gradients: parameters without one stay out until they get one. Until then, and after
whatever makes buffers useless (a new group, parameters that were moved), gradients are treated one by one as always,
and the buffers are made, with the values of that time, after the next backward pass.
"""

from __future__ import annotations

import operator
import warnings

import torch

from apex._flat import DTYPES, Layout, addresses, alias, check_tensors
from apex._sharding import is_sharded
from apex.amp._convert import HALVES
from apex.amp._errors import AmpUsageError, AmpWarning


class Part:
    """The combined parameters of an optimizer that are of one kind, in the order of its groups.

    Kinds: float32 masters of half-precision parameters (`models`), parameters that are what the model computes with.

    Attributes:
        owners: what the optimizer updates, a list of parameters.
        models: the model's parameters behind masters, or None.
        sources: whose gradients autograd writes: models, or owners.
        layout: where they lie, the same for each buffer.
        bounds: (first, last) of each group in owners.
        grad, grads: flat gradients of owners, and the views that are their .grad.
        model_grad, model_grads: the same of models, or None.
        param: flat owners of a fused optimizer, or None; addresses: where they lie.
        stash: flat gradients that were there before a backward pass, or None; stashed: whether they count.
    """

    def __init__(self, owners, models, bounds, rows):
        self.owners, self.models, self.bounds = owners, models, bounds
        self.sources = owners if models is None else models
        self.layout = Layout(owners, rows)
        device, dtype = owners[0].device, owners[0].dtype
        self.grad = self.layout.zeros(dtype, device)
        self.grads = self.layout.views(self.grad)
        self.model_grad = self.model_grads = None
        if models is not None:
            self.model_grad = self.layout.zeros(models[0].dtype, device)
            self.model_grads = self.layout.views(self.model_grad)
        self.param = self.addresses = self.stash = None
        self.stashed = False
        self._clean = {}  # buffer's name -> its version when it was zeroed
        self._masks = {}

    @property
    def written(self):
        """The buffer that autograd writes."""
        return self.grad if self.models is None else self.model_grad

    def pairs(self):
        """[(parameters, their views, the buffer's name)] of each buffer of gradients."""
        found = [(self.owners, self.grads, "grad")]
        return found if self.models is None else [*found, (self.models, self.model_grads, "model_grad")]

    def zero(self, name):
        """Zeroes a buffer of gradients, unless nothing was written to it since that was done last."""
        if not self.is_zero(name):
            getattr(self, name).zero_()
            self._clean[name] = getattr(self, name)._version

    def is_zero(self, name):
        # A buffer and its views, into which autograd adds, count their changes together.
        return self._clean.get(name) == getattr(self, name)._version

    def written_by_kernels(self, name):
        """Kernels count no change."""
        self._clean.pop(name, None)

    def combine_params(self):
        self.param = self.layout.zeros(self.owners[0].dtype, self.owners[0].device)
        views = self.layout.views(self.param)
        torch._foreach_copy_(views, [p.detach() for p in self.owners])
        for p, view in zip(self.owners, views, strict=True):
            alias(p, view)
        self.addresses = addresses(self.owners)

    def set_aside(self):
        """What the buffer holds goes to the stash, if it may be anything but zero."""
        if self.is_zero("grad"):
            return
        if self.stash is None:
            self.stash = torch.empty_like(self.grad)
        self.stash.copy_(self.grad)
        self.stashed = True
        self.zero("grad")

    def mask(self, dtype):
        if dtype not in self._masks:
            self._masks[dtype] = self.layout.mask(dtype, self.grad.device)
        return self._masks[dtype]

    def slice(self, group):
        """(first, last) of the owners of a group, and the elements of a buffer that they take."""
        first, last = self.bounds[group]
        if first == last:
            return first, last, 0, 0
        start = self.layout.offsets[first]
        return first, last, start, self.layout.offsets[last - 1] + self.layout.slots[last - 1]


class Combination:
    """The combined tensors of one optimizer that went through amp.initialize.

    Args:
        optimizer: with its _amp_stash.
        check: look at every address at every entrance, rather than at what costs nothing to see.
        reducer: a combined DDP (see _combined_ddp), or None.

    Attributes:
        parts: list of Part, masters first; None while nothing is combined.
        generation: how often it was built.
        left_out: parameters that are in no buffer, for want of a gradient.
    """

    def __init__(self, optimizer, check=False, reducer=None):
        self.optimizer, self.check, self.reducer = optimizer, check, reducer
        self.fused = is_fused(optimizer)
        self.parts, self.generation, self.left_out = None, 0, []
        self._delayed = False

    # ---- building ------------------------------------------------------------------------------------------

    def dissolve(self):
        """Back to tensors one by one; they keep their values, and their places in the old buffers."""
        if self.parts is not None and self.reducer is not None:
            self.reducer.detach()
        for part in self.parts or ():
            if part.stashed:
                for i, p in enumerate(part.owners):
                    self._stash_of(p, part.layout.view(part.stash, i))
        self.parts = None

    def _stash_of(self, param, value):
        for params, grads in self.optimizer._amp_stash.stashes():
            for i, p in enumerate(params):
                if p is param:
                    grads[i] = value

    @torch.no_grad()
    def build(self):
        """Makes the buffers of what has a gradient, and moves values there."""
        self.dissolve()
        rows, self.left_out = self._collect()
        stashed = {}
        for params, grads in self.optimizer._amp_stash.stashes():
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
        if self.reducer is not None:
            try:
                self.reducer.attach(parts)
            except BaseException:
                self.dissolve()
                raise

    def _collect(self):
        """({(dtype, masters?): one list of (owner, model) a group}, what has no gradient)."""
        optimizer, stash = self.optimizer, self.optimizer._amp_stash
        model_of = {}
        if hasattr(stash, "fp16_groups"):
            model_of = {id(m): p for p, m in zip(stash.all_fp16_params, stash.masters(), strict=True)}
        waiting = {id(p) for ps, gs in stash.stashes() for p, g in zip(ps, gs, strict=True) if g is not None}
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

    def _restore(self, when, keep=True):
        """Gradients that are not the buffers' views any more become so, with their values if `keep`.

        A gradient that was set to None is zero. Anything else is reported.
        """
        broken = []
        for part in self.parts:
            for params, views, name in part.pairs():
                grads = [p.grad for p in params]
                if not all(map(operator.is_, grads, views)):
                    broken += _restore_replaced(part, params, views, name, keep)
                if self.check:
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
            if p.dtype != view.dtype or p.device != view.device or p.shape != view.shape:
                raise AmpUsageError(
                    f"a combined parameter was {view.dtype}, {tuple(view.shape)} on {view.device}, and is {p.dtype}, "
                    f"{tuple(p.shape)} on {p.device}",
                    remedy="move and cast models before amp.initialize",
                )
            with torch.no_grad():
                view.copy_(p)
            alias(p, view)
        return broken

    def _report(self, broken, when):
        kind, tensor = broken[0]
        group = self._group_of(tensor)
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        warnings.warn(
            f"combined tensors were destroyed and are recombined: at {when}, the {kind} of a parameter of shape "
            f"{tuple(tensor.shape)} in group {group}{more} did not lie in its buffer; please check what replaces "
            ".grad or .data (data_ptr, size, format), and write in place instead: p.grad.copy_(...)",
            AmpWarning,
            stacklevel=4,
        )

    def _group_of(self, tensor):
        stash = self.optimizer._amp_stash
        updated = [group["params"] for group in self.optimizer.param_groups]
        for groups in (updated, getattr(stash, "fp16_groups", ())):
            for index, group in enumerate(groups):
                if any(p is tensor for p in group):
                    return index
        return "?"

    # ---- a backward pass -------------------------------------------------------------------------------------

    def before_backward(self):
        """Empties what autograd is about to add into; False where nothing is combined yet."""
        if self.parts is not None and any(p.grad is not None for p in self.left_out):
            if self.reducer is not None:
                self.reducer.refuse_late_gradient()
            self.dissolve()
        if self.parts is None:
            return False
        with torch.no_grad():
            self._restore("scale_loss")
            for part in self.parts:
                if part.models is None:
                    part.set_aside()
                else:
                    part.zero("model_grad")  # what it held is in its masters' gradients already
        return True

    def begin(self, delayed):
        """A backward pass comes. One whose unscaling is delayed is averaged over ranks with the one after it."""
        self._delayed = delayed
        if self.parts is not None and self.reducer is not None and not delayed:
            self.reducer.start()

    def _average(self):
        try:
            self.reducer.finish()
        except BaseException:
            self.abandon()
            raise

    def stop(self):
        """The pass raised."""
        if self.reducer is not None and not self._delayed:
            self.reducer.abandon()

    @torch.no_grad()
    def after_backward(self, scaler):
        """Averages over ranks if that is asked for, and unscales: one launch a buffer."""
        if self.parts is None:
            self.build()
            if self.reducer is not None:
                self.reducer.reduce_whole()
        elif any(p.grad is not None for p in self.left_out):
            if self.reducer is not None:
                self.reducer.refuse_late_gradient()
            self.build()
        else:
            self._restore("the end of a backward pass")
            if self.reducer is not None:
                self._average()
        scaled = scaler.dynamic or scaler.loss_scale() != 1.0
        grads, targets, sums, stashed, results = [], [], [], [], []
        for part in self.parts or ():
            if part.models is not None and part.is_zero("grad"):
                grads.append(part.model_grad)
                targets.append(part.grad)
            elif part.models is not None:
                sums.append(part.model_grad)
                stashed.append(part.grad)
                results.append(part.grad)
            elif part.stashed:
                sums.append(part.grad)
                stashed.append(part.stash)
                results.append(part.grad)
            elif scaled:
                grads.append(part.grad)
                targets.append(part.grad)
            part.stashed = False
            for _, _, name in part.pairs():
                part.written_by_kernels(name)
        if grads:
            scaler.unscale(grads, targets, None, models_are_masters=False)
        if sums:
            scaler.unscale_with_stashed(sums, stashed, results)

    @torch.no_grad()
    def abandon(self):
        """After a backward pass that raised: gradients are what they were before it. False if nothing is combined."""
        if self.parts is None:
            return False
        for part in self.parts:
            for params, views, _ in part.pairs():
                _point(params, views)
            if part.models is not None:
                part.zero("model_grad")
            elif part.stashed:
                part.grad.copy_(part.stash)
                part.stashed = False
            else:
                part.zero("grad")
        return True

    # ---- steps -----------------------------------------------------------------------------------------------

    def zero_grad(self):
        """Zeroes the buffers, one launch each; False if nothing is combined."""
        if self.parts is None:
            return False
        with torch.no_grad():
            self._restore("zero_grad()", keep=False)
            for part in self.parts:
                for _, _, name in part.pairs():
                    part.zero(name)
                part.stashed = False
        for p in self.left_out:
            p.grad = None
        return True

    def before_step(self):
        """Everything lies where it should when the optimizer updates; called by amp's step()."""
        if self.parts is None:
            if self.fused:
                self.build()
        elif self.fused and any(p.grad is not None for p in self.left_out):
            if self.reducer is not None:
                self.reducer.refuse_late_gradient()
            self.build()
        elif self.fused or self.check:
            with torch.no_grad():
                self._restore("step()")

    def after_step(self):
        """Masters' gradients are spent; False if nothing is combined."""
        if self.parts is None:
            return False
        for part in self.parts:
            if part.models is not None:
                with torch.no_grad():
                    part.zero("grad")
        return True


def is_fused(optimizer):
    """Whether an optimizer updates combined tensors (CombinedAdam, NpuFusedAdam, ...)."""
    return bool(getattr(optimizer, "is_npu_fused_optimizer", False))


def _point(params, views):
    for p, view in zip(params, views, strict=True):
        if p.grad is not view:
            p.grad = view


def _move_gradients(params, views):
    """Gradients become these views of a zeroed buffer, with the values that they had; whether there were any."""
    check_tensors([p.grad for p in params if p.grad is not None], "gradient")
    held = [(view, p.grad) for p, view in zip(params, views, strict=True) if p.grad is not None]
    if held:
        torch._foreach_copy_([view for view, _ in held], [grad.detach() for _, grad in held])
    _point(params, views)
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
    """Gradients whose .data was replaced."""
    flat, broken = getattr(part, name), []
    start, size = flat.data_ptr(), flat.element_size()
    for i, (p, view) in enumerate(zip(params, views, strict=True)):
        if view.numel() and view.data_ptr() != start + size * part.layout.offsets[i]:
            views[i] = part.layout.view(flat, i)
            if keep:
                views[i].copy_(view)
            p.grad = views[i]
            broken.append(("gradient", p))
    return broken
