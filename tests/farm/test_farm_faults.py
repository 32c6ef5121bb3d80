"""What goes wrong in a farm is named, nothing half made is used, and the same command then goes on."""

import logging
import types

import pytest

pytest.importorskip("distributed")

from build_matrix.check import verify
from build_matrix.errors import FarmError, PythonMissing, StoreError
from build_matrix.farm import cluster, plan, steps
from build_matrix.farm.steps import Step
from build_matrix.spec import identity, matrix, pins
from build_matrix.store import Store, WorkUnit, digest
from build_matrix.toolchains import host_compiler, package_index, provision, pythons, range_zip
from build_matrix.wheels import wheel
from tests.farm.test_farm_run import OBJECTS, object_plan
from tests.farm.test_headers import Ranges, archive, serving

TORCH = "2.8.0"
BINDINGS = plan.Plan(
    (
        Step("headers", f"torch-{TORCH}", (TORCH,)),
        Step("3a", f"torch {TORCH}", (TORCH,), (f"headers torch-{TORCH}",)),
        Step("3b", f"torch {TORCH} cp311", (TORCH, "cp311"), (f"headers torch-{TORCH}",)),
    )
)
HEADERS = plan.Plan(BINDINGS.steps[:1])


@pytest.fixture(scope="module")
def client():
    with cluster.local(2, processes=False) as client:
        yield client


def fault(client, store, wanted):
    with pytest.raises(FarmError) as caught:
        cluster.run(wanted, client, store)
    return caught.value


def stored(store):
    return [path for path in store.root.glob("*/*") if path.is_dir()]


def wheel_of_torch(git_version):
    """A wheel with torch's version.py and enough headers to be cut in."""
    version = f"__version__ = '{TORCH}'\ncuda = None\ngit_version = '{git_version}'\n"
    headers = [(f"torch/include/{n}.h", bytes(range(256)) * 256, 0) for n in range(8)]
    return archive([("torch/version.py", version.encode(), 0), *headers])


@pytest.fixture
def offer(monkeypatch):
    """Makes the package index hold the wheel at an address."""

    def offer(address):
        name = f"torch-{TORCH}-cp311-cp311-manylinux_2_28_x86_64.whl"
        file = package_index.IndexFile(name, address, "0" * 64)
        monkeypatch.setattr(package_index, "files", lambda project: [file])
        monkeypatch.setattr(pins, "headers", lambda version, platform: None)  # its headers are not torch's

    return offer


def test_an_index_that_does_not_answer_is_named(client, tmp_path, monkeypatch):
    monkeypatch.setattr(package_index, "urls", lambda: ["http://127.0.0.1:9/simple"])
    store = Store(tmp_path)
    found = fault(client, store, BINDINGS)
    ((step, words),) = found.failures
    assert step == f"headers torch-{TORCH}" and "http://127.0.0.1:9/simple/torch/: " in words
    assert "PIP_INDEX_URL, or pip's configuration, names another index" in words
    assert (found.waiting, found.exit_code, stored(store)) == (2, 7, [])


@pytest.mark.parametrize("page", [b"<html", b"{", b'{"files": [{}]}'])
def test_an_index_whose_page_is_none_is_named(page, monkeypatch):
    class Page(Ranges):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", package_index.JSON if page[:1] == b"{" else "text/html")
            self.send_header("Content-Length", "1000" if page == b"{" else str(len(page)))
            self.end_headers()
            self.wfile.write(page)

    with serving(b"", handler=Page) as (url, _):
        monkeypatch.setattr(package_index, "urls", lambda: [url.rpartition("/")[0]])
        with pytest.raises(package_index.PackageIndexError, match="no index holds torch"):
            package_index.files("torch")


def test_a_wrong_pin_is_named(client, tmp_path, offer):
    store = Store(tmp_path)
    with serving(wheel_of_torch("f" * 40)) as (url, _):
        offer(url)
        found = fault(client, store, BINDINGS)
    ((step, words),) = found.failures
    assert words.startswith(f"torch {TORCH} is pinned to {pins.torch(TORCH).sha}, have {'f' * 40}.")
    assert (step, found.exit_code, stored(store)) == (f"headers torch-{TORCH}", 6, [])


@pytest.mark.parametrize("way", ["closed early", "short"])
def test_a_download_that_is_cut_is_named_and_begun_anew(client, tmp_path, offer, way):
    class Cut(Ranges):
        whole = False

        def do_GET(self):
            # All but the archive's end.
            if not self.whole and f"-{range_zip.TAIL}" not in self.headers["Range"]:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                last = min(int(last), len(self.content) - 1)
                half = self.content[int(first) : (int(first) + last) // 2]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.content)}")
                length = last - int(first) + 1 if way == "closed early" else len(half)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(half)
                self.close_connection = True
            else:
                super().do_GET()

    store = Store(tmp_path)
    with serving(wheel_of_torch(pins.torch(TORCH).sha), handler=Cut) as (url, server):
        offer(url)
        found = fault(client, store, HEADERS)
        ((_, words),) = found.failures
        assert url in words and ("IncompleteRead" in words or "the download was cut" in words)
        assert (found.exit_code, stored(store)) == (7, [])
        server.whole = True  # the same command goes on
        (done,) = cluster.run(HEADERS, client, store)
    assert not done.stored and stored(store) == [store.output("headers", done.key)]


def test_a_full_disk_is_named(client, tmp_path, monkeypatch):
    def unit(store, name):
        def make(folder):
            (folder / "half").write_text("x")
            with open("/dev/full", "w") as full:
                full.write("x" * 1_000_000)

        return WorkUnit("fake", name, {}, make)

    monkeypatch.setitem(steps.UNITS, "fake", unit)
    store = Store(tmp_path)
    found = fault(
        client, store, plan.Plan((Step("fake", "a", ("a",)), Step("fake", "b", ("b",), ("fake a",))))
    )
    assert found.failures == [
        ("fake a", f"no space is left for fake a in the store {tmp_path}. APEX_STORE names another place.")
    ]
    assert (found.waiting, found.exit_code, stored(store)) == (1, 10, [])


@pytest.mark.parametrize("way", ["no index", "another hash", "cut", "whole"])
def test_a_toolchain_that_does_not_come_leaves_nothing(tmp_path, monkeypatch, capfd, way):
    """pip names it, and no folder is left that would be taken for a toolchain."""
    (pin,) = [p for p in pins.load() if (p.project, p.branch) == ("package", "nvrtc-12.3")]
    project, version = pin.component, pin.sha
    page = tmp_path / "simple" / project
    page.mkdir(parents=True)
    file = page / f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
    wheel.write(file, project, version, "py3-none-any", {"nvidia/nvrtc.txt": b"x" * 1000})
    sha = digest.of_bytes(file.read_bytes())
    if way != "another hash":  # the index says what it serves; the pin says otherwise
        monkeypatch.setattr(pins, "packages", lambda name: [f"{project}=={version} --hash=sha256:{sha}"])
    (page / "index.html").write_text(f'<a href="{file.name}#sha256={sha}">{file.name}</a>')
    if way == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    address = "http://127.0.0.1:9/simple" if way == "no index" else page.parent.as_uri()
    monkeypatch.setenv("PIP_INDEX_URL", address)
    monkeypatch.setattr(provision, "provisioned_root", lambda: tmp_path / ".toolchains")
    if way == "whole":
        provision.provision("nvrtc-12.3")
        assert (tmp_path / ".toolchains/nvrtc-12.3/nvidia/nvrtc.txt").is_file()
        return
    with pytest.raises(
        package_index.PackageIndexError, match="nvrtc-12.3 did not come: .* it says why above"
    ):
        provision.provision("nvrtc-12.3")
    said = capfd.readouterr().err
    assert ("No matching distribution" if way == "no index" else "DO NOT MATCH THE HASHES") in said
    assert not list((tmp_path / ".toolchains").iterdir())


def test_a_fault_is_told_once_and_only_one_that_has_no_name_with_its_traceback(tmp_path, monkeypatch, capfd):
    """Workers are processes, as in a release: what they say of a fault would stand between the lines of progress."""
    object_step = object_plan().steps[0]
    unknown = Step("object", "csrc/host/none.cpp", ("csrc/host/none.cpp",))  # no such file: an OSError
    broken = Step("nothing", "of this kind", ())  # a KeyError of ours
    with cluster.local(1) as client:
        found = fault(client, Store(tmp_path), plan.Plan((object_step, unknown, broken)))
    words = dict(found.failures)
    assert words[unknown.id].startswith("FileNotFoundError: ") and "Traceback" not in words[unknown.id]
    assert words[broken.id].startswith("Traceback ") and words[broken.id].endswith("KeyError: 'nothing'")
    assert "Traceback" not in capfd.readouterr().err


def test_a_store_that_cannot_be_is_named_before_anything_is_begun(client, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(client, "submit", lambda *arguments, **options: pytest.fail("it was begun"))
    with pytest.raises(StoreError, match="nothing can be written"):
        cluster.run(object_plan(), client, Store(tmp_path / "file"))


def test_a_wheel_whose_python_is_not_here_cannot_be_built_again(tmp_path, monkeypatch):
    """An optional Python above all: a plan leaves it out without a word, and the wheel with it."""
    own = host_compiler.find()
    facts = {"source_sha256": identity.compiled(), "host_compiler": own.describe(), "python": ["cp314"]}
    facts["accelerator"] = "cpu"
    built = types.SimpleNamespace(path=tmp_path / "apex.whl", facts=facts, packs={}, platform=matrix.NATIVE)

    def find(tag):
        raise PythonMissing(tag)

    monkeypatch.setattr(pythons, "find", find)
    monkeypatch.setattr(cluster, "local", lambda jobs: pytest.fail("it was begun"))
    with pytest.raises(PythonMissing, match="Python 3.14 is not here: put python3.14 on PATH"):
        verify.whole(built, Store(tmp_path), 1, lambda done: None)


def test_a_compiler_that_fails_stops_its_own_step_alone(client, tmp_path, monkeypatch):
    broken = tmp_path / "g++"
    fails = 'case "$*" in *status.cpp*) echo "error: cosmic ray" >&2; exit 1;; esac'
    broken.write_text(f'#!/bin/sh\n{fails}\nexec {host_compiler.find().path} "$@"\n')
    broken.chmod(0o755)
    compiler = host_compiler.HostCompiler(str(broken))
    monkeypatch.setattr(host_compiler, "find", lambda platform: compiler)
    store = Store(tmp_path / "store")
    found = fault(client, store, object_plan())
    ((step, words),) = found.failures
    assert step == "object csrc/host/status.cpp" and "error: cosmic ray" in words and found.exit_code == 4
    assert len(stored(store)) == len(OBJECTS) - 1  # the others were made all the same


def test_a_damaged_output_is_named_and_made_again(client, tmp_path, caplog):
    store = Store(tmp_path)
    first = cluster.run(object_plan(), client, store)
    victim = next(store.output(first[0].kind, first[0].key).glob("*.o"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with caplog.at_level(logging.WARNING, "build_matrix.store"):
        again = cluster.run(object_plan(), client, store)
    assert [done.name for done in again if not done.stored] == [first[0].name]
    assert f"the stored {victim.parent} is damaged" in caplog.text
    data[len(data) // 2] ^= 1
    assert victim.read_bytes() == data
