"""`python -m apex` as a user meets it: exit codes, text, JSON; each in a new process."""

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest

from apex._loader import installed, layout, probe
from apex._loader.doctor import cpu_threads
from apex._loader.fit import fit

from .described import ROOT


def doctor(*arguments, interpreter=sys.executable, script=None, path=(), **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("APEX_", "HSA_", "PYTHONPATH"))}
    search = os.pathsep.join(map(str, (*path, ROOT)))
    kept = {**kept, "PYTHONPATH": search, **{k: str(v) for k, v in environment.items()}}
    command = [interpreter, *(["-m", "apex"] if script is None else [script]), *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=kept, cwd="/")


@pytest.fixture
def no_parts(tmp_path):
    (tmp_path / "tree" / "apex").mkdir(parents=True)
    return tmp_path / "tree"


def test_fine():
    fits = fit(probe.for_bindings())
    if installed.library_fault() or not fits.module:
        pytest.skip("this tree has no binding for this torch and Python")
    done = doctor()
    if "degraded: wrong vendor" in done.stdout:
        pytest.skip("this tree's packs are for another vendor than this torch")
    assert done.returncode == 0 and ": fine" in done.stdout.splitlines()[0], done.stdout + done.stderr
    assert "to mend it" not in done.stdout


def test_threads_of_the_cpu():
    """As many as torch has now; a torch without any is told."""
    import torch

    done = doctor(OMP_NUM_THREADS=1, MKL_NUM_THREADS=1)
    assert "\n  threads   1 of torch's own (OpenMP)\n" in done.stdout, done.stdout + done.stderr
    without = "ATen/Parallel:\n\tat::get_num_threads() : 1\nATen parallel backend: no parallelization\n"
    with mock.patch.object(torch.__config__, "parallel_info", lambda: without):
        assert cpu_threads() == "1: this torch was built without threads for its operators"


def test_degraded_without_compiled_parts(no_parts):
    done = doctor(APEX_TREE=no_parts)
    assert done.returncode == 1, done.stderr
    assert ": degraded" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[-1] == "to mend it: unset APEX_TREE"  # no wheel helps while it is set
    assert "not cpu: no binding" in done.stdout


def test_broken_without_torch(no_parts):
    """Report 22: torch missing; also on the oldest Python, without its packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "apex", "--json"], capture_output=True, text=True, cwd=ROOT,
        env={"PATH": os.environ["PATH"], "APEX_TREE": str(no_parts)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    found = json.loads(done.stdout)
    assert found["state"] == "broken" and found["machine"]["torch"] is None
    assert found["problems"][0]["name"] == "no torch"


def test_json(no_parts):
    done = doctor("--json", APEX_TREE=no_parts, HSA_OVERRIDE_GFX_VERSION="11.0.0")
    found = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode == 1
    assert {"apex", "state", "machine", "binding", "distributions", "choices", "problems"} <= set(found)
    row = found["choices"][0]
    assert row["taken"] == "reference" and row["candidates"][0]["reason"]
    assert "HSA_OVERRIDE_GFX_VERSION" in [problem["name"] for problem in found["problems"]]


def test_plain_text_without_rich(no_parts, tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('no rich')")
    plain = doctor(APEX_TREE=no_parts, path=[tmp_path])
    assert plain.stdout == doctor(APEX_TREE=no_parts).stdout and plain.returncode == 1


def test_a_reader_that_leaves(no_parts):
    command = f"{sys.executable} -m apex explain --arch sm_90 | true"
    environment = {"PATH": os.environ["PATH"], "APEX_TREE": str(no_parts)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stderr == ""


def test_one_screen(no_parts):
    assert len(doctor(APEX_TREE=no_parts).stdout.splitlines()) <= 40


def test_a_damaged_library_is_broken_in_words(tmp_path):
    fits = fit(probe.for_bindings())
    if not fits.library:
        pytest.skip("this tree has no binding for this torch")
    shutil.copytree(layout.built(), tmp_path / "apex")
    file = tmp_path / "apex" / "lib" / "libapex.so"
    file.write_bytes(file.read_bytes()[:1000])
    done = doctor(APEX_TREE=tmp_path)
    assert done.returncode == 2 and "libapex.so is damaged" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


# ---- explain: a machine that is not this one --------------------------------------------------------------


def explain(*arguments, **environment):
    done = doctor("explain", "--json", *arguments, **environment)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def test_explain_the_question_of_the_design(no_parts):
    code, found = explain("--arch", "sm_120", "--driver", "550", "--torch", "2.14", APEX_TREE=no_parts)
    assert code == 2
    assert any("CUDA 12.8" in p["text"] and p["name"] == "old driver" for p in found["problems"])


def test_explain_by_the_packs_of_a_tree(tmp_path, cubin):
    import hashlib

    folder = tmp_path / "apex" / "packs" / "sm_80"
    folder.mkdir(parents=True)
    (folder / "code.cubin").write_bytes(cubin("sm_80"))
    row = {"file": "code.cubin", "sha256": hashlib.sha256(cubin("sm_80")).hexdigest(), "kernels": {}}
    units = {"multi_tensor_scale": row, "multi_tensor_adam": row}
    manifest = {"format": 1, "arch": "sm_80", "vendor": "cuda", "kind": "cubin", "units": units}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "apex" / "lib").mkdir()
    binding = {
        "torch": "2.14",
        "built_against": "2.14.0",
        "python": "cp312",
        "cxx11_abi": True,
        "folder": "x",
    }
    (tmp_path / "apex" / "lib" / "bindings.json").write_text(json.dumps([binding]))
    machine = ["--arch", "sm_86", "--arch", "sm_90", "--driver", "580", "--torch", "2.14.0+cu130"]
    _, found = explain(*machine, "--python", "3.12", APEX_TREE=tmp_path)
    assert found["binding"]["fits"]
    taken = {(row["unit"], row["arch"]): row["taken"] for row in found["choices"]}
    assert taken["multi_tensor_adam", "sm_86"] == "sm_80" and taken["multi_tensor_adam", "sm_90"] == "jit"
    assert taken["multi_tensor_table", "sm_86"] == "jit"  # per unit, not per pack


@pytest.mark.parametrize(
    "arguments",
    [("--arch", "foo"), ("--driver", "x"), ("--torch", "new"), ("--python", "snake"), ("--nothing",)],
)
def test_wrong_usage(arguments):
    """None of the codes that are answers."""
    done = doctor("explain", *arguments)
    assert done.returncode == 64 and "usage:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("foo",), ("which", "--foo"), ("compat",), ("--arch", "sm_90")])
def test_wrong_usage_has_one_code(arguments):
    done = doctor(*arguments)
    assert done.returncode == 64 and "usage:" in done.stderr and not done.stdout


@pytest.mark.parametrize("home", ["", "home", "nowhere"])
def test_a_diagnosis_makes_nothing(no_parts, tmp_path, home):
    (tmp_path / "home").mkdir()
    there = Path("/.cache").exists()
    named = str(tmp_path / home) if home else ""
    done = doctor(APEX_TREE=no_parts, HOME=named, XDG_CACHE_HOME="")
    assert done.returncode == 1, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["home", "tree"] and not os.listdir(tmp_path / "home")
    assert Path("/.cache").exists() is there


def test_explain_assumes_the_release_of_torch_that_is_here(no_parts):
    _, found = explain("--arch", "sm_90", APEX_TREE=no_parts)
    assert found["machine"]["torch"]["version"] == metadata.version("torch").partition("+")[0]
    assert not any(p["name"] == "no torch" for p in found["problems"])


def test_explain_needs_no_torch(no_parts):
    command = [sys.executable, "-S", "-m", "apex", "explain", "--arch", "gfx942", "--torch", "2.13+rocm7.2"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "APEX_TREE": str(no_parts)},
    )
    assert done.returncode == 1 and "gfx942" in done.stdout, done.stderr


# ---- who owns the package ---------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    """A site-packages with this package installed as apex-cpu, as a wheel would be."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "apex", site / "apex", ignore=shutil.ignore_patterns("__pycache__"))
    for name, source in (("ops.schemas", layout.schemas()), ("build.json", None)):
        target = site / "apex" / name
        if source:
            shutil.copy(source, target)
        else:
            target.write_text('{"version": "1.10.0+cpu", "distribution": "apex-cpu"}')
    shutil.copytree(layout.device_sources(), site / "apex" / "device")
    distribution(site, "apex_cpu", "1.10.0+cpu", [p for p in (site / "apex").rglob("*") if p.is_file()])
    return site


def distribution(site, name, version, files):
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    rows = [f"{file.relative_to(site)},,\n" for file in (*files, info / "METADATA", info / "RECORD")]
    (info / "RECORD").write_text("".join(rows))
    return info


def in_site(site, *arguments, script=None):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("APEX_", "HSA_"))}
    command = [sys.executable, *([script] if script else ["-m", "apex"]), "--json", *arguments]
    environment = {**kept, "PYTHONPATH": str(site)}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, cwd=site.parent
    )
    assert done.stdout, done.stderr
    return done.returncode, {problem["name"]: problem for problem in json.loads(done.stdout)["problems"]}


def test_an_installed_wheel(site):
    code, found = in_site(site)
    assert code == 1 and {"Python only"} <= set(found) and "half-deleted apex" not in found
    assert "foreign apex" not in found and "two apex distributions" not in found


def test_a_source_install(site):
    """It is called apex, as the unrelated distribution is; what it holds tells them apart."""
    (old,) = site.glob("apex_cpu-*.dist-info")
    shutil.rmtree(old)
    distribution(site, "apex", "1.10.0", [p for p in (site / "apex").rglob("*") if p.is_file()])
    _, found = in_site(site)
    assert "foreign apex" not in found and "two apex distributions" not in found


def test_a_second_distribution(site):
    distribution(site, "apex_cuda", "1.10.0+cu130", [site / "apex" / "__init__.py"])
    assert "apex-cpu and apex-cuda" in in_site(site)[1]["two apex distributions"]["text"]


def pyramid(site):
    """What installing the unrelated distribution over ours leaves: its __init__.py wants Pyramid."""
    (site / "apex" / "__init__.py").write_text("from pyramid_of_nothing import config\n")
    (site / "apex" / "models.py").write_text("")
    distribution(site, "apex", "0.9.10.dev0", [site / "apex" / "__init__.py", site / "apex" / "models.py"])


def test_the_unrelated_apex_installed_after_ours(site):
    """`python -m apex` would fail in its code; the file run by its path tells what happened."""
    pyramid(site)
    code, found = in_site(site, script=site / "apex" / "__main__.py")
    assert code == 2 and found["foreign apex"]["severity"] == "broken"
    assert found["foreign apex"]["remedy"].startswith("python -m pip uninstall -y apex &&")


def test_the_unrelated_apex_installed_before_ours(site):
    ours = (site / "apex" / "__init__.py").read_text()
    pyramid(site)
    (site / "apex" / "__init__.py").write_text(ours)
    code, found = in_site(site)
    assert code == 1 and found["foreign apex"]["severity"] == "degraded"


def test_half_deleted_after_the_other_was_uninstalled(site):
    (site / "apex" / "__init__.py").unlink()
    code, found = in_site(site)  # apex is a namespace package now, and still says what is wrong
    assert code == 2 and "apex/__init__.py" in found["half-deleted apex"]["text"]
    assert found["half-deleted apex"]["remedy"].endswith("--force-reinstall --no-deps apex-cpu==1.10.0+cpu")
