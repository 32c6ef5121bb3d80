"""Files of other projects in dist/ (a source wheel, an sdist, what pip left there) are named and passed over by every
command that reads the folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_matrix import REPOSITORY
from build_matrix.wheels import wheel

FOREIGN = (
    "apex-1.10.0-cp311-cp311-linux_x86_64.whl",
    "apex-1.10.0.tar.gz",
    "torch-2.13.0-cp311-none-any.whl",
)


@pytest.fixture
def dist(wheel_of_tree, tmp_path):
    """A wheel of ours beside a wheel that pip built from the sources, their archive, and a damaged one of torch."""
    folder = tmp_path / "dist"
    shutil.copytree(wheel_of_tree, folder)
    facts = json.dumps({"accelerator": "cpu", "archs": [], "distribution": "apex", "local": ""}).encode()
    parts = {"apex/build.json": facts, "apex/lib/bindings.json": b"[]"}
    wheel.write(folder / FOREIGN[0], "apex", "1.10.0", "cp311-cp311-linux_x86_64", parts)
    (folder / FOREIGN[1]).write_bytes(b"sources")
    (folder / FOREIGN[2]).write_bytes(b"cut")
    return folder


def said(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "build_matrix", *map(str, arguments)],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    for name in FOREIGN:
        assert f"passed over: {name} is no wheel of apex-cpu, apex-cuda, apex-rocm" in done.stderr
    return done.stdout


def test_publish_passes_over_what_is_not_ours(dist, tmp_path):
    said("publish", "--dist", dist, "--target", tmp_path / ".whl")
    (ours,) = [path.name for path in dist.glob("apex_*.whl")]
    assert [line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()] == [ours]
    assert {cell["wheel"] for cell in json.loads((dist / "compatibility.json").read_text())} == {ours}
    assert [path.name for path in (tmp_path / ".whl/files").glob("apex_*.whl")] == [ours]
    assert len(list((tmp_path / ".whl/files").glob("*.whl"))) == 2  # and the alias that the index makes of it


def test_index_passes_over_what_is_not_ours(dist, tmp_path):
    said("index", "--dist", dist, "--target", tmp_path / ".whl")
    assert len(list((tmp_path / ".whl/files").glob("*.whl"))) == 2  # ours, and its alias


def test_variants_pass_over_what_is_not_ours(dist, tmp_path):
    pytest.importorskip("variantlib")
    made = said("variants", "--dist", dist, "--target", tmp_path / "variants").split()
    assert len(made) == 2  # the wheel's variant, and the file of all variants


def test_sign_passes_over_what_is_not_ours(dist, tmp_path):
    key = tmp_path / "key.pem"
    command = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)]
    if not shutil.which("openssl") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no openssl makes a key here")
    files = [path for path in dist.iterdir() if path.name.endswith((".whl", ".gz"))]
    made = said("sign", *files, "--key", key).split()
    (ours,) = [path.name for path in files if path.name.startswith("apex_") and path.suffix == ".whl"]
    assert len(made) == 1 and Path(made[0]).name.startswith(ours)
