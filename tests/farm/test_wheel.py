"""A wheel and its index, from the built tree of this checkout to an installed distribution."""

import csv
import io
import json
import os
import platform as machines
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from build_matrix import REPOSITORY
from build_matrix.__main__ import main
from build_matrix.errors import GateError
from build_matrix.serve import index, server
from build_matrix.spec import identity
from build_matrix.store import digest
from build_matrix.toolchains import borrow, manylinux, pythons
from build_matrix.wheels import wheel

BUILT = REPOSITORY / "build/tree"
pytestmark = pytest.mark.skipif(
    not (BUILT / "apex/build.json").is_file(), reason="no build/tree: run python -m build_matrix tree"
)
PYTHON = pythons.find(pythons.own_tag())


@pytest.fixture(scope="module")
def facts():
    return json.loads((BUILT / "apex/build.json").read_text())


@pytest.fixture(scope="module")
def built(wheel_of_tree):
    (path,) = wheel_of_tree.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def published(built, tmp_path_factory):
    target = tmp_path_factory.mktemp("index") / "root"
    index.write([built], target)
    return target


def test_each_part_is_weighed_by_its_name(built):
    weighed = wheel.sizes(built)
    with zipfile.ZipFile(built) as opened:
        packed = {info.filename: info.compress_size for info in opened.infolist()}
    assert weighed["libapex"] == packed["apex/lib/libapex.so"]
    assert weighed["portable binding"] == packed["apex/lib/apex_portable.abi3.so"]
    assert sum(weighed.values()) == sum(packed.values())


def test_libraries_fit_manylinux_2_28():
    libraries = sorted(BUILT.rglob("*.so"))
    assert any(path.name == "libapex.so" for path in libraries)
    for path in libraries:
        assert manylinux.faults(path) == []


def test_the_manylinux_gate_names_what_is_too_new():
    needed = manylinux.needed_versions(manylinux.Elf.read(Path(sys.executable).resolve()))
    assert any(version.startswith("GLIBC_2.") for version in needed)
    floor, manylinux.FLOOR = manylinux.FLOOR, {**manylinux.FLOOR, "GLIBC": (2, 2, 4)}
    try:
        with pytest.raises(GateError, match="needs GLIBC_2"):
            manylinux.check(BUILT / "apex/lib/libapex.so")
    finally:
        manylinux.FLOOR = floor


def test_no_library_needs_a_driver_or_a_path_of_this_machine():
    for path in BUILT.rglob("*.so"):
        elf = manylinux.Elf.read(path)
        assert set(elf.dynamic()[1]) <= manylinux.MAY_NEED
        for runpath in elf.dynamic()[2]:
            assert all(part.startswith("$ORIGIN") for part in runpath.split(":"))
        assert str(REPOSITORY).encode() not in elf.data


def test_the_tag_is_that_of_torch_s_wheels(built):
    platform = built.name.removesuffix(".whl").rpartition("-")[2]
    assert platform == f"manylinux_2_28_{machines.machine()}"
    with zipfile.ZipFile(built) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("dist-info/WHEEL")]
        assert f"Tag: {PYTHON.tag}-{PYTHON.tag}-{platform}\n" in archive.read(name).decode()


def test_the_image_s_auditwheel_agrees_with_the_tag(built, tmp_path):
    """Report: an image that names its platform (AUDITWHEEL_PLAT, as public ones do) called the wheel by two tags."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "patchelf").write_text("#!/bin/sh\necho patchelf 0.18.0\n")  # nothing is patched
    (programs / "patchelf").chmod(0o755)
    (tmp_path / "kept").mkdir()
    paths = [str(programs), os.path.dirname(sys.executable), os.environ["PATH"]]
    of_image = {"PATH": os.pathsep.join(paths), "AUDITWHEEL_PLAT": f"manylinux_2_28_{machines.machine()}"}
    command = ["sh", str(REPOSITORY / "ci/containers/verdict.sh"), str(built), str(tmp_path / "kept")]
    done = subprocess.run(command, env=os.environ | of_image, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "No filename tags change needed" in done.stderr
    assert (tmp_path / "kept" / built.name).read_bytes() == built.read_bytes()


def test_record_lists_every_file_with_its_digest(built):
    with zipfile.ZipFile(built) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("RECORD")]
        rows = list(csv.reader(io.StringIO(archive.read(name).decode())))
        assert {row[0] for row in rows} == set(archive.namelist())
        for path, recorded, size in rows:
            if path != name:
                assert (
                    wheel._record_digest(archive.read(path)) == recorded
                    and int(size) == archive.getinfo(path).file_size
                )


def test_metadata_asks_for_torch_by_a_floor_and_for_nothing_else(facts):
    lines = wheel.metadata(facts["distribution"], "1.10.0+cpu").splitlines()
    assert [line for line in lines if line.startswith("Requires-Dist")] == ["Requires-Dist: torch>=2.8"]


def test_complete_extensions_have_their_top_level_module_and_no_other(built, facts):
    from build_matrix.spec.registry import Registry

    with zipfile.ZipFile(built) as archive:
        top = {name for name in archive.namelist() if "/" not in name}
    stand_in = f"{facts['distribution'].replace('-', '_')}.pth"  # a path, no module
    assert top == {stand_in, *(f"{extension.name}.py" for extension in Registry.load().complete())}


def fetch(address, accept="*/*"):
    request = urllib.request.Request(address, headers={"Accept": accept})
    with urllib.request.urlopen(request) as answer:
        return answer.headers.get_content_type(), answer.read()


def test_the_index_speaks_both_languages(built, published, facts):
    (root,) = [r for r in (published / "whl").iterdir() if (r / facts["distribution"]).is_dir()]
    with server.background(published) as address:
        page = f"{address}/whl/{root.name}/{facts['distribution']}/"
        kind, body = fetch(page)
        assert kind == "text/html" and built.name in body.decode()
        assert "data-core-metadata=" in body.decode() and "#sha256=" in body.decode()
        kind, body = fetch(page, server.JSON)
        assert kind == server.JSON
        (file,) = json.loads(body)["files"]
        assert file["filename"] == built.name and file["size"] == built.stat().st_size
        # pip 22.3 to 23.0 takes the value of the old name for text, and ends in a TypeError (PEP 714).
        assert set(file["core-metadata"]) == {"sha256"} and "dist-info-metadata" not in file
        address_of_wheel = urllib.parse.urljoin(page, file["url"])
        _, metadata = fetch(f"{address_of_wheel}.metadata")
        assert metadata.decode().startswith("Metadata-Version")


def test_every_accelerator_has_its_root(published):
    assert {path.name for path in (published / "whl").iterdir()} >= {"cpu", "cu130", "rocm7.2"}


@pytest.fixture(scope="module")
def environment(published, facts, tmp_path_factory):
    """A clean environment with the wheel installed by pip over HTTP, beside a torch that is lent to it."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = place / "bin/python"
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True)
    borrow.lend(["torch", "numpy"], place)
    (root,) = [r.name for r in (published / "whl").iterdir() if (r / facts["distribution"]).is_dir()]
    with server.background(published) as address:
        options = ["--isolated", "--no-cache-dir", "--index-url", f"{address}/whl/{root}/"]
        done = subprocess.run(
            [python, "-m", "pip", "install", *options, f"{facts['distribution']}==1.10"],
            capture_output=True,
            encoding="utf-8",
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Requirement already satisfied: torch" in done.stdout
    return place


def run(environment, *arguments, **variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("APEX_", "PYTHONPATH"))} | variables
    return subprocess.run(
        [environment / "bin/python", *arguments],
        cwd=environment,
        env=clean,
        encoding="utf-8",
        capture_output=True,
    )


def test_it_installs_and_the_probe_is_content(environment, facts):
    """A wheel of packs, whose card is not here, says that it is degraded."""
    done = run(environment, "-m", "apex", "--json")
    packs = bool(facts["archs"])
    assert done.returncode == packs and (json.loads(done.stdout)["state"] == "degraded") == packs, done.stdout


def test_an_optimizer_steps_without_a_compiler_and_without_a_write(environment):
    """Report A16: PATH with python only, read-only home and site-packages."""
    program = (
        "import torch; from apex.optimizers import FusedAdam; p = torch.nn.Parameter(torch.ones(3)); "
        "p.grad = torch.ones(3); FusedAdam([p], lr=0.1).step(); assert abs(p[0].item() - 0.9) < 1e-5; "
        "from apex._loader import bindings; assert bindings.load().native"
    )
    before = {
        path: path.stat().st_mtime_ns for path in environment.rglob("*") if "__pycache__" not in path.parts
    }
    done = run(environment, "-B", "-c", program, PATH=str(environment / "bin"), HOME="/nonexistent")
    assert done.returncode == 0, done.stderr
    after = {
        path: path.stat().st_mtime_ns for path in environment.rglob("*") if "__pycache__" not in path.parts
    }
    assert after == before


def test_torch_is_left_alone_and_uninstalling_leaves_nothing(environment, facts):
    done = run(environment, "-m", "pip", "uninstall", "-y", facts["distribution"])
    assert done.returncode == 0, done.stderr
    (site,) = environment.glob("lib/python3.*/site-packages")
    assert not (site / "apex").exists() and not [*site.glob("apex*"), *site.glob("_apex*")]
    assert run(environment, "-c", "import torch").returncode == 0


def test_tree_names_what_it_was_built_from(facts):
    assert facts["version"] == identity.version()
    entries = json.loads((BUILT / "apex/lib/bindings.json").read_text())
    for entry in entries:
        assert (BUILT / "apex/lib" / entry["folder"] / "libapex_torch.so").is_file()
        assert len(entry["git_version"]) == 40


def test_wheels_that_several_machines_made_are_published_together(wheel_of_tree, tmp_path):
    dist, target = tmp_path / "dist", tmp_path / "index"
    shutil.copytree(wheel_of_tree, dist)
    (path,) = dist.glob("*.whl")
    done = CliRunner().invoke(main, ["publish", "--dist", str(dist), "--target", str(target)])
    assert done.exit_code == 0, done.output
    assert (dist / "SHA256SUMS").read_text() == f"{digest.of_file(path)}  {path.name}\n"
    assert {cell["wheel"] for cell in json.loads((dist / "compatibility.json").read_text())} == {path.name}
    assert (target / "files" / path.name).read_bytes() == path.read_bytes()
    none = CliRunner().invoke(main, ["publish", "--dist", str(tmp_path / "none"), "--target", str(target)])
    assert none.exit_code == 1 and "there is no wheel in" in str(none.exception)
