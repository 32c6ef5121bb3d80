"""megatron-core runs its fused layers and gradient_accumulation_fusion over apex.

Where it is installed: pip install --no-deps megatron-core; it needs numpy and packaging.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apex import _legacy
from apex._loader import registry

ROOT = Path(__file__).resolve().parents[2]
LAYERS = Path(__file__).with_name("megatron_core_layers.py")


def missing():
    """Of what megatron-core's layers import, what is not here."""
    names = ("megatron.core", "numpy", "packaging")
    found = [name for name in names[1:] if importlib.util.find_spec(name) is None]
    try:
        here = importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        here = False
    return found if here else ["megatron.core", *found]


@pytest.fixture
def import_names(tmp_path):
    """A folder with the top-level modules that a wheel has."""
    for extension in registry.extensions().values():
        if extension.state == "complete":
            (tmp_path / f"{extension.name}.py").write_text(_legacy.module_text(extension.name))
    return tmp_path


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_of_megatron_core(device, import_names):
    if missing():
        pytest.skip(f"megatron-core's layers need {', '.join(missing())}: not installed")
    path = os.pathsep.join(filter(None, [str(import_names), str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(LAYERS), device],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("passed ") == 4
