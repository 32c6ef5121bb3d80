"""What autograd records of an op: the Node that calls its gradient, the kernel that makes the Node, and what generated
kernels begin with."""

from __future__ import annotations

import ast

from apex._loader.op_model import Argument, Op
from build_matrix.errors import BuildError
from build_matrix.generator import cpp
from build_matrix.generator.cpp import camel, listed


def opening(op: Op, kernel: str, unused: tuple[str, ...] = ()) -> str:
    """The first line of the op's kernel `autograd` or `autocast`. unused: arguments that it does not read."""
    first = ["c10::DispatchKeySet keys"] if kernel == "autograd" else []
    head = f"inline {camel(op.name)}::Result {op.name}_{kernel}("
    return listed(head, [*first, *cpp.parameters(op, unused)], ") {")


def handle(op: Op) -> str:
    """The dispatcher's op, as `op`."""
    return f"  const auto& op = dispatcher_op<{camel(op.name)}>();"


def refuse_forward_mode(op: Op) -> str:
    """A dual tensor among the arguments is an error."""
    tensors = [a.name for a in op.arguments if a.is_tensor]
    return listed(f'  refuse_forward_mode_of("{op.unit}", ', tensors, ");")


def redispatch(op: Op) -> str:
    """The op below autograd."""
    passed = ["keys & c10::after_autograd_keyset", *cpp.names(op)]
    return listed("    return op.redispatch(", passed, ");")


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
        lines = [opening(op, "autograd"), handle(op), refuse_forward_mode(op)]
        lines += ["  auto made = [&] {", "    at::AutoDispatchBelowADInplaceOrView guard;"]
        lines += [redispatch(op), "  }();"]
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
