"""C++ text: types, expressions, lines within 120 columns."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass

from apex._loader.op_model import REQUIRED, Argument, Op
from build_matrix.errors import BuildError

COLUMNS = 120
API = "APEX_TORCH_API"  # of functions that libapex_torch.so defines, once for every Python


@dataclass(frozen=True)
class Type:
    """How C++ has a type of a schema.

    parameter: as the dispatcher passes it. kept: a value that outlives the call. python: as pybind11 takes it.
    passed: what is handed to the dispatcher, of a `{}` that is of type `python`. borrowed: a member of a struct that
    lives as long as the parameters.
    """

    parameter: str
    kept: str
    python: str
    passed: str = "{}"
    borrowed: str = ""


TENSOR = "const at::Tensor&"
OPTIONAL = "const std::optional<at::Tensor>&"
TYPES = {
    "Tensor": Type(TENSOR, "at::Tensor", TENSOR),
    "Tensor?": Type(OPTIONAL, "std::optional<at::Tensor>", OPTIONAL),
    "Tensor[]": Type("at::TensorList", "std::vector<at::Tensor>", "const std::vector<at::Tensor>&"),
    "float": Type("double", "double", "double"),
    "int": Type("int64_t", "int64_t", "int64_t"),
    "int?": Type("std::optional<int64_t>", "std::optional<int64_t>", "std::optional<int64_t>"),
    "bool": Type("bool", "bool", "bool"),
    "str": Type("c10::string_view", "std::string", "const std::string&"),
    "SymInt": Type("c10::SymInt", "c10::SymInt", "int64_t", borrowed="const c10::SymInt&"),
    "SymInt[]": Type(
        "c10::SymIntArrayRef",
        "std::vector<c10::SymInt>",
        "const std::vector<int64_t>&",
        "c10::fromIntArrayRefSlow({})",
    ),
    "ScalarType?": Type(
        "std::optional<at::ScalarType>", "std::optional<at::ScalarType>", "std::optional<at::ScalarType>"
    ),
}

# A member that is left out where an op has no such argument.
ABSENT = {
    "Tensor": "const at::Tensor& {} = no_tensor", "Tensor?": "const OptionalTensor& {} = nothing",
    "float": "double {} = 0", "int": "int64_t {} = 0", "int?": "std::optional<int64_t> {} = std::nullopt",
    "bool": "bool {} = false", "str": "c10::string_view {} = {{}}", "SymInt": "c10::SymInt {} = 0",
    "SymInt[]": "c10::SymIntArrayRef {} = {{}}", "ScalarType?": "std::optional<at::ScalarType> {} = std::nullopt",
}  # fmt: skip


def type_of(argument: Argument) -> Type:
    """Raises BuildError, which names it, for a type that the generator has no C++ for."""
    try:
        return TYPES[argument.type]
    except KeyError:
        known = "build_matrix/generator/cpp.py"
        raise BuildError(f"{argument.name}: {known} has no C++ for the type {argument.type!r}") from None


def refuse_names(op: Op, reserved: set[str]) -> None:
    """Raises BuildError for an argument that is called as something in the text that is generated."""
    for name in sorted(reserved.intersection(names(op))):
        raise BuildError(
            f"{op.name}: an argument cannot be called {name!r}: generated C++ has another thing of that name"
        )


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def result_type(op: Op) -> str:
    return tensors(len(op.results))


def tensors(count: int) -> str:
    """void, at::Tensor, or a tuple of them."""
    if not count:
        return "void"
    listed_types = ", ".join(["at::Tensor"] * count)
    return listed_types if count == 1 else f"std::tuple<{listed_types}>"


def parameters(op: Op, unused: Iterable[str] = ()) -> list[str]:
    return [
        type_of(a).parameter + ("" if a.name in unused else f" {a.name}")
        for a in op.arguments
    ]  # fmt: skip


def parameters_with_defaults(op: Op) -> list[str]:
    """So that a new argument with a default is none of callers that do not pass it. C++ takes defaults at the end."""
    found, last = parameters(op), len(op.arguments)
    while last and op.arguments[last - 1].default is not REQUIRED:
        last -= 1
        found[last] += f" = {literal(op.arguments[last].default)}"
    return found


def names(op: Op) -> list[str]:
    return [argument.name for argument in op.arguments]


def signature(op: Op) -> str:
    return f"{result_type(op)}({', '.join(type_of(a).parameter for a in op.arguments)})"


def listed(head: str, items: Iterable[str], tail: str) -> str:
    """`head` item, item, ... `tail`, broken at commas within 120 columns; `head` begins with the indentation."""
    items = list(items)
    pad = head[: len(head) - len(head.lstrip())]
    pieces = [item + ("," if i + 1 < len(items) else tail) for i, item in enumerate(items)] or [tail]
    lines = [head.rstrip()] if len(head) + len(pieces[0]) > COLUMNS else [head + pieces.pop(0)]
    for piece in pieces:
        if len(lines[-1]) + 1 + len(piece) <= COLUMNS:
            lines[-1] += f" {piece}"
        else:
            lines.append(f"{pad}    {piece}")
    return "\n".join(lines)


def literal(value: object) -> str:
    """A default of a schema."""
    if value is REQUIRED:
        raise BuildError("an argument without default has no literal")
    if value is None:
        return "std::nullopt"
    if isinstance(value, str):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else repr(value)


OPERATORS = {
    ast.And: "&&", ast.Or: "||", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
}  # fmt: skip


def expression(text: str) -> str:
    """A Python expression of ops.schemas as C++. Raises BuildError for what has no counterpart."""
    return _outer(_render(parse(text)))


def parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise BuildError(f"csrc/ops.schemas: {text!r} is no expression: {error.msg}") from None


def _outer(text: str) -> str:
    """Without the parentheses round the whole."""
    if not text.startswith("("):
        return text
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:-1] if i == len(text) - 1 else text
    return text


def _render(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return literal(node.value)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and node.attr == "dtype":
        return f"{_render(node.value)}.scalar_type()"
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "shape"
    ):
        return f"{_render(node.value.value)}.sym_size({_render(node.slice)})"
    if isinstance(node, ast.Attribute):
        return f"{_render(node.value)}.{node.attr}"
    if isinstance(node, ast.Call) and not node.keywords:
        return f"{_render(node.func)}({', '.join(map(_render, node.args))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        return f"{'!' if isinstance(node.op, ast.Not) else '-'}{_render(node.operand)}"
    if isinstance(node, ast.BoolOp):
        return f"({f' {OPERATORS[type(node.op)]} '.join(map(_render, node.values))})"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        return f"({_render(node.left)} {OPERATORS[type(node.ops[0])]} {_render(node.comparators[0])})"
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return f"({_render(node.left)} {OPERATORS[type(node.op)]} {_render(node.right)})"
    if isinstance(node, ast.IfExp):
        return f"({_render(node.test)} ? {_render(node.body)} : {_render(node.orelse)})"
    raise BuildError(f"csrc/ops.schemas: {ast.unparse(node)!r} has no counterpart in C++")


def names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(parse(text)) if isinstance(node, ast.Name)}


def python_function(name: str, function: str, arguments: Iterable[str]) -> str:
    """The Python module's `name`, which calls the C++ function; arguments: as pybind11 has them."""
    return listed("  m.def(", [f'"{name}"', f"&{function}", *arguments, "no_gil()"], ");")
