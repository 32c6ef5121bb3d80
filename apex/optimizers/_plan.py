"""Plans: how an optimizer hands its tensors to a multi-tensor op at every step.

The native plan (C++, `_C.OptimizerPlan`) checks and re-reads all tensors in microseconds and launches once per
dtype. Where no binding fits this torch, or a parameter is laid out as no kernel takes it, ReferencePlan does
the same work through the reference op, on any device. On meta and fake tensors that op does nothing.
"""

from __future__ import annotations

import functools

import torch

from apex._loader import bindings, library
from apex._plain import Dtypes, check, is_shape_alone, layouts_differ, writable_gradient


def make_plan(names, written, lists, owners, watched=(), states=None, params=None):
    """A plan over `lists` (parameters first, then their states), whose gradients are read at each step.

    names: what errors call each list, the gradients' name first. written: bit k is set if the op writes list k
    (bit 0: gradients). The last of several lists may hold None for parameters that are without. owners: the
    tensors whose .grad are the gradients. watched: parameters without state; see `watched_has_gradient`.
    states: the optimizer's dict of states, where `lists` come from it for `params` (if None: for `owners`); see
    `state_changed`.
    """
    native = bindings.load().module
    listed = [t for column in lists for t in column if t is not None]
    if (
        native is None
        or not all(map(native.is_dense, listed))
        or any(map(is_shape_alone, (*listed, *owners)))
    ):
        return ReferencePlan(names, lists, owners, watched, states, params)
    watch = None if states is None else native.StateWatch(states, owners if params is None else params)
    return NativePlan(native, native.OptimizerPlan(names, written, lists, owners, watched), watch, owners)


def refuse_sparse(name, owners):
    """Raises RuntimeError if a gradient is sparse. name: what that calls a parameter, as "parameter {}"."""
    for i, owner in enumerate(owners):
        grad = owner.grad
        if grad is not None and grad.layout != torch.strided:
            raise RuntimeError(f"{name.format(i)} has a sparse gradient: fused optimizers take dense ones")


class _Plan:
    # Set by the optimizer: DTensors and the shards that the plan was made for, refuse_sparse of its parameters.
    shards = None

    def __init__(self, owners):
        self.refuse_sparse = functools.partial(refuse_sparse, "parameter {}", owners)


class NativePlan(_Plan):
    def __init__(self, module, plan, watch, owners):
        super().__init__(owners)
        self._module = module
        self._plan = plan
        self._watch = watch
        self.watched_has_gradient = plan.watched_has_gradient
        self.set_gradients = plan.set_gradients

    def state_changed(self, states):
        """Whether a state is not what the plan was made of, or not laid out as its parameter is, whose dtype may have
        changed, too: model.double()."""
        return self._plan.is_outdated() or (self._watch is not None and not self._watch.holds(states))

    def check(self, alone):
        """Raises RuntimeError for a sparse gradient, where this plan is not `alone`, but others would have run before.

        `run` compares all tensors of its own before it launches.
        """
        if not alone:
            self.refuse_sparse()

    def run(self, op, **scalars):
        """One step of `op` (multi_tensor_adam, ...); scalars are the op's, by the names of its schema.

        Returns the number of buckets: one per device and combination of dtypes.
        """
        try:
            bindings.entry(self._module, op)(self._plan, **scalars)
        except RuntimeError as error:
            library.raise_stored(error)  # the probe's own exception, if it refused to choose
            raise
        except TypeError:
            self.refuse_sparse()
            raise
        return self._plan.launches


class ReferencePlan(_Plan):
    def __init__(self, names, lists, owners, watched, states, params=None):
        super().__init__(owners)
        self._names = names
        self._lists = lists
        self._owners = owners
        self._watched = watched
        self._gradients = None
        self._states = states
        self._params = owners if params is None else params
        self._entries = self._state_entries()
        self._dtypes = Dtypes(owners, lists)

    def _state_entries(self):
        return [] if self._states is None else [dict(self._states.get(p, ())) for p in self._params]

    def state_changed(self, states):
        """As NativePlan's."""
        if states is not self._states or self._dtypes.changed():
            return True
        if self._lists and layouts_differ(self._lists):
            return True
        return any(
            old.keys() != new.keys() or any(old[name] is not new[name] for name in old)
            for old, new in zip(self._entries, self._state_entries(), strict=True)
        )

    def watched_has_gradient(self):
        return any(p.grad is not None for p in self._watched)

    def set_gradients(self, gradients):
        self._gradients = gradients

    def check(self, alone):
        """Raises RuntimeError, ValueError for gradients that `run` would refuse, perhaps behind others."""
        self.refuse_sparse()
        if self._gradients is not None or not self._lists:
            return
        for i, (owner, first) in enumerate(zip(self._owners, self._lists[0], strict=True)):
            if owner.grad is not None and owner.grad.numel() != first.numel():
                raise ValueError(
                    f"{self._names[0]}[{i}] has {owner.grad.numel()} elements but {self._names[1]}[{i}] has "
                    f"{first.numel()}"
                )

    def run(self, op, **scalars):
        self.refuse_sparse()
        grads = self._gradients
        if grads is None:
            grads = [writable_gradient(p) for p in self._owners]
        buckets = {}
        for i, row in enumerate(zip(grads, *self._lists, strict=True)):
            if row[0] is not None:
                row = row[:-1] if row[-1] is None else row
                for name, tensor in zip(self._names, row, strict=False):
                    if not is_shape_alone(tensor):
                        check(tensor, f"{name}[{i}]")
                buckets.setdefault((row[0].device, len(row)), []).append(row)
        devices = sorted({str(device) for device, _ in buckets})
        if len(devices) > 1 and scalars.get("step_tensor") is not None:
            raise ValueError(f"{op}: one step tensor cannot serve several devices: {devices}")
        for i, rows in enumerate(buckets.values(), 1):
            here = scalars
            if i < len(buckets) and scalars.get("advance_step"):  # the last call alone advances the step
                here = dict(scalars, step_tensor=scalars["step_tensor"] + 1, advance_step=False)
            _call_reference(op, [list(column) for column in zip(*rows, strict=True)], here)
        return len(buckets)


def _call_reference(op, lists, scalars):
    reference = getattr(torch.ops.apex_reference, op)
    tensor_lists = sum(str(a.type) == "List[Tensor]" for a in reference.default._schema.arguments)
    missing = [[] for _ in range(tensor_lists - len(lists))]  # an optional last list, as master weights have
    reference(*lists, *missing, **scalars)
