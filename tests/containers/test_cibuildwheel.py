"""A wheel through cibuildwheel, for real. The first test is the container step of CI."""

import json
import subprocess
import sys
import zipfile

import pytest

from build_matrix import REPOSITORY
from build_matrix.containers import engine
from build_matrix.wheels import provenance

pytestmark = [
    pytest.mark.container,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="cibuildwheel runs on Python 3.11 and later"),
]
TORCH = "2.13.0"


def python_of(engine_name, image) -> str:
    """The tag of the Python that a local image has."""
    listed = subprocess.run(
        [engine_name, "run", "--rm", "--network=host", *engine.limits(), image, "ls", "/opt/python"],
        text=True,
        capture_output=True,
        check=True,
    ).stdout.split()
    (tag,) = {name.split("-")[0] for name in listed} - {"cp39"}
    return tag


def test_cibuildwheel_builds_the_wheel(engine_name, image, tmp_path):
    """The command, with the checkout's store: what it has compiled by these very compilers is used."""
    pytest.importorskip("cibuildwheel")
    tag = python_of(engine_name, image)
    command = [sys.executable, "-m", "build_matrix", "wheel", "cpu", f"--torch={TORCH}", f"--python={tag}"]
    command += ["--container", f"--engine={engine_name}", f"--image={image}", f"--dist={tmp_path}"]
    ended = subprocess.run(command, cwd=REPOSITORY, encoding="utf-8", capture_output=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert ended.stdout.split() == [str(wheel)]
    assert wheel.name.startswith(f"apex_cpu-1.10.0+cpu-{tag}-{tag}-manylinux_2_")
    assert "No filename tags change needed" in ended.stderr, "the image's auditwheel was not asked"
    assert provenance.check(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = json.loads(archive.read("apex/lib/bindings.json"))
    assert (entry["torch"], entry["python"]) == ("2.13", tag)
    left = subprocess.run(
        [engine_name, "ps", "--all", "--quiet", "--filter=name=cibuildwheel-"], capture_output=True
    )
    assert left.stdout == b"", "containers are left"


def test_an_image_that_is_not_there_is_named_with_the_command_that_makes_one(engine_name, tmp_path):
    pytest.importorskip("cibuildwheel")
    command = [
        sys.executable,
        "-m",
        "build_matrix",
        "wheel",
        "cpu",
        "--container",
        "--image=localhost/apex-none",
    ]
    ended = subprocess.run(
        [*command, f"--engine={engine_name}"], cwd=REPOSITORY, encoding="utf-8", capture_output=True
    )
    assert ended.returncode == 11
    assert "has no image localhost/apex-none. Run: bash ci/containers/local_image.sh" in ended.stderr
