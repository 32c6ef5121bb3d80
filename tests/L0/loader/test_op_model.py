"""What is read of csrc/ops.schemas: every form of a schema, every directive, and what is refused."""

import pytest

from apex._loader import op_model, registry

TYPES = """
every_type(Tensor(a!)[] lists, Tensor x, Tensor(b!)? y, Tensor? z=None, float eps=1e-05, int n=-1, int? p=None,
    bool flag=False, str name, SymInt size, SymInt[] shape, ScalarType? dtype=None) -> (Tensor out, Tensor rest)
"""


def test_every_form_of_a_schema():
    op = op_model.parse(TYPES)["every_type"]
    assert {a.type for a in op.arguments} == set(op_model.TYPES)
    defaults = {a.name: a.default for a in op.arguments if a.default is not op_model.REQUIRED}
    assert defaults == {"z": None, "eps": 1e-5, "n": -1, "p": None, "flag": False, "dtype": None}
    assert [a.name for a in op.arguments if a.written] == ["lists", "y"] and op.writes
    assert (
        [r.name for r in op.results] == ["out", "rest"] and op.result("rest") == 1 and op.result("x") is None
    )
    assert "\n" not in op.text and op.text.endswith("ScalarType? dtype=None) -> (Tensor out, Tensor rest)")
    assert [a.name for a in op.lists] == ["lists"] and op.argument("size").type == "SymInt"
    assert [r.name for r in op_model.parse("f(Tensor x) -> Tensor")["f"].results] == [""]


def test_directives():
    text = """
# a comment
f_forward(Tensor x, Tensor? w=None, bool keep=False) -> (Tensor y, Tensor mean)
  differentiable: x, w
  backward: f_backward
  given: saved = y if keep
      else x
  given: wanted = needed(w)
  history: y
  entry: none
f_backward(Tensor grad_y, Tensor saved, bool wanted) -> (Tensor grad_x, Tensor grad_w)
  double_backward: is not implemented
"""
    ops = op_model.parse(text)
    forward = ops["f_forward"]
    assert forward.differentiable == ("x", "w") and forward.backward == "f_backward" and forward.unit == "f"
    assert forward.given == {"saved": "y if keep else x", "wanted": "needed(w)"}
    assert forward.history == ("y",) and forward.entry == () and ops["f_backward"].entry is None
    assert ops["f_backward"].double_backward == "is not implemented" and not forward.returns_nothing


@pytest.mark.parametrize(
    "text, error",
    [
        ("f(Tensor x)", "not a schema"),
        ("f(Double x) -> ()", "f: the type 'Double' of x is none of Tensor, "),
        ("f(Tensor x, y) -> ()", "type 'y' of a result is none of"),
        ("f(Tensor x!) -> ()", "not an argument: 'Tensor x!'"),
        ("f(Tensor x) -> ()\nf(Tensor x) -> ()", "f is there twice"),
        ("  backward: f", "belongs to no op"),
        ("f(Tensor x) -> Tensor\n  backwards: g", "f: no directive is called 'backwards'"),
        ("f(Tensor x) -> Tensor\n  backward: g", "its backward 'g' is no op"),
        ("f(Tensor x) -> Tensor\n  differentiable: y", "differentiable names 'y', which is not there"),
        ("f(Tensor x) -> Tensor\n  backward: f\n  given: z = x", "given names 'z', which is not there"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(text, error):
    with pytest.raises(ValueError, match=error):
        op_model.parse(text)


def test_the_own_ops_are_read():
    ops = registry.schemas()
    assert ops["multi_tensor_adam"].writes and not ops["rope_forward"].writes
    assert all(ops[op.backward].backward or ops[op.backward].double_backward or ops[op.backward].by_hand
               for op in ops.values() if op.backward)  # fmt: skip
