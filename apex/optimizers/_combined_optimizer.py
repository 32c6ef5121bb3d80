"""What the optimizers over combined tensors share: one flat slice a group, states beside it, counts on the device."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from apex._loader.errors import ApexError
from apex.optimizers._arguments import check_numbers, evaluate
from apex.optimizers._plan import make_plan
from apex.optimizers._scalars import learning_rate
from apex.optimizers._scaling import Scaling

USE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")'


class CombinedOptimizer(torch.optim.Optimizer):
    """Base of the optimizers whose parameters, gradients and states lie in flat buffers, as amp.initialize makes them.

    A group's parameters are one slice of a buffer (two under O2: masters, and parameters that are float32
    themselves), so that a step is one launch a group over one or two long tensors. What lies between parameters is
    zero and stays so.

    Subclasses name their per-parameter states in `_states`, and update one group in `_update`. With `counts`, a group's
    steps are counted on the device: one int32 tensor, which is `state[p]["step"]` of each of its parameters.

    A parameter that has no gradient when tensors are combined is left alone. From then on a parameter that gets none
    is updated as with a gradient of zeros.
    """

    is_npu_fused_optimizer = True  # what amp.initialize knows these by; the name is the Ascend patch's
    reads_found_inf = True  # step() leaves everything as it is where this attribute, a tensor, is not 0
    combines_rows = False  # the first dimension of a parameter must be its outermost in memory
    counts = True
    _groups = None  # [GroupOfSlices or None]

    def _combined(self):
        combined = getattr(getattr(self, "_amp_stash", None), "combined", None)
        if combined is None:
            raise ApexError(f"apex.optimizers.{type(self).__name__} should be used with AMP.", remedy=USE)
        return combined

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure=None):
        """One update of every combined parameter; returns what `closure`, if given, returns.

        Raises ApexError (a RuntimeError) if the optimizer did not go through amp.initialize.
        """
        combined = self._combined()
        loss = evaluate(closure)
        for index, group in enumerate(self.param_groups):
            check_numbers(type(self).__name__, index, group)
        scaling = Scaling(self)
        groups = self._combined_groups(combined)
        self._before_groups(combined, groups)
        for group, slices in zip(self.param_groups, groups, strict=True):
            if slices is not None:
                self._update(group, slices, scaling.on(slices.device))
                # Parameters lie in the slices, but their versions, by which autograd knows of a change, are their own.
                increment_version([p for owners in slices.owners for p in owners])
        return loss

    def _before_groups(self, combined, groups):
        """What a step does once for all groups."""

    def _update(self, group, slices, scaling):
        """Updates one group. scaling: found_inf, or nothing."""
        raise NotImplementedError

    # ---- states --------------------------------------------------------------------------------------------

    def _states(self, group):
        """Names of a group's states, each float32 and shaped like its parameter, in the order in which the op reads."""
        return ()

    def _new_state(self, like):
        """A new state, flat."""
        return torch.zeros_like(like)

    def _combined_groups(self, combined):
        if (
            self._groups is None
            or self._made_for != self._signature(combined)
            or (combined.check and self._moved())
        ):
            self._made_for = self._signature(combined)
            self._groups = [
                self._combine_group(combined, i, group) for i, group in enumerate(self.param_groups)
            ]
        return self._groups

    def _signature(self, combined):
        return combined.generation, [self._states(group) for group in self.param_groups]

    def _moved(self):
        """Whether a state is not the view of its flat one any more."""
        return any(
            self.state[p].get(name) is not view
            for slices in self._groups
            if slices is not None
            for p, name, view in slices.views
        )

    def _combine_group(self, combined, index, group):
        slices = GroupOfSlices(combined.parts or (), index)
        if not slices.params:
            return None
        names = self._states(group)
        slices.states = {name: [self._new_state(param) for param in slices.params] for name in names}
        for number, (owners, layout) in enumerate(zip(slices.owners, slices.layouts, strict=True)):
            for i, p in enumerate(owners):
                state = self.state[p]
                for name in names:
                    view = layout.view(slices.states[name][number], i)
                    if isinstance(state.get(name), torch.Tensor):
                        view.copy_(state[name])
                    state[name] = view
                    slices.views.append((p, name, view))
        if self.counts:
            states = [self.state[p] for owners in slices.owners for p in owners]
            slices.count = max(int(state.get("step", 0)) for state in states)
            slices.step = torch.full((), slices.count, dtype=torch.int32, device=slices.device)
            for state in states:
                state["step"] = slices.step
        return slices

    def load_state_dict(self, state_dict):
        """Takes its own and torch.optim's layout. States move into the flat buffers at the next step."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._groups = None

    def __setstate__(self, state):
        super().__setstate__(state)
        self._groups = None


class GroupOfSlices:
    """A group's slices of the flat buffers.

    Attributes:
        owners, layouts: of each slice, its parameters and where they lie in it.
        params, grads: the slices, 1-D float32.
        states: name -> one flat state a slice; views: (parameter, name, its view) of each.
        step, count: steps so far, on the device and as the host knew when this was made.
    """

    def __init__(self, parts, index):
        self.owners, self.layouts, self.params, self.grads = [], [], [], []
        self.states, self.views, self.step, self.count = {}, [], None, 0
        self._plans = {}
        for part in parts:
            first, last, start, stop = part.slice(index)
            if first < last:
                self.owners.append(part.owners[first:last])
                self.layouts.append(part.layout.part(first, last))
                self.params.append(part.param[start:stop])
                self.grads.append(part.grad[start:stop])
        self.device = self.params[0].device if self.params else None

    def run(self, op, names, lr_from=None, **scalars):
        """One launch of a multi-tensor op over gradients, parameters and the states of these names.

        lr_from: the group whose learning rate it takes.
        """
        if lr_from is not None:
            scalars.update(learning_rate(lr_from, self.device))
        plan = self._plans.get((op, names))
        if plan is None:
            lists = [self.params, *(self.states[name] for name in names)]
            written = ((1 << (len(names) + 2)) - 1) & ~1
            plan = make_plan(["gradient", "parameter", *names], written, lists, self.params)
            plan.set_gradients(self.grads)
            self._plans[op, names] = plan
        plan.run(op, **scalars)

    def run_by_tensor(self, op, names, lr_from, **scalars):
        """The same over each parameter for itself, for ops that measure whole tensors; gradients are written too."""
        plan = self._plans.get((op, "by tensor"))
        if plan is None:
            owners = [p for owners in self.owners for p in owners]
            by_name = {name: [view for _, n, view in self.views if n == name] for name in names}
            lists = [owners, *(by_name[name] for name in names)]
            written = (1 << (len(names) + 2)) - 1
            plan = make_plan(["gradient", "parameter", *names], written, lists, owners)
            self._plans[op, "by tensor"] = plan
        plan.run(op, **learning_rate(lr_from, self.device), **scalars)

    def count_on_device(self, scaling):
        """Counts the step of an op that does not count."""
        found_inf = scaling.get("found_inf")
        self.step += 1 if found_inf is None else (found_inf == 0).reshape(())

    def counted(self):
        """Keywords of an op that counts its step on the device."""
        return dict(step=0, step_tensor=self.step, advance_step=True)
