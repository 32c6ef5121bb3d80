"""A disk that is really full: a small file system in memory. It is named, nothing half made is left, and with more
space the same command goes on."""

import os
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("distributed")

from build_matrix import REPOSITORY
from build_matrix.errors import FarmError
from build_matrix.farm import cluster
from build_matrix.serve import index
from build_matrix.store import Store
from build_matrix.wheels import wheel
from tests.farm.test_farm_run import OBJECTS, object_plan
from tests.farm.test_index import make


@pytest.fixture
def disk(tmp_path):
    """A folder on a disk of 80 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(place)], text=True, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk needs root: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def enlarge(disk):
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)


@pytest.fixture(scope="module")
def client():
    with cluster.local(1, processes=False) as client:
        yield client


def fault(client, store):
    with pytest.raises(FarmError) as caught:
        cluster.run(object_plan(), client, store)
    return caught.value


def halves(store):
    return list(store.root.glob("object/.*"))


def test_a_full_store_is_named(client, disk):
    """The compiler is the one that finds it full."""
    store = Store(disk)
    found = fault(client, store)
    assert found.exit_code == 10 and 0 < len(found.failures) <= len(OBJECTS)
    for step, words in found.failures:
        assert words == f"no space is left for {step} in the store {disk}. APEX_STORE names another place."
    assert not halves(store)
    enlarge(disk)
    again = cluster.run(object_plan(), client, store)
    made = [f"object {done.name}" for done in again if not done.stored]
    assert set(made) <= {step for step, _ in found.failures} and len(again) == len(OBJECTS)


def test_no_room_for_the_compiler_s_own_files_is_named(client, disk, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (disk / "what others left").write_bytes(bytes(76_000))
    store = Store(tmp_path / "store")
    found = fault(client, store)
    assert found.exit_code == 10
    step, words = found.failures[0]
    assert words == f"no space is left for {step} in {disk}. TMPDIR names another place."
    assert not halves(store)


def test_no_room_for_the_index_leaves_the_old_one(disk, tmp_path):
    """The command says so, and the index that was there is whole."""
    (tmp_path / "dist").mkdir()
    index.write([make(tmp_path / "dist", "1.9.0+cpu")], disk / ".whl")
    before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    noise = {"apex/noise": os.urandom(100_000)}
    tag = "py3-none-any"
    wheel.write(tmp_path / f"dist/apex_cpu-1.10.0+cpu-{tag}.whl", "apex-cpu", "1.10.0+cpu", tag, noise)
    command = ["index", f"--dist={tmp_path / 'dist'}", f"--target={disk / '.whl'}"]
    done = subprocess.run(
        [sys.executable, "-m", "build_matrix", *command],
        cwd=REPOSITORY,
        env=os.environ | {"APEX_STORE": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    last = done.stderr.splitlines()[-1]  # the wheel of this test has no page, which is said before
    assert done.returncode == 10 and last.startswith("build_matrix: no space is left: "), done.stderr
    assert {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()} == before
