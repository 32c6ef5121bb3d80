"""Ops that return fresh tensors, or write arguments by a binding's own hand: the struct of their arguments, their
kernels, Python's entry."""

from __future__ import annotations

from collections.abc import Sequence

from apex._loader.op_model import REQUIRED, Argument, Op
from build_matrix.errors import BuildError
from build_matrix.generator import cpp
from build_matrix.generator.cpp import camel, listed
from build_matrix.generator.recorded import Recorded, handle, opening, redispatch, refuse_forward_mode

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


def _autograd_by_hand(op: Op) -> str:
    call = listed(f"  return {camel(op.name)}{{", cpp.names(op), "}.autograd(keys);")
    return "\n".join([opening(op, "autograd"), refuse_forward_mode(op), call, "}"])


def _backward_kernel(op: Op) -> str:
    """Of a backward op: with create_graph=True its own derivative is wanted."""
    formula, _, why = op.double_backward.partition(":")
    has_formula = formula == "formula"
    refuses = not has_formula or op.formula_unless
    lines = [opening(op, "autograd"), handle(op), refuse_forward_mode(op)]
    lines.append(listed("  const bool recorded = records(", op.differentiable, ");"))
    if has_formula:
        unless = f" && !({cpp.expression(op.formula_unless)})" if op.formula_unless else ""
        lines.append(f"  if (recorded{unless})")
        lines.append(listed(f"    return {camel(op.name)}{{", cpp.names(op), "}.formula();"))
    if not refuses:
        lines += ["  at::AutoDispatchBelowADInplaceOrView guard;", redispatch(op).removeprefix("  ")]
        return "\n".join([*lines, "}"])
    lines += [
        "  auto made = [&] {",
        "    at::AutoDispatchBelowADInplaceOrView guard;",
        redispatch(op),
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
    lines = [opening(op, "autocast", tuple(set(cpp.names(op)) - used)), handle(op)]
    lines += ["  const auto guard = without_autocast();", listed("  return op.call(", passed, ");"), "}"]
    return "\n".join(lines)


def _entry(op: Op) -> str:
    """The name of the direct entry for eager calls: as torch.ops.apex.<op>, but past it. "": there is none."""
    if op.entry == () or (op.entry is None and op.name.endswith("_backward") and op.differentiable):
        return ""
    return op.name.removesuffix("_forward") if op.differentiable else op.name


def _wanted(op: Op) -> list[str]:
    """The results that its callers want."""
    if not op.differentiable:
        return [result.name for result in op.results]
    return list(op.entry or op.history or [op.results[0].name])


def _entry_head(op: Op, before: str, tail: str) -> str:
    """Result, name and parameters of the entry; before: its name."""
    taken = [f"{cpp.type_of(a).python} {a.name}" for a in op.arguments]
    head = before.format(result=cpp.tensors(len(_wanted(op))))
    return listed(f"{head}{_entry(op)}(", taken, tail)


def entry_declaration(op: Op) -> str:
    """What Python calls; cpp.API says where it is defined."""
    if not _entry(op):
        return ""
    return f"namespace entries {{\n{_entry_head(op, f'{cpp.API} {{result}} ', ');')}\n}}"


def entry_definition(op: Op) -> str:
    if not _entry(op):
        return ""
    wanted = _wanted(op)
    passed = [cpp.type_of(a).passed.format(a.name) for a in op.arguments]
    lines = [_entry_head(op, "{result} entries::", ") {"), handle(op)]
    if len(wanted) == len(op.results):
        return "\n".join([*lines, listed("  return op.call(", passed, ");"), "}"])
    parts = ", ".join(f"std::move(std::get<{op.result(name)}>(made))" for name in wanted)
    lines.append(listed("  auto made = op.call(", passed, ");"))
    return "\n".join([*lines, f"  return {parts if len(wanted) == 1 else f'{{{parts}}}'};", "}"])


def python_entry(op: Op) -> str:
    if not _entry(op):
        return ""
    return cpp.python_function(_entry(op), f"apex::entries::{_entry(op)}", python_arguments(op.arguments))


def python_arguments(arguments: tuple[Argument, ...] | list[Argument]) -> list[str]:
    """pybind11's names and defaults."""
    return [
        f'py::arg("{a.name}")' + ("" if a.default is REQUIRED else f" = {cpp.literal(a.default)}")
        for a in arguments
    ]
