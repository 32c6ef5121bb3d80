"""Programs that reach for `transformer_engine` run over apex-transformer-engine: accelerate, megatron-core.

Where they are installed: pip install accelerate; pip install --no-deps megatron-core.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that holds what pip would unpack of both wheels."""
    transformer_engine = pytest.importorskip(
        "build_matrix.wheels.transformer_engine", reason="needs a checkout"
    )
    folder = tmp_path_factory.mktemp("engine")
    for path in (transformer_engine.write(folder), transformer_engine.write_alias(folder)):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder / "site")
    return folder / "site"


def missing(*names):
    """Of those names, what is not here."""
    absent = []
    for name in names:
        try:
            if importlib.util.find_spec(name) is None:
                absent.append(name)
        except ModuleNotFoundError:  # of the package around it
            absent.append(name)
    return absent


def run(site, script):
    path = os.pathsep.join(filter(None, [str(site), str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_accelerate_trains_in_fp8(site):
    if missing("accelerate"):
        pytest.skip("accelerate is not installed")
    assert run(site, "accelerate_training.py").count("passed ") == 1


def test_gpt_of_megatron_core(site):
    names = missing("megatron.core", "numpy", "packaging")
    if names:
        pytest.skip(f"megatron-core's layers need {', '.join(names)}: not installed")
    assert run(site, "megatron_core_engine.py").count("passed ") == 2
