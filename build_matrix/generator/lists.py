"""Ops that write their arguments: over lists of tensors, launched by plans, or over single ones."""

from __future__ import annotations

from apex._loader.op_model import Argument, Op
from build_matrix.generator import cpp
from build_matrix.generator.cpp import camel, listed
from build_matrix.generator.functional import python_arguments

# What the generated text calls things of its own.
RESERVED = {
    "name", "check", "check_lists", "check_more", "unscales", "arguments", "launch", "call_reference", "reference",
    "op", "run", "fields", "blocks", "status", "of_this", "t", "l", "names", "lists", "plan", "call", "set", "place",
    "device", "m", "py", "apex", "gpu", "at", "std",
}  # fmt: skip


def declaration(op: Op) -> str:
    """The struct of everything but the lists, and the op as C++ calls it."""
    cpp.refuse_names(op, RESERVED)
    return _of_lists(op) if op.lists else _of_tensors(op)


def _scalars(op: Op) -> list[Argument]:
    return [argument for argument in op.arguments if not argument.is_list]


def _written(op: Op) -> int:
    """Bit k: the op writes list k. Gradients that are unscaled in place are so at single calls only."""
    bits = sum(1 << k for k, argument in enumerate(op.lists) if argument.written)
    return bits & ~1 if op.argument("unscale_grads") else bits


def _of_lists(op: Op) -> str:
    own, by_hand = camel(op.name), op.by_hand
    lines = ["// Everything but the tensor lists: checked once, given to every launch and to the reference."]
    lines += [f"struct {own} {{", f'  static constexpr const char* name = "{op.name}";']
    lines += [listed("  using Signature = void(", [cpp.type_of(a).parameter for a in op.arguments], ");"), ""]
    lines += [f"  {cpp.type_of(a).kept} {a.name};" for a in _scalars(op)]
    lines += ["", *_check(op)]
    if "check_lists" in by_hand:
        lines.append(listed("  void check_lists(", _list_parameters(op), ") const;"))
    if op.argument("unscale_grads"):
        lines.append("  bool unscales() const { return unscale_grads && inv_scale; }")
    lines += [*_arguments(op), *_launch(op), *_reference(op)]
    unscales = ", unscales()" if op.argument("unscale_grads") else ""
    lines += ["  TensorPlan::Op op() const {"]
    lines.append(
        f"    return {{name, {op.reductions}, [this](const TensorPlan::Launch& l) {{ return launch(l); }},"
    )
    lines.append(
        "            [this](const TensorPlan::Tensors& t, const TensorPlan::Launch& l) { reference(t, l); }"
    )
    lines[-1] += f"{unscales}}};"
    lines += ["  }", *_run(op), "};", ""]
    lines.append(listed(f"void {op.name}(", cpp.parameters(op), ") {"))
    call = ", ".join(a.name for a in op.lists)
    lines.append(listed(f"  const {own} call{{", [a.name for a in _scalars(op)], "};"))
    return "\n".join([*lines, f"  call.run({call});", "}"])


def _check(op: Op) -> list[str]:
    by_hand = "check" in op.by_hand
    if by_hand and not op.checks:
        return ["  void check() const;"]
    calls = [f"check_{what}(*this);" for what in op.checks] + ["check_more();"] * by_hand
    declared = ["  void check_more() const;"] * by_hand
    return [
        *declared,
        f"  void check() const {{ {' '.join(calls)} }}" if calls else "  void check() const {}",
    ]


def _list_parameters(op: Op) -> list[str]:
    return [f"at::TensorList {a.name}" for a in op.lists]


def field_of(op: Op, argument: Argument) -> str:
    """The device struct's field: a scalar that may lie on the device, lr_tensor, is its lr_on_device. "": it is not set
    from the argument alone."""
    if argument.name in op.per_tensor:
        return ""
    if argument.name in op.field:
        return op.field[argument.name]
    of_scalar = argument.is_tensor and argument.name.endswith("_tensor")
    return argument.name.removesuffix("_tensor") + "_on_device" if of_scalar else argument.name


def _fields(op: Op, device: str) -> list[str]:
    lines = []
    for argument in _scalars(op):
        field = field_of(op, argument)
        if field and argument.is_tensor:
            setter = "set_written" if argument.written else "set"
            lines.append(f'    {setter}(fields.{field}, {argument.name}, "{argument.name}", {device});')
        elif field:
            lines.append(f"    set(fields.{field}, {argument.name});")
    return lines


def _arguments(op: Op) -> list[str]:
    lines = [
        f"  gpu::{op.launch} arguments(const TensorPlan::Launch& l) const {{",
        f"    gpu::{op.launch} fields{{}};",
    ]
    lines += _fields(op, "l.device")
    if op.argument("advance_step"):
        lines.append("    fields.step_offset = advance_step;")
        lines.append(
            "    fields.advance_step = advance_step && l.last;  // after every other launch has read it"
        )
    if op.argument("unscale_grads"):
        lines.append("    fields.unscale_grads = unscales();")
    lines += [f"    set(fields.{field}, {cpp.expression(text)});" for field, text in op.set.items()]
    return [*lines, "    return fields;", "  }"]


def _per_tensor(op: Op) -> list[str]:
    """The numbers of a bucket's tensors, of each argument that has one for every tensor."""
    return [f'    PerTensor of_{name}({name}, l, "{name}");' for name in op.per_tensor]


def _write_back(op: Op) -> list[str]:
    return [f"    of_{a.name}.write_back();" for a in op.arguments if a.name in op.per_tensor and a.written]


def _launch(op: Op) -> list[str]:
    if "launch" in op.by_hand:
        return ["  int32_t launch(const TensorPlan::Launch& l) const;"]
    lines = ["  int32_t launch(const TensorPlan::Launch& l) const {", *_per_tensor(op)]
    lines.append(f"    gpu::{op.launch} fields = arguments(l);")
    for name, field in op.per_tensor.items():
        argument = op.argument(name)
        pointer = "pointer_to_write" if argument and argument.written else "pointer"
        lines.append(f"    fields.{field} = of_{name}.{pointer}();")
    more = [cpp.expression(text) for text in op.call]
    if op.workspace:
        lines.append("    const auto run = [&](const apex_workspace* lent) {")
        arguments = ["&l.place", "&l.lists", "&fields", *more, "lent"]
        lines += [listed(f"      return apex_{op.name}(", arguments, ");"), "    };"]
        call = "with_workspace(l.device, run);"
    else:
        call = listed(f"apex_{op.name}(", ["&l.place", "&l.lists", "&fields", *more], ");")
    back = _write_back(op)
    if not back:
        return [*lines, f"    return {call}", "  }"]
    return [*lines, f"    const int32_t status = {call}", *back, "    return status;", "  }"]


def _reference(op: Op) -> list[str]:
    """call_reference with all arguments, and what a plan's bucket gives it."""
    lines = [listed("  void call_reference(", _list_parameters(op), ") const {")]
    lines += [listed("    apex::call_reference<Signature>(", ["name", *cpp.names(op)], ");"), "  }"]
    if "reference" in op.by_hand:
        return [*lines, "  void reference(const TensorPlan::Tensors& t, const TensorPlan::Launch& l) const;"]
    lists = [f"list_of(t, {k})" if a.name in op.optional else f"t[{k}]" for k, a in enumerate(op.lists)]
    steps = bool(op.argument("advance_step"))
    launch = "const TensorPlan::Launch&" + (" l" if steps or op.per_tensor else "")
    lines.append(f"  void reference(const TensorPlan::Tensors& t, {launch}) const {{")
    if not op.per_tensor:
        call = f"{'of_bucket(*this, l).' * steps}call_reference("
        return [*lines, listed(f"    {call}", lists, ");"), "  }"]
    lines += [
        *_per_tensor(op),
        f"    {camel(op.name)} of_this = {'of_bucket(*this, l)' if steps else '*this'};",
    ]
    for argument in op.arguments:
        if argument.name in op.per_tensor:
            bucket = "bucket_if_any" if argument.type == "Tensor?" else "bucket"
            lines.append(f"    of_this.{argument.name} = of_{argument.name}.{bucket}();")
    return [*lines, listed("    of_this.call_reference(", lists, ");"), *_write_back(op), "  }"]


def _run(op: Op) -> list[str]:
    """On lists, and on a plan that keeps them."""
    if "run" in op.by_hand:
        return [
            listed("  void run(", _list_parameters(op), ") const;"),
            "  void run(OptimizerPlan& plan) const;",
        ]
    lines = [listed("  void run(", _list_parameters(op), ") const {"), "    check();"]
    if "check_lists" in op.by_hand:
        lines.append(listed("    check_lists(", [a.name for a in op.lists], ");"))
    fixed = [a for a in op.lists if a.name not in op.optional]
    names, lists = [f'"{a.name}"' for a in fixed], [a.name for a in fixed]
    written = f"0b{_written(op):b}"
    if not op.optional:
        lines.append(listed("    run_once(op(), {", names, f"}}, {written}, {{{', '.join(lists)}}});"))
    else:
        lines.append(listed("    std::vector<std::string> names = {", names, "};"))
        lines.append(listed("    std::vector<at::TensorList> lists = {", lists, "};"))
        for name, condition in op.optional.items():
            there = cpp.expression(condition) if condition else f"!{name}.empty()"
            lines.append(f'    if ({there}) names.push_back("{name}"), lists.push_back({name});')
        lines.append(f"    run_once(op(), names, {written}, lists);")
    return [
        *lines,
        "  }",
        "  void run(OptimizerPlan& plan) const {",
        "    check();",
        "    plan.run(op());",
        "  }",
    ]


def _of_tensors(op: Op) -> str:
    """One launch, on the device of the first tensor."""
    first = next(a.name for a in op.arguments if a.is_tensor)
    own = camel(op.name)
    lines = [f"struct {own} {{", f'    static constexpr const char* name = "{op.name}";']
    lines += [
        listed("    using Signature = void(", [cpp.type_of(a).parameter for a in op.arguments], ");"),
        "};",
    ]
    lines += [listed(f"void {op.name}(", cpp.parameters(op), ") {")]
    lines += [f"    const c10::Device device = {first}.device();", f"    gpu::{op.launch} fields{{}};"]
    lines += _fields(op, "device")
    lines += ["    const apex_place place = place_of(device);"]
    lines += [
        "    if (place.platform >= 0) {",
        f"      const int32_t status = apex_{op.name}(&place, &fields);",
    ]
    lines += [f'      if (!use_reference(status, "{op.name}")) return;', "    }"]
    lines.append(listed(f"    call_reference<{own}::Signature>(", [f"{own}::name", *cpp.names(op)], ");"))
    return "\n".join([line.removeprefix("  ") if line.startswith("    ") else line for line in lines] + ["}"])


def registrations(op: Op) -> list[tuple[str, str]]:
    """(dispatch key, the kernel's address)"""
    return [
        ("CompositeExplicitAutograd", f"apex::{op.name}"),
        ("Meta", f"apex::DoNothing<apex::{camel(op.name)}>::call"),
    ]


def _entry_parameters(op: Op) -> list[str]:
    """A plan or lists; everything else by value."""
    return ["const PlanOrLists& tensors", *(f"{cpp.type_of(a).kept} {a.name}" for a in _scalars(op))]


def entry_declaration(op: Op) -> str:
    """The op as C++ calls it, and what Python calls; cpp.API says where both are defined."""
    text = listed(f"{cpp.API} void {op.name}(", cpp.parameters_with_defaults(op), ");")
    if not op.lists:
        return text
    entry = listed(f"{cpp.API} void {op.name}(", _entry_parameters(op), ");")
    return f"{text}\nnamespace entries {{\n{entry}\n}}"


def entry_definition(op: Op) -> str:
    """Of what Python calls on a plan or on lists."""
    if not op.lists:
        return ""
    moved = [
        a.name if cpp.type_of(a).parameter == cpp.type_of(a).kept else f"std::move({a.name})"
        for a in _scalars(op)
    ]
    lines = [
        listed(f"void entries::{op.name}(", _entry_parameters(op), ") {"),
        listed(f"  const {camel(op.name)} call{{", moved, "};"),
        "  if (const auto* plan = std::get_if<OptimizerPlan*>(&tensors)) return call.run(**plan);",
    ]
    least = len(op.lists) - len(op.optional)
    named = ", ".join(f"[{a.name}]" if a.name in op.optional else a.name for a in op.lists)
    sizes = [str(least), str(len(op.lists)), f'"{named}"']
    lines.append(listed("  const auto& lists = lists_of(", ["tensors", "call.name", *sizes], ");"))
    passed = [
        f"list_of(lists, {k})" if a.name in op.optional else f"lists[{k}]" for k, a in enumerate(op.lists)
    ]
    return "\n".join([*lines, listed("  call.run(", passed, ");"), "}"])


def python_entry(op: Op) -> str:
    """Of lists: on a plan or on lists; everything else by keyword."""
    if not op.lists:
        return cpp.python_function(op.name, f"apex::{op.name}", python_arguments(op.arguments))
    arguments = ['py::arg("tensors").none(false)', *python_arguments(_scalars(op))]
    return cpp.python_function(op.name, f"apex::entries::{op.name}", arguments)
