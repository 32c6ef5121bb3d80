"""How apex.amp is laid out: who imports whom, and what the rest knows of combined tensors."""

from __future__ import annotations

import ast
import graphlib
import pathlib
import subprocess
import sys

import apex.amp
import apex.amp._combined

ROOT = pathlib.Path(apex.amp.__file__).parent


def modules():
    """Dotted name -> syntax tree."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("apex", "amp", *path.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree, known):
    """Modules of apex.amp that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else node.module


def test_no_import_circles():
    found = modules()
    graph = {name: set(imports(tree, found)) for name, tree in found.items()}
    assert graph["apex.amp.frontend"] >= {"apex.amp._initialize", "apex.amp._levels"}
    assert (
        "apex.amp._combined" in graph["apex.amp._process_optimizer"]
    )  # a folder's name, beside its modules'
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_files_and_functions_are_short():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                inside = node.body[1:] if ast.get_docstring(node) else node.body
                lines = inside[-1].end_lineno - inside[0].lineno + 1 if inside else 0
                assert lines <= 60, f"{name}.{node.name} has {lines} lines"


def test_combined_tensors_are_known_by_three_functions():
    room = "apex.amp._combined"
    for name, tree in modules().items():
        if name.startswith(room):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not node.module.startswith(room), f"{name} imports from {node.module}"
            is_use = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_use and node.value.id == "_combined":
                assert node.attr in apex.amp._combined.__all__, f"{name} uses _combined.{node.attr}"


def test_amp_without_combined_tensors():
    """The folder could go: these three functions in its place, and everything else works."""
    code = """
import sys, types
stub = sys.modules["apex.amp._combined"] = types.ModuleType("apex.amp._combined")
stub.check = stub.prepare = lambda *arguments: None
stub.fit = lambda policy, properties: policy
import torch
from apex import amp
from apex.optimizers import FusedAdam, FusedSGD
for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
    for make in (torch.optim.SGD, FusedSGD, FusedAdam):
        amp._amp_state.__init__()
        amp._amp_state.__dict__.pop("opt_properties", None)
        model = torch.nn.Linear(4, 2, dtype=torch.float32, device="cpu")
        optimizer = make(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8, verbosity=0)
        before = model.weight.detach().clone()
        with amp.scale_loss(model(torch.ones(3, 4, dtype=torch.float32, device="cpu")).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model.weight, before), (level, make)
assert not [name for name in sys.modules if name.startswith("apex.amp._combined.")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
