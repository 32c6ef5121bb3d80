"""A flat buffer of gradients, what lies in it, and the copy of what it held before a backward pass."""

from __future__ import annotations

import torch

from apex._flat import Layout, addresses, alias


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
        places: buffer's name -> where its views lie.
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
        self.places = {name: addresses(views) for _, views, name in self.pairs()}
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
