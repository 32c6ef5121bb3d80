"""Every device source compiles for the host, without a warning, in every build."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import Timeout

from simt.build import FLAVOURS, WARP_SIZES, _run_once, build, device_sources
from simt.executor import Executor
from simt.targets import Target

BUILDS = [
    pytest.param(flavour, width, marks=[getattr(pytest.mark, m) for m in Target("", flavour, width, 0).marks])
    for flavour in FLAVOURS
    for width in WARP_SIZES
]


@pytest.mark.parametrize(("flavour", "width"), BUILDS)
def test_compiles(flavour, width):
    library = build(flavour, width)
    assert not library.failures
    assert not library.warnings


def test_kernels_bear_their_units_name():
    units = [path.stem for path in device_sources()]
    strangers = [
        name
        for name in Executor("plain", 32).kernel_names()
        if not any(name.startswith(unit) for unit in units)
    ]
    assert not strangers


def test_workers_make_an_output_once(tmp_path):
    output, begun = tmp_path / "unit.o", tmp_path / "begun"
    slow = "import sys, time; open(sys.argv[1], 'a').write('x'); time.sleep(1); open(sys.argv[3], 'w')"
    command = [sys.executable, "-c", slow, str(begun)]
    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(_run_once, command, output) for _ in range(2)]
        while not begun.exists():
            time.sleep(0.01)
        with pytest.raises(Timeout):  # it goes on to units that nobody makes
            _run_once(command, output, patience=0)
        assert [worker.result() for worker in workers] == ["", ""]
    assert begun.read_text() == "x"
