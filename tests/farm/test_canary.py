"""What a wheel serves under the newest torch of the index (build_matrix/check/canary.py)."""

import json
import zipfile

import pytest
import yaml
from click.testing import CliRunner

from build_matrix import REPOSITORY
from build_matrix.check import canary
from build_matrix.commands import canary as canary_command
from build_matrix.errors import BuildError, PackageIndexError
from build_matrix.toolchains import package_index, pythons, slim_torch
from build_matrix.toolchains.package_index import IndexFile

PYTHON = pythons.find(pythons.own_tag())
LINUX = "manylinux_2_28_x86_64"


def index_of(monkeypatch, *names):
    files = [IndexFile(f"torch-{name}.whl", f"https://example.org/{name}", "") for name in names]
    monkeypatch.setattr(package_index, "files", lambda project: files)


def wheels(*versions, tag=PYTHON.tag, platform=LINUX):
    return [f"{version}-{tag}-{tag}-{platform}" for version in versions]


def test_the_newest_release_and_a_newer_pre_release_are_tried(monkeypatch):
    index_of(
        monkeypatch, *wheels("2.9.1", "2.15.0", "2.10.0", "2.16.0.dev20261129+cpu", "2.16.0.dev20261101+cpu")
    )
    assert canary.newest(PYTHON) == ["2.15.0", "2.16.0.dev20261129+cpu"]
    assert canary.newest(PYTHON, before=False) == ["2.15.0"]


def test_a_pre_release_that_is_older_is_not_tried(monkeypatch):
    index_of(monkeypatch, *wheels("2.15.0", "2.15.0rc3"))
    assert canary.newest(PYTHON) == ["2.15.0"]


def test_wheels_of_other_pythons_and_platforms_and_odd_versions_are_passed_over(monkeypatch):
    others = [*wheels("2.17.0", tag="cp399"), *wheels("2.17.0", platform="manylinux_2_28_aarch64")]
    index_of(monkeypatch, *others, *wheels("no.version", "2.15.0"))
    assert canary.newest(PYTHON) == ["2.15.0"]
    index_of(monkeypatch, *others)
    with pytest.raises(PackageIndexError, match=f"no torch|holds a torch for {PYTHON.tag}"):
        canary.newest(PYTHON)


def make_wheel(path, name="apex/__init__.py"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "")
    return path


def test_what_is_no_wheel_of_apex_is_refused(tmp_path):
    (tmp_path / "cut.whl").write_bytes(b"PK")
    for path in (tmp_path / "cut.whl", make_wheel(tmp_path / "other.whl", "other/__init__.py")):
        with pytest.raises(BuildError, match="cannot be read|holds no apex"):
            canary.unpack(path, tmp_path / "out")
    assert (canary.unpack(make_wheel(tmp_path / "apex.whl"), tmp_path / "out") / "apex/__init__.py").is_file()


EXPECTED = {"a 0": ["1"], "b 0": ["2", "3"]}


def stand_in(monkeypatch, kind="portable", digests=EXPECTED, error=None):
    """slim_torch.wheel_values without a torch."""

    def values(version, python, installed, store):
        if version is None:
            return "portable", EXPECTED
        if error:
            raise BuildError(error)
        return kind, digests

    monkeypatch.setattr(slim_torch, "wheel_values", values)


@pytest.mark.parametrize(
    "given,well,words",
    [
        (dict(), True, "the portable binding serves; 2 of 2 calls"),
        (dict(kind="exact"), True, "the exact binding serves"),
        (dict(kind="reference"), False, "the reference binding serves"),
        (dict(digests={"a 0": ["1"]}), False, "1 of 2 calls give the same bits; others: b 0"),
        (dict(digests={**EXPECTED, "b 0": ["2", "4"]}), False, "others: b 0"),
        (dict(error="undefined symbol"), False, "nothing serves: undefined symbol"),
    ],
    ids=str,
)
def test_what_serves_is_said_and_judged(monkeypatch, tmp_path, given, well, words):
    stand_in(monkeypatch, **given)
    found = canary.run("2.16.0", PYTHON, tmp_path, EXPECTED, None)
    assert found.well is well and words in str(found) and "2.16.0" in str(found)
    wheel, written = make_wheel(tmp_path / "apex.whl"), tmp_path / "report.json"
    arguments = [str(wheel), "--torch", "2.16.0", "--report", str(written)]
    done = CliRunner().invoke(canary_command.command, arguments)
    assert words in done.output and (done.exception is None) is well
    (told,) = json.loads(written.read_text())
    assert told["torch"] == "2.16.0" and told["well"] is well
    if not well:
        assert isinstance(done.exception, BuildError) and "2.16.0" in str(done.exception)


def test_it_runs_every_week_on_nightly_torches():
    said = yaml.safe_load((REPOSITORY / ".github/workflows/canary.yml").read_text(encoding="utf-8"))
    assert "schedule" in said[True]  # YAML reads `on` as true
    (step,) = [s for s in said["jobs"]["canary"]["steps"] if "nox -s canary" in s.get("run", "")]
    assert step["env"]["PIP_EXTRA_INDEX_URL"].endswith("/nightly/cpu")
