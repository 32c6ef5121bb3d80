"""The line that installs apex is spelled once, and works as it is printed: by README, which, compat, and the server."""

import re
import subprocess
import sys
import threading
import urllib.request

import pytest

from build_matrix import REPOSITORY
from build_matrix.serve import index, install_line, server
from build_matrix.site import readme
from build_matrix.spec import identity, matrix

ADDRESSES = (
    "http://127.0.0.1:8000",
    "http://127.0.0.1:8000/",
    "http://127.0.0.1:8000/whl",
    "http://127.0.0.1:8000/whl/",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_may_be_given_with_its_whl(address):
    line = install_line.line("cuda", address)
    pin = f"apex-cuda=={identity.version()}+cu130"
    assert line == f"python -m pip install {pin} --index-url http://127.0.0.1:8000/whl/cu130/"


@pytest.mark.parametrize("index", ["<index>", "http://127.0.0.1:8000/whl"])
def test_compat_prints_the_same_line(index):
    asked = ["--torch", "2.13.0+cu130", "--arch", "sm_90", "--python", "3.11", "--index", index]
    command = [sys.executable, "-m", "build_matrix", "compat", *asked]
    done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
    assert install_line.line("cuda", index) in done.stdout, done.stdout + done.stderr


def test_every_page_has_the_same_line():
    for accelerator in matrix.load().accelerators:
        text = (readme.NPU if accelerator.pure else readme.README).read_text(encoding="utf-8")
        line = install_line.line(accelerator.name)
        assert f"`{line}`" in text and f"`{install_line.torch(accelerator.name)}`" in text
    for path in [readme.README, *REPOSITORY.glob("docs/*.md")]:
        for pin in re.findall(r"apex-(?:cpu|cuda|rocm|npu)==[^\s`]+", path.read_text(encoding="utf-8")):
            assert pin in [install_line.pin(a.name) for a in matrix.load().accelerators], (
                f"{path.name}: {pin}"
            )


@pytest.fixture
def served(wheel_of_tree, tmp_path):
    """(address, lines) of the server of an index with one wheel."""
    index.write(sorted(wheel_of_tree.glob("*.whl")), tmp_path / ".whl")
    running = server.make(tmp_path / ".whl")
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    address = f"http://{server.HOST}:{running.server_address[1]}"
    yield address, server.lines(tmp_path / ".whl", address)
    running.shutdown()
    thread.join()
    running.server_close()


def test_the_server_prints_the_line_of_each_root_that_is_not_empty(served):
    """And the line finds the wheel, with the pip that ships with Python."""
    address, (line,) = served
    assert re.fullmatch(
        rf"python -m pip install apex-(cpu|cuda|rocm)==\S+ --index-url {address}/whl/\S+/", line
    )
    root = line.rpartition(" ")[2]
    assert urllib.request.urlopen(root).status == 200
    command = [sys.executable, "-m", "pip", "--isolated", *line.split()[3:]]
    # What is here is not looked at, and torch, which the line wants to be here, is not on this index.
    options = ["--dry-run", "--no-deps", "--ignore-installed"]
    done = subprocess.run([*command, *options], text=True, capture_output=True, cwd="/")
    assert done.returncode == 0 and "Would install apex-" in done.stdout, done.stderr
