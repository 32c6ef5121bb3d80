"""Tests that run containers for real skip, and say why, where no engine runs. The image is the one that
APEX_CONTAINER_IMAGE names, else a local one, made here from Debian's archive and removed at the end."""

import os
import shutil
import subprocess

import pytest

from build_matrix import REPOSITORY
from build_matrix.containers import engine, wheels
from build_matrix.errors import ContainerError

SCRIPT = REPOSITORY / "ci/containers/local_image.sh"
OWN_IMAGE = "localhost/apex-manylinux-of-tests"


def asked_for_all() -> bool:
    """Whether tests that take many minutes run too: APEX_CONTAINER_TESTS=all."""
    return os.environ.get("APEX_CONTAINER_TESTS") == "all"


long = pytest.mark.skipif(not asked_for_all(), reason="takes minutes: set APEX_CONTAINER_TESTS=all")


@pytest.fixture(scope="session")
def engine_name():
    try:
        return engine.find()
    except ContainerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def image(engine_name):
    """A local image that starts."""
    named = os.environ.get("APEX_CONTAINER_IMAGE")
    made = None
    if not named and not engine.has_image(engine_name, wheels.LOCAL_IMAGE):
        if os.geteuid():
            pytest.skip("making an image needs root, or name one: APEX_CONTAINER_IMAGE")
        if not (shutil.which("mmdebstrap") or shutil.which("debootstrap")):
            pytest.skip("making an image needs mmdebstrap: apt-get install mmdebstrap")
        made = OWN_IMAGE
        command = ["bash", str(SCRIPT), "--engine", engine_name, "--name", made]
        subprocess.run(command, check=True)
    chosen = named or made or wheels.LOCAL_IMAGE
    started = subprocess.run(
        [engine_name, "run", "--rm", "--network=host", *engine.limits(), chosen, "true"],
        text=True,
        capture_output=True,
    )
    if started.returncode:
        pytest.skip(f"{engine_name} cannot start a container here: {started.stderr.strip()[-200:]}")
    yield chosen
    if made:
        subprocess.run([engine_name, "rmi", "--force", made], capture_output=True)
