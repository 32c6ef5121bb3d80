"""The emulated tier itself: what it runs is the packs' machine code, and it names planted bugs.

Right results are tested beside the SIMT executor's (tests/simt): every test there runs here too.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from simt.build import SELFTEST
from simt.device import KernelFault
from simt.targets import Target

from emulated.toolchain import ARCHES, FLAGS, ROOT, compile_source, why_not

pytestmark = [pytest.mark.emulated, pytest.mark.skipif(bool(why_not()), reason=why_not() or "available")]
UNITS = sorted(path.stem for path in (ROOT / "csrc" / "device").glob("*.cu"))


@pytest.fixture(params=ARCHES)
def arch(request):
    return request.param


def _open(arch: str, order: int = 0):
    return Target(f"emulated-{arch}", "emulated", arch, order).device(selftest=True)


@pytest.fixture
def device(arch):
    """The self-test kernels, waves in order."""
    opened = _open(arch)
    yield opened
    opened.close()


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_compiles(arch, unit):
    image = compile_source(ROOT / "csrc" / "device" / f"{unit}.cu", arch).read_bytes()
    assert image.startswith(b"\x7fELF")
    assert f"amdgcn-amd-amdhsa--{arch}".encode() in image


def test_compiling_again_gives_the_same_bytes(arch, tmp_path, monkeypatch):
    first = compile_source(SELFTEST, arch).read_bytes()
    monkeypatch.setattr("emulated.toolchain.OUTPUT", tmp_path)
    assert compile_source(SELFTEST, arch).read_bytes() == first


# The emulator's memory is one, so it cannot show a write that is late: the code is looked at.
WAITS = {
    "gfx9": r"s_waitcnt .*vmcnt\(0\)",
    "gfx10": r"s_waitcnt_vscnt (null|0), 0x0",
    "gfx12": "s_wait_storecnt 0x0",
}
WAITS["gfx11"] = WAITS["gfx10"]


@pytest.mark.parametrize("arch", ["gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1201"])
def test_waves_wait_for_their_writes_before_their_block_is_counted(arch):
    """The wave that counts the block in releases what others of the block wrote, too."""
    text = compile_source(SELFTEST, arch, (*FLAGS, "-S")).read_text()
    body = text.split("\nselftest_last_block:")[1].split("s_endpgm")[0]
    before = body[: body.index("s_barrier")]
    writes = list(re.finditer(r"(global|flat)_store", before))
    assert writes
    assert re.search(WAITS[next(name for name in WAITS if arch.startswith(name))], before[writes[-1].end() :])


def test_past_a_tensor(device):
    with pytest.raises(KernelFault, match="out of bounds"):
        device.launch("selftest_past_tensor", 1, 64, [device.full(64, 0), np.int32(64)])


def test_null(device):
    with pytest.raises(KernelFault, match="out of bounds"):
        device.launch("selftest_past_tensor", 1, 64, [None, np.int32(64)])


@pytest.mark.parametrize("kernel, shared", [("static", 0), ("dynamic", 64 * 4)])
def test_past_shared_memory(device, kernel, shared):
    with pytest.raises(KernelFault, match="LDS out of bounds"):
        device.launch(f"selftest_past_{kernel}_shared", 1, 64, [device.full(64, 0)], shared)


def test_arguments_are_counted_and_measured(device):
    with pytest.raises(TypeError, match="takes 2 arguments, 1 given"):
        device.launch("selftest_past_tensor", 1, 1, [None])
    with pytest.raises(TypeError, match="8 bytes for a parameter of 4"):
        device.launch("selftest_past_tensor", 1, 1, [None, np.int64(1)])


def test_unknown_kernel(device):
    with pytest.raises(KernelFault, match="no kernel selftest_nowhere"):
        device.launch("selftest_nowhere", 1, 1, [])


@pytest.mark.parametrize("kernel", ["selftest_missing_barrier", "selftest_reused_buffer"])
def test_a_wave_order_shows_missing_barriers(arch, kernel):
    """In order, or in turns: one of the two gives a wrong sum."""
    wrong = 0
    for order in (0, 1):
        device = _open(arch, order)
        out = device.full(1, 0)
        device.launch(kernel, 1, 256, [device.full(256, 1), out])
        wrong += out.numpy()[0] != 256 * 256
        device.close()
    assert wrong
