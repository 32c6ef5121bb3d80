"""The command line and the loader where standard streams are closed or full, and where paths are not ASCII."""

import functools
import os
import shutil
import subprocess
import sys

import pytest

from apex._loader import layout

from .described import ROOT

DOCTOR = f"{sys.executable} -m apex"
STEP = """
import os, sys, torch, apex
from apex.optimizers import FusedAdam
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
FusedAdam([p], lr=1.0).step()
assert p.eq(p[0]).all() and p[0] < 0.1, p
assert os.path.realpath(os.path.dirname(apex.__file__)).startswith(os.getcwd())
from apex.__main__ import main
assert main([]) in (0, 1)
print("done")
"""


def shell(command, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, shell=True, capture_output=True, env=environment, cwd="/")


@functools.cache
def normal():
    return shell(DOCTOR).returncode


@pytest.mark.parametrize("closed", [">&-", "--json >&-", "<&- >&- 2>&-"])
def test_closed_streams(closed):
    done = shell(f"{DOCTOR} {closed}")
    assert done.returncode == normal() and done.stderr == b""


def test_usage_with_closed_streams():
    assert shell(f"{DOCTOR} --nonsense >&- 2>&-").returncode == 64
    assert shell(f"{DOCTOR} --help >&-").returncode == 0


def test_a_file_that_is_opened_gets_no_closed_streams_number():
    code = "import os; from apex._loader import streams; streams.open_closed(); assert os.open(os.devnull, 0) > 2"
    assert shell(f"{sys.executable} -c '{code}' <&- >&-").returncode == 0


def test_a_full_output_is_named():
    done = shell(f"{DOCTOR} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == b"apex: the output cannot be written: No space left on device\n"


def test_a_reader_that_goes_away():
    done = shell(f"{DOCTOR} --json | true")
    assert done.stderr == b""


def test_a_socket_that_breaks_is_not_taken_for_the_output():
    code = (
        "import socket, sys; from apex._loader import streams\n"
        "def main():\n    a, b = socket.socketpair()\n    b.close()\n    print('said')\n    a.send(b'x')\n"
        "sys.exit(streams.run(main))"
    )
    done = shell(f'{sys.executable} -c "{code}"')
    assert done.stdout == b"said\n" and done.stderr.endswith(b"BrokenPipeError: [Errno 32] Broken pipe\n")


@pytest.mark.parametrize("buffered", ["", "-u"])
def test_a_long_output_whose_reader_goes_away(buffered):
    """More than fits into a buffer, in one piece and in many."""
    for printing in ("print('x' * 300_000)", "[print('x' * 99) for _ in range(9999)]"):
        code = f"from apex._loader import streams; raise SystemExit(streams.run(lambda: {printing}))"
        done = subprocess.run(
            ["bash", "-c", f'{sys.executable} {buffered} -c "{code}" | head -c 5; echo ${{PIPESTATUS[0]}}'],
            capture_output=True, text=True, cwd=ROOT,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == ("xxxxx1\n", "")


@pytest.fixture(scope="module", params=["nä".encode(), b"n\xff"])
def elsewhere(request, tmp_path_factory):
    """A copy of apex with its built parts, under a name that is not ASCII, or not UTF-8; as bytes."""
    root = os.fsencode(tmp_path_factory.mktemp("names")) + b"/" + request.param
    os.mkdir(root)
    for source, target in (
        (layout.PACKAGE, b"apex"),
        (ROOT / "csrc", b"csrc"),
        (layout.built(), b"build/tree/apex"),
    ):
        if source.exists():
            shutil.copytree(
                os.fsencode(source), root + b"/" + target, ignore=lambda *_: [b"__pycache__", b"packs"]
            )
    shutil.copyfile(ROOT / "version.txt", root + b"/version.txt")
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize(("utf8", "bindings"), [("0", True), ("1", True), ("0", False)])
def test_paths_that_are_not_ascii(elsewhere, utf8, bindings):
    left_out = ("LC_", "LANG", "APEX")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment |= {"PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONPATH": "."}
    if not bindings:
        environment["APEX_TREE"] = "/nowhere"
    done = subprocess.run([sys.executable, "-c", STEP], cwd=elsewhere, env=environment, capture_output=True)
    assert done.returncode == 0 and done.stdout.endswith(b"done\n"), done.stderr.decode(errors="replace")
    assert b"cannot load" not in done.stdout and b"multi_tensor_adam" in done.stdout
