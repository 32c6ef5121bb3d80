"""One index with wheels of every platform of one version: each machine gets its own, and so does who downloads for
another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from build_matrix.serve import index
from build_matrix.spec import matrix
from build_matrix.wheels import audit, wheel

PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}"
LINUX = {"linux_x86_64": f"{audit.TAG}_x86_64", "linux_aarch64": f"{audit.TAG}_aarch64"}
# What torch's own wheels are tagged with: pip takes no wheel with an older tag when it is asked for one of these.
ASKED = {
    "linux_x86_64": "manylinux_2_28_x86_64",
    "linux_aarch64": "manylinux_2_28_aarch64",
    "win_amd64": "win_amd64",
}


def tags(platform):
    """Of the wheels of a platform."""
    return "py3-none-win_amd64" if platform.windows else f"{PYTHON}-{PYTHON}-{LINUX[platform.name]}"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of an index of small wheels: of every accelerator, on every platform that has it."""
    folder = tmp_path_factory.mktemp("mixed")
    wheels = []
    for of in matrix.load().accelerators:
        for platform in matrix.load().platforms:
            if of.name not in platform.accelerators:
                continue
            tag, version = wheel.PURE if of.pure else tags(platform), f"1.10.0+{of.label}"
            path = folder / f"{of.distribution.replace('-', '_')}-{version}-{tag}.whl"
            wheel.write(path, of.distribution, version, tag, {"apex/__init__.py": tag.encode()})
            wheels.append(path)
    index.write(sorted(set(wheels)), folder / ".whl")
    return (folder / ".whl").as_uri()


def pip(folder: Path, *arguments: str) -> tuple[int, list[str], str]:
    """pip's exit code, the wheels that came, and what it said."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    command = [sys.executable, "-m", "pip", "--isolated", *arguments]
    done = subprocess.run(command, env=clean, text=True, capture_output=True)
    return done.returncode, sorted(path.name for path in folder.glob("*.whl")), done.stdout + done.stderr


def download(folder: Path, root: str, platform: str, *names: str) -> tuple[int, list[str], str]:
    options = [
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
        f"--platform={platform}",
        "--index-url",
        root,
    ]
    return pip(folder, "download", f"--dest={folder}", *options, *names)


@pytest.mark.parametrize("of", matrix.load().accelerators, ids=lambda of: of.name)
def test_who_downloads_for_another_machine_gets_its_wheel(served, of, tmp_path):
    for platform in matrix.load().platforms:
        folder = tmp_path / platform.name
        root = f"{served}/whl/{of.roots[0]}/"
        code, came, said = download(folder, root, ASKED[platform.name], of.distribution)
        tag = wheel.PURE if of.pure else tags(platform)
        if of.pure or of.name in platform.accelerators:
            assert (code, came) == (
                0,
                [f"{of.distribution.replace('-', '_')}-1.10.0+{of.label}-{tag}.whl"],
            ), said
        else:
            assert code and not came and "No matching distribution" in said


def test_a_machine_that_no_wheel_is_for_gets_none(served, tmp_path):
    for platform in ("macosx_14_0_arm64", "win_arm64", "musllinux_1_2_x86_64", "manylinux2014_x86_64"):
        code, came, said = download(tmp_path, f"{served}/whl/cpu/", platform, "apex-cpu")
        assert code and not came and "No matching distribution" in said, platform


def test_this_machine_gets_its_own(served, tmp_path):
    options = ["--no-deps", "--no-cache-dir", f"--target={tmp_path}", "--index-url", f"{served}/whl/cpu/"]
    code, _, said = pip(tmp_path, "install", *options, "apex-cpu")
    assert code == 0, said
    assert (tmp_path / "apex/__init__.py").read_text() == tags(matrix.load().platform(matrix.NATIVE))
