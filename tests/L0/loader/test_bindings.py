"""Loading: reference mode, strict mode, a second copy, damage; each in a new process."""

import json
import shutil

import pytest

from apex._loader import environment, installed, layout, probe
from apex._loader.fit import fit

from .described import python

LOAD = """
import warnings
from apex._loader import load
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = load()
print(found.native, found.module is not None)
print(found.reason)
print(len(caught), *caught[:1])
import torch
flag = torch.zeros(1, dtype=torch.int32)
out = [torch.empty(3), torch.empty(2)]
torch.ops.apex.multi_tensor_scale([torch.ones(3), torch.ones(2)], out, flag, 2.0)
print([t.tolist() for t in out])
"""
native = pytest.mark.skipif(
    installed.library_fault() is not None or not installed.bindings(), reason="no built bindings in this tree"
)


def empty_tree(folder, rows=None):
    """A tree without libraries; with `rows`, one whose bindings.json lists them."""
    (folder / "apex" / "lib").mkdir(parents=True)
    if rows is not None:
        (folder / "apex" / "lib" / "bindings.json").write_text(json.dumps(rows))
    return folder


def row(**changes):
    torch = environment.running_torch()
    return {
        "torch": torch.minor, "git_version": torch.git_version, "built_against": torch.version,
        "python": environment.python_tag(), "cxx11_abi": torch.cxx11_abi, "folder": "torchX", **changes,
    }  # fmt: skip


def test_without_bindings_everything_runs_on_the_reference(tmp_path):
    lines = python(LOAD, APEX_TREE=empty_tree(tmp_path)).stdout.splitlines()
    assert lines[0] == "False False" and "no compiled bindings" in lines[1]
    assert lines[2] == "0"  # a Python-only installation is no news
    assert lines[-1] == "[[2.0, 2.0, 2.0], [2.0, 2.0]]"


def test_another_torch_is_one_warning_and_the_reference(tmp_path):
    """Report 5: the wheel's torch was swapped."""
    tree_of_another = empty_tree(tmp_path, [row(torch="2.99", built_against="2.99.0", git_version="x")])
    done = python(LOAD, APEX_TREE=tree_of_another).stdout
    assert "built for torch 2.99, running" in done and "\n1 " in done and "[[2.0" in done
    assert "python -m pip install apex-" in done and "/whl/" in done  # the line of `which`, index included


def test_strict_makes_it_an_error(tmp_path):
    tree_of_another = empty_tree(tmp_path, [row(torch="2.99", built_against="2.99.0", git_version="x")])
    done = python("import apex._loader as l; l.load()", check=False, APEX_TREE=tree_of_another, APEX_STRICT=1)
    assert done.returncode and "BindingMismatchError" in done.stderr and "remedy:" in done.stderr


def test_a_listed_library_that_is_missing(tmp_path):
    done = python("import apex._loader as l; l.load()", check=False, APEX_TREE=empty_tree(tmp_path, [row()]))
    assert "InstallationError" in done.stderr and "libapex_torch.so is not installed" in done.stderr


@native
def test_native():
    lines = python(LOAD).stdout.splitlines()
    fits = fit(probe.for_bindings())
    assert lines[0] == f"{fits.library} {fits.module}"
    assert lines[-1] == "[[2.0, 2.0, 2.0], [2.0, 2.0]]"


def copy_of_tree(folder):
    shutil.copytree(layout.built(), folder / "apex", symlinks=True)
    return folder


@native
def test_a_second_copy_is_named_before_it_dies_in_torch(tmp_path):
    copy = copy_of_tree(tmp_path)
    code = f"""
import os
from apex._loader import bindings
first = bindings.load()
if not first.native:
    raise SystemExit("skip")
bindings.load.forget()
os.environ["APEX_TREE"] = {str(copy)!r}
from apex._loader import errors
try:
    bindings.load()
except errors.TwoCopiesError as error:
    print(error)
"""
    done = python(code, check=False)
    if "skip" in done.stderr:
        pytest.skip("the built binding is for another torch")
    assert "two apex are loaded" in done.stdout and "found:" in done.stdout, done.stderr


def test_ops_that_somebody_else_defined(tmp_path):
    code = """
import torch
other = torch.library.Library("apex", "DEF")
other.define("something(Tensor x) -> Tensor")
import apex._loader as loader
loader.load()
"""
    done = python(code, check=False, APEX_TREE=empty_tree(tmp_path))
    assert "TwoCopiesError" in done.stderr and "apex::something" in done.stderr


@native
@pytest.mark.parametrize("length", [0, 5000, 50_000])
@pytest.mark.parametrize("file", ["libapex_torch.so", "libapex.so", "_C*.so"])
def test_a_library_that_is_cut_short(tmp_path, file, length):
    """dlopen would end the process with SIGBUS."""
    copy = copy_of_tree(tmp_path)
    if not fit(probe.for_bindings()).module:
        pytest.skip("the built binding is for another torch or Python")
    path = next((copy / "apex" / "lib").rglob(file))
    path.write_bytes(path.read_bytes()[:length])
    done = python("import apex._loader as l; l.load()", check=False, APEX_TREE=copy)
    assert "InstallationError" in done.stderr and f"{path.name} is damaged" in done.stderr, done


UNDEFINED = """
import torch
from apex._loader import errors, load

def refuse(path):
    raise OSError(f"Could not load this library: {path}") from OSError("undefined symbol: apex_of_another_version")

torch.ops.load_library = refuse
try:
    load()
except errors.InstallationError as error:
    print(error)
"""


@native
def test_why_a_library_cannot_be_opened_is_passed_on():
    """torch's own text names the file alone."""
    assert "undefined symbol: apex_of_another_version" in python(UNDEFINED).stdout


def test_load_is_idempotent_over_threads(tmp_path):
    code = """
import threading
from apex._loader import load
found = []
threads = [threading.Thread(target=lambda: found.append(load())) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print(len(set(map(id, found))), len(found))
"""
    assert python(code, APEX_TREE=empty_tree(tmp_path)).stdout.split() == ["1", "8"]


@native
def test_a_choice_that_failed_reaches_the_caller_of_an_op():
    """Else APEX_STRICT and a wrong APEX_VARIANT would be silent wherever an op is called."""
    if not fit(probe.for_bindings()).library:
        pytest.skip("the built binding is for another torch")
    code = """
import torch
from apex._loader import library, load
load()
def answer(*arguments):
    raise ValueError("boom")
library.load().resolver.answer = answer
flag = torch.zeros(1, dtype=torch.int32)
torch.ops.apex.multi_tensor_scale([torch.ones(3)], [torch.empty(3)], flag, 2.0)
"""
    assert python(code, check=False).returncode


def old_build(folder, change):
    """A copy of the built tree whose ops.schemas went through `change`."""
    copy = copy_of_tree(folder)
    (copy / "apex" / "ops.schemas").write_text(change(layout.schemas().read_text()))
    return copy


@native
def test_a_build_older_than_its_sources_is_not_loaded(tmp_path):
    """A changed signature would end the process in torch's dispatcher."""
    copy = old_build(tmp_path, lambda text: text.replace("float scale", "float scale, int old=0", 1))
    done = python(LOAD, APEX_TREE=copy).stdout
    if "built for torch" in done:
        pytest.skip("the built binding is for another torch")
    assert done.startswith("False False") and "multi_tensor_scale changed" in done
    assert "remedy:    python -m build_matrix tree" in done and "[[2.0, 2.0, 2.0], [2.0, 2.0]]" in done


@native
def test_an_op_newer_than_the_build_runs_on_its_reference():
    code = """
from apex._loader import bindings, op_model, registry
schemas = dict(registry.schemas())
extra = op_model.parse("one_more(Tensor x) -> Tensor")
registry.schemas = lambda: {**schemas, **extra}
import sys, types
module = types.ModuleType("apex.reference.one_more")
module.one_more = lambda x: x + 1
sys.modules["apex.reference.one_more"] = module
found = bindings.load()
import torch
print(found.native, torch.ops.apex.one_more(torch.ones(2)).tolist())
"""
    assert python(code).stdout.split(" ", 1)[1] == "[2.0, 2.0]\n"


@native
@pytest.mark.parametrize("kind", ["exact", "portable"])
def test_a_binding_without_the_entry_of_an_op_is_named_with_what_to_do(kind):
    """One that was built from older sources than the Python beside it."""
    code = """
import torch
from apex import _functional, _lists
from apex._loader import errors
from apex.optimizers import FusedAdam
p = torch.nn.Parameter(torch.ones(2))
p.grad = torch.ones(2)
optimizer = FusedAdam([p])
optimizer._plan(0)
module = _functional._module
for name in ("newer", "multi_tensor_newer"):
    assert not hasattr(module, name)
rms = torch.ops.apex.rms_norm_forward.default
for call in (
    lambda: _functional.call("newer", rms, 1, (torch.ones(2),)),
    lambda: _lists.call("multi_tensor_newer", [[torch.ones(2)]]),
    lambda: optimizer._plan(0).run("multi_tensor_newer"),
):
    try:
        call()
    except errors.BindingMismatchError as error:
        print("newer" in error.what, bool(error.remedy))
"""
    assert python(code, APEX_BINDING=kind).stdout == "True True\n" * 3


def test_a_build_whose_schemas_cannot_be_read_is_stale(tmp_path, monkeypatch):
    """Words that another version's csrc/ops.schemas has: said as any other difference is, by every command."""
    path = tmp_path / "ops.schemas"
    path.write_text("f(Tensor x) -> Tensor\n  unheard: of\n", encoding="utf-8")
    monkeypatch.setattr(layout, "built_schemas", lambda: path)
    assert "another csrc/ops.schemas: f: no directive is called 'unheard'" in installed.staleness()
