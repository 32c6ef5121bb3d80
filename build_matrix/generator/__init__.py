"""Writes the bindings' C++ from csrc/ops.schemas (apex/_loader/op_model.py says what stands there).

By hand, in csrc/bindings/<op>.h, are an op's checks, the shapes of its outputs and its launch, as members of structs
that are declared here. Files:

generated/<op>.h          the structs of its arguments
generated/shared_<name>.h the arguments and results of all ops whose functions are in the header of that name
generated/<op>_kernels.h  of the dispatcher library: autograd's Nodes, autocast, registrations
generated/<op>_python.h   of the Python module: entries with names and defaults
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
        found[f"generated/{unit}_python.h"] = _python(unit, own)
        has_own = (by_hand / f"{unit}.h").exists() and not own[0].shared
        header = f"bindings/{unit}.h" if has_own else f"generated/{unit}.h"
        library.append(header)
        kernels.append(f"generated/{unit}_kernels.h")
        module += [header] * any(op.launch for op in own) + [f"generated/{unit}_python.h"]
    found["ops.inc"] = _includes([*library, *kernels])
    calls = "".join(f"  add_{unit}(m);\n" for unit in units)
    found["python_ops.inc"] = f"{_includes(module)}\nstatic void add_ops(py::module_& m) {{\n{calls}}}\n"
    return found


def _includes(names: list[str]) -> str:
    return "".join(f'#include "{name}"\n' for name in names)


def _declarations(unit: str, ops: list[Op], together: list[Op]) -> str:
    shared = f"bindings/{ops[0].shared}.h" if ops[0].shared else "functional.h"
    includes = [f"host/{unit}.h", "lists_op.h" if ops[0].launch else shared]
    structs = [lists.declaration(op) if op.launch else functional.declaration(op, together) for op in ops]
    return (
        f"{HEAD}{_includes(includes)}\nnamespace apex {{\n"
        + "\n\n".join(structs)
        + "\n}  // namespace apex\n"
    )


def _kernels(ops: list[Op], every: dict[str, Op]) -> str:
    written = [text for op in ops if not op.launch and (text := functional.kernels(op, every))]
    parts = [HEAD]
    if written:
        parts.append("namespace apex {\n" + "\n\n".join(written) + "\n}  // namespace apex\n")
    registered = [
        (key, op.name, f"&{kernel}")
        for op in ops
        for key, kernel in (lists if op.launch else functional).registrations(op)
    ]
    # torch resolves the lazy bits of arguments by itself only where none is written.
    through = "torch::CppFunction::makeFallthrough()"
    registered += [(key, op.name, through) for key in LAZY for op in ops if op.writes]
    for key, group in itertools.groupby(sorted(registered, key=lambda r: r[0]), key=lambda r: r[0]):
        lines = [f'  m.impl("{name}", {kernel});' for _, name, kernel in group]
        parts.append(f"TORCH_LIBRARY_IMPL(apex, {key}, m) {{\n" + "\n".join(lines) + "\n}\n")
    return "\n".join(parts)


def _python(unit: str, ops: list[Op]) -> str:
    entries = [(lists if op.launch else functional).python_entry(op) for op in ops]
    body = "\n".join(filter(None, entries))
    return f"{HEAD}\nstatic void add_{unit}(py::module_& m) {{\n{body}\n}}\n"
