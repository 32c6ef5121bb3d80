"""Packs on disk: coverage comes from the objects, and every kind of damage is a named reason."""

import hashlib
import json
import lzma
import sys

import pytest

from apex._loader import pack_files
from apex._loader.errors import InstallationError


@pytest.fixture
def pack(tmp_path, cubin):
    """A folder with a good pack of sm_90, and a function that rewrites its manifest."""
    folder = tmp_path / "sm_90"
    folder.mkdir()
    data = cubin("sm_90")
    (folder / "unit_one.cubin").write_bytes(data)
    row = {
        "file": "unit_one.cubin",
        "sha256": hashlib.sha256(data).hexdigest(),
        "kernels": {"unit_one_f32": {}, "unit_one_f16": {}},
    }
    manifest = {
        "format": 1, "arch": "sm_90", "vendor": "cuda", "kind": "cubin",
        "compiler": {"name": "nvcc", "version": "13.0.88"}, "units": {"unit_one": row},
    }  # fmt: skip

    def write(**changes):
        (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        return pack_files.read(folder)

    write.folder, write.row = folder, row
    return write


def test_a_good_pack(pack):
    found = pack()
    assert (found.arch, found.vendor, found.kind, found.fault) == ("sm_90", "cuda", "cubin", None)
    code = found.units["unit_one"]
    assert code.fault is None and code.contents.kernels == ("unit_one_f16", "unit_one_f32")
    assert pack_files.image(code) == (pack.folder / "unit_one.cubin").read_bytes()
    assert found.units.get("unit_two") is None


def test_a_flipped_byte(pack):
    file = pack.folder / "unit_one.cubin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "damaged" in pack().units["unit_one"].fault


@pytest.fixture
def compressed(pack):
    """The pack as wheels have it: its file is compressed, and the digest is of what is in it."""
    plain = pack.folder / "unit_one.cubin"
    file = plain.with_name("unit_one.cubin.xz")
    file.write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    return file, lambda: pack(units={"unit_one": {**pack.row, "file": file.name}})


def test_a_compressed_code_object(compressed, cubin):
    _, read = compressed
    code = read().units["unit_one"]
    assert code.fault is None and pack_files.image(code) == cubin("sm_90")


def test_a_compressed_code_object_that_is_damaged(compressed):
    file, read = compressed
    data, good = file.read_bytes(), read().units["unit_one"]
    assert good.fault is None
    for broken in (data[:-9], data[:40] + b"\0\0" + data[42:], b"", b"text"):
        file.write_bytes(broken)
        fault = read().units["unit_one"].fault
        assert fault.startswith("unit_one.cubin.xz is damaged: it cannot be decompressed")
        with pytest.raises(InstallationError, match="vanished after it was chosen"):
            pack_files.image(good)


def test_a_python_without_lzma_is_told(compressed, monkeypatch):
    monkeypatch.setitem(sys.modules, "lzma", None)
    fault = compressed[1]().units["unit_one"].fault
    assert fault == "unit_one.cubin.xz is compressed, and this Python has no module lzma"


def test_a_missing_file(pack):
    (pack.folder / "unit_one.cubin").unlink()
    assert "cannot be read" in pack().units["unit_one"].fault


def test_an_empty_file_without_a_digest(pack):
    (pack.folder / "unit_one.cubin").write_bytes(b"")
    row = {key: value for key, value in pack.row.items() if key != "sha256"}
    assert "no code object" in pack(units={"unit_one": row}).units["unit_one"].fault


def test_an_object_of_another_arch(pack, cubin):
    data = cubin("sm_80")
    (pack.folder / "unit_one.cubin").write_bytes(data)
    row = {**pack.row, "sha256": hashlib.sha256(data).hexdigest()}
    fault = pack(units={"unit_one": row}).units["unit_one"].fault
    assert fault == "unit_one.cubin holds code for sm_80, its manifest says sm_90"


def test_a_kernel_that_the_manifest_promises(pack):
    row = {**pack.row, "kernels": {"unit_one_f32": {}, "unit_one_bf16": {}}}
    assert "lacks the kernel unit_one_bf16" in pack(units={"unit_one": row}).units["unit_one"].fault


@pytest.mark.parametrize("text", [None, "", "{", '{"format": 2}'])
def test_a_bad_manifest(pack, text):
    file = pack.folder / "manifest.json"
    if text is not None:
        file.write_text(text)
    assert pack_files.read(pack.folder).fault


def test_only_what_is_asked_for_is_opened(pack):
    found = pack(units={"unit_one": pack.row, "absent": {"file": "absent.cubin"}})
    assert found.units["unit_one"].fault is None
    assert set(found.units) == {"unit_one", "absent"}
