"""Ops that return fresh tensors, or write arguments by a binding's own hand: the struct of their arguments, their
kernels, the Node that autograd records."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from apex._loader.op_model import REQUIRED, Argument, Op
from build_matrix.errors import BuildError
from build_matrix.generator import cpp
from build_matrix.generator.cpp import camel, listed

# What the generated text calls things of its own.
RESERVED = {
    "name", "unit", "check", "outputs", "launch", "formula", "autograd", "place", "made", "op", "keys", "node", "guard",
    "recorded", "result", "found", "gradients", "kept", "shown", "wants", "m", "py", "apex", "at", "std", "torch",
}  # fmt: skip


def declaration(op: Op, together: Sequence[Op] = ()) -> str:
    """The struct whose functions the binding writes. together: all ops that share its header."""
    cpp.refuse_names(op, RESERVED)
    members = [(cpp.type_of(a).borrowed or cpp.type_of(a).parameter, a.name) for a in op.arguments]
    lines = [
        f"struct {camel(op.name)} {{",
        f'  static constexpr const char *name = "{op.name}", *unit = "{op.unit}";',
        f"  using Result = {cpp.result_type(op)};",
        listed("  using Signature = Result(", _parameter_types(op), ");"),
        "",
        *(f"  {kind} {name};" for kind, name in members),
        "",
    ]
    for declared, comment in _functions(op):
        lines += [] if op.shared else [f"  // {comment}", f"  {declared} const;"]
    return "\n".join([*lines, *(_by_shared(op, together) if op.shared else []), "};"])


def _functions(op: Op) -> list[tuple[str, str]]:
    """(declaration, what it does) of the functions that are written by hand."""
    found = [("void check()", "Throws for arguments that do not fit. Sizes may be symbols.")]
    if op.returns_nothing:
        return [*found, ("bool launch(const apex_place& place)", "False: the reference must run.")]
    found += [
        ("Result outputs()", "The results without their values. Sizes may be symbols."),
        ("bool launch(const apex_place& place, Result& made)", "False: the reference must run."),
    ]
    if op.double_backward.startswith("formula"):
        found.append(("Result formula()", "The same by torch's ops, which can be differentiated again."))
    if "autograd" in op.by_hand:
        found.append(("Result autograd(c10::DispatchKeySet keys)", "The kernel that autograd records."))
    return found


def _by_shared(op: Op, together: Sequence[Op]) -> list[str]:
    """Likewise, by the functions of all ops of the header."""
    own = op.shared
    given = [f".is_forward = {str(op.name.endswith('_forward')).lower()}"]
    ordered = [name for name in _kinds(together) if op.argument(name)]
    given += [f".{name} = {name}" for name in ("name", "unit", *ordered)]
    made = [f"std::move(made.{result.name or 'output'})" for result in op.results]
    lines = [
        listed(f"  {own}::Arguments arguments() const {{ return {{", given, "}; }"),
        listed(f"  static Result results({own}::Results&& made) {{ return {{", made, "}; }"),
        f"  void check() const {{ {own}::check(arguments()); }}",
        f"  Result outputs() const {{ return results({own}::outputs(arguments())); }}",
        "  bool launch(const apex_place& place, Result& made) const {",
        f"    {own}::Results found;",
        f"    if (!{own}::launch(arguments(), place, found)) return false;",
        "    made = results(std::move(found));",
        "    return true;",
        "  }",
    ]
    if op.double_backward.startswith("formula"):
        lines.append(f"  Result formula() const {{ return results({own}::formula(arguments())); }}")
    return lines


def _kinds(ops: Sequence[Op]) -> dict[str, str]:
    """name -> type of all arguments of these ops, in the order in which they come."""
    kinds: dict[str, str] = {}
    for op in ops:
        for argument in op.arguments:
            if kinds.setdefault(argument.name, argument.type) != argument.type:
                raise BuildError(
                    f"{op.name}: {argument.name} has another type in an op that shares {op.shared}.h"
                )
    return kinds


def shared(ops: list[Op]) -> str:
    """The arguments of several ops as one struct, and their results as another."""
    kinds = _kinds(ops)
    members = [f"  {cpp.ABSENT[kind].format(name)};" for name, kind in kinds.items()]
    results = list(dict.fromkeys(result.name or "output" for op in ops for result in op.results))
    return "\n".join([
        '#include "functional.h"', "", f"namespace apex::{ops[0].shared} {{",
        "// Of any of these ops: empty, false or 0 what one is without.", "struct Arguments {",
        "  bool is_forward;", "  const char *name, *unit;", *members, "};",
        listed("struct Results { at::Tensor ", results, "; };"), f"}}  // namespace apex::{ops[0].shared}", "",
    ])  # fmt: skip


def _parameter_types(op: Op) -> list[str]:
    return [cpp.type_of(a).parameter for a in op.arguments]


def kernels(op: Op, ops: dict[str, Op]) -> str:
    """Everything but the kernel itself, which is a template: autograd, autocast."""
    parts = []
    if "autograd" in op.by_hand:
        parts.append(_autograd_by_hand(op))
    elif op.backward:
        recorded = Recorded(op, ops[op.backward])
        parts += [recorded.node(), recorded.kernel()]
    elif op.double_backward:
        parts.append(_backward_kernel(op))
    if op.autocast:
        parts.append(_autocast_kernel(op))
    return "\n\n".join(parts)


def registrations(op: Op) -> list[tuple[str, str]]:
    """(dispatch key, the kernel's address)"""
    own = camel(op.name)
    found = [
        ("CompositeExplicitAutograd", f"apex::Kernels<apex::{own}>::run"),
        ("Meta", f"apex::Kernels<apex::{own}>::meta"),
    ]
    if op.backward or op.double_backward or "autograd" in op.by_hand:
        found.append(("Autograd", f"apex::{op.name}_autograd"))
    if op.autocast:
        found += [(key, f"apex::{op.name}_autocast") for key in ("AutocastCPU", "AutocastCUDA")]
    return found


def _opening(op: Op, kernel: str, unused: tuple[str, ...] = ()) -> str:
    first = ["c10::DispatchKeySet keys"] if kernel == "autograd" else []
    head = f"inline {camel(op.name)}::Result {op.name}_{kernel}("
    return listed(head, [*first, *cpp.parameters(op, unused)], ") {")


def _handle(op: Op) -> str:
    return f"  const auto& op = dispatcher_op<{camel(op.name)}>();"


def _refuse_forward_mode(op: Op) -> str:
    tensors = [a.name for a in op.arguments if a.is_tensor]
    return listed(f'  refuse_forward_mode_of("{op.unit}", ', tensors, ");")


def _redispatch(op: Op) -> str:
    passed = ["keys & c10::after_autograd_keyset", *cpp.names(op)]
    return listed("    return op.redispatch(", passed, ");")


def _autograd_by_hand(op: Op) -> str:
    call = listed(f"  return {camel(op.name)}{{", cpp.names(op), "}.autograd(keys);")
    return "\n".join([_opening(op, "autograd"), _refuse_forward_mode(op), call, "}"])


def _backward_kernel(op: Op) -> str:
    """Of a backward op: with create_graph=True its own derivative is wanted."""
    formula, _, why = op.double_backward.partition(":")
    has_formula = formula == "formula"
    refuses = not has_formula or op.formula_unless
    lines = [_opening(op, "autograd"), _handle(op), _refuse_forward_mode(op)]
    lines.append(listed("  const bool recorded = records(", op.differentiable, ");"))
    if has_formula:
        unless = f" && !({cpp.expression(op.formula_unless)})" if op.formula_unless else ""
        lines.append(f"  if (recorded{unless})")
        lines.append(listed(f"    return {camel(op.name)}{{", cpp.names(op), "}.formula();"))
    if not refuses:
        lines += ["  at::AutoDispatchBelowADInplaceOrView guard;", _redispatch(op).removeprefix("  ")]
        return "\n".join([*lines, "}"])
    lines += [
        "  auto made = [&] {",
        "    at::AutoDispatchBelowADInplaceOrView guard;",
        _redispatch(op),
        "  }();",
    ]
    lines.append("  if (recorded)")
    reason = why.strip() if has_formula else op.double_backward
    lines.append(
        listed(
            f'    set_history_of(made, no_double_backward("{op.unit}", "{reason}", ', op.differentiable, "));"
        )
    )
    return "\n".join([*lines, "  return made;", "}"])


def _autocast_kernel(op: Op) -> str:
    used = set().union(*map(cpp.names_in, op.autocast.values())) | set(cpp.names(op)) - set(op.autocast)
    passed = [cpp.expression(op.autocast.get(name, name)) for name in cpp.names(op)]
    lines = [_opening(op, "autocast", tuple(set(cpp.names(op)) - used)), _handle(op)]
    lines += ["  const auto guard = without_autocast();", listed("  return op.call(", passed, ");"), "}"]
    return "\n".join(lines)


class Recorded:
    """An op and the op that is its gradient: the Node that calls the one, and the kernel that records the other."""

    def __init__(self, op: Op, backward: Op):
        self.op, self.backward = op, backward
        self.result_names = [result.name or "result" for result in op.results]
        self.history = op.history or tuple(self.result_names[:1])
        self.saved: dict[
            str, list[tuple[str, str | None]]
        ] = {}  # of the backward: [(condition, what is kept)]
        self.kept: dict[str, str] = {}  # of the backward: what a scalar is, as the forward knows it
        self.passed = [self._passed(i, argument) for i, argument in enumerate(backward.arguments)]
        clash = set(self.result_names) & set(cpp.names(op))
        if clash:
            raise BuildError(f"{op.name}: {', '.join(clash)} is an argument and a result")

    def _passed(self, index: int, argument: Argument) -> str:
        """An argument of the backward op, as the Node has it; what it must keep is noted."""
        name, op = argument.name, self.op
        gradient = self._gradient(index, name)
        if gradient is not None:
            return f"gradients[{gradient}]" if argument.type == "Tensor" else f"if_any(gradients[{gradient}])"
        text = op.given.get(name, name)
        needed = cpp.parse(text)
        if isinstance(needed, ast.Call) and getattr(needed.func, "id", "") == "needed":
            edges = [op.differentiable.index(a.id) for a in needed.args if isinstance(a, ast.Name)]
            return " || ".join(f"wants({edge})" for edge in edges)
        if not argument.is_tensor:
            self.kept[name] = cpp.expression(text)
            return name
        self.saved[name] = self._choices(cpp.parse(text))
        return f"kept_{name}"

    def _gradient(self, index: int, name: str) -> int | None:
        """Which result's gradient an argument of the backward op is."""
        if len(self.op.results) == 1 and not self.op.results[0].name:
            return 0 if index == 0 else None
        wanted = name.removeprefix("grad_")
        return (
            self.result_names.index(wanted)
            if name.startswith("grad_") and wanted in self.result_names
            else None
        )

    def _choices(self, node: ast.expr) -> list[tuple[str, str | None]]:
        """`a if c else b` as [("c", "a"), ("", "b")]; None is nothing."""
        if isinstance(node, ast.IfExp):
            return [
                (cpp.expression(ast.unparse(node.test)), self._tensor(node.body)),
                ("", self._tensor(node.orelse)),
            ]
        return [("", self._tensor(node))]

    def _tensor(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.Name) and (node.id in self.result_names or node.id in cpp.names(self.op)):
            return node.id
        raise BuildError(f"{self.op.name}: {ast.unparse(node)!r} is neither an argument nor a result")

    def node(self) -> str:
        op, backward = self.op, self.backward
        own, shown = f"{camel(op.name)}Node", camel(op.name.removesuffix("_forward"))
        lines = [f"struct {own} : OpNode<{own}> {{"]
        lines.append(f'  static constexpr const char* shown = "Apex{shown}Backward";')
        if self.saved:
            lines.append(listed("  SavedVariable ", self.saved, ";"))
        for name in self.kept:
            argument = backward.argument(name)
            lines.append(f"  {cpp.type_of(argument).kept} {name}{{}};")
        lines += [
            listed("  auto kept() { return std::tie(", [*self.saved, *self.kept], "); }"),
            *self._gives(),
            "",
            f"  variable_list gradients({'' if self._zeros_for_first() else 'const '}variable_list"
            f"{'' if self._zeros_for_first() else '&'} gradients) {{",
            f"    const auto& op = dispatcher_op<{camel(backward.name)}>();",
            f"    variable_list found({len(op.differentiable)});",
            *self._without_gradient(),
            *map(self._unpacked, self.saved),
            "    const PastAutograd guard(gradients);",
            listed("    const auto made = op.call(", self.passed, ");"),
        ]
        for i, name in enumerate(op.differentiable):
            lines.append(f"    if (wants({i})) found[{i}] = {self._result_for(name)};")
        return "\n".join([*lines, "    return found;", "  }", "};"])

    def _unpacked(self, name: str) -> str:
        """A saved tensor, with autograd in force: checkpoints compute it anew when it is unpacked."""
        node = "getptr()" if any(what in self.history for _, what in self.saved[name]) else ""
        if self.backward.argument(name).type == "Tensor":
            return f"    const at::Tensor kept_{name} = {name}.unpack({node});"
        return f"    const OptionalTensor kept_{name} = if_any({name}.unpack({node}));"

    def _passed_on(self) -> list[tuple[int, int]]:
        """(input, result whose gradient is its own) where the gradient of the first result is not known."""
        return [
            (i, self.result_names.index(gradient.removeprefix("grad_")))
            for gradient, result in self.op.alone.items()
            for i, name in enumerate(self.op.differentiable)
            if self.op.gradient.get(name, f"grad_{name}") == result
        ]

    def _zeros_for_first(self) -> bool:
        """Whether a second result has a gradient that goes through the backward op without the first one's."""
        return len(self.history) > 1 and not self.op.alone

    def _without_gradient(self) -> list[str]:
        passed = self._passed_on()
        if self._zeros_for_first():
            return [
                "    if (!gradients[0].defined()) {",
                "      if (!gradients[1].defined()) return found;",
                "      gradients[0] = at::zeros_like(gradients[1]);",
                "    }",
            ]
        if not passed:
            return ["    if (!gradients[0].defined()) return found;"]
        lines = [f"      if (wants({i})) found[{i}] = gradients[{known}];" for i, known in passed]
        return ["    if (!gradients[0].defined()) {", *lines, "      return found;", "    }"]

    def _gives(self) -> list[str]:
        """What _without_gradient leaves out."""
        passed = self._passed_on()
        if self._zeros_for_first():
            known = "given[0].defined() || given[1].defined()"
            return [f"  bool gives(size_t, const variable_list& given) const {{ return {known}; }}"]
        if not passed:
            return ["  bool gives(size_t, const variable_list& given) const { return given[0].defined(); }"]
        known = [f"(input == {i} && given[{result}].defined())" for i, result in passed]
        return [
            "  bool gives(size_t input, const variable_list& given) const {",
            f"    return given[0].defined() || {' || '.join(known)};",
            "  }",
        ]

    def _result_for(self, argument: str) -> str:
        if len(self.backward.results) == 1:
            return "made"
        wanted = self.op.gradient.get(argument, f"grad_{argument}")
        index = self.backward.result(wanted)
        if index is None:
            raise BuildError(
                f"{self.op.name}: {self.backward.name} has no result {wanted}, the gradient of {argument}"
            )
        return f"std::get<{index}>(made)"

    def kernel(self) -> str:
        op = self.op
        lines = [_opening(op, "autograd"), _handle(op), _refuse_forward_mode(op)]
        lines += ["  auto made = [&] {", "    at::AutoDispatchBelowADInplaceOrView guard;"]
        lines += [_redispatch(op), "  }();"]
        lines.append(listed("  if (!records(", op.differentiable, ")) return made;"))
        if len(op.results) == 1:
            lines.append(f"  const at::Tensor& {self.result_names[0]} = made;")
        else:
            lines.append(f"  const auto& [{', '.join(self.result_names)}] = made;")
        lines.append(f"  const auto node = make_node<{camel(op.name)}Node>();")
        lines.append(
            listed("  node->set_next_edges(torch::autograd::collect_next_edges(", op.differentiable, "));")
        )
        lines += [f"  torch::autograd::set_history({name}, node);" for name in self.history]
        lines += [f"  node->{name} = {value};" for name, value in map(self._assigned, self.kept)]
        lines += [f"  node->{name} = {self._kept_tensor(choices)};" for name, choices in self.saved.items()]
        return "\n".join([*lines, "  return made;", "}"])

    def _assigned(self, name: str) -> tuple[str, str]:
        kind, value = self.backward.argument(name).type, self.kept[name]
        wrapped = {"str": "std::string({})", "SymInt[]": "{}.vec()"}.get(kind, "{}")
        return name, wrapped.format(value)

    def _kept_tensor(self, choices: list[tuple[str, str | None]]) -> str:
        def keep(what: str | None) -> str:
            if what is None:
                return "SavedVariable()"
            return f"{'keep_result' if what in self.history else 'keep'}({what})"

        if len(choices) == 1:
            return keep(choices[0][1])
        return f"{choices[0][0]} ? {keep(choices[0][1])} : {keep(choices[1][1])}"


def python_entry(op: Op) -> str:
    """The direct entry for eager calls: as torch.ops.apex.<op>, but past it, and with the results that callers want."""
    if op.entry == () or (op.entry is None and op.name.endswith("_backward") and op.differentiable):
        return ""
    entry = op.name.removesuffix("_forward") if op.differentiable else op.name
    wanted = [result.name for result in op.results]
    if op.differentiable:
        wanted = list(op.entry or op.history or wanted[:1])
    passed = [cpp.type_of(a).passed.format(a.name) for a in op.arguments]
    taken = [f"{cpp.type_of(a).python} {a.name}" for a in op.arguments]
    lines = ["  m.def(", listed(f'      "{entry}", [](', taken, ") {")]
    lines.append(listed(f"        using Signature = {cpp.result_type(op)}(", _parameter_types(op), ");"))
    lines.append(f'        static const auto op = apex::dispatcher_op<Signature>("apex::{op.name}");')
    if len(wanted) == len(op.results):
        lines.append(listed("        return op.call(", passed, ");"))
    else:
        indices = [op.result(name) for name in wanted]
        lines.append(listed("        const auto made = op.call(", passed, ");"))
        parts = ", ".join(f"std::get<{i}>(made)" for i in indices)
        lines.append(f"        return {parts if len(indices) == 1 else f'std::make_tuple({parts})'};")
    lines += ["      },", listed("      ", [*python_arguments(op.arguments), "no_gil());"], "")]
    return "\n".join(lines)


def python_arguments(arguments: tuple[Argument, ...] | list[Argument]) -> list[str]:
    """pybind11's names and defaults."""
    return [
        f'py::arg("{a.name}")' + ("" if a.default is REQUIRED else f" = {cpp.literal(a.default)}")
        for a in arguments
    ]
