"""Every device source compiles for the host, without a warning, in every build."""

from __future__ import annotations

import pytest

from simt.build import FLAVOURS, WARP_SIZES, build, device_sources
from simt.executor import Executor


@pytest.mark.parametrize("width", WARP_SIZES)
@pytest.mark.parametrize("flavour", FLAVOURS)
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
