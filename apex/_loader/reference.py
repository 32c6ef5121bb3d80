"""The reference implementations as dispatcher ops: library `apex_reference`.

Each op of ops.schemas is defined there under the same name and schema; its implementation is the function of
that name in `apex/reference/<op>.py`, imported at the first call. It serves every device (NPU, XPU and MPS
among them); the bindings call it through the dispatcher wherever no other variant runs.
"""

from __future__ import annotations

import functools
import importlib
import threading

from apex._loader import registry

NAMESPACE = "apex_reference"
_lock = threading.Lock()
_library = None


def register():
    """Defines the ops, once a process. Imports torch; raises InstallationError without ops.schemas."""
    global _library
    with _lock:
        if _library is None:
            _library = define(NAMESPACE, implementation)
    return _library


def define(namespace, implementation, names=None, kind="DEF"):
    """Defines ops of ops.schemas in `namespace` and returns the library that keeps them alive.

    implementation: op name -> callable, registered for every device
    names: the ops, by default all
    kind: "DEF", or "FRAGMENT" where the namespace exists
    """
    import torch

    library = torch.library.Library(namespace, kind)
    for name in registry.schemas() if names is None else names:
        schema = registry.schemas()[name]
        library.define(schema.text, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(schema.name, implementation(schema.name), "CompositeExplicitAutograd")
        if schema.returns_nothing:  # nothing to infer, and the implementation would touch data
            library.impl(schema.name, _nothing, "Meta")
    return library


def implementation(name):
    """The callable that imports `apex.reference.<name>` when it is first called."""

    @functools.cache
    def function():
        return getattr(importlib.import_module(f"apex.reference.{name}"), name)

    def reference(*arguments, **keywords):
        import torch

        # Gradients belong to the differentiable op above; in-place ops may write leaves that require grad.
        with torch.no_grad():
            return function()(*arguments, **keywords)

    return reference


def _nothing(*arguments, **keywords):
    return None
