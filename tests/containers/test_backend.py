"""The build backend: what config settings ask of the farm, and what they leave to setuptools."""

import os
import subprocess
import sys

import pytest

from build_matrix import REPOSITORY, backend
from build_matrix.errors import BuildError
from build_matrix.spec import identity, toml
from build_matrix.wheels import wheel

FARM = toml.read(REPOSITORY / "pyproject.toml")["dependency-groups"]["farm"]


@pytest.mark.parametrize("settings", [None, {}, {"--build-option": "--cpp_ext"}])
def test_without_farm_it_is_setuptools(settings):
    assert backend.asked(settings) is None


def test_config_settings_name_a_cell():
    assert backend.asked({"farm": "cpu"}) == backend.Asked("cpu")
    asked = backend.asked({"farm": "rocm", "arch": "gfx942, gfx950", "torch": ["2.13.0", "2.14.1"]})
    assert asked == backend.Asked("rocm", ("gfx942", "gfx950"), ("2.13.0", "2.14.1"))


@pytest.mark.parametrize(
    "settings", [{"farm": "tpu"}, {"farm": "cpu,rocm"}, {"arch": "gfx942"}, {"torch": "2.13.0"}]
)
def test_half_a_request_is_refused(settings):
    with pytest.raises(BuildError, match="-C"):
        backend.asked(settings)
    with pytest.raises(SystemExit, match="^apex: -C"):  # in words, also from a front end's hooks
        backend.get_requires_for_build_wheel(settings)


def test_a_farm_wheel_is_built_with_what_the_farm_needs():
    assert backend.get_requires_for_build_wheel({"farm": "cpu"}) == FARM


def test_metadata_is_that_of_the_wheel(tmp_path):
    name = backend.prepare_metadata_for_build_wheel(str(tmp_path), {"farm": "rocm", "arch": "gfx942"})
    version = f"{identity.version()}+rocm7.2"
    assert name == f"apex_rocm-{version}.dist-info"
    assert (tmp_path / name / "METADATA").read_text(encoding="utf-8") == wheel.metadata("apex-rocm", version)


def test_a_named_fault_ends_the_build_in_words(tmp_path):
    """Through the very call that a front end makes."""
    script = (
        "from build_matrix import backend\n"
        f"backend.build_wheel({str(tmp_path)!r}, {{'farm': 'rocm', 'arch': 'sm_90'}})\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "APEX_STORE": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True)
    assert ended.returncode == 1
    assert ended.stderr.strip() == "apex: sm_90 does not go into apex-rocm, but into apex-cuda"
