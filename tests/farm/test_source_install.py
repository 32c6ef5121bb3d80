"""What a source build is asked for, and what it says when something is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_matrix import REPOSITORY, headers, identity, source_install
from build_matrix.archs import Arch
from build_matrix.errors import BuildError, RequirementMissing
from build_matrix.registry import Registry, device_units

REGISTRY = Registry.load()


def test_options_are_taken_out_of_the_command_line():
    arguments = ["setup.py", "--cuda_ext", "bdist_wheel", "--cpp_ext", "--dist-dir", "x"]
    assert source_install.take_options(arguments, REGISTRY) == ["--cuda_ext", "--cpp_ext"]
    assert arguments == ["setup.py", "bdist_wheel", "--dist-dir", "x"]


@pytest.mark.parametrize(
    ("vendor", "text", "archs"),
    [
        ("cuda", "9.0", ["sm_90"]),
        ("cuda", "8.0;9.0+PTX", ["sm_80", "sm_90", "compute_90"]),
        ("cuda", "8.0 9.0a, 12.0", ["sm_80", "sm_90", "sm_120"]),
        ("rocm", "gfx90a:sramecc+:xnack-;gfx942", ["gfx90a", "gfx942"]),
    ],
)
def test_arch_lists_of_torch_are_understood(vendor, text, archs):
    variable = source_install.ARCH_VARIABLES[vendor]
    assert source_install.archs(vendor, {variable: text}) == archs


def test_no_arch_list_means_the_matrix_and_nonsense_is_named():
    assert "sm_90" in source_install.archs("cuda", {}) and "gfx942" in source_install.archs("rocm", {})
    with pytest.raises(BuildError, match="'Hopper'"):
        source_install.archs("cuda", {"TORCH_CUDA_ARCH_LIST": "Hopper"})


class Compiler:
    name, version = "nvcc", "13.0.88"

    def knows(self, arch: Arch) -> bool:
        return arch.name in ("sm_80", "sm_90")


def test_an_arch_that_was_named_must_be_known(monkeypatch):
    monkeypatch.setattr(source_install, "of_vendor", lambda vendor: [Compiler()])
    assert list(source_install.toolchains("cuda", ["sm_70", "sm_90"], False, "X")) == ["sm_90"]
    with pytest.raises(BuildError, match="sm_70: no compiler here knows it"):
        source_install.toolchains("cuda", ["sm_70", "sm_90"], True, "X")


def test_a_missing_compiler_is_named_with_the_variable_and_the_command(monkeypatch):
    monkeypatch.setattr(source_install, "of_vendor", lambda vendor: [])
    with pytest.raises(RequirementMissing, match="APEX_BUILD_AMP_C needs it. Run: nox -s toolchain"):
        source_install.toolchains("cuda", ["sm_90"], False, "APEX_BUILD_AMP_C")


def test_missing_torch_names_build_isolation(monkeypatch):
    monkeypatch.setattr(headers, "installed_version", lambda: None)
    with pytest.raises(RequirementMissing, match="--no-build-isolation"):
        source_install.request([])


def test_packs_of_one_extension_hold_its_ops_and_the_helpers():
    asked = REGISTRY.asked({"APEX_BUILD_AMP_C": "1"})
    units = set(source_install.units(asked))
    assert set(asked[0].ops) - set(asked[0].host_ops) <= units
    assert units - set(REGISTRY.device_ops()) == {p.stem for p in device_units()} - set(REGISTRY.device_ops())
    other = set(source_install.units(REGISTRY.asked({"APEX_BUILD_XENTROPY": "1"})))
    assert not other & set(asked[0].ops)


def test_build_version_replaces_the_version(monkeypatch):
    assert source_install.version() == identity.version()
    monkeypatch.setenv("BUILD_VERSION", "1.10.1+mine")
    assert source_install.version() == "1.10.1+mine"


def setup(*arguments, **variables):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **variables}
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, encoding="utf-8", capture_output=True)


def test_setup_py_says_its_name_and_version_and_refuses_unknown_variables():
    assert setup("--name", "--version", BUILD_VERSION="9.9").stdout.split()[-2:] == ["apex", "9.9"]
    done = setup("--version", APEX_BUILD_AMP_D="1")
    assert done.returncode and "APEX_BUILD_AMP_D names no extension" in done.stderr
    assert setup("--cpp_ext", "--version").returncode == 0


def test_make_clean_leaves_only_sources(tmp_path):
    for name in ("build/store", "dist", ".whl", "apex/__pycache__", ".toolchains/x"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "apex/__init__.py").write_text("")
    shutil.copyfile(REPOSITORY / "Makefile", tmp_path / "Makefile")
    if shutil.which("make") is None:
        pytest.skip("make is not here")
    subprocess.run(["make", "--quiet", "clean"], cwd=tmp_path, check=True)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")}
    assert left == {"Makefile", "apex", "apex/__init__.py", ".toolchains", ".toolchains/x"}
