"""The compiler of the emulated tier: what several processes of one run want at once is compiled once."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from build_matrix.check import cards

FAKE = """
import pathlib, sys, time
with open(sys.argv[1], "a") as log:
    log.write("compiled\\n")
time.sleep(1)
pathlib.Path(sys.argv[2], "out.co").write_text("code")
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """tests/emulated/toolchain.py with a compiler that notes each run in `log`, and ends with `code`."""
    module = cards._emulator()
    module.log, module.code = tmp_path / "log", 0

    def command(folder, arguments):
        return [sys.executable, "-c", FAKE, str(module.log), str(folder), str(module.code)]

    for name, value in {
        "OUTPUT": tmp_path / "store",
        "_version": lambda root: "1",
        "_chrooted_clang": lambda root: None,
        "_clang": command,
    }.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_what_is_asked_for_at_once_is_compiled_once(toolchain):
    source = toolchain.ROOT / "csrc/device/multi_tensor_scale.cu"
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(toolchain.compile_source, [source] * 4, ["gfx950"] * 4))
    (path,) = found
    assert path.read_text() == "code" and toolchain.log.read_text() == "compiled\n"


def test_a_compiler_that_failed_lets_the_next_one_try(toolchain):
    source = toolchain.ROOT / "csrc/device/multi_tensor_scale.cu"
    toolchain.code = 1
    with pytest.raises(RuntimeError, match="multi_tensor_scale.cu for gfx950"):
        toolchain.compile_source(source, "gfx950")
    toolchain.code = 0
    assert toolchain.compile_source(source, "gfx950").read_text() == "code"
