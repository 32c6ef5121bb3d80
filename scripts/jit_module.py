"""Scaffolds an elementwise multi-tensor op: device source, launcher, Python face, reference, tests, and its lines of
csrc/ops.schemas, from which the binding is generated, and of the registry.

    python scripts/jit_module.py multi_tensor_lerp --inputs x,y --scalars weight --expression "x + weight * (y
    - x)"

What no flag says it asks, at a terminal. What it makes builds and passes at once: python -m build_matrix tree, then
python -m pytest tests/simt/test_<name>.py tests/L0/test_<name>.py; on a GPU it is compiled at first use, or packed by
--arch.
"""

from __future__ import annotations

import argparse
import ast
import keyword
import re
import sys
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from build_matrix.generator.lists import RESERVED  # noqa: E402

TEMPLATES = Path(__file__).with_name("jit_module_templates")
TYPES = {"f32": "float", "f16": "gpu::half", "bf16": "gpu::bfloat16"}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# What the templates call things of their own.
TAKEN = {
    "a", "math", "np", "make", "put", "device", "dtype", "rng", "values", "array", "arrays",
    "arguments", "buffers", "table", "found", "wanted", "close", "torch", "pytest", "tensors", "generator", "variant",
    "size",
} | RESERVED  # fmt: skip
NAME = re.compile(r"[a-z][a-z0-9_]*")
FILES = {
    "device.h.tmpl": "csrc/device/{}.h",
    "device.cu.tmpl": "csrc/device/{}.cu",
    "host.h.tmpl": "csrc/host/{}.h",
    "host.cpp.tmpl": "csrc/host/{}.cpp",
    "reference.py.tmpl": "apex/reference/{}.py",
    "face.py.tmpl": "apex/contrib/{}.py",
    "test.py.tmpl": "tests/L0/test_{}.py",
    "simt.py.tmpl": "tests/simt/test_{}.py",
}


class BadAnswer(Exception):
    """An answer that cannot be used; the text says why."""


def render(node: ast.expr, names: dict[str, str], constant: str) -> str:
    """`node` as text: each name as `names` spells it, each number as `constant` wraps it.

    Raises BadAnswer for anything but names, numbers, + - * / and parentheses: C++ and torch read the same
    then.
    """
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return constant.format(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return f"(-{render(node.operand, names, constant)})"
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = render(node.left, names, constant), render(node.right, names, constant)
        return f"({left} {OPERATORS[type(node.op)]} {right})"
    raise BadAnswer(f"{ast.unparse(node)!r}: use {', '.join(names)}, numbers, + - * / and parentheses")


def outer(text: str) -> str:
    """Without the parentheses round the whole."""
    return text[1:-1] if text.startswith("(") else text


def check_names(names: list[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name) or keyword.iskeyword(name) or name in TAKEN:
            raise BadAnswer(f"{name!r} cannot be a name here")
    if len(set(names)) < len(names):
        raise BadAnswer("a name is there twice")


def fields(name: str, inputs: list[str], output: str, scalars: list[str], expression: str) -> dict[str, str]:
    """Everything that the templates ask for. Raises BadAnswer."""
    check_names([name, *inputs, output, *scalars])
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise BadAnswer(f"{expression!r} is no expression: {error.msg}") from None
    lists = [*inputs, output]
    as_is = {n: n for n in [*inputs, *scalars]}
    suffixed = {n: f"{n}_" for n in inputs} | {n: n for n in scalars}
    joined = ", ".join
    short = [f"{n}={n}" for n in lists[:-1]] + [f"{output}=[]"] + [f"{n}={n}" for n in scalars]
    return {
        "name": name,
        "NAME": name.upper(),
        "Name": camel(name),
        "output": output,
        "expression": expression,
        "lists": str(len(lists)),
        "read_mask": f"0b{(1 << len(inputs)) - 1:b}",
        "written_mask": f"0b{1 << len(inputs):b}",
        "list_names": joined(lists),
        "argument_fields": "\n".join(f"  double {n};" for n in scalars) or "  i32 unused;",
        "math_fields": "\n".join(f"  Math {n};" for n in scalars),
        "begin": "\n".join(f"    {n} = (Math)a.{n};" for n in scalars) or "    (void)a;",
        "update_parameters": joined([*(f"const Math& {n}" for n in inputs), f"Math& {output}"]),
        "math_expression": outer(render(tree, as_is, "Math({})")),
        "variants": " \\\n".join(
            f"  V({joined_types(t, len(lists))}, {camel(name)}Update, float, "
            f"{joined([TYPES[t]] * len(lists))})"
            for t in TYPES
        ),
        "parameters": joined([*lists, *scalars]),
        "face_parameters": joined([*lists, *(["*"] if scalars else []), *scalars]),
        "call_arguments": joined([*lists, *scalars]),
        "call_keywords": joined(f"{n}={n}" for n in [*lists, *scalars]),
        "call_keywords_short": joined(short),
        "loop_targets": joined(f"{n}_" for n in lists),
        "loop_names": joined(f"{n}_" for n in lists),
        "to_math": "\n".join(f"        {n}_ = {n}_.to(math)" for n in inputs),
        "torch_expression": outer(render(tree, suffixed, "{}")),
        "make_tensors": "\n".join(f"    {n} = tensors()" for n in lists),
        "make_scalars": "\n".join(f"    {n} = {0.5 + 0.25 * i}" for i, n in enumerate(scalars)),
        "make_values": "\n".join(f"    {n} = values()" for n in lists),
        "argument_keywords": joined(f"{n}={n}" for n in scalars) or "unused=0",
        "input_targets": joined(f"{n}_" for n in inputs),
        "input_names": joined(inputs),
        "to_double": "\n".join(f"        {n}_ = {n}_.double()" for n in inputs),
        "double_expression": outer(render(tree, suffixed, "{}")),
        "one_tensor_each": "\n".join(f"    {n} = [torch.ones(3, device=variant.device)]" for n in inputs),
        "schema": f"{name}({joined([*(f'Tensor[] {n}' for n in inputs), f'Tensor(a!)[] {output}'])}"
        f"{''.join(f', float {n}' for n in scalars)}) -> ()\n  launch: {camel(name)}Arguments",
    }


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def joined_types(name: str, lists: int) -> str:
    return "_".join([name] * lists)


def registry_entry(name: str) -> str:
    """The op's own extension. Its state stays `planned`: it has no import name of public apex."""
    return f"""
[[extension]]
name = "{name}_cuda"
variable = "APEX_BUILD_{name.upper()}"
group = "cuda"
option = "{name}"
ops = ["{name}"]
minimum_torch = "2.8"
state = "planned"
"""


def write(values: dict[str, str], root: Path = ROOT) -> list[Path]:
    """Writes the files and adds the lines; touches nothing when one of the files is there. Raises
    BadAnswer."""
    name = values["name"]
    paths = {template: root / place.format(name) for template, place in FILES.items()}
    for path in paths.values():
        if path.exists():
            raise BadAnswer(f"{path.relative_to(root)} is there already")
    for template, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        text = Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
        # An op without scalars leaves empty lines where their lines would be.
        path.write_text(re.sub(r"\n{4,}", "\n\n\n", text), encoding="utf-8")
    package = root / "apex/contrib/__init__.py"
    if not package.exists():
        package.write_text("")
    for file, text in (
        ("csrc/extensions.toml", registry_entry(name)),
        ("csrc/ops.schemas", f"\n{values['schema']}\n"),
    ):
        with open(root / file, "a", encoding="utf-8") as out:
            out.write(text)
    return list(paths.values())


QUESTIONS = {
    "name": ("name of the op", "multi_tensor_scaled"),
    "inputs": ("lists that are read", "x"),
    "output": ("the list that is written", "out"),
    "scalars": ("scalars, or none", "alpha"),
    "expression": ("what an element becomes", "alpha * x"),
}


def ask(question: str, default: str) -> str:
    return input(f"{question} [{default}]: ").strip() or default


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="multi_tensor_lerp")
    parser.add_argument("--inputs", help="x,y: lists that are read")
    parser.add_argument("--output", help="the list that is written")
    parser.add_argument("--scalars", help="alpha,beta; an empty text for none")
    parser.add_argument("--expression", help='"x + weight * (y - x)": + - * / of inputs, scalars and numbers')
    given = parser.parse_args(arguments)
    given.output = given.output or ("out" if not sys.stdin.isatty() else None)
    missing = [key for key in QUESTIONS if getattr(given, key) is None]
    if missing and not sys.stdin.isatty():
        words = ", ".join(key if key == "name" else f"--{key}" for key in missing)
        parser.error(f"there is no terminal to ask at: give {words}")
    try:
        answers = vars(given) | {key: ask(*QUESTIONS[key]) for key in missing}
        name = answers["name"]
        inputs, scalars = (
            [n.strip() for n in answers[k].split(",") if n.strip() not in ("", "none")]
            for k in ("inputs", "scalars")
        )
        written = write(fields(name, inputs, answers["output"], scalars, answers["expression"]))
    except BadAnswer as error:
        print(f"jit_module: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path.relative_to(ROOT))
    tests = f"tests/simt/test_{name}.py tests/L0/test_{name}.py"
    print(f"next: python -m build_matrix tree && python -m pytest {tests}")
    print(f'then: python -m build_matrix changelog "{name}: ...", since the registry changed')
    return 0


if __name__ == "__main__":
    sys.exit(main())
