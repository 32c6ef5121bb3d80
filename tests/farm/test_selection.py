"""Tests are chosen by marker: what each stands on is marked in one place, and what was left out is counted."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from build_matrix import REPOSITORY
from build_matrix.check import junit

SMALL = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_here(n): pass

@pytest.mark.gpu
def test_there(): assert 0

class TestBoth:
    @pytest.mark.two_gpus
    @pytest.mark.parametrize("text", ["a::b[c]"])
    def test_two(self, text): assert 0
"""


@pytest.fixture
def small(tmp_path):
    """A project with the suite's conftest and markers and one file of tests; returns how to run it."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "rings.py", "torch_defaults.py"):
        shutil.copy(REPOSITORY / "tests" / name, tmp_path / "tests")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "tests/test_small.py").write_text(SMALL)

    def run(*options):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--junitxml=run.xml",
            *options,
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
def test_what_a_marker_leaves_out_is_counted(small, workers, tmp_path):
    done = small("-m", "not gpu", *workers)
    assert done.returncode == 0, done.stdout
    assert "2 not run: left out by -m 'not gpu'" in done.stdout
    cases = junit.read(tmp_path / "run.xml")
    passed = {case.name for case in cases if case.outcome == junit.PASSED}
    assert passed == {f"test_here[{n}]" for n in range(3)}
    assert {(case.module, case.name) for case in cases if case.left_out} == {
        ("tests.test_small", "test_there"),
        ("tests.test_small.TestBoth", "test_two[a::b[c]]"),
    }
    assert junit.reasons(cases) == {"left out by -m 'not gpu'": 2}


def test_one_that_another_run_ran_is_not_left_out(small, tmp_path):
    (tmp_path / "tests/test_small.py").write_text(SMALL.replace("@pytest.mark.gpu", "@pytest.mark.minutes"))
    small("-k", "test_here")
    (tmp_path / "run.xml").rename(tmp_path / "first.xml")
    small("-m", "minutes")
    runs = [junit.read(tmp_path / name) for name in ("first.xml", "run.xml")]
    outcomes = {case.name: case.outcome for case in junit.whole(runs)}
    assert outcomes["test_here[0]"] == junit.PASSED and outcomes["test_there"] == junit.FAILED
    assert len(outcomes) == 5


def test_a_marker_that_is_none_is_refused(small, tmp_path):
    (tmp_path / "tests/test_small.py").write_text(SMALL.replace("two_gpus", "two_gups"))
    done = small()
    assert done.returncode and "'two_gups' not found in `markers` configuration option" in done.stdout


def collected(*options):
    """Node ids that pytest would run in this checkout."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_markers_of_this_suite_are_true():
    """Of variants, targets and drivers, on files that have all of them."""
    files = ("tests/L0/test_variants.py", "tests/L0/test_fused_adagrad.py")
    on_gpus = collected("-m", "gpu", *files)
    assert on_gpus and all("[cuda" in name for name in on_gpus)
    assert not [name for name in collected("-m", "not gpu", *files) if "[cuda" in name]
    lower = collected("-m", "cpu_level and not cpu_level(level=4)", *files)
    assert {name.partition("cpu-v")[2][0] for name in lower} == {"1", "2", "3"}
    wide = collected("-m", "warp64", *files, "tests/simt/test_rope.py")
    assert wide and all("simt64" in name or "-64-" in name for name in wide)
    host = collected("-m", "fake_driver and not gpu", "tests/L0/host")
    assert [name for name in host if "test_cuda_launch.py" in name]
    assert not collected("-m", "not gpu", "tests/L0/host/test_cuda_device.py")


def test_no_test_looks_for_a_card_itself():
    """Markers do: a tier, a ring and a receipt know of nothing else."""
    asks = re.compile(
        r"skipif\(\s*[^)]*cuda\.(is_available|device_count)|cuda\.is_available\(\):\s+pytest\.skip"
    )
    files = [
        p for p in (REPOSITORY / "tests").rglob("*.py") if p.name not in ("rings.py", "test_selection.py")
    ]
    found = [
        p.relative_to(REPOSITORY).as_posix() for p in files if asks.search(p.read_text(encoding="utf-8"))
    ]
    assert not found, f"mark them gpu or two_gpus (docs/testing.md): {found}"


def test_mutants_know_the_tests_of_every_module():
    """A new optimizer or reference whose test bears another name stands in OTHER_TESTS, or no module can be tried."""
    code = "import mutants; print(*(target.name for target in mutants.optimizer_targets()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY / "scripts", text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    modules = [*REPOSITORY.glob("apex/optimizers/*.py"), *REPOSITORY.glob("apex/reference/*.py")]
    assert set(done.stdout.split()) == {module.stem for module in modules} - {"__init__"}
