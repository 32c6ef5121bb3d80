"""An op over lists of tensors: how a call's scalars become the C struct, plans of lists that are passed anew at every
call, and one number for each tensor of a call.

csrc/ops.schemas says most of it: the lists, which of them the op writes, the struct, how many quantities are reduced,
which field an argument goes to. What the compiled bindings write by hand of each op is in multi_tensor.py.
"""

from __future__ import annotations

import threading

import torch

from apex._loader import registry, system
from apex._loader.op_model import REQUIRED
from apex._portable import interface, tensors, workspace
from apex._portable.plan import TensorPlan

_INTEGERS = ("noop_flag", "step_tensor", "growth_tracker", "hysteresis_tracker", "overflow_flag")


def _field(op, argument):
    name = op.field.get(argument.name, argument.name)
    if argument.is_tensor and name.endswith("_tensor"):
        return name.removesuffix("_tensor") + "_on_device"
    return name


def _check_betas(op, call):
    beta1, beta2 = call["beta1"], call["beta2"]
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"{op}: betas must lie in [0, 1), not {beta1:g} and {beta2:g}")


def _check_mode(op, call):
    if call["decay_mode"] not in (0, 1):
        raise ValueError(f"{op}: decay_mode is 0 (L2) or 1 (decoupled), not {call['decay_mode']}")


def _check_step(op, call):
    if (
        call.get("step_tensor") is None
        and call.get("bias_correction", True)
        and not 1 <= call["step"] < 2**31
    ):
        raise ValueError(f"{op}: step counts from 1, not {call['step']}")


_CHECKS = {"betas": _check_betas, "decay_mode": _check_mode, "step": _check_step}


class ListOp:
    """One op. Subclasses say what is not in csrc/ops.schemas."""

    extra: tuple[str, ...] = ()  # fields that `more` fills in

    def __init__(self, name):
        self.name, self.unit = name, name.encode()
        self.model = registry.schemas()[name]
        self.lists = [argument.name for argument in self.model.lists]
        self.written = sum(argument.written << k for k, argument in enumerate(self.model.lists))
        self.reductions = int(self.model.reductions)
        self.arguments = [argument for argument in self.model.arguments if not argument.is_list]
        self.defaults = {a.name: a.default for a in self.arguments if a.default is not REQUIRED}
        self.names = tuple(argument.name for argument in self.arguments)
        self._checks = [_CHECKS[what] for what in self.model.checks]
        self._set = [compile(text, field, "eval") for field, text in self.model.set.items()]
        self._more = [compile(text, name, "eval") for text in self.model.call]
        self._per_tensor = [(a.name, a.written) for a in self.arguments if a.name in self.model.per_tensor]
        self._advances = "advance_step" in self.names
        self._layout()
        self.c = interface.function(f"apex_{name}")
        # The gradients are written by the calls that unscale them; the schema can only say that they may be.
        if "unscale_grads" in self.names:
            self.written &= ~1

    def _layout(self):
        """How the struct is packed: scalars, pointers, what `_derived` works out, and what `more` does."""
        layout, model = interface.layout(self.model.launch), self.model
        derived = ["step_offset", "advance_step"] * self._advances + [*model.set]
        derived += [model.per_tensor[name] for name, _ in self._per_tensor]
        others = {*derived, *self.extra}
        named = [(a, _field(model, a)) for a in self.arguments]
        named = [(a, field) for a, field in named if field in layout.codes and field not in others]
        named.sort(key=lambda pair: pair[0].is_tensor)
        self._scalars = [a.name for a, _ in named if not a.is_tensor]
        self._pointers = [
            (a.name, torch.int32 if a.name in _INTEGERS else torch.float32, a.written)
            for a, _ in named
            if a.is_tensor
        ]
        self._pack = layout.packer(*(field for _, field in named), *derived, *self.extra)

    def _derived(self, call, launch, kept):
        """The fields that several arguments or the launch make."""
        values, advance = [], self._advances and call["advance_step"]
        if self._advances:  # by the last launch alone, after every other has read it
            values += [advance, advance and launch.last]
        values += [eval(code, {"l": launch}, call) for code in self._set]
        for name, written in self._per_tensor:
            kept.append(PerTensor(call[name], launch, name))
            values.append(kept[-1].address(written))
        return values

    def call(self, keywords):
        """All scalars of a call, by name; raises TypeError as a function of these keywords would."""
        given = {**self.defaults, **keywords}
        if len(given) != len(self.names):
            wrong = sorted(set(given) ^ set(self.names))
            raise TypeError(f"{self.name}: these arguments are missing, or unknown: {', '.join(wrong)}")
        return given

    def check(self, call):
        """Raises ValueError for scalars that the op does not take."""
        for check in self._checks:
            check(self.name, call)
        self.check_more(call)

    # ---- what ops say by themselves

    def check_more(self, call):
        """Checks of this op alone."""

    def more(self, call, launch, kept):
        """The fields `extra`. kept: memory that must live until the launch is queued."""
        return ()

    def arguments_of(self, call):
        """Arguments of the C function after the struct."""
        return [eval(code, {}, call) for code in self._more]

    def after(self, kept):
        """Called after a launch, or after the reference."""
        for one in kept:
            if isinstance(one, PerTensor):
                one.write_back()

    def before_reference(self, call, launch, kept):
        """The scalars of the reference of one bucket."""
        changed = {}
        if self._advances and call["step_tensor"] is not None and call["advance_step"] and not launch.last:
            changed |= {"step_tensor": call["step_tensor"] + 1, "advance_step": False}
        for name, _ in self._per_tensor:
            kept.append(PerTensor(call[name], launch, name))
            changed[name] = kept[-1].bucket
        return call | changed

    def place_lists(self, call, lists):
        """A bucket's lists by the schema's names."""
        return dict(zip(self.lists, lists, strict=False))

    def chosen(self, call, given):
        """(names, lists) of what a call takes of all lists; raises ValueError."""
        names = [name for name in self.lists if name not in self.model.optional or len(given[name])]
        return names, [given[name] for name in names]

    # ---- running

    def on(self, call):
        """The op with its scalars, as TensorPlan runs it."""
        return Running(self, call)

    def run(self, *arguments, **keywords):
        """The dispatcher's kernel: arguments as the schema has them."""
        given = dict(zip((a.name for a in self.model.arguments), arguments, strict=False)) | keywords
        lists = {name: given.pop(name) for name in self.lists}
        call = self.call(given)
        self.check(call)
        self.run_on(*self.chosen(call, lists), call)

    def run_on(self, names, lists, call):
        run_once(self.on(call), names, self.written & ((1 << len(lists)) - 1), lists)

    def entry(self, lists, call):
        """The direct entry over lists: [gradients, parameters, ...]."""
        self.check_count(lists)
        given = dict(zip(self.lists, [*lists, *[[]] * (len(self.lists) - len(lists))], strict=True))
        self.check(call)
        self.run_on(*self.chosen(call, given), call)

    def check_count(self, lists):
        """Raises ValueError for a wrong number of lists."""
        most, optional = len(self.lists), self.model.optional
        least = most - len(optional)
        if least <= len(lists) <= most:
            return
        wanted = "" if least == most else f"{least} to " if most - least > 1 else f"{least} or "
        named = ", ".join(f"[{name}]" if name in optional else name for name in self.lists)
        raise ValueError(f"{self.name}: {wanted}{most} tensor lists ({named}) are required, not {len(lists)}")

    def step(self, plan, call):
        """The direct entry over an optimizer's plan."""
        self.check(call)
        plan.run(self.on(call))


class Running:
    def __init__(self, op, call):
        self.op, self.call = op, call
        self.name, self.unit, self.reductions = op.name, op.unit, op.reductions
        self.gradients_written = bool(call.get("unscale_grads") and call["inv_scale"] is not None)

    def launch(self, launch):
        op, call, kept = self.op, self.call, []
        device = launch.device
        values = [call[name] for name in op._scalars]
        if "unscale_grads" in call:
            values[op._scalars.index("unscale_grads")] = self.gradients_written
        values += [
            tensors.scalar(call[name], name, dtype, device, written) for name, dtype, written in op._pointers
        ]
        packed = op._pack(*values, *op._derived(call, launch, kept), *op.more(call, launch, kept))
        arguments = launch.place, launch.lists, packed, *op.arguments_of(call)
        status = workspace.status_of(op.c, device, *arguments) if op.model.workspace else op.c(*arguments)
        op.after(kept)
        return status

    def reference(self, lists, launch):
        op, kept = self.op, []
        named = {name: [] for name in op.lists} | op.place_lists(self.call, lists)
        scalars = op.before_reference(self.call, launch, kept)
        getattr(torch.ops.apex_reference, op.name)(**named, **scalars)
        op.after(kept)


# ---- plans of lists that are passed anew at every call --------------------------------------------------------------

_remembered: dict = {}  # shapes of lists -> their plan
_most = 64


def _fresh_lock():
    global _lock
    _lock = threading.Lock()


_fresh_lock()
system.in_forked_child(_fresh_lock)  # a thread that the child has not may hold it


def run_once(op, names, written, lists):
    """Runs an op once on lists that the caller does not keep: plans are remembered by shape, not by tensor."""
    for k in range(1, len(lists)):
        if len(lists[k]) != len(lists[0]):
            raise ValueError(
                f"{op.name}: {names[k]} holds {len(lists[k])} tensors but {names[0]} holds {len(lists[0])}"
            )
    if not lists or not lists[0]:
        return
    key = (
        op.name,
        written,
        *(tuple((t.numel(), t.dtype, t.device) for t in column if t is not None) for column in lists),
    )
    with _lock:  # taken out while in use: two threads never share one plan
        plan = _remembered.pop(key, None)
    if plan is None or plan.tensors != len(lists[0]) or not plan.run(op, lists):
        plan = TensorPlan(names, written, lists)
        if not plan.run(op, lists):
            raise ValueError(f"{op.name}: a tensor's layout cannot be used; pass contiguous tensors")
    with _lock:
        _remembered[key] = plan
        if len(_remembered) > _most:
            del _remembered[next(iter(_remembered))]


# ---- one number for each tensor of a call ----------------------------------------------------------------------------


class PerTensor:
    """One number for each tensor of a call, in a float32 tensor, as a bucket's kernels number their own tensors: where
    those do not stand side by side, they are copied out, and back by `write_back`."""

    def __init__(self, numbers, launch, name):
        self.bucket, self._runs, self._all = None, (), numbers
        if numbers is None:
            return
        if numbers.dtype is not torch.float32:
            raise TypeError(f"{name} must be a float32 tensor, not {tensors.dtype_name(numbers.dtype)}")
        if numbers.device != launch.device:
            raise ValueError(f"{name} is on {numbers.device} but the tensors are on {launch.device}")
        if not tensors.is_plain(numbers):
            tensors.refuse_unless_plain(numbers, name)
        if not numbers.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
        if numbers.numel() != launch.tensors:
            raise ValueError(f"{name} holds {numbers.numel()} elements for {launch.tensors} tensors")
        if len(launch.members) == launch.tensors or launch.check_only:
            self.bucket = numbers
            return
        self._runs = _runs(numbers.view(-1), launch.members)
        self.bucket = self._runs[0] if len(self._runs) == 1 else torch.cat(self._runs)

    def address(self, written=False):
        """Of the bucket's numbers; 0 if none were given."""
        if self.bucket is None:
            return 0
        if written:
            tensors.bump_version(self._all)
        return self.bucket.data_ptr()

    def write_back(self):
        """After the launch."""
        if len(self._runs) < 2:
            return
        first = 0
        for run in self._runs:
            run.copy_(self.bucket[first : first + run.numel()])
            first += run.numel()


def _runs(row, members):
    """The parts of `row` that the members are, in order."""
    found, first = [], 0
    for last in range(1, len(members) + 1):
        if last == len(members) or members[last] != members[last - 1] + 1:
            found.append(row[members[first] : members[last - 1] + 1])
            first = last
    return found or [row[:0]]
