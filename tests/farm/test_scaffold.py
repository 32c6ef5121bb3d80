"""scripts/jit_module.py writes an op whose files are whole, and whose kernels pass the SIMT test that it writes."""

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys

import pytest

from build_matrix import REPOSITORY

NAME = "multi_tensor_lerp"
ANSWERS = ["--inputs", "x,y", "--scalars", "weight", "--expression", "x + weight * (y - x)"]


@pytest.fixture
def checkout(tmp_path):
    """What the scaffold and the SIMT executor read, without the other ops' kernels: they take minutes to compile."""
    leave = shutil.ignore_patterns("__pycache__", "*.cu", "*.so")
    for name in ("csrc", "apex", "scripts", "tests/simt", "tests/emulated", "build_matrix"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=leave)
    return tmp_path


def run(checkout, *command):
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        text=True,
        capture_output=True,
    )


def simt(checkout):
    options = ["-q", "-p", "no:cacheprovider", "-k", "plain"]
    return run(checkout, "-m", "pytest", *options, f"tests/simt/test_{NAME}.py")


def test_what_is_scaffolded_passes_its_test_and_a_wrong_formula_does_not(checkout):
    done = run(checkout, "scripts/jit_module.py", NAME, *ANSWERS)
    assert done.returncode == 0, done.stderr
    *written, following, changelog = done.stdout.splitlines()
    assert {f"tests/L0/test_{NAME}.py", f"tests/simt/test_{NAME}.py"} < set(written)
    assert following.endswith(f"pytest tests/simt/test_{NAME}.py tests/L0/test_{NAME}.py")
    assert "build_matrix changelog" in changelog
    for name in written:
        assert (checkout / name).is_file()
        if name.endswith(".py"):
            py_compile.compile(checkout / name, doraise=True)
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("no C++ compiler: the executor cannot be built")
    passed = simt(checkout)
    assert passed.returncode == 0 and " passed" in passed.stdout, passed.stdout
    header = checkout / f"csrc/device/{NAME}.h"
    text = header.read_text()
    assert "x + (weight" in text
    header.write_text(text.replace("x + (weight", "x - (weight"))
    assert simt(checkout).returncode == 1


def test_an_op_without_scalars_has_whole_files_too(checkout):
    done = run(
        checkout, "scripts/jit_module.py", NAME, "--inputs", "x", "--scalars", "", "--expression", "x + x"
    )
    assert done.returncode == 0, done.stderr
    assert "unused=0" in (checkout / f"tests/simt/test_{NAME}.py").read_text()
    py_compile.compile(checkout / f"tests/simt/test_{NAME}.py", doraise=True)


def test_the_binding_is_generated_from_the_schema(checkout):
    assert run(checkout, "scripts/jit_module.py", NAME, *ANSWERS).returncode == 0
    assert not (checkout / f"csrc/bindings/{NAME}.h").exists()
    done = run(checkout, "-m", "build_matrix.generator", str(checkout / "out"))
    assert done.returncode == 0, done.stderr
    text = (checkout / f"out/generated/{NAME}.h").read_text()
    assert "struct MultiTensorLerp {" in text and "set(fields.weight, weight);" in text
    assert 'run_once(op(), {"x", "y", "out"}, 0b100, {x, y, out});' in text
    assert f"apex_{NAME}(&l.place, &l.lists, &fields)" in text


def test_what_no_flag_says_is_asked_at_a_terminal(monkeypatch):
    spec = importlib.util.spec_from_file_location("jit_module", REPOSITORY / "scripts/jit_module.py")
    jit_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(jit_module)
    asked, written = [], []
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "")
    monkeypatch.setattr(jit_module, "write", lambda values: written.append(values) or [])
    assert jit_module.main([NAME, "--scalars", "none", "--expression", "x + x"]) == 0
    assert asked == ["lists that are read [x]: ", "the list that is written [out]: "]
    assert written[0]["name"] == NAME and "float" not in written[0]["schema"]
    asked.clear()
    assert jit_module.main([]) == 0
    assert len(asked) == 5 and written[1]["name"] == "multi_tensor_scaled"


def test_without_a_terminal_the_flags_must_say_it(checkout):
    done = run(checkout, "scripts/jit_module.py", NAME, "--inputs", "x")
    assert done.returncode == 2 and "no terminal to ask at: give --scalars, --expression" in done.stderr


@pytest.mark.parametrize("name", ["dtype", "device", "values", "math", "class", "X", "fields"])
def test_names_that_the_files_need_themselves_are_refused(checkout, name):
    done = run(
        checkout, "scripts/jit_module.py", NAME, "--inputs", name, "--scalars", "", "--expression", name
    )
    assert done.returncode == 1 and "cannot be a name here" in done.stderr
    assert not (checkout / f"csrc/device/{NAME}.cu").exists()
