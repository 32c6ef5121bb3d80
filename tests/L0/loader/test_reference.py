"""The library apex_reference, and the ops that Python defines where no binding fits."""

import pytest

from apex._loader import op_model, reference, registry

from .described import python


def test_schemas():
    found = op_model.parse("# comment\n\nf(Tensor x) -> Tensor\ng(Tensor(a!)[] xs) -> ()\n")
    assert [(s.name, s.returns_nothing) for s in found.values()] == [("f", False), ("g", True)]
    with pytest.raises(ValueError, match="not a schema"):
        op_model.parse("f(Tensor x)")


def test_every_op_has_its_reference():
    for name in registry.schemas():
        assert callable(getattr(reference.module(name), name))


def test_registered_lazily_traceable_and_below_autograd(tmp_path):
    code = """
import sys, torch
from apex._loader import load, reference
load()
assert not [m for m in sys.modules if m.startswith("apex.reference.multi")]
for ops in (torch.ops.apex, torch.ops.apex_reference):
    flag = torch.zeros(1, dtype=torch.int32)
    leaf = torch.full((3,), 5.0, requires_grad=True)
    before = leaf._version
    ops.multi_tensor_scale([torch.ones(3)], [leaf], flag, 2.0)   # a leaf may be written in place
    assert leaf.tolist() == [2.0] * 3 and leaf._version > before, leaf
    meta = torch.empty(3, device="meta")
    assert ops.multi_tensor_scale([meta], [meta], flag.to("meta"), 2.0) is None
    from torch._subclasses import FakeTensorMode
    with FakeTensorMode():
        fake = torch.empty(3)
        ops.multi_tensor_scale([fake], [torch.empty(3)], torch.zeros(1, dtype=torch.int32), 2.0)
    infinite = [torch.tensor([float("inf")])]
    ops.multi_tensor_scale(infinite, [torch.empty(1)], flag, 1.0)
    assert flag.item() == 1
def step(x, out, flag):
    torch.ops.apex.multi_tensor_scale([x + 1], [out], flag, 3.0)
    return out * 2
compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
print(compiled(torch.ones(2), torch.zeros(2), torch.zeros(1, dtype=torch.int32)).tolist())
"""
    (tmp_path / "apex" / "lib").mkdir(parents=True)
    assert python(code, APEX_TREE=tmp_path).stdout.split("\n")[0] == "[12.0, 12.0]"


def test_opcheck(tmp_path):
    code = """
import torch
from apex._loader import load
load()
args = ([torch.ones(3)], [torch.empty(3)], torch.zeros(1, dtype=torch.int32), 2.0)
print(torch.library.opcheck(torch.ops.apex.multi_tensor_scale.default, args))
"""
    (tmp_path / "apex" / "lib").mkdir(parents=True)
    assert python(code, APEX_TREE=tmp_path).stdout.count("SUCCESS") == 4
