"""Functional ops: a kernel each, and the entry that eager calls take past torch's dispatcher.

A kernel is a function of the op's schema that fills in the C struct and calls libapex, or the reference where it must.
The dispatcher has it, too (module.py): tracers, modes, transforms and subclasses of torch.Tensor come that way. In
eager mode that costs 70 us a call, so an entry asks whether anything looks at the call, and else makes autograd's node
itself, out of what csrc/ops.schemas says of the op.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from apex._loader import registry
from apex._portable import tensors

# ---- who looks at a call ---------------------------------------------------------------------------------------------

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _private(path):
    """A function of torch that has no public name. Where a torch lacks it, one that says that somebody looks: then
    every call goes through the dispatcher, slower and as right."""
    found = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found or (lambda: 1)


_dispatch_modes, _function_modes = (
    _private("_len_torch_dispatch_stack"),
    _private("_len_torch_function_stack"),
)
_transforms, _tracing = _private("_functorch.maybe_current_level"), _private("_get_tracing_state")
_compiling = torch.compiler.is_compiling


def is_looked_at(given):
    """Whether a subclass, a mode, a transform, forward mode or a tracer has to do with a call of these tensors."""
    for tensor in given:
        if tensor is not None and type(tensor) not in _PLAIN_TYPES:
            return True
    return bool(
        _dispatch_modes()
        or _function_modes()
        or _transforms() is not None
        or _tracing() is not None
        or getattr(forward_ad, "_current_level", 0) >= 0
        or _compiling()
    )


# ---- kernels ---------------------------------------------------------------------------------------------------------

_keys, _foreign, _data_ptr = torch._C._dispatch_keys, tensors._FOREIGN, torch.Tensor.data_ptr
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
KERNELS = {}  # op -> Kernel


class Kernel:
    """An op's kernel, whose tensors are looked at first; `function` is the kernel alone."""

    def __init__(self, name, function):
        self.op = registry.schemas()[name]
        self.name, self.function = name, function
        self.arguments = self.op.arguments
        self.tensors = tuple(i for i, a in enumerate(self.arguments) if a.is_tensor)
        self.defaults = tuple(a.default for a in self.arguments)
        self.reference = getattr(torch.ops.apex_reference, name).default

    def __call__(self, *arguments, **keywords):
        if keywords or len(arguments) < len(self.arguments):
            arguments = self.complete(arguments, keywords)
        for i in self.tensors:
            tensor = arguments[i]
            if tensor is None:
                continue
            if _keys(tensor).raw_repr() & _foreign or tensor.dtype in _COMPLEX or not _has_memory(tensor):
                self._refuse(tensor, self.arguments[i].name)
        found = self.function(*arguments)
        return self.reference(*arguments) if found is None else found

    def complete(self, arguments, keywords):
        """All arguments in the schema's order: torch leaves those out that have their default and come last."""
        names = [a.name for a in self.arguments[len(arguments) :]]
        rest = zip(names, self.defaults[len(arguments) :], strict=True)
        return (*arguments, *(keywords.get(name, default) for name, default in rest))

    def _refuse(self, tensor, name):
        no_storage = not torch._C._has_storage(tensor) and not tensors.foreign_keys(tensor)
        if no_storage and not tensor.is_complex() and tensor.device.type not in ("cpu", "cuda"):
            return  # a device of another kind may have tensors without storage: there the reference runs
        tensors.refuse_unless_plain(tensor, f"apex::{self.name}: {name}")


def _has_memory(tensor):
    """apex._plain.has_memory, for the case that is almost always there in half its time."""
    if not tensor.is_contiguous():
        return tensors._plain.has_memory(tensor)
    numel = tensor.numel()
    if not numel:
        return True
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return False
    return held >= (tensor.storage_offset() + numel) * tensor.element_size()


def kernel(function):
    """Enters a function of an op's schema, of the op's name. It returns None where the reference must run."""
    KERNELS[function.__name__] = Kernel(function.__name__, function)
    return function


# ---- entries ---------------------------------------------------------------------------------------------------------

_Function = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)


class _Source:
    """The node of one op as Python source: `forward` keeps what the backward op is given, `backward` calls it."""

    def __init__(self, op):
        self.op, self.backward = op, registry.schemas()[op.backward]
        self.names = [a.name for a in op.arguments]
        self.results = [r.name or "result" for r in op.results]
        self.history = op.history or tuple(self.results[:1])  # what has gradients
        self.returned = op.entry or self.history
        self.gradients = [f"grad_{name}" for name in self.history]
        self.saved, self.known, self.given = [], [], []
        for i, argument in enumerate(self.backward.arguments):
            self.given.append(self._give(i, argument))

    def _give(self, i, argument):
        """The expression in the node's backward that an argument of the backward op is given."""
        name, text = argument.name, self.op.given.get(argument.name)
        unnamed = self.results == ["result"]
        if text is None and (name in self.gradients or (unnamed and i == 0)):
            return name if name in self.gradients else self.gradients[0]
        if text is not None and text.startswith("needed("):
            indices = [self.names.index(part.strip()) for part in text[7:-1].split(",")]
            return " or ".join(f"needs[{k}]" for k in indices)
        if text is None:
            text = name if name in self.names + self.results else "result"
        (self.saved if argument.is_tensor else self.known).append((f"of_{name}", text))
        return f"of_{name}"

    def _gradient_of(self, argument):
        results = [r.name for r in self.backward.results]
        wanted = self.op.gradient.get(argument, f"grad_{argument}")
        return results.index(wanted) if wanted in results else 0

    def text(self):
        names, results = ", ".join(self.names), ", ".join(self.results)
        comma = "," if len(self.results) == 1 and self.op.results[0].name else ""
        returned = ", ".join(self.returned)
        rest = [name for name in self.returned if name not in self.history]
        lines = [f"def forward(ctx, {names}):", f"    {results}{comma} = kernel({names})"]
        if rest:
            lines.append(f"    ctx.mark_non_differentiable({', '.join(rest)})")
        lines.append(f"    ctx.save_for_backward({', '.join(text for _, text in self.saved)})")
        lines.append(f"    ctx.known = ({''.join(f'{text}, ' for _, text in self.known)})")
        lines += ["    ctx.set_materialize_grads(False)", f"    return {returned}", ""]
        grads = [f"grad_{name}" for name in self.returned]
        lines += [f"def backward(ctx, {', '.join(grads)}):"]
        nothing = f"({'None, ' * len(self.names)})"
        lines += self._alone(nothing)
        for kept, where in ((self.saved, "saved_tensors"), (self.known, "known")):
            if kept:
                lines.append(f"    {''.join(f'{name}, ' for name, _ in kept)} = ctx.{where}")
        lines += ["    needs = ctx.needs_input_grad", f"    found = call({', '.join(self.given)})"]
        single = len(self.backward.results) == 1
        of = {a: "found" if single else f"found[{self._gradient_of(a)}]" for a in self.op.differentiable}
        made = [f"{of[a]} if needs[{i}] else None" if a in of else "None" for i, a in enumerate(self.names)]
        lines.append(f"    return {', '.join(made)},")
        return "\n".join(lines)

    def _alone(self, nothing):
        first = self.gradients[0]
        if not self.op.alone:
            return [f"    if {first} is None:", f"        return {nothing}"]
        ((alone, result),) = self.op.alone.items()
        given = [a for a in self.op.differentiable if self.op.gradient.get(a, f"grad_{a}") == result]
        made = ", ".join(alone if name in given else "None" for name in self.names)
        return [f"    if {first} is None:", f"        return {made},"]


def _node(op, run, call):
    """autograd's function of an op: `run` is its kernel, `call` calls its backward op."""
    scope = {"kernel": run, "call": call}
    exec(compile(_Source(op).text(), f"<apex {op.name}>", "exec"), scope)
    members = {"forward": staticmethod(scope["forward"]), "backward": staticmethod(scope["backward"])}
    return type(f"Apex_{op.name.removesuffix('_forward')}", (_Function,), members)


def caller(name):
    """Calls a backward op from a node: its kernel, or the dispatcher's op where its own derivative is wanted or
    something looks."""
    run, op = KERNELS[name], getattr(torch.ops.apex, name).default
    positions = run.tensors

    def call(*arguments):
        if torch.is_grad_enabled() or is_looked_at([arguments[i] for i in positions]):
            return op(*arguments)
        return run(*arguments)

    return call


class Entry:
    """The direct entry of an op, by the schema's arguments in their order; it returns what the op's entry returns."""

    def __init__(self, name, pair):
        op = registry.schemas()[name]
        self.pair, self.run = pair, KERNELS[name]
        self.dispatched = getattr(torch.ops.apex, name).default
        self.apply = _node(op, self.run, caller(op.backward)).apply if op.backward else None
        chosen = op.entry or op.history or ((op.results[0].name,) if op.results[0].name else ())
        self.outputs = (
            [[r.name for r in op.results].index(name) for name in chosen] if op.results[0].name else None
        )
        self.count, self.tensors = len(op.arguments), self.run.tensors
        self.differentiable = tuple(i for i, a in enumerate(op.arguments) if a.name in op.differentiable)
        self.first = self.tensors[0]

    def __call__(self, *arguments, **keywords):
        if keywords or len(arguments) < self.count:
            arguments = self.run.complete(arguments, keywords)
        given = [arguments[i] for i in self.tensors]
        if is_looked_at(given):
            return self._select(self.dispatched(*arguments))
        device_type = given[0].device.type
        if torch.is_autocast_enabled(device_type):
            arguments = self._autocast(device_type, arguments)
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_autocast_key(device_type))):
                return self._recorded(arguments)
        return self._recorded(arguments)

    def _recorded(self, arguments):
        if torch.is_grad_enabled():
            for i in self.differentiable:
                if arguments[i] is not None and arguments[i].requires_grad:
                    if self.apply is None:
                        return self._select(self.dispatched(*arguments))
                    return self.apply(*arguments)
        return self._select(self.run(*arguments))

    def _select(self, found):
        if self.outputs is None:
            return found
        return found[0] if self.outputs == [0] else tuple(found[i] for i in self.outputs)

    def _autocast(self, device_type, arguments):
        changed = self.pair.autocast(device_type, arguments, {})
        return tuple(
            changed.get(a.name, value) for a, value in zip(self.run.arguments, arguments, strict=True)
        )


def _autocast_key(device_type):
    return torch._C.DispatchKey.AutocastCPU if device_type == "cpu" else torch._C.DispatchKey.AutocastCUDA
