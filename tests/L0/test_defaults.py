"""No tensor of apex is made without naming its dtype and device: torch's defaults are the user's. Nor is one of the
tests that run under other defaults."""

from __future__ import annotations

import ast
import pathlib

import pytest
import torch
import torch_defaults

import apex

APEX = pathlib.Path(apex.__file__).parent
TESTS = pathlib.Path(__file__).parent

# What torch makes of numbers and sizes alone; `frombuffer` reads bytes of the host and takes no device.
FACTORIES = {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "logspace",
    ),
    *(
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "scalar_tensor",
        "sparse_coo_tensor",
    ),
    *("tensor", "zeros", "tril_indices", "triu_indices"),
}
FORBIDDEN = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "get_default_dtype"}
# Parameters and buffers of modules follow the defaults as those of torch.nn do: file -> how many.
AS_TORCH_MODULES = {
    "RNN/RNNBackend.py": 5,
    "RNN/cells.py": 2,
    "contrib/cudnn_gbn/batch_norm.py": 1,
    "contrib/groupbn/batch_norm.py": 1,
    "contrib/multihead_attn/_module.py": 1,
    "contrib/layer_norm/layer_norm.py": 2,
    "normalization/fused_layer_norm.py": 1,
    "transformer/testing/commons.py": 1,
}


def faults(source):
    """Lines that make a tensor whose dtype or device is torch's default.

    Beside factories: torch.where with a number, whose dtype is the default one if the other is a number too
    (masked_fill says the same of a tensor), and torch.finfo without a dtype.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
            continue
        name, keywords = ast.unparse(node.func).removeprefix("torch."), {k.arg for k in node.keywords}
        unnamed = name in FACTORIES and not {"dtype", "device"} <= keywords
        bare = name == "finfo" and not node.args
        if unnamed or bare or name in FORBIDDEN or (name == "where" and any(map(is_number, node.args[1:]))):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def is_number(node):
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) or ast.unparse(node) in (
        "torch.inf",
        "torch.nan",
        "math.inf",
        "math.nan",
    )


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3)",
        "torch.empty(3, dtype=dtype)",
        "torch.full((1,), 2.0, device=device)",
        "torch.as_tensor(x)",
        "torch.Tensor([1])",
        "torch.where(mask, -torch.inf, 0.0)",
        "torch.where(mask, group['x'], 1.0)",
        "torch.finfo()",
    ],
)
def test_what_depends_on_a_default_is_seen(source):
    assert len(faults(source)) == 1


def test_what_depends_on_no_default_passes():
    assert not faults(
        "torch.zeros(3, dtype=d, device=e); torch.zeros_like(x); x.new_zeros(3); torch.where(m, x, y)"
    )


def test_no_tensor_is_made_without_dtype_and_device():
    found = {}
    for path in sorted(APEX.rglob("*.py")):
        name = path.relative_to(APEX).as_posix()
        lines = faults(path.read_text())
        if len(lines) != AS_TORCH_MODULES.get(name, 0):
            found[name] = lines
    assert not found


def test_tests_that_run_under_other_defaults_name_dtype_and_device():
    """torch.where takes numbers here: beside tensors, which say both."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        if torch_defaults.marked(path.relative_to(TESTS.parents[1]).as_posix()):
            lines = [line for line in faults(path.read_text()) if ": torch.where(" not in line]
            found |= {path.name: lines} if lines else {}
    assert not found


def test_every_file_runs_under_other_defaults_that_is_not_left_out(request):
    """One of a new optimizer, too."""
    assert request.node.get_closest_marker("defaults")
    assert torch_defaults.marked("tests/L0/test_fused_new.py") and torch_defaults.marked(
        "tests/L0/amp/test_new.py"
    )
    assert not any(map(torch_defaults.marked, ("tests/farm/test_store.py", "tests/L0/host/test_cpu.py")))
    names = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py")]
    assert all(any(name.startswith(beginning) for name in names) for beginning in torch_defaults.LEFT_OUT)


def defaults():
    weight = torch.nn.Linear(1, 1).weight
    return weight.dtype, weight.device.type


@pytest.mark.parametrize(
    "setting, wanted",
    [
        (("bfloat16", None), (torch.bfloat16, None)),
        (("float64", None), (torch.float64, None)),
        ((None, "meta"), (torch.float32, "meta")),
    ],
    ids=str,
)
def test_the_environment_sets_the_defaults(setting, wanted, monkeypatch):
    """Around a test, and no longer."""
    before = defaults()
    wanted = wanted[0], wanted[1] or before[1]
    monkeypatch.setattr(torch_defaults, "DTYPE", setting[0])
    monkeypatch.setattr(torch_defaults, "DEVICE", setting[1])
    around = torch_defaults.pytest_runtest_protocol()
    next(around)
    try:
        assert defaults() == wanted
        with torch_defaults.float32_on_cpu():
            assert defaults() == (torch.float32, "cpu")
        assert defaults() == wanted
    finally:
        with pytest.raises(StopIteration):
            around.send(None)
    assert defaults() == before
