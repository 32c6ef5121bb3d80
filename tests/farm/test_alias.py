"""The distribution `apex` of the index: importlib.metadata finds the name, and it owns no file of any package."""

import json
import subprocess
import sys
import zipfile

import pytest

from apex._loader import distributions, owners
from apex._loader.distributions import Distribution, Installation
from apex._loader.facts import Facts
from apex._loader.machine import Machine
from build_matrix.serve import index
from build_matrix.wheels import alias, wheel

VERSIONS = ("1.10.0+cpu", "1.11.0+cpu")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """An index of two versions of apex-cpu, the newer one yanked."""
    folder, wheels = tmp_path_factory.mktemp("alias"), []
    for version in VERSIONS:
        wheels.append(folder / f"apex_cpu-{version}-py3-none-any.whl")
        wheel.write(wheels[-1], "apex-cpu", version, "py3-none-any", {"apex/_loader/__init__.py": b""})
    (folder / "yanked.toml").write_text("[[yanked]]\nwheels = 'apex_cpu-1.11.0+cpu-*'\nreason = 'wrong'\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "YANKED", folder / "yanked.toml")
        by_root = index.write(wheels, folder / ".whl")
    assert [w.project for w in by_root["cpu"]] == ["apex-cpu", "apex-cpu"]
    return folder / ".whl"


def test_a_root_lists_one_for_each_version(published):
    page = json.loads((published / "whl/cpu/apex/index.json").read_text())
    assert [file["filename"] for file in page["files"]] == [f"apex-{v}-py3-none-any.whl" for v in VERSIONS]
    assert [file["yanked"] for file in page["files"]] == [False, "wrong"]
    assert json.loads((published / "whl/cpu/index.json").read_text())["projects"] == [
        {"name": "apex"},
        {"name": "apex-cpu"},
    ]


def test_it_is_small_and_holds_nothing_but_its_metadata(tmp_path):
    path = alias.write(tmp_path, "apex-cpu", "1.10.0+cpu")
    assert path.stat().st_size < 4096
    with zipfile.ZipFile(path) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {"apex-1.10.0+cpu.dist-info"}
        text = archive.read("apex-1.10.0+cpu.dist-info/METADATA").decode()
    assert "\nRequires-Dist: apex-cpu==1.10.0+cpu\n" in text and "torch" not in text
    (tmp_path / "again").mkdir()
    assert alias.write(tmp_path / "again", "apex-cpu", "1.10.0+cpu").read_bytes() == path.read_bytes()


def test_programs_find_the_version_of_apex(published, tmp_path):
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--no-deps"]
    root = (published / "whl/cpu").as_uri() + "/"
    done = subprocess.run(
        [*pip, "--index-url", root, "--target", tmp_path, "apex", "apex-cpu"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from importlib import metadata\n"
        "print(metadata.version('apex'), metadata.requires('apex'), metadata.version('apex-cpu'))\n"
        "assert all('.dist-info/' in str(file) for file in metadata.files('apex'))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout == "1.10.0+cpu ['apex-cpu==1.10.0+cpu'] 1.10.0+cpu\n", done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path)])
        found = {d.name: d for d in distributions.describe().distributions}
    assert found["apex"].stands_for == "apex-cpu" and not found["apex"].ours
    assert found["apex-cpu"].ours and not found["apex-cpu"].stands_for


def told(*installed):
    machine = Machine(python="cp311")
    facts = Facts(machine, installation=Installation(installed, "/site/apex"))
    checks = (owners.foreign_package, owners.alias_of_another, owners.two_distributions)
    return [problem.name for check in checks for problem in check(facts)]


def test_the_doctor_tells_an_alias_from_a_foreign_apex():
    cpu = Distribution("apex-cpu", "1.10.0+cpu", "/site", has_loader=True)
    its = Distribution("apex", "1.10.0+cpu", "/site", stands_for="apex-cpu")
    assert told(cpu, its) == []
    assert told(cpu, Distribution("apex", "0.9.10.dev0", "/site")) == ["foreign apex"]
    assert told(cpu, Distribution("apex", "1.9.0+cpu", "/site", stands_for="apex-cpu")) == [
        "alias of another apex"
    ]
    assert told(cpu, Distribution("apex", "1.10.0+cu130", "/site", stands_for="apex-cuda")) == [
        "alias of another apex"
    ]
