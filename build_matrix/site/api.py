"""Pages of the reference: a page for each public package of apex, with all of its modules and their public names. Text
and signatures come from the docstrings and the code, by Sphinx's autodoc, which imports apex: no GPU and no kernel is
needed for that."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

# Public by their names alone: the references behind the ops, which users reach by APEX_VARIANT=reference.
LEFT_OUT = ("apex.reference",)


def modules() -> list[str]:
    """Names of the public modules: no part of them begins with an underscore."""
    import apex

    found = ["apex", *(module.name for module in pkgutil.walk_packages(apex.__path__, "apex."))]
    return sorted(
        name
        for name in found
        if not any(part.startswith("_") for part in name.split(".")) and not name.startswith(LEFT_OUT)
    )


def page_of(module: str) -> str:
    """The page that a module stands on: its package's, or that of its part of apex.contrib."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["contrib"] else 2])


def names(module: ModuleType) -> list[str]:
    """Public names: what __all__ lists, else the functions and classes that are defined there."""
    if (listed := getattr(module, "__all__", None)) is not None:
        return [
            name
            for name in listed
            if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
        ]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def pages() -> dict[str, str]:
    """Name of a page -> its text, as reStructuredText; "index" lists them."""
    found: dict[str, list[str]] = {}
    shown: dict[int, str] = {}
    # A package comes before its modules: what it exports is shown there, under the name that one imports.
    for name in sorted(modules(), key=lambda name: (name.count("."), name)):
        found.setdefault(page_of(name), []).append("\n".join(_section(name, shown)))
    listed = "\n".join(f"   {name}" for name in sorted(found))
    index = (
        f"Reference\n=========\n\nEvery public module of apex.\n\n.. toctree::\n   :maxdepth: 1\n\n{listed}\n"
    )
    return {name: "\n\n".join(sections) for name, sections in found.items()} | {"index": index}


def _section(name: str, shown: dict[int, str]) -> Iterator[str]:
    """A module with its names; those that `shown` has already are referred to."""
    module = importlib.import_module(name)
    yield name
    yield ("=" if page_of(name) == name else "-") * len(name)
    # apex.contrib.index_mul_2d.index_mul_2d is a module, and a function of the package: one entry is enough.
    index = "   :no-index:\n" if name in shown.values() else ""
    yield f"\n.. automodule:: {name}\n   :no-members:\n{index}"
    elsewhere = []
    # Another name of the same object comes after its own.
    for each in sorted(names(module), key=lambda n: getattr(getattr(module, n), "__name__", n) != n):
        value = getattr(module, each)
        if first := shown.get(id(value)):
            elsewhere.append(f":py:obj:`{first}`")
            continue
        shown[id(value)] = f"{name}.{each}"
        yield from _entry(f"{name}.{each}", value)
    if elsewhere:
        yield f"See {', '.join(elsewhere)}.\n"


def _entry(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        yield f".. auto{'exception' if issubclass(value, BaseException) else 'class'}:: {name}\n"
    elif inspect.isroutine(value):
        yield f".. autofunction:: {name}\n"
    else:  # the docstring of a value is its type's
        yield f".. py:data:: {name}\n\n   A value of type `{type(value).__name__}`.\n"
