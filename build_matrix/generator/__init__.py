"""Writes the bindings' C++ from csrc/ops.schemas (apex/_loader/op_model.py says what stands there).

By hand, in csrc/bindings/<op>.h, are an op's checks, the shapes of its outputs and its launch, as members of structs
that are declared here. Files:

generated/<op>.h          the structs of its arguments
generated/shared_<name>.h the arguments and results of all ops whose functions are in the header of that name
generated/<op>_kernels.h  of the dispatcher library: autograd's Nodes, autocast, registrations, what Python calls
generated/<op>_entries.h  declarations of what Python calls: the dispatcher library has it, because there is one module
                          for each Python
generated/<op>_python.h   of the Python module: names and defaults of these
ops.inc, python_ops.inc   all of them, in the order of the registry
ops_schemas.inc           what the dispatcher is told
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from apex._loader.op_model import Op
from build_matrix.generator import functional, lists

LAZY = ("Conjugate", "Negative", "ZeroTensor")
HEAD = "// Generated from csrc/ops.schemas by build_matrix/generator.\n#pragma once\n"


def files(units: list[str], ops: Mapping[str, Op], by_hand: Path) -> dict[str, str]:
    """File name -> text, for the units in that order. by_hand: csrc/bindings; a unit may need nothing there."""
    found = {"ops_schemas.inc": "".join(f"APEX_SCHEMA({json.dumps(op.text)})\n" for op in ops.values())}
    library, kernels, module = [], [], []
    for unit in units:
        own = [op for op in ops.values() if op.unit == unit]
        together = [op for op in ops.values() if op.shared and op.shared == own[0].shared]
        found[f"generated/{unit}.h"] = _declarations(unit, own, together)
        if together:
            found[f"generated/shared_{own[0].shared}.h"] = f"{HEAD}{functional.shared(together)}"
        found[f"generated/{unit}_kernels.h"] = _kernels(own, dict(ops))
        found[f"generated/{unit}_entries.h"] = _entries(own)
        found[f"generated/{unit}_python.h"] = _python(unit, own)
        has_own = (by_hand / f"{unit}.h").exists() and not own[0].shared
        header = f"bindings/{unit}.h" if has_own else f"generated/{unit}.h"
        library.append(header)
        kernels.append(f"generated/{unit}_kernels.h")
        module.append(f"generated/{unit}_python.h")
    found["ops.inc"] = _includes([*library, *kernels])
    calls = "".join(f"  add_{unit}(m);\n" for unit in units)
    found["python_ops.inc"] = f"{_includes(module)}\nstatic void add_ops(py::module_& m) {{\n{calls}}}\n"
    return found


def _includes(names: list[str]) -> str:
    return "".join(f'#include "{name}"\n' for name in names)


def _declarations(unit: str, ops: list[Op], together: list[Op]) -> str:
    shared = f"bindings/{ops[0].shared}.h" if ops[0].shared else "functional.h"
    includes = [f"host/{unit}.h", "lists_op.h" if ops[0].launch else shared]
    if ops[0].launch:
        includes.append(f"generated/{unit}_entries.h")
    structs = [lists.declaration(op) if op.launch else functional.declaration(op, together) for op in ops]
    return (
        f"{HEAD}{_includes(includes)}\nnamespace apex {{\n"
        + "\n\n".join(structs)
        + "\n}  // namespace apex\n"
    )


def _kernels(ops: list[Op], every: dict[str, Op]) -> str:
    written = [functional.kernels(op, every) for op in ops if not op.launch]
    written = [text for text in [*written, *(_kind(op).entry_definition(op) for op in ops)] if text]
    parts = [f"{HEAD}{_includes([f'generated/{ops[0].unit}_entries.h'])}"]
    if written:
        parts.append("namespace apex {\n" + "\n\n".join(written) + "\n}  // namespace apex\n")
    registered = [(key, op.name, f"&{kernel}") for op in ops for key, kernel in _kind(op).registrations(op)]
    # torch resolves the lazy bits of arguments by itself only where none is written.
    through = "torch::CppFunction::makeFallthrough()"
    registered += [(key, op.name, through) for key in LAZY for op in ops if op.writes]
    for key, group in itertools.groupby(sorted(registered, key=lambda r: r[0]), key=lambda r: r[0]):
        lines = [f'  m.impl("{name}", {kernel});' for _, name, kernel in group]
        parts.append(f"TORCH_LIBRARY_IMPL(apex, {key}, m) {{\n" + "\n".join(lines) + "\n}\n")
    return "\n".join(parts)


def _kind(op: Op):
    return lists if op.launch else functional


def _entries(ops: list[Op]) -> str:
    declared = "\n".join(filter(None, (_kind(op).entry_declaration(op) for op in ops)))
    needed = "optimizer_plan.h" if any(op.lists for op in ops) else "entry_types.h"
    return f"{HEAD}{_includes([needed])}\nnamespace apex {{\n{declared}\n}}  // namespace apex\n"


def _python(unit: str, ops: list[Op]) -> str:
    body = "\n".join(filter(None, (_kind(op).python_entry(op) for op in ops)))
    included = _includes([f"generated/{unit}_entries.h"])
    return f"{HEAD}{included}\nstatic void add_{unit}(py::module_& m) {{\n{body}\n}}\n"
