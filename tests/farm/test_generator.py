"""The C++ of the bindings that is generated from csrc/ops.schemas."""

import os
import re
import shutil
import subprocess

import pytest

from apex._loader import op_model
from build_matrix import generator
from build_matrix.errors import BuildError
from build_matrix.generator import cpp, functional
from build_matrix.parts import bindings
from build_matrix.spec import registry
from build_matrix.spec.registry import Registry

PAIR = """
f_forward(Tensor input, Tensor? weight=None, SymInt[] shape, str kind, SymInt size=0, int? pad=None, float eps=1e-05,
    bool slim=False, ScalarType? dtype=None) -> (Tensor output, Tensor sum, Tensor mean)
  differentiable: input, weight
  backward: f_backward
  given: saved = output if slim else input
  given: mean = None if slim and eps > 0 else mean
  given: width = input.shape[1]
  given: dtype = input.dtype
  given: wanted = needed(weight)
  history: output, sum
  alone: grad_sum = grad_input
  autocast: dtype = autocast_dtype(input)
f_backward(Tensor grad_output, Tensor? grad_sum, Tensor saved, Tensor? mean, Tensor? weight, SymInt width,
    SymInt[] shape, str kind, int? pad, bool slim, ScalarType? dtype, bool wanted) -> (Tensor grad_input, Tensor grad_weight)
  differentiable: grad_output, saved
  double_backward: formula: is not there
  formula_unless: slim
"""  # noqa: E501
LISTS = """
multi_tensor_f(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] copies, float lr, int step, Tensor? lr_tensor=None,
    Tensor(c!)? step_tensor=None, bool advance_step=False, Tensor? inv_scale=None, bool unscale_grads=False) -> ()
  launch: FArguments
  optional: copies = lr > 0 and not copies.empty()
  field: step = steps
"""


def generated(text, unit, tmp_path):
    return generator.files([unit], op_model.parse(text), tmp_path)


def test_every_type_of_a_schema_has_its_cpp():
    assert set(cpp.TYPES) == set(op_model.TYPES)


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(BuildError, match="x: build_matrix/generator/cpp.py has no C.. for the type 'Device'"):
        cpp.type_of(op_model.Argument("x", "Device"))


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("a and not b or c > 1", "(a && !b) || (c > 1)"),
        ("x.shape[1] if k == 2 else 1 / (1 - p)", "(k == 2) ? x.sym_size(1) : (1 / (1 - p))"),
        ("dtype_of(x.dtype, None, True, -1)", "dtype_of(x.scalar_type(), std::nullopt, true, -1)"),
        ("momentum != 0 or not copies.empty()", "(momentum != 0) || !copies.empty()"),
    ],
)
def test_expressions(text, wanted):
    assert cpp.expression(text) == wanted


@pytest.mark.parametrize("text", ["[1]", "a if", "lambda: 1", "a < b < c", "f(x=1)"])
def test_what_is_no_expression_here_is_refused(text):
    with pytest.raises(BuildError, match="has no counterpart|is no expression"):
        cpp.expression(text)


def test_lines_are_broken_at_commas():
    text = cpp.listed("    call(", [f"argument_{i}" for i in range(30)], ");")
    lines = text.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 120
    assert re.sub(r"\s+", " ", text).strip() == f"call({', '.join(f'argument_{i}' for i in range(30))});"


def test_a_pair(tmp_path):
    files = generated(PAIR, "f", tmp_path)
    struct, kernels, python = (files[f"generated/f{end}.h"] for end in ("", "_kernels", "_python"))
    assert "  const c10::SymInt& size;\n" in struct and "  c10::string_view kind;\n" in struct
    assert struct.count("Result formula() const") == 1  # of the backward op
    for line in (
        "node->saved = slim ? keep_result(output) : keep(input);",
        "node->mean = slim && (eps > 0) ? SavedVariable() : keep(mean);",
        "node->width = input.sym_size(1);",
        "node->dtype = input.scalar_type();",
        "node->kind = std::string(kind);",
        "node->shape = shape.vec();",
        "torch::autograd::set_history(sum, node);",
        "auto kept() { return std::tie(saved, mean, weight, width, shape, kind, pad, slim, dtype); }",
        "const at::Tensor kept_saved = saved.unpack(getptr());",
        "const OptionalTensor kept_mean = if_any(mean.unpack());",
        "op.call(gradients[0], if_any(gradients[1]), kept_saved, kept_mean,",
        "if (wants(0)) found[0] = gradients[1];",
        "if (wants(1)) found[1] = std::get<1>(made);",
        "if (recorded && !(slim))",
        'no_double_backward("f", "is not there", grad_output, saved)',
        'm.impl("f_forward", &apex::f_forward_autocast);',
    ):
        assert line in kernels, line
    assert "torch::autograd::set_history(mean" not in kernels
    assert 'py::arg("eps") = 1e-05' in python and 'py::arg("pad") = std::nullopt' in python
    assert "return {std::move(std::get<0>(made)), std::move(std::get<1>(made))};" in kernels
    assert "APEX_TORCH_API std::tuple<at::Tensor, at::Tensor> f(" in files["generated/f_entries.h"]
    assert 'm.def("f", &apex::entries::f, py::arg("input")' in python
    assert "f_backward" not in python


def test_an_op_over_lists(tmp_path):
    files = generated(LISTS, "multi_tensor_f", tmp_path)
    text = files["generated/multi_tensor_f.h"]
    for line in (
        "set(fields.steps, step);",
        ' set(fields.lr_on_device, lr_tensor, "lr_tensor", l.device);',
        'set_written(fields.step_on_device, step_tensor, "step_tensor", l.device);',
        "fields.advance_step = advance_step && l.last;",
        "fields.unscale_grads = unscales();",
        'if ((lr > 0) && !copies.empty()) names.push_back("copies"), lists.push_back(copies);',
        "run_once(op(), names, 0b110, lists);",
        "of_bucket(*this, l).call_reference(t[0], t[1], list_of(t, 2));",
        "return apex_multi_tensor_f(&l.place, &l.lists, &fields);",
        "const std::optional<at::Tensor>& inv_scale, bool unscale_grads) {",
    ):
        assert line in text, line
    declared = files["generated/multi_tensor_f_entries.h"]
    assert (
        "const std::optional<at::Tensor>& inv_scale = std::nullopt, bool unscale_grads = false);" in declared
    )
    assert "void multi_tensor_f(const PlanOrLists& tensors, double lr, int64_t step," in declared
    assert '2, 3, "grads, params, [copies]"' in files["generated/multi_tensor_f_kernels.h"]
    assert files["generated/multi_tensor_f_kernels.h"].count("makeFallthrough") == 3


def test_what_kernels_are_given_beside_the_arguments(tmp_path):
    """Fields that are worked out, numbers for each tensor, a workspace, arguments after the struct, shared checks."""
    text = LISTS.replace("int step,", "int step, Tensor(d!) norms, Tensor? decays, bool maximum,").replace(
        "field: step = steps", "field: step = steps\n  field: maximum =\n  set: scale = 1.0 - lr\n  workspace: yes\n"
        "  per_tensor: norms = grad_norms\n  per_tensor: decays = decay\n  call: maximum, step == 1\n"
        "  checks: betas, step\n  by_hand: check",
    )  # fmt: skip
    struct = generated(text, "multi_tensor_f", tmp_path)["generated/multi_tensor_f.h"]
    for line in (
        "  void check() const { check_betas(*this); check_step(*this); check_more(); }",
        "    set(fields.scale, 1.0 - lr);",
        '    PerTensor of_norms(norms, l, "norms");',
        "    fields.grad_norms = of_norms.pointer_to_write();",
        "    fields.decay = of_decays.pointer();",
        "      return apex_multi_tensor_f(&l.place, &l.lists, &fields, maximum, step == 1, lent);",
        "    const int32_t status = with_workspace(l.device, run);",
        "    MultiTensorF of_this = of_bucket(*this, l);",
        "    of_this.norms = of_norms.bucket();",
        "    of_this.decays = of_decays.bucket_if_any();",
    ):
        assert line in struct, line
    assert struct.count("of_norms.write_back();") == 2 and "of_decays.write_back();" not in struct
    assert "fields.maximum" not in struct and "set(fields.norms" not in struct


def test_checks_are_known_ones():
    with pytest.raises(ValueError, match="checks names 'gammas', which is not there"):
        op_model.parse(LISTS + "  checks: gammas\n")


def test_ops_that_share_their_functions(tmp_path):
    """Their arguments are one struct, in whose order each fills in what it has."""
    text = re.sub("^  differentiable", "  shared: fs\n  differentiable", PAIR, flags=re.MULTILINE)
    files = generated(text.replace("str kind", "int kind"), "f", tmp_path)
    together, own = files["generated/shared_fs.h"], files["generated/f.h"]
    assert "  const OptionalTensor& weight = nothing;\n" in together and "  bool slim = false;\n" in together
    assert "struct Results { at::Tensor output, sum, mean, grad_input, grad_weight; };" in together
    assert (
        '#include "bindings/fs.h"' in own
        and ".is_forward = false, .name = name, .unit = unit, .weight" in own
    )
    assert "results(std::move(found))" in own and "Result formula() const" in own
    with pytest.raises(BuildError, match="f_backward: kind has another type in an op that shares fs.h"):
        generated(text.replace("str kind", "int kind", 1), "f", tmp_path)


@pytest.mark.parametrize(
    "text, unit, error",
    [
        (
            PAIR.replace("Tensor input,", "Tensor made,").replace("input", "made"),
            "f",
            "cannot be called 'made'",
        ),
        (
            LISTS.replace("float lr,", "float fields,").replace("lr > 0", "step > 0"),
            "multi_tensor_f",
            "'fields'",
        ),
        (PAIR.replace("output if slim else input", "other if slim else input"), "f", "'other' is neither"),
        (PAIR.replace("Tensor grad_weight)", "Tensor grad_w)"), "f", "has no result grad_weight"),
    ],
)
def test_what_does_not_go_together_is_refused(text, unit, error, tmp_path):
    with pytest.raises(BuildError, match=error):
        generated(text, unit, tmp_path)


def test_an_op_needs_no_file_of_its_own(tmp_path):
    files = generated(LISTS, "multi_tensor_f", tmp_path)
    assert '#include "generated/multi_tensor_f.h"' in files["ops.inc"]
    (tmp_path / "multi_tensor_f.h").write_text("")
    files = generated(LISTS, "multi_tensor_f", tmp_path)
    assert (
        '#include "bindings/multi_tensor_f.h"' in files["ops.inc"] and "generated/multi_tensor_f.h" in files
    )


def test_own_ops_within_120_columns_and_each_registered_once():
    files = generator.files(Registry.load().ops(), registry.schemas(), bindings.BINDINGS)
    for name, text in files.items():
        if name.startswith("generated/"):
            assert max(map(len, text.splitlines())) <= 120, name
    text = "".join(files.values())
    for op in registry.schemas().values():
        kernel = op.name if op.launch else f"Kernels<apex::{cpp.camel(op.name)}>::run"
        assert text.count(f'm.impl("{op.name}", &apex::{kernel});') == 1


def test_what_is_written_by_hand_repeats_no_signature():
    """csrc/ops.schemas is the one place where an op's arguments stand."""
    for path in sorted(bindings.BINDINGS.glob("*.h")):
        text = path.read_text(encoding="utf-8")
        for op in registry.schemas().values():
            assert f"{op.name}_autograd" not in text and f"{op.name}_meta" not in text, path.name


COMPILE = """
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>
namespace at {{ struct Tensor {{}}; struct TensorList {{}}; enum class ScalarType {{}}; }}
namespace c10 {{ struct SymInt {{}}; struct SymIntArrayRef {{}}; using string_view = const char*; }}
struct apex_place;
namespace apex {{
{}
}}
"""


def test_structs_compile_by_themselves(tmp_path):
    """All types, without torch: the build compiles the whole."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if not compiler:
        pytest.skip("no C++ compiler")
    structs = [functional.declaration(op) for op in op_model.parse(PAIR).values()]
    source = tmp_path / "structs.cpp"
    source.write_text(COMPILE.format("\n".join(structs)))
    done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_generated_sources_are_part_of_the_identity(monkeypatch):
    digest_now = bindings.source_identity.__wrapped__  # a process asks once
    before = digest_now()
    texts = generator.files
    monkeypatch.setattr(generator, "files", lambda *a: {k: v + "\n" for k, v in texts(*a).items()})
    assert digest_now() != before
