"""What csrc/ops.schemas says of each op, as data: arguments, results, and how autograd and autocast treat it.

Needs no framework: the generator of the bindings, the loader and the farm read it.

An op begins at the start of a line with its dispatcher schema, which may go on in lines that are indented:

    rms_norm_forward(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float eps=1e-05,
        bool memory_efficient=False, ScalarType? dtype=None) -> (Tensor output, Tensor rstd)
      differentiable: input, weight
      backward: rms_norm_backward
      given: saved = output if memory_efficient else input
      given: weight_gradients = needed(weight)
      autocast: dtype = norm_autocast_dtype(input, dtype)

Below it stand directives, each `word: value`; `#` begins a comment line. Those that hold `name = expression` may come
several times. Expressions are Python's: the arguments and results of the op by name, `tensor.dtype`,
`tensor.shape[1]`, numbers, comparisons, `and`, `or`, `not`, `x if y else z`, and calls of a few functions.

differentiable   arguments that get gradients
backward         the op that computes them
given            what an argument of the backward op is, where it is not the forward's argument or result of its
                 name, or the gradient of a result (grad_<result>; of a result without name, the first argument).
                 `result` is the one without name. needed(a, b): whether the gradient of one of these is wanted
gradient         which result of the backward op an argument's gradient is, where that is not grad_<argument>
alone            where only that gradient of a result is known: the backward's result that it is, unchanged
history          results that are differentiable, where that is not the first alone: what is kept for the backward is,
                 or it would have no gradient there. Where the first one's gradient is not known, and `alone` does not
                 say what comes of the second's, it is zeros like that
entry            results that the direct entry for Python returns, where these are not the differentiable ones; none:
                 there is no entry
autocast         what an argument becomes under autocast
double_backward  of a backward op: `formula` (written by hand in torch's ops), or why there is none
formula_unless   where that holds, a formula cannot serve: double_backward's words after `formula: ` say why
by_hand          functions that the binding writes itself, where the generator would; of `check` and `checks`, beside it
shared           the header of csrc/bindings, and its namespace, that has the op's functions: several ops share them
launch           of an op over tensor lists, or over scalars: the device's struct of its arguments. An op that returns
                 nothing and has none is launched as its binding writes
reductions       of an op over tensor lists: how many quantities its kernels reduce
optional         of an op over tensor lists: a list that may be left out; `name = expression` says when it is there,
                 else that it is not empty does
field            the struct's field that an argument goes to, where it has another name; none: it is set by hand
set              a field that is worked out of several arguments, and of the launch `l`: l.first, l.last
per_tensor       an argument with one number for each tensor, and its field: a bucket's kernels number their own
workspace        of an op over tensor lists: `yes`: its C function takes an apex_workspace last
call             what the C function is given after the struct
checks           of an op over tensor lists: betas, decay_mode, step: whether these arguments lie in their ranges
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPES = (
    "Tensor",
    "Tensor?",
    "Tensor[]",
    "float",
    "int",
    "int?",
    "bool",
    "str",
    "SymInt",
    "SymInt[]",
    "ScalarType?",
)
LISTS = ("differentiable", "history", "entry", "by_hand", "call", "checks")
TABLES = ("given", "gradient", "alone", "autocast", "optional", "field", "set", "per_tensor")
TEXTS = ("shared", "backward", "double_backward", "formula_unless", "launch", "reductions", "workspace")
CHECKS = ("betas", "decay_mode", "step")
REQUIRED = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()  # the default of what has none


@dataclass(frozen=True)
class Argument:
    """An argument, or a result (whose name may be ""). `written`: the op writes the tensor."""

    name: str
    type: str
    default: object = REQUIRED
    written: bool = False

    @property
    def is_tensor(self) -> bool:
        """One tensor, or None where the type ends in `?`."""
        return self.type in ("Tensor", "Tensor?")

    @property
    def is_list(self) -> bool:
        return self.type == "Tensor[]"


@dataclass(frozen=True)
class Op:
    """One dispatcher op. `text` is the schema as torch.library takes it, in one line."""

    name: str
    text: str
    arguments: tuple[Argument, ...] = ()
    results: tuple[Argument, ...] = ()
    differentiable: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    entry: tuple[str, ...] | None = None
    by_hand: tuple[str, ...] = ()
    call: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    given: dict[str, str] = dataclasses.field(default_factory=dict)
    gradient: dict[str, str] = dataclasses.field(default_factory=dict)
    alone: dict[str, str] = dataclasses.field(default_factory=dict)
    autocast: dict[str, str] = dataclasses.field(default_factory=dict)
    optional: dict[str, str] = dataclasses.field(default_factory=dict)
    field: dict[str, str] = dataclasses.field(default_factory=dict)
    set: dict[str, str] = dataclasses.field(default_factory=dict)
    per_tensor: dict[str, str] = dataclasses.field(default_factory=dict)
    workspace: str = ""
    shared: str = ""
    backward: str = ""
    double_backward: str = ""
    formula_unless: str = ""
    launch: str = ""
    reductions: str = "0"

    @property
    def returns_nothing(self) -> bool:
        return not self.results

    @property
    def writes(self) -> bool:
        """Whether the op writes any of its arguments."""
        return any(argument.written for argument in self.arguments)

    @property
    def unit(self) -> str:
        """The op whose files it lies in: layer_norm for add_layer_norm_backward."""
        return re.sub(r"^add_|_(forward|backward)$", "", self.name)

    @property
    def lists(self) -> tuple[Argument, ...]:
        """The arguments that are lists of tensors."""
        return tuple(argument for argument in self.arguments if argument.is_list)

    def argument(self, name: str) -> Argument | None:
        """The argument of that name, or None."""
        return next((argument for argument in self.arguments if argument.name == name), None)

    def result(self, name: str) -> int | None:
        """The index of the result of that name, or None."""
        return next((i for i, result in enumerate(self.results) if result.name == name), None)


def parse(text: str) -> dict[str, Op]:
    """op name -> Op, in the order of the text. Raises ValueError, which quotes what cannot be read."""
    found: dict[str, Op] = {}
    for schema, directives in _entries(text):
        op = _op(schema, directives)
        if op.name in found:
            raise ValueError(f"{op.name} is there twice")
        found[op.name] = op
    for op in found.values():
        _check(op, found)
    return found


def _entries(text: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """(the schema in one line, [(word, value)]) of each op."""
    entries: list[tuple[list[str], list[list[str]]]] = []  # of a schema, its parts
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        directive = re.match(r"\s+(\w+):\s+(.*)", line)
        if line[0] != " ":
            entries.append(([line.strip()], []))
        elif not entries:
            raise ValueError(f"belongs to no op: {line!r}")
        elif directive:
            entries[-1][1].append([directive[1], directive[2].strip()])
        elif entries[-1][1]:
            entries[-1][1][-1][1] += f" {line.strip()}"
        else:
            entries[-1][0].append(line.strip())
    return [(" ".join(schema), [(word, value) for word, value in rest]) for schema, rest in entries]


def _op(schema: str, directives: list[tuple[str, str]]) -> Op:
    match = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", schema)
    if not match:
        raise ValueError(f"not a schema: {schema!r}")
    name, arguments, results = match.groups()
    results = results[1:-1] if results.startswith("(") else results
    fields: dict[str, Any] = {key: {} for key in TABLES}
    for word, value in directives:
        if word in LISTS:
            fields[word] = () if value == "none" else tuple(part.strip() for part in value.split(","))
        elif word in TABLES:
            key, _, expression = (part.strip() for part in value.partition("="))
            fields[word][key] = expression
        elif word in TEXTS:
            fields[word] = value
        else:
            raise ValueError(f"{name}: no directive is called {word!r}")
    return Op(
        name,
        schema,
        tuple(_argument(name, part) for part in _split(arguments)),
        tuple(_argument(name, part) for part in _split(results)),
        **fields,
    )


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(", ")] if text else []


def _argument(op: str, text: str) -> Argument:
    """`Tensor(a!)[] params`, `float eps=1e-05`; of a result the name may lack."""
    match = re.fullmatch(r"(\w+)(\(\w+!\))?(\[\])?(\?)?(?: (\w+)(?:=(\S+))?)?", text)
    if not match:
        raise ValueError(f"{op}: not an argument: {text!r}")
    base, alias, is_list, optional, name, default = match.groups()
    kind = base + (is_list or "") + (optional or "")
    if kind not in TYPES:
        raise ValueError(f"{op}: the type {kind!r} of {name or 'a result'} is none of {', '.join(TYPES)}")
    value = REQUIRED if default is None else ast.literal_eval(default)
    return Argument(name or "", kind, value, alias is not None)


def _check(op: Op, ops: Mapping[str, Op]) -> None:
    """Raises ValueError for a directive that names what is not there."""
    arguments = {argument.name for argument in op.arguments}
    results = {result.name for result in op.results}
    named = [("differentiable", op.differentiable, arguments), ("autocast", op.autocast, arguments)]
    named += [("optional", op.optional, arguments), ("field", op.field, arguments)]
    named += [("per_tensor", op.per_tensor, arguments), ("checks", op.checks, set(CHECKS))]
    named += [
        ("gradient", op.gradient, arguments),
        ("history", op.history, results),
        ("entry", op.entry or (), results),
    ]
    if op.backward:
        if op.backward not in ops:
            raise ValueError(f"{op.name}: its backward {op.backward!r} is no op")
        named.append(("given", op.given, {argument.name for argument in ops[op.backward].arguments}))
    for word, names, known in named:
        for name in names:
            if name not in known:
                raise ValueError(f"{op.name}: {word} names {name!r}, which is not there")
