"""Names of public apex (ROCm's, and those of the Ascend patch) are importable and take what they take there.

public_names.txt lists them, one a line: a module's attribute or a class's method, with its parameters where it has
any. Classes stand for their constructors; `required` is what public apex writes for a default that there is not.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

LINES = Path(__file__).with_name("public_names.txt").read_text().splitlines()

OWNERS = ("self", "ctx")


def find(path):
    """The object of a dotted name whose first parts are modules."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def parameters_of(text):
    """[(name, its default's source or None)] of "(a, b=1, *c)", names with their stars."""
    given = ast.parse(f"def f{text}: pass").body[0].args
    names = [a.arg for a in given.args]
    defaults = [None] * (len(names) - len(given.defaults)) + [ast.unparse(d) for d in given.defaults]
    stars = ("*" + given.vararg.arg,) if given.vararg else ()
    found = [*zip(names, defaults, strict=True), *((star, None) for star in stars)]
    return [(name, default) for name, default in found if name not in OWNERS]


def assert_takes(function, text):
    ours = [p for name, p in inspect.signature(function).parameters.items() if name not in OWNERS]
    theirs = parameters_of(text)
    assert [str(p).split(":")[0].split("=")[0] for p in ours[: len(theirs)]] == [name for name, _ in theirs]
    for parameter, (_, default) in zip(ours, theirs, strict=False):
        if default not in (None, "required"):
            assert parameter.default == eval(default, {"torch": torch})
    for parameter in ours[len(theirs) :]:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert variadic or parameter.default is not parameter.empty


@pytest.mark.parametrize("line", LINES)
def test_public_name(line):
    path, parameters = re.fullmatch(r"([\w.]+)(\(.*\))?", line).groups()
    found = find(path)
    if parameters:
        assert_takes(found, parameters)


@pytest.mark.parametrize(
    "function", [lambda a, c, b=1: 0, lambda a, b=2: 0, lambda a, b=1, *, c: 0, lambda b=1: 0]
)
def test_a_difference_is_seen(function):
    with pytest.raises(AssertionError):
        assert_takes(function, "(a, b=1)")
    assert_takes(lambda a, b=1, c=None, *, d=0, **e: 0, "(a, b=1)")
