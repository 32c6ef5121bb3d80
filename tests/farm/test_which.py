"""The one pip line for an environment, or why there is none and what is nearest."""

import json
import subprocess
import sys

import pytest

from apex._loader import ask, distributions, explain, offers
from build_matrix import REPOSITORY
from build_matrix.serve import compat, which
from build_matrix.spec import identity, matrix

VERSION = identity.version()
CUDA = f"python -m pip install apex-cuda=={VERSION}+cu130 --index-url <index>/whl/cu130/"
ROCM = f"python -m pip install apex-rocm=={VERSION}+rocm7.2 --index-url <index>/whl/rocm7.2/"
UPGRADE = "python -m pip install --upgrade --no-deps apex-cuda --index-url <index>/whl/cu130/"
CPU = f"python -m pip install apex-cpu=={VERSION}+cpu --index-url <index>/whl/cpu/"


@pytest.fixture(autouse=True)
def no_index(monkeypatch):
    monkeypatch.delenv("APEX_INDEX", raising=False)


def machine(python, torch=None, *archs, **facts):
    """A Machine; CUDA, or ROCm, of a torch whose label does not say, is `cuda` or `rocm`."""
    return explain.described(torch, archs, **{"python": python, "system": matrix.NATIVE, **facts})


@pytest.mark.parametrize(
    ("described", "line", "reasons"),
    [
        (machine("cp311", "2.13.0+cu130", "sm_90", "sm_90"), CUDA, ["sm_90: a pack of exactly this arch"]),
        (
            machine("cp313", "2.8.0", "sm_99", "sm_130", cuda="13.0"),
            CUDA,
            ["sm_90: code of its family", "compute_120: PTX, compiled by the driver at first use"],
        ),
        (machine("cp310", "2.14.1+rocm7.2", "gfx942"), ROCM, ["gfx942: a pack of exactly this arch"]),
        (machine("cp312", "2.10.0+cpu"), CPU, []),
        (machine("cp312", "2.9.1+cu130"), CUDA, []),  # an image build: no card is here
        (  # a torch for another CUDA: its binding fits, and so do packs, by the driver
            machine("cp311", "2.8.0+cu128", "sm_90", driver="580"),
            CUDA,
            ["sm_90: a pack of exactly this arch"],
        ),
        (
            machine("cp311", "2.8.0+cu128", "sm_90", driver="570"),
            CUDA,
            ["compute_80: PTX, compiled by the driver at first use"],
        ),
        (
            machine("cp311", "2.13.0", "gfx942", "gfx1010", rocm="7.2"),
            ROCM,
            [
                "gfx942: a pack of exactly this arch",
                "gfx1010: hipRTC of ROCm 7.2; compiled at first use, then cached",
            ],
        ),
    ],
)
def test_an_environment_that_a_wheel_fits_gets_its_line(described, line, reasons):
    answer = ask.of_machine(described)
    assert (answer["found"], answer["command"], answer["reasons"]) == (True, line, reasons)


@pytest.mark.parametrize(
    ("described", "reason", "wheel"),
    [
        (machine("cp311", "2.99.0+cu130"), "built for torch 2.8, ", CUDA),
        (machine("cp311", "2.10.0.dev20250924+cu130"), "is a pre-release, and its git", CUDA),
        (machine("cp311", "2.13.0a0+81ea7a4", cuda="13.0"), "is a pre-release, and its", CUDA),
        (machine("cp311", "2.13.0+gitabc"), "is somebody's own build", CPU),
        (machine("cp310", "2.15.0"), "built for torch 2.8, ", CPU),
    ],
)
def test_a_torch_without_a_compiled_binding_is_served_by_the_portable_one(described, reason, wheel):
    answer = ask.of_machine(described)
    assert answer["found"] and answer["command"] == wheel
    assert any(reason in said and "portable binding" in said for said in answer["reasons"])


@pytest.mark.parametrize(
    ("described", "reason", "nearest", "mend"),
    [
        (
            machine("cp311", "2.7.1+cu130", "sm_90"),
            "torch 2.7.1+cu130 is older than 2.8",
            CUDA,
            "python -m pip install 'torch>=2.8'",
        ),
        (machine("cp311", "2.13.0+cu130", "sm_61"), "no kernel for sm_61: ", CUDA, UPGRADE),
        (machine("cp39", "2.8.0"), "no wheel is built for cp39", CPU, "use Python 3.10 or newer"),
        (machine("cp311"), "no torch is installed", CPU, "python -m pip install torch"),
        (machine("cp39"), "no wheel is built for cp39; there are cp310, ", None, "use Python 3.10 or newer"),
        (machine("cp314"), "no wheel is built for cp314, but where such an", None, offers.SOURCE),
        (machine("cp314", "2.13.0"), "no wheel is built for cp314, but where", CPU, offers.SOURCE),
        (  # cards that its torch cannot use: never the wheel without packs
            machine("cp311", "2.13.0+cpu", "gfx942"),
            "built without ROCm: it cannot use the AMD card",
            ROCM,
            "python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/rocm7.2",
        ),
    ],
)
def test_what_has_no_line_has_a_reason_and_the_nearest(described, reason, nearest, mend):
    answer = ask.of_machine(described)
    assert not answer["found"] and "command" not in answer
    assert any(reason in said for said in answer["reasons"]), answer["reasons"]
    assert answer["mend"] == mend
    commands = [near["command"] for near in answer["nearest"]]
    assert nearest in commands if nearest else commands == []
    assert all(near["cell"] for near in answer["nearest"])


def test_every_cell_of_the_matrix_has_its_line():
    axes = matrix.load()
    for accelerator in axes.accelerators:
        label = {"cuda": "+cu130", "rocm": "+rocm7.2"}.get(accelerator.name, "+cpu")
        for torch in axes.torch:
            for tag in axes.python:
                answer = ask.of_machine(machine(tag, f"{torch}{label}"))
                portable = any("portable binding" in said for said in answer["reasons"])
                assert answer["found"] and portable == (axes.why_not(torch, tag) is not None)


@pytest.mark.parametrize("index", ["https://x.example/a", "https://x.example/a/", "https://x.example/a/whl/"])
def test_the_index_may_be_named(index, monkeypatch):
    described = machine("cp311", "2.13.0+cpu")
    assert ask.of_machine(described, index)["command"].endswith(" https://x.example/a/whl/cpu/")
    monkeypatch.setenv("APEX_INDEX", "https://y.example")
    assert ask.of_machine(described)["command"].endswith(" https://y.example/whl/cpu/")
    assert ask.of_machine(described, index)["command"].endswith(" https://x.example/a/whl/cpu/")


def test_the_line_puts_the_wheel_in_the_place_of_another(monkeypatch, capsys):
    """Report: it installed a second apex over the first, and uninstalling either broke the other."""
    described = machine("cp311", "2.13.0+cpu")
    line = ask.of_machine(described, "https://x.example")["command"]
    both = ask.of_machine(described, "https://x.example", ["apex-cpu", "apex-cuda"])["command"]
    assert both == f"python -m pip uninstall -y apex-cuda && {line}"
    assert ask.of_machine(described, "https://x.example", ["apex-cpu"])["command"] == line
    installed = [
        distributions.Distribution(name, "1", "", has_loader=name == "apex") for name in ("apex", "torch")
    ]
    here = distributions.Installation(tuple(installed), "")
    monkeypatch.setattr(ask.distributions, "describe", lambda: here)
    monkeypatch.setattr(ask.probe, "describe", lambda: described)
    assert ask.which(["--index", "https://x.example"], "which") == ask.FOUND
    assert capsys.readouterr().out == f"python -m pip uninstall -y apex && {line}\n"


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
