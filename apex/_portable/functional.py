"""Functional ops: a kernel each, and the entry that eager calls take past torch's dispatcher.

A kernel is a function of the op's schema that fills in the C struct and calls libapex, or the reference where it must.
The dispatcher has it, too (module.py): tracers, modes, transforms and subclasses of torch.Tensor come that way. In
eager mode that costs 70 us a call, so an entry asks whether anything looks at the call, and else makes autograd's node
itself, out of what csrc/ops.schemas says of the op.
"""

from __future__ import annotations

import functools
import operator
from types import SimpleNamespace

import torch
from torch.autograd import forward_ad

from apex._loader import autograd, registry
from apex._loader.op_model import REQUIRED
from apex._portable import fast, tensors
from apex.reference._leaves import given_if_compiled

# ---- who looks at a call ---------------------------------------------------------------------------------------------


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
# Its `_current_level` is -1 where there are no dual tensors.
_forward_mode = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=0)


# Source for functions that are compiled at load: whether no mode, transform, forward mode or tracer looks at a call.
# What types its tensors have is asked beside it.
_NOBODY = (
    "not (compiling() or dispatch_modes() or function_modes() or transforms() is not None or tracing() is not None"
    " or forward_mode._current_level >= 0)"
)
_LOOKING = {
    "types": frozenset((torch.Tensor, torch.nn.Parameter)), "dispatch_modes": _dispatch_modes,
    "function_modes": _function_modes, "transforms": _transforms, "tracing": _tracing,
    "forward_mode": _forward_mode, "compiling": torch.compiler.is_compiling, "grad_enabled": torch.is_grad_enabled,
}  # fmt: skip


# ---- kernels ---------------------------------------------------------------------------------------------------------

KERNELS: dict[str, Kernel] = {}


class Kernel:
    """An op's kernel: `run` is its function of the schema's arguments, whose tensors are looked at first.

    quick: the same by the module in C, which looks at them itself, or None. It returns None for what it does not take.
    """

    def __init__(self, name, function, quick=None):
        self.op = registry.schemas()[name]
        self.name, self.arguments = name, self.op.arguments
        self.tensors = tuple(i for i, a in enumerate(self.arguments) if a.is_tensor)
        self._scope = {
            "function": function, "quick": fast.module and quick,
            "keys": torch._C._dispatch_keys, "foreign": tensors._FOREIGN,
            "has_memory": tensors._plain.has_memory, "refuse": self._refuse, "apart": self._apart,
            "reference": getattr(torch.ops.apex_reference, name).default,
            "is_lazy": tensors.is_lazy, "dispatched": lambda *given: getattr(torch.ops.apex, name).default(*given),
        }  # fmt: skip
        self.run = self.trusting(())

    def trusting(self, known):
        """The same where these arguments, by name, were plain when a node kept them: all that may have happened to them
        is that their memory was freed."""
        names = ", ".join(a.name for a in self.arguments)
        lines = [f"def {self.name}({parameters(self.op)}):", *self._quickly(names)]
        for t in (a.name for a in self.arguments if a.is_tensor):
            held = (
                f"{t}.untyped_storage().nbytes() < ({t}.storage_offset() + {t}.numel()) * {t}.element_size()"
            )
            values = "" if t in known else f"keys({t}).raw_repr() & foreign or {t}.is_complex() or "
            memory = f"({t}.numel() and {held} if {t}.is_contiguous() else not has_memory({t}))"
            lines.append(f"    if {t} is not None and ({values}{memory}):")
            if (
                not self.op.writes
            ):  # a direct entry came past torch's dispatcher, which makes values of lazy views
                lines.append(f"        if is_lazy({t}): return dispatched({names})")
            lines.append(f"        if refuse({t}, {t!r}): return reference({names})")
        first, *others = (a.name for a in self.arguments if a.is_tensor)
        if others:
            apart = " or ".join(f"{t} is not None and {t}.device != {first}.device" for t in others)
            lines += [
                f"    if {first} is not None and ({apart}):",
                f"        apart({first}, {', '.join(others)})",
            ]
        lines.append(f"    found = function({names})")
        if self.op.returns_nothing:
            lines.append(f"    if found is None: reference({names})")
        else:
            lines.append(f"    return reference({names}) if found is None else found")
        return _compile(self.name, lines, self._scope)

    def _quickly(self, names):
        """What DLPack does not tell is whether a storage is as large as its tensor."""
        if self._scope["quick"] is None:
            return []
        held = "{0}.untyped_storage().nbytes() >= {0}.storage_offset() * {0}.itemsize + {0}.nbytes"
        tests = {"Tensor": held, "Tensor?": f"({{0}} is None or {held})"}
        all_held = " and ".join(tests[a.type].format(a.name) for a in self.arguments if a.is_tensor)
        return [
            "    try:",
            f"        held = {all_held}",
            "    except RuntimeError:",  # a tensor without storage
            "        held = False",
            f"    if held and (found := quick({names})) is not None:",
            "        return found",
        ]

    def _refuse(self, tensor, name):
        """Raises for a tensor that kernels cannot read; True: it is a shape alone, of which the reference knows."""
        if tensor.device.type == "meta":
            return True
        no_storage = not torch._C._has_storage(tensor) and not tensors.foreign_keys(tensor)
        if no_storage and not tensor.is_complex() and tensor.device.type not in ("cpu", "cuda"):
            return (
                False  # a device of another kind may have tensors without storage: there the reference runs
            )
        tensors.refuse_unless_plain(tensor, f"apex::{self.name}: {name}")
        return False

    def _apart(self, first, *others):
        """Raises for the last tensor that lies on another device: kernels would read another device's memory."""
        names = [a.name for a in self.arguments if a.is_tensor]
        for name, tensor in reversed(list(zip(names[1:], others, strict=True))):
            if tensor is not None and tensor.device != first.device:
                raise ValueError(
                    f"{self.name}: {name} is on {tensor.device} but {names[0]} is on {first.device}"
                )


def parameters(op):
    """An op's arguments as those of a Python function."""
    return ", ".join(a.name if a.default is REQUIRED else f"{a.name}={a.default!r}" for a in op.arguments)


def _compile(name, lines, scope):
    """The function of that name that these lines of source define: what is asked at every call is written out, for a
    loop over an op's arguments takes longer than the kernel."""
    exec(compile("\n".join(lines), f"<apex {name}>", "exec"), scope)
    return scope[name]


def kernel(function=None, *, quick=None):
    """Enters a function of an op's schema, of the op's name. It returns None where the reference must run; of an op
    without results anything else says that it did not.

    quick: see Kernel.
    """
    if function is None:
        return functools.partial(kernel, quick=quick)
    KERNELS[function.__name__] = Kernel(function.__name__, function, quick)
    return function


# ---- entries ---------------------------------------------------------------------------------------------------------


class _Source:
    """The node of one op as Python source: `forward` keeps what the backward op is given, `backward` calls it."""

    def __init__(self, op):
        self.op, self.backward = op, registry.schemas()[op.backward]
        self.names = [a.name for a in op.arguments]
        self.results = [r.name or "result" for r in op.results]
        self.history = op.history or tuple(self.results[:1])  # what has gradients
        self.returned = tuple(dict.fromkeys((*self.history, *(op.entry or ()))))
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
        given, looked = ", ".join(self.given), [f"type({name}) in types" for name in self.gradients[:1]]
        looked += [f"({name} is None or type({name}) in types)" for name in self.gradients[1:]]
        lines += [
            "    needs = ctx.needs_input_grad",
            f"    if not grad_enabled() and {' and '.join(looked)} and {_NOBODY}:",
            f"        found = run({given})",
            "    else:",
            f"        found = call({given})",
        ]
        single = len(self.backward.results) == 1
        of = {a: "found" if single else f"found[{self._gradient_of(a)}]" for a in self.op.differentiable}
        made = [f"{of[a]} if needs[{i}] else None" if a in of else "None" for i, a in enumerate(self.names)]
        lines.append(f"    return {', '.join(made)},")
        return "\n".join(lines)

    def _alone(self, nothing):
        first, *others = self.gradients
        if not self.op.alone:
            lines = [
                f"    if {first} is None and {other} is not None: {first} = zeros_like({other})"
                for other in others
            ]
            return [*lines, f"    if {first} is None:", f"        return {nothing}"]
        ((alone, result),) = self.op.alone.items()
        given = [a for a in self.op.differentiable if self.op.gradient.get(a, f"grad_{a}") == result]
        made = ", ".join(alone if name in given else "None" for name in self.names)
        # Compiled autograd takes no None for an input that is asked for.
        kept = {text: name for name, text in self.saved if text in self.op.differentiable}
        whole = ", ".join(
            alone if name in given else f"given_if_compiled(None, {kept.get(name)})" for name in self.names
        )
        return [
            f"    if {first} is None:",
            f"        if not compiling(): return {made},",
            f"        {''.join(f'{name}, ' for name, _ in self.saved)} = ctx.saved_tensors",
            f"        return {whole},",
        ]


def _recorded_call(op, run):
    """An op with autograd's node, as a function of its arguments that returns what its entry does: `run` is its kernel.
    The node's backward calls the backward op's kernel, or the dispatcher's op where its own derivative is wanted or
    something looks."""
    source, backward = _Source(op), KERNELS[op.backward]
    kept = [
        a.name for a, text in zip(backward.arguments, source.given, strict=True) if text.startswith("of_")
    ]
    scope = {
        **_LOOKING, "kernel": run, "run": backward.trusting(kept),
        "call": getattr(torch.ops.apex, op.backward).default, "zeros_like": torch.zeros_like,
        "given_if_compiled": given_if_compiled,
    }  # fmt: skip
    exec(compile(source.text(), f"<apex {op.name}>", "exec"), scope)
    members = {"forward": staticmethod(scope["forward"]), "backward": staticmethod(scope["backward"])}
    node = type(f"Apex_{op.name.removesuffix('_forward')}", (autograd.function(),), members)
    chosen = op.entry or source.history
    if source.returned == chosen:
        return node.apply
    indices = [source.returned.index(name) for name in chosen]
    pick = operator.itemgetter(*indices)
    return lambda *arguments: pick(node.apply(*arguments))


class Entry:
    """The direct entry of an op: `function` takes the schema's arguments in their order, and returns what the op's
    entry returns. pair: its reference's autograd and autocast, or None."""

    def __init__(self, name, pair):
        self.op, self.pair, self.kernel = registry.schemas()[name], pair, KERNELS[name]
        self.dispatched = getattr(torch.ops.apex, name).default
        self.apply = _recorded_call(self.op, self.kernel.run) if self.op.backward else self._dispatch
        scope = {
            **_LOOKING, "any_autocast": getattr(torch._C, "_is_any_autocast_enabled", lambda: True),
            "apply": self.apply, "run": self.kernel.run, "dispatch": self._dispatch, "autocast": self._autocast,
        }  # fmt: skip
        self.function = _compile(name, self._source(), scope)

    def _outputs(self):
        """Indices of the results that the entry returns; None: the one result, or none."""
        results = [r.name for r in self.op.results]
        if not results or not results[0]:
            return None
        chosen = self.op.entry or self.op.history or (results[:1] if self.op.backward else results)
        return [results.index(name) for name in chosen]

    def _select(self, expression):
        outputs = self._outputs()
        if outputs is None:
            return f"return {expression}"
        parts = [f"found[{i}]" for i in outputs]
        return f"found = {expression}; return {parts[0] if len(parts) == 1 else ', '.join(parts)}"

    def _source(self):
        names = ", ".join(a.name for a in self.op.arguments)
        tests = {"Tensor": ("{0}",), "Tensor?": ("({1} is None or {0})", "({1} is not None and {0})")}
        of_type, recorded = [], []
        for argument in self.op.arguments:
            if argument.is_tensor:
                forms, name = tests[argument.type], argument.name
                of_type.append(forms[0].format(f"type({name}) in types", name))
                if name in self.op.differentiable:
                    recorded.append(forms[-1].format(f"{name}.requires_grad", name))
        lines = [
            f"def {self.op.name}({parameters(self.op)}):",
            f"    if {' and '.join(of_type)} and {_NOBODY}:",
        ]
        lines += ["        if any_autocast():", f"            return autocast({names})"]
        if recorded:
            lines += [
                f"        if grad_enabled() and ({' or '.join(recorded)}):",
                f"            return apply({names})",
            ]
        return [*lines, f"        {self._select(f'run({names})')}", f"    return dispatch({names})"]

    def _dispatch(self, *arguments):
        found, outputs = self.dispatched(*arguments), self._outputs()
        if outputs is None:
            return found
        return found[outputs[0]] if len(outputs) == 1 else tuple(found[i] for i in outputs)

    def _autocast(self, *arguments):
        """Under autocast: the arguments as its rule changes them, and then without it."""
        device_type = arguments[self.kernel.tensors[0]].device.type
        if self.pair is None or not torch.is_autocast_enabled(device_type):
            return self._recorded(arguments)
        changed = self.pair.autocast(device_type, arguments, {})
        arguments = [changed.get(a.name, v) for a, v in zip(self.op.arguments, arguments, strict=True)]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_autocast_key(device_type))):
            return self._recorded(arguments)

    def _recorded(self, arguments):
        wanted = [
            v for a, v in zip(self.op.arguments, arguments, strict=True) if a.name in self.op.differentiable
        ]
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wanted):
            return self.apply(*arguments)
        found, outputs = self.kernel.run(*arguments), self._outputs()
        if outputs is None:
            return found
        return found[outputs[0]] if len(outputs) == 1 else tuple(found[i] for i in outputs)


def _autocast_key(device_type):
    return torch._C.DispatchKey.AutocastCPU if device_type == "cpu" else torch._C.DispatchKey.AutocastCUDA
