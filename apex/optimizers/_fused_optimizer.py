"""What the fused optimizers share: plans, states in full precision, and states loaded from any checkpoint."""

from __future__ import annotations

import functools
import itertools
import operator
import warnings

import torch

from apex._gradients import separate_gradients, writable_gradients
from apex._plain import plain
from apex._sharding import is_sharded, local, local_gradient
from apex.optimizers._amp_c import OverflowFlag
from apex.optimizers._arguments import check_numbers
from apex.optimizers._kept_options import KeptOptions
from apex.optimizers._plan import make_plan, refuse_sparse

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def full_precision(dtype):
    """The dtype that states and master weights have: float64 for float64 parameters, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class FusedOptimizer(KeptOptions, torch.optim.Optimizer):
    """Base of the optimizers that update all parameters of a group in one launch per dtype.

    Subclasses name their per-parameter states in `state_names` (each a tensor shaped like its parameter, of
    `_state_dtype`) and call `_all_plans()` in `step`, before any group changes. A group's step count is
    `group["step"]`, one for the whole group: a parameter that receives a gradient only now and then is corrected by
    the group's count.
    """

    state_names: tuple[str, ...] = ()
    count_names: tuple[str, ...] = ("step",)  # of states in checkpoints
    reads_found_inf = True  # step() leaves everything as it is where this attribute, a tensor, is not 0
    _saved_options = ("_step_supports_amp_scaling",)
    _dummy_overflow_buf = OverflowFlag()

    def __init__(self, params, defaults, set_grad_none=True):
        self._plans = {}
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    # ---- plans ---------------------------------------------------------------------------------------

    def _all_plans(self, first=True):
        """index -> plan, of each group with parameters; what a group is refused for is raised before one changes.

        first: no other op reads gradients before the plans run.
        """
        return self._plans_of([i for i, group in enumerate(self.param_groups) if group["params"]], first)

    def _plan(self, index):
        """The plan of group `index`."""
        return self._plans_of([index])[index]

    def _plans_of(self, indices, first=True):
        parts = {index: self._parts(index) for index in indices}
        kept = {}
        for index in indices:
            check_numbers(type(self).__name__, index, self.param_groups[index])
            kept.update((part, self._kept_plan(part)) for part in parts[index])
        for part, plan in kept.items():
            if plan is None:
                self._check_group(part)
        plans = {part: self._ready_plan(part, plan) for part, plan in kept.items()}
        for plan in plans.values():
            plan.check(alone=first and len(plans) == 1)
        return {index: self._joined(index, [plans[part] for part in parts[index]]) for index in indices}

    def _joined(self, index, plans):
        """The plans of the parts of group `index` as one."""
        return plans[0]

    def _kept_plan(self, index):
        """The plan of a group or part; None where parameters, states or gradients' presence changed since."""
        params = self._group(index)["params"]
        made_for, plan = self._plans.get(self._plan_key(index), ((), None))
        same = plan is not None and len(made_for) == len(params) and all(map(operator.is_, made_for, params))
        return plan if same and not (plan.watched_has_gradient() or plan.state_changed(self.state)) else None

    def _ready_plan(self, index, plan):
        """The plan, which is made where there is none."""
        if plan is None:
            plan = self._make_plan(index)
        if plan.shards is not None:
            plan = self._follow_shards(index, plan)
        return plan

    def _plan_key(self, index):
        """Group `index`, and what beside its parameters its plan depends on."""
        return index

    def _group(self, index):
        """The group, or the part of one, that has a plan of its own."""
        return self.param_groups[index]

    def _parts(self, index):
        """What `_group` takes for each part of group `index`."""
        return (index,)

    def _has_state(self, p):
        return bool(self.state.get(p))

    def _make_plan(self, index):
        group = self._group(index)
        params = group["params"]
        owned = list(zip(params, self._gradient_owners(params), strict=True))
        ready = self._ordered([p for p, owner in owned if owner.grad is not None or self._has_state(p)])
        for p in ready:
            self._init_state(p, group)
        waiting = [owner for p, owner in owned if owner.grad is None and not self._has_state(p)]
        lists = [[local(t) for t in column] for column in self._lists(ready, group)]
        names = ["gradient of parameter", "parameter", *self._list_names(ready, group)]
        owners = self._gradient_owners(ready)
        plan = make_plan(names, self._written(group), lists, owners, waiting, self.state, ready)
        plan.shards = [(p, local(p)) for p in ready] if any(map(is_sharded, ready)) else None
        plan.refuse_sparse = functools.partial(
            refuse_sparse, self._parameter(index), self._gradient_owners(params)
        )
        self._plans[self._plan_key(index)] = (list(params), plan)
        return plan

    def _follow_shards(self, index, plan):
        """A DTensor's gradient is a DTensor too: its local shard is handed over at every step."""
        if any(local(p) is not shard for p, shard in plan.shards):
            plan = self._make_plan(index)
        owners = self._gradient_owners([p for p, _ in plan.shards])
        plan.gradients = [local_gradient(owner) for owner in owners]
        plan.gradients = [g if g is None else plain(g, "a local gradient") for g in plan.gradients]
        if self._written(self._group(index)) & 1:
            shards = [shard for _, shard in plan.shards]
            plan.gradients = list(map(_laid_out_like, shards, plan.gradients))
        plan.set_gradients(plan.gradients)
        return plan

    def _gradient_owners(self, params):
        """The tensors whose .grad the op reads for these parameters of a group."""
        return params

    def _ordered(self, params):
        """In which order the op is given these parameters of a group."""
        return params

    def _states(self, group):
        """Names of the states that the op reads for this group's parameters."""
        return self.state_names

    def _lists(self, params, group):
        """The op's lists but the gradients, for these parameters: params, then one list for each state."""
        return [params, *([self.state[p][name] for p in params] for name in self._states(group))]

    def _list_names(self, params, group):
        return self._states(group)

    def _written(self, group):
        return ((1 << (len(self._states(group)) + 2)) - 1) & ~1  # everything but the gradients

    def _init_state(self, p, group):
        state = self.state[p]
        for name in self._states(group):
            if name not in state:
                state[name] = self._new_state(p)
        for name in self._float_states():
            if name not in state:
                continue
            dtype = self._kept_dtype(p, state[name].dtype)
            if dtype != state[name].dtype or local(state[name]).stride() != local(p).stride():
                laid_out = torch.empty_like(p, dtype=dtype, requires_grad=False)
                state[name] = laid_out.copy_(state[name])

    def _new_state(self, p):
        return torch.zeros_like(p, dtype=self._state_dtype(p), requires_grad=False)

    def _state_dtype(self, p):
        return full_precision(p.dtype)

    def _kept_dtype(self, p, dtype):
        """The dtype of a state that was made in another, as before model.double() or .half(): it stays where it serves
        this parameter, else it gets full precision."""
        full = full_precision(p.dtype)
        return dtype if dtype in (full, self._state_dtype(p)) else full

    def _check_group(self, index):
        """Raises what a plan of the group is refused for; nothing is changed."""
        params = self._group(index)["params"]
        self._check_parameters(index, params)
        refuse_sparse(self._parameter(index), self._gradient_owners(params))
        for i, p in enumerate(params):
            for name in self._float_states():
                state = self.state.get(p, {}).get(name)
                if isinstance(state, torch.Tensor) and state.shape != p.shape:
                    raise ValueError(
                        f"{self._parameter(index).format(i)} has shape {list(p.shape)}, its {name} "
                        f"{list(state.shape)}: load a state_dict() of these parameters"
                    )

    def _check_parameters(self, index, params):
        kinds = {local(p).device.type for p in params}
        for i, p in enumerate(params):
            where = self._parameter(index).format(i)
            if p.dtype not in SUPPORTED_DTYPES:
                raise TypeError(f"{where} is {p.dtype}; float16, bfloat16, float32 or float64 is required")
            if len(kinds) > 1 and p.device.type != params[0].device.type:
                raise ValueError(
                    f"{where} is on {p.device} but parameter 0 is on {params[0].device}: put parameters of the "
                    "CPU and of an accelerator into separate groups"
                )
        refuse_sparse(self._parameter(index), params)

    def _parameter(self, index):
        """What errors call a parameter of group `index`, to be formatted with its place there."""
        return f"{type(self).__name__}: parameter {{}} of group {index}"

    # ---- the interface of torch.optim.Optimizer ----------------------------------------------------------

    def zero_grad(self, set_to_none=None):
        """Drops gradients, or zeroes them if set_grad_none (or set_to_none here) is False."""
        params = [p for group in self.param_groups for p in group["params"]]
        if self.set_grad_none if set_to_none is None else set_to_none:
            for p in params:
                p.grad = None
            return
        separate_gradients(params)  # autograd adds to them
        grads = [p.grad for p in params if p.grad is not None]
        if {*map(type, grads)} - {torch.Tensor}:  # DTensors among them
            super().zero_grad(set_to_none=False)
            return
        by_kind = {}  # torch zeroes one by one where its own foreach is off
        for grad in grads:
            if grad.requires_grad:
                grad.detach_() if grad.grad_fn is not None else grad.requires_grad_(False)
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        try:
            for kind in by_kind.values():
                torch._foreach_zero_(kind)
        except RuntimeError:  # negative views and zero tensors, which it refuses
            for grad in writable_gradients(params):
                grad.zero_()

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self._plans.clear()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._plans = {}

    @torch._disable_dynamo
    def load_state_dict(self, state_dict):
        """Takes public apex's layout (`step` in the group) and torch's (`step` in each parameter's state).

        States get the precision that they have here: torch would round them to the parameter's dtype.
        """
        self._check_loaded(state_dict)
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        here = itertools.chain.from_iterable(g["params"] for g in self.param_groups)
        for key, p in zip(saved, here, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name in self._float_states() and isinstance(value, torch.Tensor):
                    self.state[p][name] = _copy_like(value, p, self._state_dtype(p))
        for index, group in enumerate(self.param_groups):
            self._load_step(index, group)
            for name, value in self.defaults.items():
                group.setdefault(name, value)  # torch's groups lack our options
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise ValueError(f"{type(self).__name__} cannot continue a checkpoint with {option}=True")
        self._plans.clear()

    def _check_loaded(self, state_dict):
        """Refuses another optimizer's checkpoint, which would start from zeros without a word."""
        for index, (group, saved) in enumerate(
            zip(self.param_groups, state_dict["param_groups"], strict=False)
        ):
            for key in saved["params"]:
                state = state_dict["state"].get(key)
                missing = [name for name in self._states({**group, **saved}) if name not in (state or ())]
                if missing and state:
                    raise ValueError(
                        f"{type(self).__name__}: the checkpoint's state of parameter {key} in group {index} "
                        f"holds {', '.join(sorted(map(str, state)))} but not {', '.join(missing)}: it is another "
                        "optimizer's, or was cut"
                    )

    def _float_states(self):
        return self.state_names

    def _load_step(self, index, group):
        steps = [self.state[p].pop("step") for p in group["params"] if "step" in self.state.get(p, ())]
        if steps and "step" not in group:
            counts = {int(step) for step in steps}
            if len(counts) > 1:
                warnings.warn(
                    f"{type(self).__name__}: the checkpoint holds step counts {min(counts)} to {max(counts)} in "
                    f"group {index}; fused optimizers keep one a group and continue from {max(counts)}",
                    stacklevel=3,
                )
            group["step"] = max(counts)


def _laid_out_like(shard, gradient):
    """The gradient with the strides of its shard: LAMB leaves the update in it."""
    if gradient is None or gradient.stride() == shard.stride():
        return gradient
    return torch.empty_like(shard, dtype=gradient.dtype).copy_(gradient)


def _copy_like(value, p, dtype):
    """`value` with the device, layout and sharding of `p`, in `dtype`."""
    if value.shape != p.shape:
        raise ValueError(f"a loaded state has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}")
    copy = torch.empty_like(p, dtype=dtype, requires_grad=False)
    with torch.no_grad():
        copy.copy_(value)
    return copy
