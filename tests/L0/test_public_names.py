"""Public apex's names (ROCm's, NVIDIA's and the Ascend patch's) are importable and take what they take there; of those
that this build does not have, whoever asks is told.

apex/_legacy/public_names.txt lists them. Classes stand for their constructors; `required` is what public apex writes
for a default that there is not.
"""

from __future__ import annotations

import ast
import glob
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from apex._legacy import public_names
from apex._loader import registry
from apex.transformer import enums

ROOT = Path(__file__).resolve().parents[2]

LISTED = public_names.listed()
# What this build does not have; a name that is neither here nor importable has been lost.
ABSENT = [
    "apex.DeprecatedFeatureWarning",
    "apex.contrib.torchsched",
    "apex.deprecated_warning",
    "apex.git_version_info",
    "apex.pyprof",
    "apex.reparameterization",
]
# Internal ops of public apex's norms; ours are other ones.
INTERNAL = [name for name in LISTED if LISTED[name].successor.startswith("torch.ops.apex.")]
ABSENT += [*INTERNAL, "apex.normalization.fused_layer_norm.supports_custom_op"]
PYTHONS = [sys.executable, *sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.1[0-9]*/bin/python")))]


def is_absent(name):
    return any(name == absent or name.startswith(f"{absent}.") for absent in ABSENT)


PRESENT = [name for name in LISTED if not is_absent(name)]

OWNERS = ("self", "ctx")


def parameters_of(text):
    """[(name, its default's source or None)] of "(a, b=1, *c)", names with their stars."""
    given = ast.parse(f"def f{text}: pass").body[0].args
    names = [a.arg for a in given.args]
    defaults = [None] * (len(names) - len(given.defaults)) + [ast.unparse(d) for d in given.defaults]
    stars = ("*" + given.vararg.arg,) if given.vararg else ()
    found = [*zip(names, defaults, strict=True), *((star, None) for star in stars)]
    return [(name, default) for name, default in found if name not in OWNERS]


def keywords_of(text):
    """{name: whether it must be given} of what "(a, *, b, c=1)" takes by keyword alone."""
    given = ast.parse(f"def f{text}: pass").body[0].args
    return {a.arg: default is None for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)}


def assert_takes(function, text):
    ours = [p for name, p in inspect.signature(function).parameters.items() if name not in OWNERS]
    theirs = parameters_of(text)
    assert [str(p).split(":")[0].split("=")[0] for p in ours[: len(theirs)]] == [name for name, _ in theirs]
    for parameter, (_, default) in zip(ours, theirs, strict=False):
        if default not in (None, "required"):
            assert parameter.default == eval(default, {"torch": torch, **vars(enums)})
    for parameter in ours[len(theirs) :]:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert variadic or parameter.default is not parameter.empty or keywords_of(text).get(parameter.name)
    taken = {p.name for p in ours}
    if not any(p.kind is p.VAR_KEYWORD for p in ours):
        assert not set(keywords_of(text)) - taken


@pytest.mark.parametrize("name", PRESENT)
def test_public_name(name):
    found, parameters = public_names.find(name), LISTED[name].parameters
    if parameters:
        assert_takes(found, parameters)


def raised_by(statement):
    with pytest.raises(Exception) as caught:
        exec(statement, {})
    return caught.value


@pytest.mark.parametrize("name", ABSENT)
def test_absent_name_is_told(name):
    owner, _, last = name.rpartition(".")
    module, error = importlib.import_module(owner), raised_by(f"from {owner} import {last}")
    assert "not in this build" in str(error) and public_names.successor(name) in str(error)
    assert not hasattr(module, last)
    with pytest.raises(AttributeError, match="not in this build"):
        getattr(module, last)
    if LISTED[name].is_module:
        assert type(error) is ModuleNotFoundError and error.name == name
        assert importlib.util.find_spec(name) is None
        error = raised_by(f"import {name}.part")
        assert type(error) is ModuleNotFoundError and error.name == name and "not in this build" in str(error)
    else:
        assert type(error) is ImportError and error.name == owner


def test_names_below_an_absent_one_are_absent_too():
    below = [name for name in LISTED if is_absent(name) and name not in ABSENT]
    assert below
    for name in below:
        assert "not in this build" in public_names.message(name)
        with pytest.raises((ImportError, AttributeError)):
            public_names.find(name)


def test_a_name_that_apex_never_had_is_as_for_any_package():
    assert str(raised_by("import apex.contrib.no_such")) == "No module named 'apex.contrib.no_such'"
    assert "cannot import name 'no_such' from 'apex.contrib'" in str(
        raised_by("from apex.contrib import no_such")
    )
    assert str(raised_by("import apex; apex.no_such")) == "module 'apex' has no attribute 'no_such'"


@pytest.mark.parametrize("interpreter", PYTHONS)
def test_absent_names_on_every_python(interpreter):
    """The finder and `__getattr__` look at frames. None of this needs torch."""
    code = """
import importlib.util, apex, apex.contrib
imports = ("import apex.pyprof", "from apex import pyprof", "import apex.pyprof as p")
imports += ("from apex.contrib import torchsched",)
for statement in imports:
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        assert error.name in ("apex.pyprof", "apex.contrib.torchsched") and "not in this build" in str(error), error
    else:
        raise AssertionError(statement)
assert importlib.util.find_spec("apex.pyprof") is None
assert not hasattr(apex, "pyprof") and getattr(apex.contrib, "torchsched", 1) == 1
print("done")
"""
    done = subprocess.run(
        [interpreter, "-c", code], capture_output=True, text=True, cwd="/", env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "done\n", done.stderr


# The compiled modules that the setup.py of public apex builds, NVIDIA's and ROCm's.
COMPILED = """
    _apex_gpu_direct_storage _apex_nccl_allocator amp_C apex_C bnp cudnn_gbn_lib distributed_adam_cuda
    distributed_lamb_cuda fast_bottleneck fast_layer_norm fast_multihead_attn fmhalib focal_loss_cuda fused_adam_cuda
    fused_bias_swiglu fused_conv_bias_relu fused_dense_cuda fused_index_mul_2d fused_lamb_cuda fused_layer_norm_cuda
    fused_rotary_positional_embedding fused_weight_gradient_mlp_cuda generic_scaled_masked_softmax_cuda group_norm_cuda
    group_norm_v2_cuda mlp_cuda nccl_p2p_cuda peer_memory_cuda permutation_search_cuda scaled_masked_softmax_cuda
    scaled_softmax_cuda scaled_upper_triang_masked_softmax_cuda syncbn transducer_joint_cuda transducer_loss_cuda
    xentropy_cuda
"""


def test_no_compiled_module_of_public_apex_is_unknown():
    """Importing one that is not in this build says so, and what to use; never a bare "No module named"."""
    of_transformer_engine = ["transformer_engine_extensions"]
    assert sorted(registry.extensions()) == sorted([*COMPILED.split(), *of_transformer_engine])
    for name, extension in registry.extensions().items():
        if extension.state == "planned":
            error = raised_by(f"import {name}")
            assert "not in this build" in str(error) and "; use " in str(error), name


def test_every_planned_extension_names_a_successor_or_none():
    for extension in registry.extensions().values():
        assert extension.state == "planned" or not extension.successor
    for name, extension in registry.extensions().items():
        if extension.state == "planned" and extension.successor:
            error = raised_by(f"import {name}")
            assert type(error) is ModuleNotFoundError and error.name == name
            assert "not in this build" in str(error) and f"use {extension.successor}" in str(error)


def test_successors_in_torch_and_apex_exist():
    texts = [entry.successor for entry in LISTED.values()]
    texts += [extension.successor for extension in registry.extensions().values()]
    named = {name for text in texts for name in re.findall(r"\b(?:torch|apex)(?:\.\w+)+", text)}
    assert {"torch.compile", "torch.ops.apex.layer_norm_forward"} <= named
    for name in named - {"apex.__version__"}:
        public_names.find(name)


@pytest.mark.parametrize(
    "function", [lambda a, c, b=1: 0, lambda a, b=2: 0, lambda a, b=1, *, c: 0, lambda b=1: 0]
)
def test_a_difference_is_seen(function):
    with pytest.raises(AssertionError):
        assert_takes(function, "(a, b=1)")
    assert_takes(lambda a, b=1, c=None, *, d=0, **e: 0, "(a, b=1)")
