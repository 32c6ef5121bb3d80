"""Every file of an installation, missing, damaged, or something else than a file: told in words, never waited for."""

import json
import os
import shutil
import signal

import pytest

from apex._loader import ask, choose, doctor, installed, layout, probe, problems, registry, release, remedies
from apex._loader.errors import InstallationError
from apex._loader.machine import Machine

from .described import CPU, TORCH, gpu

FILES = {
    "lib/libapex.so": b"\x7fELF",
    "lib/bindings.json": b"[]",
    "build.json": b'{"distribution": "apex-cuda", "version": "1.10.0"}',
    "release.json": b"{}",
    "extensions.json": b"[]",
    "ops.schemas": b"multi_tensor_scale(Tensor x) -> Tensor\n",
    "packs/sm_90/manifest.json": json.dumps(
        {
            "format": 1,
            "arch": "sm_90",
            "vendor": "cuda",
            "kind": "cubin",
            "units": {"one": {"file": "one.cubin"}},
        }
    ).encode(),
    "packs/sm_90/one.cubin": b"\x7fELF" + bytes(100),
    "device/one.cu": b"",
}
JSON = [b"null", b"3", b'"x"', b"[]", b"{}", b"[1]", b'["x"]', b"[null]", b'{"a": 1}', b'[{"a": 1}]', b"[[[[[[[[",
        b"[" * 100_000, b'{"format": 1}', b'{"format": 1, "arch": 3, "vendor": [], "kind": {}}',
        b'{"format": 1, "arch": "sm_90", "vendor": "cuda", "kind": "cubin", "units": [1]}',
        b'{"format": 1, "arch": "sm_90", "vendor": "cuda", "kind": "cubin", "units": {"one": 3}}',
        b'{"format": 1, "arch": "sm_90", "vendor": "cuda", "kind": "cubin", "units": {"one": {"file": 3}}}',
        b'{"format": 1, "arch": "sm_90", "vendor": "cuda", "kind": "cubin", "compiler": "x", "units": {}}']  # fmt: skip


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """An installation whose every file is small."""
    for name, data in FILES.items():
        (tmp_path / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apex" / name).write_bytes(data)
    monkeypatch.setattr(layout, "checkout", lambda: None)
    monkeypatch.setattr(layout, "PACKAGE", tmp_path / "apex")
    monkeypatch.setenv("APEX_TREE", str(tmp_path))
    signal.alarm(30)  # a FIFO that is waited for would be for ever
    yield tmp_path / "apex"
    signal.alarm(0)


def test_the_doctor_says_which_file(wheel):
    (wheel / "release.json").write_bytes(b'{"format": 1}')
    (wheel / "build.json").write_bytes(b"{")
    (wheel / "lib/bindings.json").write_bytes(b"[3]")
    said = describe()
    for name in (
        "build.json: it is no whole JSON",
        "release.json: release.json is damaged",
        "bindings.json: 'int'",
    ):
        assert name in said
    assert "pip install --force-reinstall" in said


def describe():
    """Everything that `python -m apex` looks at; the text of its screen."""
    try:
        machine = installed.on(Machine(torch=TORCH, python="cp311", devices=(gpu("sm_90"), CPU)))
    except InstallationError as error:
        assert error.remedy and "ops" in str(error)
        return str(error)
    found = choose.outcome(machine, ("one",))
    facts = doctor.Facts(found.machine, found.choices, found.fit, damage=installed.damage())
    for extension in registry.extensions().values():
        assert extension.name
    return (
        doctor.as_text(doctor.Report(facts, problems.find(facts))) + remedies.reinstall() + layout.version()
    )


def _fifo(path):
    os.mkfifo(path)


def _link(target):
    return lambda path: path.symlink_to(target)


DAMAGE = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00" * 50),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "FIFO": _fifo,
    "folder": lambda path: path.mkdir(),
    "dangling link": _link("/nowhere/at/all"),
    "link to itself": lambda path: path.symlink_to(path),
    "endless device": _link("/dev/zero"),
    "terminal": _link("/dev/tty"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_files_that_are_none(wheel, name, damage):
    (wheel / name).unlink()
    DAMAGE[damage](wheel / name)
    assert describe()


@pytest.mark.parametrize("folder", ["lib", "packs", "packs/sm_90", "device"])
@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "folder"])
def test_folders_that_are_none(wheel, folder, damage):
    shutil.rmtree(wheel / folder)
    DAMAGE[damage](wheel / folder)
    assert describe()


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
@pytest.mark.parametrize("data", JSON, ids=lambda data: data[:60].decode() if len(data) < 200 else "deep")
def test_json_of_strange_shape(wheel, name, data):
    (wheel / name).write_bytes(data)
    assert describe()


def test_a_release_that_is_damaged_is_named(wheel):
    (wheel / "release.json").write_bytes(b'{"format": 1}')
    with pytest.raises(ValueError, match=r"release\.json is damaged: KeyError"):
        release.load()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", None])
def test_which_says_whether_a_release_is_damaged_or_missing_and_what_mends_it(wheel, capsys, data):
    (wheel / "release.json").unlink()
    if data is not None:
        (wheel / "release.json").write_bytes(data)
        assert "release.json: " in describe()
    for command in (lambda: ask.which([], "which"), lambda: ask.compat(["--torch", "2.13"], "compat")):
        with pytest.raises(SystemExit) as ended:
            command()
        said = capsys.readouterr().err
        assert ended.value.code == 64 and ("is missing" in said) is (data is None), said
        assert "Run: python -m pip install --force-reinstall --no-deps apex-cuda==1.10.0" in said


def test_names_in_a_manifest_stay_in_its_folder(wheel):
    """What is read is loaded onto a device: nothing of another place counts."""
    (wheel / "outside.cubin").write_bytes(b"\x7fELF")
    manifest = json.loads(FILES["packs/sm_90/manifest.json"])
    for name in ("../../outside.cubin", str(wheel / "outside.cubin"), "..", ".", ""):
        manifest["units"]["one"]["file"] = name
        (wheel / "packs/sm_90/manifest.json").write_text(json.dumps(manifest))
        (pack,) = installed.packs()
        assert "is no file of its folder" in pack.fault, name


def test_what_is_no_utf8_in_the_environment(wheel, monkeypatch):
    monkeypatch.setenv("APEX_VARIANT", os.fsdecode(b"sm_\xff"))
    assert describe()
    assert probe.environment.switches()["APEX_VARIANT"].startswith("sm_")
