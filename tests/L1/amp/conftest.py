"""The marker of the full cross product: `pytest tests/L1/amp -m full_cross`; without -m a part of it runs."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "L0" / "amp"))


def pytest_collection_modifyitems(config, items):
    if "full_cross" not in (config.getoption("markexpr") or ""):
        full = [item for item in items if item.get_closest_marker("full_cross")]
        if full:
            config.hook.pytest_deselected(items=full)
            items[:] = [item for item in items if item not in full]


@pytest.fixture(autouse=True)
def clean():
    from amp_runs import forget

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    forget()
    yield
    forget()
    torch.set_num_threads(threads)
