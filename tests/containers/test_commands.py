"""What containers are told, found out without running one."""

import os
import subprocess
import sys

import pytest

from build_matrix import REPOSITORY
from build_matrix.containers import engine, pip_settings, wheels
from build_matrix.errors import BuildError, ContainerError, ToolchainMissing
from build_matrix.spec import matrix, toml

CIBUILDWHEEL = toml.read(REPOSITORY / "pyproject.toml")["tool"]["cibuildwheel"]


# ---- pip's configuration ------------------------------------------------------------------------------------


def test_pip_s_configuration_is_passed_on(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "ca.pem").write_text("")
    lines = [
        "global.index-url='https://files.example/simple'",
        f"global.cert='{tmp_path}/ca.pem'",
        f"global.find-links='{tmp_path}/wheels https://more.example/wheels'",
        "global.target='/somewhere'",
        "install.user='true'",
        ":env:.timeout='20'",
    ]
    settings = pip_settings.of(lines, {"HTTPS_PROXY": "http://proxy.example:3128", "HOME": "/root"})
    assert settings.variables == {
        "PIP_INDEX_URL": "https://files.example/simple",
        "PIP_CERT": f"{tmp_path}/ca.pem",
        "PIP_FIND_LINKS": f"{tmp_path}/wheels https://more.example/wheels",
        "PIP_TIMEOUT": "20",
        "HTTPS_PROXY": "http://proxy.example:3128",
    }
    assert settings.paths == (tmp_path / "ca.pem", tmp_path / "wheels")


def test_the_environment_goes_before_the_files():
    lines = [":env:.index-url='https://a.example'", "global.index-url='https://b.example'"]
    assert pip_settings.of(lines, {}).variables == {"PIP_INDEX_URL": "https://a.example"}


def test_a_local_index_is_shown_with_the_files_beside_its_root(tmp_path):
    (tmp_path / "pypi/simple").mkdir(parents=True)
    lines = [f"global.extra-index-url='file://{tmp_path}/pypi/simple file://{tmp_path}/gone/simple'"]
    assert pip_settings.of(lines, {}).paths == (tmp_path / "pypi",)


# ---- engines ------------------------------------------------------------------------------------------------


def fake(folder, name, code):
    path = folder / name
    path.write_text(f"#!/bin/sh\n[ {code} = 0 ] || echo 'cannot connect' >&2\nexit {code}\n")
    path.chmod(0o755)


def test_the_first_engine_that_answers_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CIBW_CONTAINER_ENGINE", raising=False)
    fake(tmp_path, "podman", 1)
    fake(tmp_path, "docker", 0)
    assert engine.find() == "docker"
    fake(tmp_path, "docker", 1)
    with pytest.raises(
        ContainerError, match="podman does not answer: cannot connect; docker does not answer.*Run: "
    ):
        engine.find()
    fake(tmp_path, "podman", 0)
    assert engine.find() == "podman"
    monkeypatch.setenv("CIBW_CONTAINER_ENGINE", "docker; create_args: --gpus all")
    with pytest.raises(ContainerError, match="^docker does not answer"):  # named, so no other is tried
        engine.find()


def test_limits_are_lowered_only_for_a_root_that_may_not_raise_them(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(engine, "_capable", lambda capability: True)
    assert engine.limits() == []
    monkeypatch.setattr(engine, "_capable", lambda capability: False)
    nofile, nproc = engine.limits()
    assert nofile.startswith("--ulimit=nofile=") and nproc.startswith("--ulimit=nproc=")
    assert int(nofile.rpartition(":")[2]) <= 1024
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert engine.limits() == []


def test_a_path_that_a_volume_cannot_spell_is_refused(tmp_path):
    assert engine.volume(tmp_path) == f"--volume={tmp_path}:{tmp_path}:ro"
    with pytest.raises(ContainerError, match="cannot be shown in a container"):
        engine.volume(tmp_path / "a:b")


# ---- cibuildwheel -------------------------------------------------------------------------------------------


@pytest.fixture
def toolchain_folders(tmp_path, monkeypatch):
    root = tmp_path / ".toolchains"
    (root / "nvrtc-13.0").mkdir(parents=True)
    (root / "rocm/usr/lib/llvm-22/bin").mkdir(parents=True)
    (root / "rocm/usr/lib/llvm-22/bin/clang").touch()
    monkeypatch.delenv("APEX_ROCM_ROOT", raising=False)
    monkeypatch.setattr(wheels, "provisioned_root", lambda: root)
    return root


def test_the_cell_is_told_in_cibuildwheel_s_variables():
    told = wheels.variables("rocm", ["gfx942", "gfx950"], ["2.13.0"], ["cp311", "cp312"])
    assert told["CIBW_BUILD"] == "cp311-manylinux_x86_64 cp312-manylinux_x86_64"
    assert told["CIBW_CONFIG_SETTINGS"] == "farm=rocm arch=gfx942,gfx950 torch=2.13.0"


def test_each_toolchain_is_shown_where_the_checkout_looks_for_it(toolchain_folders):
    assert wheels.toolchains([]) == []
    assert wheels.toolchains(["sm_80", "sm_90"]) == [
        f"--volume={toolchain_folders}/nvrtc-13.0:/project/.toolchains/nvrtc-13.0:ro"
    ]
    assert wheels.toolchains(["gfx942"]) == [
        f"--volume={toolchain_folders}/rocm:/project/.toolchains/rocm:ro",
        "--tmpfs=/project/.toolchains/rocm/tmp",
    ]
    with pytest.raises(ToolchainMissing, match="Run: nox -s toolchain -- nvrtc-12.3"):
        wheels.toolchains(["sm_70"])


def test_the_container_sees_what_is_named_and_nothing_else(toolchain_folders, tmp_path):
    pytest.importorskip("cibuildwheel")
    from cibuildwheel.oci_container import OCIContainerEngineConfig

    (tmp_path / "a folder").mkdir()
    index = "https://user:secret@files.example/simple"
    settings = pip_settings.PipSettings({"PIP_INDEX_URL": index}, (tmp_path / "a folder",))
    text = wheels.container_engine("podman", ["gfx942"], settings, jobs=3)
    assert "secret" not in text  # cibuildwheel prints it
    told = OCIContainerEngineConfig.from_config_string(text)
    assert (told.name, told.disable_host_mount) == ("podman", True)
    arguments = list(told.create_args)
    shown = {a.split("=", 1)[1].split(":")[0] for a in arguments if a.startswith("--volume=")}
    assert shown == {
        str(wheels.default_root().resolve()),
        str(toolchain_folders / "rocm"),
        str(tmp_path / "a folder"),
    }
    variables = [a.split("=", 1)[1] for a in arguments if a.startswith("--env=")]
    assert variables == ["PIP_INDEX_URL", "APEX_STORE=/store", "APEX_JOBS=3"]


def test_every_python_of_the_matrix_can_be_built():
    assert CIBUILDWHEEL["build"].split() == [f"{tag}-manylinux_x86_64" for tag in matrix.load().python]


def test_the_exported_sources_are_those_of_the_checkout(tmp_path):
    """A container compiles and packs what this checkout would, and nothing built comes along."""
    wheels.export(tmp_path / "sources")
    files = [path for path in (tmp_path / "sources").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".so", ".o", ".pyc")]
    assert sum(path.stat().st_size for path in files) < 20_000_000
    ask = "from build_matrix.spec import identity; print(identity.checkout())"
    told = [
        subprocess.run(
            [sys.executable, "-c", ask], cwd=folder, text=True, capture_output=True, check=True
        ).stdout
        for folder in (REPOSITORY, tmp_path / "sources")
    ]
    assert told[0] == told[1]


def test_a_configuration_that_pip_cannot_read_is_named(tmp_path, monkeypatch):
    file = tmp_path / "pip.conf"
    file.write_text("no section = 1\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    with pytest.raises(BuildError, match="pip config list` failed, and a container needs what it says"):
        pip_settings.read()
