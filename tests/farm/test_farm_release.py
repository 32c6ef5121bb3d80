"""The command that makes a whole release, of one cell: what is stored is not made again, and one that was killed while
it zipped or published goes on to the same bytes."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("distributed")

from build_matrix import REPOSITORY
from build_matrix.check import verify
from build_matrix.errors import PackageIndexError
from build_matrix.parts import host_library
from build_matrix.store import Store
from build_matrix.toolchains import headers, pythons
from build_matrix.wheels import provenance
from build_matrix.wheels.wheel_file import WheelFile
from tests.farm.test_farm_run import KILLS


def files(*folders):
    """Everything under its final name in folders: hidden ones are on their way."""
    return {
        path: path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


@pytest.mark.kills
@pytest.mark.minutes
def test_a_whole_release_of_one_cell(objects_of_checkout, tmp_path):
    """The command, from nothing but the host library's objects of the checkout's store to an index; and again,
    with everything stored, and after kills, to the same bytes."""
    pytest.importorskip("auditwheel")
    try:
        headers.wheel_of("2.8.0")
    except PackageIndexError as error:
        pytest.skip(str(error))
    store = tmp_path / "store"
    for folder in objects_of_checkout.values():
        shutil.copytree(folder, store / "object" / folder.name)
    dist, index = tmp_path / "dist", tmp_path / "index"
    tag = pythons.own_tag()
    command = [sys.executable, "-m", "build_matrix", "farm", "--accelerator=cpu", "--torch=2.8.0"]
    command += ["--platform=linux_x86_64"]
    command += [f"--python={tag[2]}.{tag[3:]}", "--jobs=2", f"--dist={dist}", f"--target={index}"]
    environment = os.environ | {"APEX_STORE": str(store)}

    def farm():
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        (wheel,) = map(Path, done.stdout.split())
        return wheel, done.stderr

    wheel, told = farm()
    first = wheel.read_bytes()
    assert wheel.parent == dist and wheel.name.startswith(f"apex_cpu-1.10.0+cpu-{tag}-{tag}-manylinux_2_")
    assert (
        f"steps on 2 workers: 1 headers, {len(host_library.sources())} object, 1 library, 1 3a, 1 3b, 1 wheel"
        in told
    )
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = json.loads(archive.read("apex/lib/bindings.json"))
        assert archive.getinfo(f"apex/lib/torch2.8/_C{pythons.find(tag).suffix}").file_size
    assert (entry["torch"], entry["python"], entry["built_against"][:5]) == ("2.8", tag, "2.8.0")
    assert wheel.name in (dist / "SHA256SUMS").read_text()
    (cell,) = json.loads((dist / "compatibility.json").read_text())
    assert (cell["torch"], cell["python"], cell["accelerator"], cell["packs"]) == ("2.8", tag, "cpu", {})
    assert wheel.name in (index / "whl/cpu/apex-cpu/index.html").read_text()
    made = len(Store(store).journal())
    assert farm()[0].read_bytes() == first
    assert len(Store(store).journal()) == made, "what was stored was made again"
    published = files(dist, index)
    begun = time.monotonic()
    farm()
    seconds = time.monotonic() - begun
    for number in range(max(1, KILLS // 5)):  # while it zips, and lays out what came
        for folder in (store / "wheel", dist) if number % 2 else (store / "wheel",):
            shutil.rmtree(folder)
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(seconds * (0.4 + 0.6 * random.Random(number).random()))
        process.kill()
        process.wait()
        assert set(files(dist, index).items()) <= set(published.items()), "half of a file is published"
        assert farm()[0].read_bytes() == first
        assert files(dist, index) == published
    made = len(Store(store).journal())
    # Verifying would make all anew; here it may believe the store, and compares the wheel that comes of it.
    assert provenance.check(wheel)
    assert verify.whole(WheelFile(wheel), Store(store), 2, lambda done: None).endswith(
        "the same, byte for byte"
    )
    assert len(Store(store).journal()) == made
