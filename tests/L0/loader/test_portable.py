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


OTHER_VERSION = """
from apex._portable import interface
described = interface._described()
kind, name, field = GONE
if field:
    described[kind][name] = [entry for entry in described[kind][name] if entry[0] != field]
else:
    del described[kind][name]
from apex._loader import errors, load
for _ in range(2):
    try:
        load()
    except errors.InstallationError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (("structs", "apex_workspace", ""), "it has no struct apex_workspace"),
        (("functions", "apex_take_memory", ""), "it has no function apex_take_memory"),
        (("structs", "Rope", "angle_type"), "it has no angle_type in struct Rope"),
    ],
)
def test_a_library_of_another_version_says_what_it_lacks_and_what_to_do(gone, said):
    """At each call, as the first time."""
    if installed.portable_fault():
        pytest.skip("no built host library in this tree")
    done = python(f"GONE = {gone!r}{OTHER_VERSION}", APEX_BINDING="portable").stdout
    assert done.count(said) >= 2 and done.count("python -m build_matrix tree") == 2, done


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
    assert (
        exact - portable
        == {
            "AmpGradients",
            "Fp8Products",
            "fp8_linear_layer",
            "fp8_new_scales",
            "group_batch_norm_layer",
            "sync_batch_norm_layer",
        }
        and portable <= exact
    )


CHANGES = """
import ctypes, sys
sys.path[:0] = {paths!r}
import torch
from op_samples import SAMPLES, Values
from apex._loader import library, load, registry
from apex._loader.op_model import REQUIRED
load()
from apex._portable import functional, plan

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
    """An op that looks at the choice and then calls libapex runs what it found: memory was made for that."""
    names = ("multi_tensor_adam", "multi_tensor_lamb")
    paths = [str(ROOT / "tests/L0"), str(ROOT / "tests")]
    code = CHANGES.format(paths=paths, names=names)
    assert python(code, APEX_BINDING="portable").stdout.split() == list(names)


CALLS = """
import sys
sys.path[:0] = {paths!r}
import torch
from op_samples import SAMPLES, Values
from apex._loader.op_model import REQUIRED
from apex._portable import interface

seen = []
plain = interface.function


def counting(name):
    function = plain(name)

    def call(*arguments):
        seen.append(name)
        return function(*arguments)
    return call


interface.function = counting
from apex._loader import load, registry
load()
from apex._portable import functional

for name, kernel in functional.KERNELS.items():
    given = {{a.name: a.default for a in kernel.arguments if a.default is not REQUIRED}}
    given |= SAMPLES[name][0](Values("cpu"))
    seen.clear()
    kernel._scope["function"](*(given[a.name] for a in kernel.arguments))
    if len(seen) > 1:
        print(name, *seen)
"""


@native
def test_each_direction_is_one_call_of_libapex():
    """What it needs beside its arguments the call takes itself. index_mul_2d's two gradients are two kernels, between
    which torch sorts."""
    paths = [str(ROOT / "tests/L0"), str(ROOT / "tests")]
    found = python(CALLS.format(paths=paths), APEX_BINDING="portable", APEX_PORTABLE_MODULE="0").stdout
    assert found.splitlines() == ["index_mul_2d_backward apex_index_mul_2d_forward apex_index_mul_2d_scatter"]


REFUSALS = """
import json, sys
sys.path[:0] = {paths!r}
import torch
from op_samples import SAMPLES, Values
from apex._loader import load, registry
from apex._loader.op_model import REQUIRED

load()
changes = {{
    "shorter": lambda t: t[..., :-1], "longer": lambda t: torch.cat((t, t), -1) if t.dim() else t.expand(2),
    "deeper": lambda t: t[None], "other dtype": lambda t: t.half() if t.is_floating_point() else t.float(),
}}
said = {{}}
for name, op in registry.schemas().items():
    if op.lists or name not in SAMPLES:
        continue
    given = {{a.name: a.default for a in op.arguments if a.default is not REQUIRED}}
    given |= SAMPLES[name][0](Values("cpu"))
    for argument in op.arguments:
        value = given[argument.name]
        for change, make in changes.items() if isinstance(value, torch.Tensor) else ():
            try:
                getattr(torch.ops.apex, name)(**given | {{argument.name: make(value)}})
            except (TypeError, ValueError, IndexError) as error:
                said[f"{{name}} {{argument.name}} {{change}}"] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(said))
"""


@native
def test_refusals_read_alike():
    """Every op, each of its tensors changed: what the bindings refuse they refuse in one type and in one text."""
    code = REFUSALS.format(paths=[str(ROOT / "tests/L0"), str(ROOT / "tests")])
    exact, portable = (
        json.loads(python(code, APEX_BINDING=kind).stdout.splitlines()[-1]) for kind in ("exact", "portable")
    )
    assert len(exact) > 100 and portable == exact


GRADIENTS = """
import torch
from torch.nn import functional as F

from apex._loader import bindings

bindings.load()
op, f64 = torch.ops.apex, torch.float64
x, w = torch.randn(2, 8, dtype=f64), torch.randn(2, 8, dtype=f64)
square, row = torch.randn(8, 8, dtype=f64), torch.randn(8, dtype=f64)
labels = torch.tensor([1, 3])


def twice(f):
    return torch.func.grad(lambda a: (torch.func.grad(lambda b: f(b).pow(3).sum())(a) * w).sum())(x)


for ours, theirs in (
    (lambda b: op.scaled_masked_softmax_forward(b), lambda b: b.softmax(-1)),
    (lambda b: op.masked_softmax_dropout_forward(b)[0], lambda b: b.softmax(-1)),
    (lambda b: op.layer_norm_forward(b, [8], row, row)[0], lambda b: F.layer_norm(b, (8,), row, row)),
    (lambda b: op.rms_norm_forward(b, [8], row, 1e-5)[0], lambda b: F.rms_norm(b, (8,), row, 1e-5)),
    (lambda b: op.group_norm_forward(b.view(1, 2, 2, 4), 1)[0], lambda b: F.group_norm(b.view(1, 2, 2, 4), 1)),
    (lambda b: op.xentropy_forward(b, labels)[0], lambda b: F.cross_entropy(b, labels, reduction="none")),
    (lambda b: op.bias_activation_forward(b, None, "silu", False), F.silu),
    (lambda b: op.dense_forward(b, square, row, "sigmoid")[0], lambda b: F.linear(b, square, row).sigmoid()),
):
    torch.testing.assert_close(twice(ours), twice(theirs))
refused = 0
for once in (
    lambda b: op.focal_loss_forward(b, labels, torch.ones(1, dtype=f64), 8, 0.25, 2.0),
):
    try:
        twice(once)
    except NotImplementedError as error:
        refused += "double backward" in str(error)
print(refused)
"""


@pytest.mark.parametrize("binding", ["portable", "exact"])
def test_torch_func_differentiates_twice(binding):
    """The gradient of a gradient by nested torch.func.grad: right or refused. Ops defined from Python left the outer
    level out, and gave another number."""
    environment = {"APEX_BINDING": "portable"} if binding == "portable" else {}
    assert python(GRADIENTS, **environment).stdout == "1\n"


ABSENT = """
import torch
from torch._dynamo import compiled_autograd

from apex._loader import bindings

bindings.load()


def gradients():
    x, residual, weight = (torch.ones(n, 8, requires_grad=True) for n in (4, 4, 1))
    weight = weight.flatten()
    _, total, _ = torch.ops.apex.add_rms_norm_forward(x, residual, [8], weight)
    return torch.autograd.grad(total.square().sum() + weight.square().sum(), [x, residual, weight])


wanted = gradients()
with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
    torch.testing.assert_close(gradients(), wanted)
"""


@pytest.mark.parametrize("binding", ["portable", "reference"])
def test_compiled_autograd_and_a_gradient_that_is_not_there(binding):
    """It adds up what nodes written in Python return for each input that is asked for, and takes no None. The whole of
    it: APEX_BINDING=portable pytest tests/L0/test_compiled_autograd.py."""
    python(ABSENT, APEX_BINDING=binding)


LAZY = """
import torch

from apex._loader import bindings
from apex.fused_dense import fused_dense_function
from apex.normalization.fused_layer_norm import fused_rms_norm_affine

bindings.load()
lazily = lambda t: torch.complex(t, -t).conj().imag
x, w, g = torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8)
assert lazily(x).is_neg()
for function in (lambda x: fused_dense_function(x, w, w[0]), lambda x: fused_rms_norm_affine(x, w[0], (8,), 1e-5)):
    found, wanted = [], []
    for turn, into in ((lazily, found), (torch.Tensor.clone, wanted)):
        leaf = turn(x).requires_grad_()
        y = function(leaf)
        into += [y, *torch.autograd.grad(y, leaf, turn(g))]
    torch.testing.assert_close(found, wanted)
"""


def test_lazy_views_are_read_by_direct_entries():
    """As by the dispatcher, which the compiled binding's entries go through: in the forward, and as a gradient."""
    python(LAZY, APEX_BINDING="portable")


def test_statuses_tell_types_from_values():
    """libapex's own words for a dtype and for a size, through either kind of status."""
    code = """
import ctypes
from apex._loader import load
load()
from apex._portable import group_norm, interface, tensors
layout = interface.layout("GroupNorm")
for fields in (dict(input_type=9), dict(groups=3, channels=8)):
    status = group_norm._c_forward(tensors.CPU_PLACE, layout.packer(*fields)(*fields.values()), None)
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


NOT_PLAIN = """
import torch
from torch._subclasses import FakeTensorMode
import apex.optimizers
from apex._portable import fast

def status(input, shape=(8,), weight=torch.ones(8), residual=None):
    output, rstd = torch.empty(2, 8), torch.empty(2)
    return fast.module.norm_forward(False, shape, 1e-5, input, residual, weight, None, output, None, None, rstd)

x, kept = torch.randn(2, 8), []
assert status(x) == 0 and status(x, [8]) == 0 and status(x, (8,), None) == 0
torch.func.grad(lambda t: (kept.append(t), t.sum())[1])(x)
torch.func.vmap(lambda t: (kept.append(t), t.sum())[1])(torch.randn(3, 2, 8))
freed = torch.randn(2, 8)
freed.untyped_storage().resize_(0)
for t in (torch._neg_view(x), torch._efficientzerotensor(2, 8), x.to(torch.complex64).conj(), x.to_sparse(), freed,
          torch._to_functional_tensor(x), x.to("meta"), FakeTensorMode().from_tensor(x), x.int(), x.t(), *kept):
    assert status(t) is None, t
for given in (dict(shape=(4,)), dict(shape=(2, 8), weight=None),
              dict(shape=()), dict(shape=(3, 2, 8)), dict(shape=("8",)), dict(weight=torch.ones(7)),
              dict(residual=torch.ones(2, 7)), dict(residual=torch.ones(2, 8).double()), dict(weight=freed)):
    assert status(x, **given) is None, given

from apex.normalization.fused_layer_norm import fused_layer_norm, fused_rms_norm
for norm in (fused_layer_norm, fused_rms_norm):
    for shape in ((-1,), (-8,), (4,), (), (2, -8), (1, 2, 8)):
        try:
            norm(x, shape)
            raise SystemExit(f"{shape} was taken")
        except ValueError as error:
            assert "normalized_shape" in str(error), error
"""


@native
def test_the_module_in_c_takes_what_fits_and_is_plain_alone():
    """What else it is given, kernels written in Python look at, which say what is wrong."""
    assert python(NOT_PLAIN, APEX_BINDING="portable").returncode == 0


READ_AHEAD = """
import torch
from apex.optimizers import FusedAdam

def made(cls, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
    return params, cls(params, lr=0.1, weight_decay=0.1, **options)

ours, fused = made(FusedAdam)
theirs, plain = made(torch.optim.AdamW)

def gradients():
    for params in (ours, theirs):
        for i, p in enumerate(params):
            p.grad = torch.full((5,), i - 1.5)

def moved(params):
    for p in params:
        p.data = p.data.clone()

def compare():
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)

for _ in range(2):
    gradients()
    fused.step(), plain.step()
compare()
# A step that is refused has read the lists; the next one reads them again.
fused.param_groups[0]["betas"] = (2.0, 0.999)
try:
    fused.step()
    raise SystemExit("betas of 2 were taken")
except ValueError:
    pass
fused.param_groups[0]["betas"] = (0.9, 0.999)
before = [p.data for p in ours]
untouched = [t.clone() for t in before]
moved(ours)
fused.step(), plain.step()
compare()
assert all(map(torch.equal, before, untouched))
# So does one that nobody asked for whether the plan is outdated.
plan = fused._plans[0][1]
run = plan.run
assert not plan.state_changed(fused.state)
scalars = dict(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, decay_mode=1, bias_correction=True, weight_decay=0.1)
run("multi_tensor_adam", step=4, **scalars), plain.step()
moved(ours)
run("multi_tensor_adam", step=5, **scalars), plain.step()
fused.param_groups[0]["step"] = 5
compare()
# A state that is gone, or of another dtype, is noticed.
state = fused.state[ours[0]]
state["exp_avg"] = state["exp_avg"].clone()
fused.step(), plain.step()
compare()
del state["exp_avg_sq"], plain.state[theirs[0]]["exp_avg_sq"]
plain.state[theirs[0]]["exp_avg_sq"] = torch.zeros(5)
fused.step(), plain.step()
compare()
for params in (ours, theirs):
    for p in params:
        p.data, p.grad = p.data.double(), None
assert plan.state_changed(fused.state) and all(t.dtype == torch.float64 for t in ours)
"""


@native
@pytest.mark.parametrize("module", ["0", "1"], ids=["ctypes", "module"])
def test_lists_that_are_read_ahead_are_read_once_a_step(module):
    assert python(READ_AHEAD, APEX_BINDING="portable", APEX_PORTABLE_MODULE=module).returncode == 0


@native
@pytest.mark.parametrize("module", ["0", "1"], ids=["ctypes", "module"])
def test_none_in_a_list_that_is_not_the_gradients_is_refused(module):
    """Never launched on, whatever the plan that is remembered for these shapes."""
    code = """
import torch
import apex.optimizers
from apex._loader import load
_C = load().module
lists = [[torch.ones(4), torch.ones(4)] for _ in range(4)]
scalars = dict(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, decay_mode=1, bias_correction=True, weight_decay=0.1, step=1)
_C.multi_tensor_adam(lists, **scalars)
lists[2][1] = None
try:
    _C.multi_tensor_adam(lists, **scalars)
except (ValueError, TypeError) as error:
    print(error)
"""
    done = python(code, APEX_BINDING="portable", APEX_PORTABLE_MODULE=module)
    assert "exp_avgs[1]" in done.stdout


def test_a_forked_child_is_not_held_up_by_a_lock_of_its_parent():
    """One that another thread held while the process forked."""
    code = """
import os, signal, threading
import torch
import apex.optimizers
from apex import _lists
from apex._portable import list_op
x = torch.ones(4)
held, done = threading.Event(), threading.Event()
def hold():
    with list_op._lock:
        held.set()
        done.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    _lists.call("multi_tensor_scale", [[x], [x]], None, 2.0)
    os._exit(int(x.sum()))
done.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    if installed.library_fault():
        pytest.skip("no built bindings in this tree")
    assert python(code, APEX_BINDING="portable").stdout == "8\n"
