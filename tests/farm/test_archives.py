"""Archives that others made are refused in words before a byte is written: by every place that unpacks or reads one."""

import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError, PackageIndexError, PinError
from build_matrix.serve import index, publish
from build_matrix.spec import identity, pins
from build_matrix.store import Store, WorkUnit, archive, digest
from build_matrix.store.remote import Remote
from build_matrix.toolchains import headers, package_index, range_zip, slim_torch
from build_matrix.wheels.wheel_file import WheelFile

from .test_headers import VERSION_FILE, serving

TORCH = "2.99.0"
CPYTHON = type("Python", (), {"tag": "cp311"})


def zipped(members):
    """A zip archive of (name or ZipInfo, contents)."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two members of one name
        for name, contents in members:
            made.writestr(name, contents)
    return out.getvalue()


def typed(name, kind):
    found = zipfile.ZipInfo(name)
    found.create_system, found.external_attr = 3, (kind | 0o644) << 16
    return found


def lying(name, contents, size):
    """An archive whose one member states another size than it unpacks to."""
    data = bytearray(zipped([(name, contents)]))
    at = data.index(b"PK\1\2")
    data[at + 24 : at + 28] = size.to_bytes(4, "little")
    return bytes(data)


OUTSIDE = "a name that leads outside"
BAD = {
    "parent": ("torch/include/../../../x.h", OUTSIDE),
    "parent first": ("../x.h", OUTSIDE),
    "absolute": ("/tmp/apex_absolute.h", "an absolute name"),
    "drive": ("C:/x.h", "an absolute name"),
    "backslash": ("torch\\..\\x.h", "systems read differently"),
    "dot": ("torch/./x.h", "no plain name"),
    "nothing": ("torch//x.h", "no plain name"),
    "link": (typed("torch/include/l.h", stat.S_IFLNK), "neither a file nor a folder"),
    "device": (typed("torch/include/d.h", stat.S_IFCHR), "neither a file nor a folder"),
    "fifo": (typed("torch/include/f.h", stat.S_IFIFO), "neither a file nor a folder"),
    "twice": ("torch/include/ok.h", "twice"),
    "under a file": ("torch/include/ok.h/x.h", "which is a file"),
}
CASES = pytest.mark.parametrize("case", BAD)


def torch_wheel(*more):
    good = [("torch/version.py", VERSION_FILE), ("torch/include/ok.h", "int x;\n")]
    return zipped([*good, *more])


@pytest.fixture
def offered(monkeypatch):
    """Offers the wheel of torch 2.99.0 at an address."""

    def offer(url):
        file = package_index.IndexFile(f"torch-{TORCH}-cp311-cp311-manylinux_2_28_x86_64.whl", url, "0" * 64)
        monkeypatch.setattr(package_index, "files", lambda project: [file])

    return offer


def unpacked(unit, folder):
    """Everything under pytest's folder once a unit that must be refused was made in folder/deep/store/unit."""
    place = folder / "deep/store/unit"
    place.mkdir(parents=True)
    with pytest.raises(PackageIndexError) as fault:
        unit.make(place)
    assert not [path for path in folder.rglob("*") if path.is_file()]
    return str(fault.value)


@CASES
@pytest.mark.parametrize("which", ["headers", "slim torch"])
def test_a_wheel_of_an_index_writes_nothing_outside(offered, tmp_path, case, which):
    name, words = BAD[case]
    with serving(torch_wheel((name, "written\n"))) as (url, _):
        offered(url)
        unit = headers.unit(TORCH) if which == "headers" else slim_torch.unit(TORCH, CPYTHON)
        assert words in unpacked(unit, tmp_path)
    assert not Path("/tmp/apex_absolute.h").exists()


@pytest.mark.parametrize("which", ["headers", "slim torch"])
def test_a_bomb_in_a_wheel_of_an_index_is_not_unpacked(offered, tmp_path, monkeypatch, which):
    """One that states its size, one that states another, and one of many members."""
    small = archive.Limits(5, 1000, 1500)
    monkeypatch.setattr(headers, "LIMITS", small)
    monkeypatch.setattr(slim_torch, "LIMITS", small)
    folder = "torch/include" if which == "headers" else "torch/lib"
    large = (f"{folder}/large.h", b"0" * 2000)
    many = [(f"{folder}/{i}.h", "") for i in range(9)]
    spread = [(f"{folder}/{i}.h", b"0" * 700) for i in range(3)]
    for count, (members, words) in enumerate(
        [([large], "too large"), (spread, "too large"), (many, "more than 5 members")]
    ):
        with serving(torch_wheel(*members)) as (url, _):
            offered(url)
            unit = headers.unit(TORCH) if which == "headers" else slim_torch.unit(TORCH, CPYTHON)
            assert words in unpacked(unit, tmp_path / str(count))


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_member_that_unpacks_to_another_size_is_refused(size):
    with serving(lying("torch/include/a.h", b"0" * 50_000, size)) as (url, _):
        remote = range_zip.RangeZip(url)
        with pytest.raises(PackageIndexError, match=f"does not unpack to the {size} bytes"):
            list(remote.read(lambda name: True, archive.WHEEL))


def test_a_directory_that_is_cut_or_no_text_is_named():
    whole = torch_wheel()
    end = whole.index(b"PK\5\6")
    for damaged in (
        whole.replace(b"torch/include", b"torch/\xff\xfe\xfdclude"),
        whole[:end] + whole[end : end + 10] + b"\xff\xff" + whole[end + 12 :],
    ):
        with serving(damaged) as (url, _), pytest.raises(PackageIndexError, match="torch.whl"):
            range_zip.RangeZip(url)


def test_what_was_not_asked_for_is_not_read():
    """A server that answers with another part of the file, or goes on for ever."""
    from .test_headers import Ranges

    class Other(Ranges):
        def do_GET(self):
            self.send_response(206)
            self.send_header("Content-Range", f"bytes 0-9/{len(self.content)}")
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(self.content[:10])

    with (
        serving(b"x" * 100_000, handler=Other) as (url, _),
        pytest.raises(PackageIndexError, match="bytes 0-9 came"),
    ):
        range_zip.RangeZip(url)


def test_headers_are_compared_with_their_pin_before_they_are_written(offered, tmp_path, monkeypatch):
    """The same commit, so says the wheel, and other headers: an index that lies."""
    asked = []

    def pin(version, platform):
        asked.append((version, platform))
        return pins.Pin("linux", pins.HEADERS, f"torch-{version}-{platform}", "", "f" * 64, "")

    monkeypatch.setattr(pins, "headers", pin)
    with serving(torch_wheel()) as (url, _):
        offered(url)
        place = tmp_path / "unit"
        place.mkdir()
        with pytest.raises(PinError, match=r"headers of torch 2.99.0 for linux_x86_64 is pinned to ffff"):
            headers.unit(TORCH).make(place)
    assert asked == [(TORCH, "linux_x86_64")] and not list(place.iterdir())


def test_every_pinned_torch_has_its_headers_pinned_where_bindings_are_compiled():
    from build_matrix.spec import matrix

    for version in pins.torch_versions():
        for platform in matrix.load().platforms:
            if not platform.windows:
                assert len(pins.headers(version, platform.name).sha) == 64


def test_every_package_of_a_toolchain_is_pinned_by_its_digest():
    for pin in pins.load():
        if pin.project == "package":
            (line,) = [found for found in pins.packages(pin.branch) if found.startswith(f"{pin.component}==")]
            stated = line.partition("--hash=sha256:")[2]
            assert len(stated) == 64 and int(stated, 16)


def test_a_slim_torch_is_what_its_record_says(offered, tmp_path):
    record = (f"torch-{TORCH}.dist-info/RECORD", "torch/__init__.py,sha256=" + "A" * 43 + ",3\n")
    with serving(torch_wheel(record, ("torch/__init__.py", "x=1"))) as (url, _):
        offered(url)
        with pytest.raises(PackageIndexError, match="__init__.py is not what the wheel's RECORD says"):
            slim_torch.unit(TORCH, CPYTHON).make(tmp_path)
    assert not (tmp_path / "torch/__init__.py").exists()


def test_a_slim_torch_of_another_commit_than_the_pinned_one_is_not_run(offered, tmp_path, monkeypatch):
    pin = pins.Pin("linux", "pytorch", f"torch-{TORCH}", "", "def", "")
    monkeypatch.setattr(pins, "torch", lambda version: pin)
    with serving(torch_wheel()) as (url, _):
        offered(url)
        with pytest.raises(PinError, match="pinned to def, have abc"):
            slim_torch.unit(TORCH, CPYTHON).make(tmp_path)
    assert not list(tmp_path.iterdir())


@CASES
def test_a_wheel_that_is_read_is_looked_at_first(tmp_path, case):
    """explain, diff, verify, variants, sign by WheelFile; index; publish; a tier's wheel."""
    name, words = BAD[case]
    facts = [("apex/build.json", "{}"), ("x.dist-info/METADATA", "Name: x\nVersion: 1\n\n")]
    path = tmp_path / "apex_cpu-1-cp311-cp311-linux_x86_64.whl"
    path.write_bytes(zipped([*facts, ("torch/include/ok.h", ""), (name, "")]))
    for read in (WheelFile, index.read, lambda p: publish.cells([p]), identity.wheel):
        with pytest.raises((BuildError, archive.Refused), match=words):
            read(path)


def test_the_size_of_a_code_object_is_bounded_by_its_manifest(tmp_path):
    import lzma

    manifest = {"units": {"u": {"file": "u.cubin.xz", "bytes": 100}}}
    path = tmp_path / "apex_cuda-1-cp311-cp311-linux_x86_64.whl"
    for contents, fits in ((b"0" * 100, True), (b"0" * 1_000_000, False), (b"0" * 99, False)):
        path.write_bytes(
            zipped(
                [
                    ("apex/build.json", "{}"),
                    ("apex/packs/sm_90/manifest.json", json.dumps(manifest)),
                    ("apex/packs/sm_90/u.cubin.xz", lzma.compress(contents)),
                ]
            )
        )
        if fits:
            assert WheelFile(path).code("sm_90", "u") == contents
        else:
            with pytest.raises(BuildError, match="not the whole of the 100 bytes that its manifest states"):
                WheelFile(path).code("sm_90", "u")


def envelope(path, *members):
    """A .tar.gz of (TarInfo, contents)."""
    with tarfile.open(path, "w:gz") as made:
        for info, contents in members:
            info.size = len(contents)
            made.addfile(info, io.BytesIO(contents))


def member(name, kind=tarfile.REGTYPE, link=""):
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    return found


TARS = {
    "parent": (member("./../x"), OUTSIDE),
    "absolute": (member("/tmp/apex_absolute.h"), "an absolute name"),
    "link": (member("./l", tarfile.SYMTYPE, "/etc"), "neither a file nor a folder"),
    "link inside": (member("./l", tarfile.SYMTYPE, "ok"), "neither a file nor a folder"),
    "hard link": (member("./l", tarfile.LNKTYPE, "ok"), "neither a file nor a folder"),
    "device": (member("./d", tarfile.CHRTYPE), "neither a file nor a folder"),
    "fifo": (member("./f", tarfile.FIFOTYPE), "neither a file nor a folder"),
    "twice": (member("./ok"), "twice"),
}


@pytest.mark.parametrize("case", TARS)
def test_an_output_of_a_shared_store_writes_nothing_outside(tmp_path, case):
    info, words = TARS[case]
    envelope(tmp_path / "x.tar.gz", (member("./ok"), b"good"), (info, b""))
    (tmp_path / "deep/target").mkdir(parents=True)
    with pytest.raises(archive.Refused, match=words):
        archive.unpack_tar(tmp_path / "x.tar.gz", tmp_path / "deep/target")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["x.tar.gz"]
    assert not Path("/tmp/apex_absolute.h").exists()


def test_a_bomb_in_a_shared_store_is_not_unpacked(tmp_path):
    envelope(tmp_path / "x.tar.gz", (member("./ok"), b"good"), (member("./zeros"), b"0" * 5000))
    (tmp_path / "target").mkdir()
    with pytest.raises(archive.Refused, match="too large"):
        archive.unpack_tar(tmp_path / "x.tar.gz", tmp_path / "target", archive.Limits(9, 1000, 9999))
    assert not list((tmp_path / "target").iterdir())


def made(name):
    return WorkUnit("test", name, {"a": [1, 2]}, lambda folder: (folder / "out").write_text(name))


def test_an_output_under_the_key_of_another_is_not_taken(tmp_path, caplog, monkeypatch):
    """Whole, with the right digest of its own, and not what was asked for."""
    monkeypatch.setenv("APEX_STORE", str(tmp_path / "one"))
    one = Store.at(f"file://{tmp_path}/shared")
    asked, other = one.build(made("asked")), one.build(made("other"))
    remote = Remote(f"file://{tmp_path}/shared")
    shared = tmp_path / "shared/test"
    (shared / f"{other.folder.name}.tar.gz").replace(shared / f"{asked.folder.name}.tar.gz")
    again = Store(tmp_path / "two", remote).build(made("asked"))
    assert (again.folder / "out").read_text() == "asked" and not again.stored
    assert "is the output of another unit" in caplog.text


def test_links_in_an_output_travel_as_files(tmp_path, monkeypatch):
    def make(folder):
        (folder / "out").write_text("contents")
        (folder / "link").symlink_to("out")

    monkeypatch.setenv("APEX_STORE", str(tmp_path / "one"))
    unit = WorkUnit("test", "links", {}, make)
    Store.at(f"file://{tmp_path}/shared").build(unit)
    taken = Store(tmp_path / "two", Remote(f"file://{tmp_path}/shared")).build(unit)
    assert taken.stored and (taken.folder / "link").read_text() == "contents"


def test_a_page_of_an_index_names_no_file_of_this_machine(monkeypatch):
    """A server that lists file: addresses, or what is no list."""
    from .test_headers import Ranges

    class Page(Ranges):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", package_index.JSON)
            self.send_header("Content-Length", str(len(self.content)))
            self.end_headers()
            self.wfile.write(self.content)

    listed = [
        {"filename": "torch-1-py3-none-any.whl", "url": "file:///etc/passwd"},
        {"filename": "torch-2-py3-none-any.whl", "url": "t.whl", "hashes": {"sha256": "not a digest"}},
    ]
    with serving(json.dumps({"files": listed}).encode(), handler=Page) as (url, _):
        (found,) = package_index.files_at(url)
        assert (found.filename, found.sha256) == ("torch-2-py3-none-any.whl", "")
    for page in (b"[]", b'{"files": 3}', b'{"files": [{"filename": 1, "url": 2}]}', b'{"files": ["x"]}'):
        with serving(page, handler=Page) as (url, _):
            assert package_index.files_at(url) == []
    monkeypatch.setattr(package_index, "LARGEST", 10)
    with serving(json.dumps({"files": []}).encode(), handler=Page) as (url, _):
        monkeypatch.setattr(package_index, "urls", lambda: [url])
        with pytest.raises(PackageIndexError, match="more than 10 bytes"):
            package_index.files("torch")


def test_torch_is_installed_by_the_digest_of_its_index(monkeypatch):
    """pip compares the file with the digest in the address."""
    import subprocess

    from build_matrix.toolchains import torch_supply

    called = []
    monkeypatch.setattr(
        torch_supply.subprocess,
        "run",
        lambda command, **options: called.append(command) or subprocess.CompletedProcess(command, 0),
    )
    stated = digest.of_bytes(b"torch")
    torch_supply.install(torch_supply.Supply("torch.whl", "https://index.example/torch.whl", 5, stated))
    assert called[0][-1] == f"https://index.example/torch.whl#sha256={stated}"


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(kind, tmp_path):
    path = tmp_path / "apex_cpu-1.10.0+cpu-cp311-cp311-linux_x86_64.whl"
    make = {"fifo": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": lambda p: p.mkdir()}
    make[kind](path)
    opens = f"with archive.wheel(pathlib.Path({str(path)!r})): pass"
    code = f"import pathlib; from build_matrix.store import archive\n{opens}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, timeout=60
    )
    assert done.stderr.strip().endswith("Refused: it is no regular file")


WRONG = [b"[]", b"{}", b"7", b"null", b"[" * 200_000, b'{"version": 7, "torch": 7, "archs": null}', b"\xff"]


@pytest.mark.parametrize("command", ["explain", "diff", "index", "publish", "variants"])
@pytest.mark.parametrize(
    "member", ["apex/build.json", "apex/lib/bindings.json", "apex/packs/sm_90/manifest.json"]
)
def test_a_wheel_whose_json_is_of_another_shape_is_named(command, member, tmp_path):
    from build_matrix import __main__ as commands

    head = "Metadata-Version: 2.1\nName: apex-cuda\nVersion: 1\n\n"
    for at, wrong in enumerate(WRONG):
        folder = tmp_path / str(at)
        folder.mkdir()
        path = folder / "apex_cuda-1-cp311-cp311-linux_x86_64.whl"
        members = {
            "apex/build.json": "{}",
            "apex-1.dist-info/METADATA": head,
            "apex-1.dist-info/WHEEL": "Tag: a-b-c\n",
        }
        path.write_bytes(zipped(list((members | {member: wrong}).items())))
        place = ["--dist", str(folder), "--target", str(tmp_path / "out")]
        arguments = {"explain": [str(path)], "diff": [str(path)] * 2}.get(command, place)
        try:
            commands.main([command, *arguments], standalone_mode=False)
        except BuildError as error:
            assert path.name in str(error)


@pytest.mark.parametrize("kind", ["loop", "dangling", "cut"])
def test_a_link_to_nowhere_and_a_cut_beginning_are_refused(kind, tmp_path):
    path = tmp_path / "apex_cpu-1.whl"
    if kind == "cut":
        path.write_bytes(zipped([("a", b"0" * 1000), ("b", "1")])[60:])
    else:
        path.symlink_to(path.name if kind == "loop" else "nowhere")
    with pytest.raises((archive.Refused, zipfile.BadZipFile)), archive.wheel(path):
        pass
