"""The plan that an optimizer keeps, and the watch over its states: csrc/bindings/{optimizer_plan,python_state_watch}.h
in Python."""

from __future__ import annotations

import operator
from itertools import chain

from apex._plain import Dtypes, layouts_differ
from apex._portable import fast
from apex._portable.plan import TensorPlan

_grad = operator.attrgetter("grad")


class OptimizerPlan:
    """Parameters and their states, whose gradients are read anew at every step.

    names begins with the gradients' name; lists hold the others: parameters first, then their states. owners are the
    tensors whose .grad are the gradients, watched parameters that have no state yet. Bit k of written: the op writes
    list k (0: gradients).
    """

    def __init__(self, names, written, lists, owners, watched):
        if len(names) != len(lists) + 1:
            raise ValueError("one name a list, gradients first")
        for name, column in zip(names[1:], lists, strict=True):
            if len(column) != len(owners):
                raise ValueError(f"{name} holds {len(column)} tensors for the gradients of {len(owners)}")
        self._names, self._written = list(names), written
        self._lists, self._owners = [list(column) for column in lists], list(owners)
        self._watched, self._gradients, self._plan = list(watched), None, None
        self._dtypes = Dtypes(self._owners, self._lists)
        listed = {id(t) for column in self._lists for t in column}
        self._owners_are_listed = all(id(owner) in listed for owner in self._owners)
        # Whether the plan is of the dtypes that are known; whether `is_outdated` has just read the lists for `run`.
        self._plan_is_of_dtypes = self._lists_are_read = False

    def watched_has_gradient(self):
        """Whether a watched parameter has received a gradient: its state is to be made, and a new plan."""
        return any(p.grad is not None for p in self._watched)

    def is_outdated(self):
        """Whether a list's tensor no longer lies in memory as the first list's (its parameter's) does, or a parameter
        has another dtype than it had: states and a new plan are to be made."""
        self._lists_are_read = self._plan_is_of_dtypes and self._plan.read_quickly(self._lists)
        if self._lists_are_read:  # which finds contiguous tensors of the plan's dtypes alone
            return False
        return self._dtypes.changed() or (bool(self._lists) and layouts_differ(self._lists))

    def set_gradients(self, gradients):
        """Gradients that are not the parameters' own .grad (local shards of a DTensor); None: .grad again."""
        if gradients is not None and len(gradients) != len(self._owners):
            raise ValueError(f"one gradient a parameter: {len(gradients)} for {len(self._owners)}")
        self._gradients = None if gradients is None else list(gradients)

    def run(self, op):
        """One step of an op that has its scalars."""
        if not self._owners:
            return
        own, read, self._lists_are_read = self._gradients is None, self._lists_are_read, False
        columns = [list(map(_grad, self._owners)) if own else self._gradients, *self._lists]
        plan = self._plan
        if plan is not None and (plan.owners is not None) == own and plan.run(op, columns, read):
            return
        self._plan = TensorPlan(self._names, self._written, columns, self._owners if own else None)
        self._plan_is_of_dtypes = self._owners_are_listed and not self._dtypes.changed()
        if not self._plan.run(op, columns):
            raise ValueError(f"{op.name}: a tensor's layout cannot be used; make it contiguous")

    @property
    def launches(self):
        """Of the last run; a bucket without elements needs none."""
        return self._plan.buckets_with_elements() if self._plan else 0


class StateWatch:
    """Notices that an optimizer's user replaced a state: opt.state[p] = {...}, opt.state[p]["exp_avg"] = tensor."""

    def __init__(self, states, params):
        self._states, self._params = states, list(params)
        self._rows = [states[p] for p in self._params if isinstance(states.get(p), dict)]
        self._values = [value for row in self._rows for value in row.values()]
        self._complete = len(self._rows) == len({id(p) for p in self._params})

    def holds(self, states):
        """Whether all of them, in this dict, are the objects they were."""
        if states is not self._states or not self._complete:
            return False
        if len(states) == len(self._rows):  # all are ours: in the dict's own order, or as ours at least
            same = all(map(operator.is_, states.values(), self._rows)) or self._same_by_key(states)
        else:
            same = self._same_by_key(states)
        if not same:
            return False
        if fast.module is not None:
            return fast.module.same_values(self._rows, self._values)
        now = list(chain.from_iterable(map(dict.values, self._rows)))
        return len(now) == len(self._values) and all(map(operator.is_, now, self._values))

    def _same_by_key(self, states):
        return all(states.get(p) is row for p, row in zip(self._params, self._rows, strict=True))
