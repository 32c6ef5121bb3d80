"""The portable binding: that it is chosen where no compiled one fits, and that its results are theirs, bit for bit.

Every test of an op runs on it where APEX_BINDING=portable is set: `APEX_BINDING=portable pytest tests/L0`.
"""

import functools
import json
import shutil
import subprocess
import sys

import pytest

from apex._loader import installed, layout, registry

from .described import ROOT, python
from .test_bindings import LOAD, empty_tree, native, row

VALUES = ROOT / "tests/L0/binding_values.py"


def tree_of_another_torch(folder, **changes):
    """A tree with the host library of this one, whose bindings were compiled for a torch that is not here."""
    rows = [row(torch="2.99", built_against="2.99.0", git_version="x", **changes)]
    made = empty_tree(folder, rows)
    for name in ("libapex.so", "apex_portable.abi3.so"):
        shutil.copy(layout.libraries() / name, made / "apex" / "lib" / name)
    return made


@functools.cache
def values(**environment):
    """What tests/L0/binding_values.py says of a binding."""
    done = python(f"import runpy; runpy.run_path({str(VALUES)!r}, run_name='__main__')", **environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_op_has_a_portable_form():
    done = python(
        "from apex._loader import load; load()\nfrom apex._portable import module; print(module.without_kernel())",
        APEX_BINDING="portable",
    )
    assert done.stdout.splitlines()[-1] == "()"


@native
@pytest.mark.parametrize("module", ["0", "1"], ids=["ctypes", "module"])
def test_every_op_gives_the_bits_of_the_compiled_binding(module):
    exact, portable = (
        values(APEX_BINDING="exact"),
        values(APEX_BINDING="portable", APEX_PORTABLE_MODULE=module),
    )
    assert (exact["kind"], portable["kind"]) == ("exact", "portable")
    ops = {key.split()[0] for key in exact["digests"]}
    assert ops == set(registry.schemas()) and exact["digests"].keys() == portable["digests"].keys()
    different = [key for key, digests in exact["digests"].items() if digests != portable["digests"][key]]
    assert not different


@native
def test_the_next_torch_is_served_by_it_without_a_warning(tmp_path):
    found = python(LOAD, APEX_TREE=tree_of_another_torch(tmp_path)).stdout
    assert found.startswith("True True\nbuilt for torch 2.99, running") and "\n0\n" in found
    assert found.splitlines()[-1] == "[[2.0, 2.0, 2.0], [2.0, 2.0]]"


@native
def test_the_doctor_says_so(tmp_path):
    place = tree_of_another_torch(tmp_path)
    done = python(
        "from apex.__main__ import main; raise SystemExit(main(['--json']))", check=False, APEX_TREE=place
    )
    said = json.loads(done.stdout)
    assert said["binding"]["kind"] == "portable" and "built for torch 2.99" in said["binding"]["reason"]
    (note,) = [problem for problem in said["problems"] if problem["name"] == "portable binding"]
    assert note["severity"] == "note" and "microseconds" in note["text"]
    assert not [c for c in said["choices"] if c["device"] == "cpu:0" and c["taken"] != "cpu"]


@native
def test_the_doctor_counts_ops_without_a_portable_form():
    """One is taken away, as a new op begins."""
    code = """
from apex._loader import load
load()
from apex._portable import functional
del functional.KERNELS["rope_backward"]
from apex.__main__ import main
main(["--json"])
"""
    said = json.loads(python(code, APEX_BINDING="portable").stdout)
    (problem,) = [p for p in said["problems"] if p["name"] == "no portable form"]
    assert "no form of rope_backward: 1 of its ops run on the reference" in problem["text"]


@native
def test_strict_mode_takes_it(tmp_path):
    """Kernels are the same: nothing slower runs."""
    found = python(LOAD, APEX_TREE=tree_of_another_torch(tmp_path), APEX_STRICT=1).stdout
    assert found.startswith("True True")


def test_a_library_that_does_not_describe_itself_is_not_called(shared_library, monkeypatch, tmp_path):
    shared_library("apex/lib/libapex.so", "libapex.so")
    monkeypatch.setenv("APEX_TREE", str(tmp_path))
    assert installed.library_fault() is None
    assert "older than the portable binding" in installed.portable_fault()


@pytest.mark.parametrize("kind", ["exact", "portable", "reference"])
def test_a_binding_can_be_asked_for(kind):
    if kind != "reference" and (installed.library_fault() or not installed.bindings()):
        pytest.skip("no built bindings in this tree")
    done = python("from apex._loader import load; print(load().kind)", APEX_BINDING=kind)
    assert done.stdout.strip() == kind


@pytest.mark.parametrize(
    ("word", "error"),
    [("exact", "BindingMismatchError"), ("portable", "BindingMismatchError"), ("x", "names no")],
)
def test_one_that_is_not_there_is_an_error(tmp_path, word, error):
    done = python(LOAD, check=False, APEX_TREE=empty_tree(tmp_path), APEX_BINDING=word)
    assert done.returncode and error in done.stderr


FUNC = """
import torch
from apex._loader import load
kind = load().kind
from apex.normalization import FusedLayerNorm
from apex.transformer.functional.fused_softmax import _softmax
torch.manual_seed(0)
x, tangent = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)


def dual(function):
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, tangent))


layer = FusedLayerNorm(8).double()
for function in (layer, lambda x: _softmax(x.view(1, 1, 3, 8), None, 0.5, False)):
    leaf = x.clone().requires_grad_()
    function(leaf).pow(2).sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: function(x).pow(2).sum())(x), leaf.grad)
    torch.testing.assert_close(torch.func.vjp(function, x)[1](torch.ones_like(function(x)))[0].shape, x.shape)
    assert torch.autograd.gradgradcheck(lambda x: function(x), x.clone().requires_grad_())
    for forward in (lambda: torch.func.jvp(function, (x,), (tangent,)), lambda: dual(function)):
        try:
            forward()
        except NotImplementedError as error:
            assert "forward-mode automatic differentiation is not implemented" in str(error), error
        else:
            raise AssertionError("silent zeros")
print(kind, "right")
"""


@pytest.mark.parametrize("kind", ["exact", "portable", "reference"])
def test_derivatives_of_torch_func_are_right_or_refused(kind):
    """torch.library.register_autograd gave silent zeros in forward mode, and refused torch.func.grad."""
    if kind != "reference" and (installed.library_fault() or not installed.bindings()):
        pytest.skip("no built bindings in this tree")
    assert python(FUNC, APEX_BINDING=kind).stdout.strip() == f"{kind} right"


def test_the_interface_is_the_headers():
    """What libapex says of itself is what its headers say now."""
    if installed.library_fault():
        pytest.skip("no built bindings in this tree")
    code = "from build_matrix.parts import interface; print(interface.digest(interface.description()))"
    here = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    code = (
        "import ctypes\nfrom apex._loader import library\nf = library.load().c.apex_interface_digest\n"
        "f.restype = ctypes.c_char_p\nprint(f().decode())"
    )
    assert python(code).stdout == here.stdout


@native
def test_its_module_has_what_the_compiled_one_has():
    """Python code calls either by the same names; what is left out has a form in Python beside it."""
    code = (
        "from apex._loader import bindings; print(*(n for n in dir(bindings.load().module) if n[0] != '_'))"
    )
    exact, portable = (
        set(python(code, APEX_BINDING=kind).stdout.splitlines()[-1].split()) for kind in ("exact", "portable")
    )
    assert exact - portable == {"AmpGradients", "group_batch_norm_layer"} and portable <= exact


CHANGES = """
import ctypes, sys
sys.path[:0] = {paths!r}
import torch
from op_samples import SAMPLES, Values
from apex._loader import library, load, registry
from apex._loader.op_model import REQUIRED
load()
from apex._portable import activation, channels, functional, interface, losses, plan, transducer

of = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p)
resolvers = {{variant: of(lambda *place, variant=variant: variant) for variant in (library.CPU, library.REFERENCE)}}


def answer(variant):
    library.load().c.apex_set_resolver(resolvers[variant])


def then_changes(function):
    def call(*arguments):
        found = function(*arguments)
        answer(library.REFERENCE)
        return found
    return call


for module in (activation, losses, transducer):
    for name, value in list(vars(module).items()):
        if getattr(value, "__name__", "").endswith("_prepare"):
            setattr(module, name, then_changes(value))
function = interface.function
interface.function = lambda name: then_changes(function(name)) if name.endswith("_prepare") else function(name)
plan._resolve = then_changes(plan._resolve)
plan.TensorPlan._run_reference = None  # calling it is an error

ran = []
for name in {names}:
    answer(library.CPU)
    given = {{a.name: a.default for a in registry.schemas()[name].arguments if a.default is not REQUIRED}}
    given |= SAMPLES[name][0](Values("cpu"))
    if name in functional.KERNELS:
        answer(library.CPU)  # samples of a backward call their forward
        kernel = functional.KERNELS[name]._scope["function"]
        assert kernel(*(given[a.name] for a in registry.schemas()[name].arguments)) is not None, name
    else:
        getattr(torch.ops.apex, name)(**given)
    ran.append(name)
print(*ran)
"""


@native
def test_a_choice_that_changes_within_a_call():
    """An op that calls libapex twice, or looks at the choice and calls it, runs what the first of them found: memory
    was made for that."""
    names = (
        "bias_activation_backward", "xentropy_forward", "focal_loss_forward", "transducer_joint_backward",
        "welford_mean_var", "reduce_bn", "multi_tensor_adam", "multi_tensor_lamb",
    )  # fmt: skip
    paths = [str(ROOT / "tests/L0"), str(ROOT / "tests")]
    code = CHANGES.format(paths=paths, names=names)
    assert python(code, APEX_BINDING="portable").stdout.split() == list(names)


def test_statuses_tell_types_from_values():
    """libapex's own words for a dtype and for a size, through either kind of status."""
    code = """
import ctypes
from apex._loader import load
load()
from apex._portable import group_norm, interface, tensors
layout = interface.layout("GroupNorm")
for fields in (dict(input_type=9), dict(groups=3, channels=8)):
    buffer = layout.buffer()
    layout.set(buffer, **fields)
    status = group_norm._c_prepare(tensors.CPU_PLACE, buffer, 0, interface.layout("GroupNormPlan").buffer())
    try:
        tensors.must_use_reference(status, "group_norm")
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
"""
    if installed.library_fault():
        pytest.skip("no built bindings in this tree")
    lines = python(code, APEX_BINDING="portable").stdout.splitlines()
    assert lines == [
        "TypeError group_norm: element types are float32, float16, bfloat16 and float64",
        "ValueError group_norm: 8 channels cannot be parted into 3 groups",
    ]
