"""The one pip line for an environment, or why there is none and what is nearest."""

import json
import subprocess
import sys

import pytest

from build_matrix import REPOSITORY, compat, identity, matrix, which
from build_matrix.which import Environment

VERSION = identity.version()
CUDA = f"python -m pip install apex-cuda=={VERSION}+cu130 --index-url <index>/whl/cu130/"
ROCM = f"python -m pip install apex-rocm=={VERSION}+rocm7.2 --index-url <index>/whl/rocm7.2/"
CPU = f"python -m pip install apex-cpu=={VERSION}+cpu --index-url <index>/whl/cpu/"


@pytest.fixture(autouse=True)
def no_index(monkeypatch):
    monkeypatch.delenv("APEX_INDEX", raising=False)


@pytest.mark.parametrize(
    ("environment", "line", "reasons"),
    [
        (
            Environment("cp311", "2.13.0+cu130", "cuda", "13.0", ("sm_90", "sm_90")),
            CUDA,
            ["sm_90: a pack of exactly this arch"],
        ),
        (
            Environment("cp313", "2.8.0", "cuda", "13.0", ("sm_87", "sm_130")),
            CUDA,
            ["sm_86: machine code of its family", "compute_120: PTX, compiled by the driver at first use"],
        ),
        (
            Environment("cp310", "2.14.1+rocm7.2", "rocm", "7.2", ("gfx942",)),
            ROCM,
            ["gfx942: a pack of exactly this arch"],
        ),
        (Environment("cp312", "2.10.0+cpu"), CPU, []),
        (Environment("cp312", "2.9.1+cu130", "cuda", "13.0"), CUDA, []),  # an image build: no card is here
    ],
)
def test_an_environment_that_a_wheel_fits_gets_its_line(environment, line, reasons):
    answer = which.answer(environment)
    assert (answer["found"], answer["command"], answer["reasons"]) == (True, line, reasons)


@pytest.mark.parametrize(
    ("environment", "reason", "nearest"),
    [
        (
            Environment("cp311", "2.8.0+cu128", "cuda", "12.8", ("sm_90",)),
            "no wheel is built for cu128",
            CUDA,
        ),
        (
            Environment("cp311", "2.7.1+cu130", "cuda", "13.0", ("sm_90",)),
            "no binding is built for torch 2.7",
            CUDA,
        ),
        (
            Environment("cp311", "2.13.0", "rocm", "7.2", ("gfx942", "gfx1010")),
            "no pack runs on gfx1010",
            ROCM,
        ),
        (Environment("cp310", "2.15.0"), "torch 2.15 and later have no wheel for Python 3.10", CPU),
        (Environment("cp39", "2.8.0"), "no wheel is built for cp39", CPU),
        (
            Environment("cp311", "2.10.0.dev20250924+cu130", "cuda", "13.0"),
            "is a pre-release: bindings are",
            None,
        ),
        (Environment("cp311", "2.13.0a0+81ea7a4", "cuda", "13.0"), "is a pre-release: bindings are", None),
        (Environment("cp311", "2.13.0+gitabc"), "is somebody's own build", None),
        (Environment("cp311"), "no torch is installed", CPU),
        (Environment("cp39"), "no wheel is built for cp39; there are cp310, ", None),
        (Environment("cp314"), "no wheel is built for cp314, but where such an interpreter is found", None),
        (Environment("cp314", "2.13.0"), "no wheel is built for cp314, but where such an interpreter", CPU),
    ],
)
def test_what_has_no_line_has_a_reason_and_the_nearest(environment, reason, nearest):
    answer = which.answer(environment)
    assert not answer["found"] and "command" not in answer
    assert any(reason in said for said in answer["reasons"]), answer["reasons"]
    commands = [near["command"] for near in answer["nearest"]]
    assert nearest in commands if nearest else commands == []
    assert all(near["cell"] for near in answer["nearest"])


def test_every_cell_of_the_matrix_has_its_line():
    axes = matrix.load()
    for accelerator in axes.accelerators:
        version = {"cuda": "13.0", "rocm": "7.2"}.get(accelerator.name, "")
        for torch in axes.torch:
            for tag in axes.python:
                found = which.answer(Environment(tag, torch, accelerator.name, version))["found"]
                assert found == (axes.why_not(torch, tag) is None)


def test_the_index_may_be_named(monkeypatch):
    environment = Environment("cp311", "2.13.0+cpu")
    assert which.answer(environment, "https://x.example/a/")["command"].endswith(
        " https://x.example/a/whl/cpu/"
    )
    monkeypatch.setenv("APEX_INDEX", "https://y.example")
    assert which.answer(environment)["command"].endswith(" https://y.example/whl/cpu/")


def run(*arguments, options=()):
    command = [sys.executable, *options, "-m", "build_matrix", "which", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)


def test_the_command_prints_one_line(capsys):
    pytest.importorskip("torch")
    done = run("--index", "http://127.0.0.1:8000")
    code = which.main(["--index", "http://127.0.0.1:8000", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == done.returncode == (0 if answer["found"] else compat.NOT_THERE), done.stderr
    if answer["found"]:
        assert done.stdout == answer["command"] + "\n"


def test_an_environment_with_nothing_in_it_is_answered_too():
    """-S: no site-packages, so neither torch nor what the farm needs."""
    done = run(options=["-S"])
    assert done.returncode == compat.NOT_THERE
    assert "no torch is installed" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == len(matrix.load().accelerators)
