"""Range requests against a server on loopback; the real index only in what `nox -s build-*` does."""

import contextlib
import http.server
import io
import threading
import zipfile

import pytest

from build_matrix.errors import PackageIndexError, PinError
from build_matrix.spec import pins
from build_matrix.toolchains import headers, package_index, range_zip


class Ranges(http.server.BaseHTTPRequestHandler):
    """Serves one file, ranges included."""

    content = b""
    requests: list = []
    ranges = True

    def do_GET(self):
        self.requests.append(self.headers.get("Range"))
        start, stop = 0, len(self.content)
        if self.ranges:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start = int(first) if first else max(len(self.content) - int(last), 0)
            stop = min(int(last) + 1, stop) if first and last else stop
        body = self.content[start:stop]
        self.send_response(206 if self.ranges else 200)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(content, ranges=True, handler=Ranges):
    handler = type("Handler", (handler,), {"content": content, "requests": [], "ranges": ranges})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/torch.whl", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def archive(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data, method in members:
            out.writestr(zipfile.ZipInfo(name), data, method)
    return buffer.getvalue()


NOISE = bytes(range(256)) * 4096  # 1 MB


def test_members_come_whole_in_few_requests():
    members = [
        (f"torch/include/{i}.h", f"header {i}\n".encode() * 50, zipfile.ZIP_DEFLATED) for i in range(300)
    ]
    members.insert(150, ("torch/lib/big.so", NOISE, zipfile.ZIP_STORED))
    content = archive([*members, ("torch/version.py", b"__version__ = '2.13.0'\n", zipfile.ZIP_STORED)])
    with serving(content) as (url, handler):
        remote = range_zip.RangeZip(url)
        found = dict(remote.read(lambda name: not name.endswith(".so"), headers.LIMITS))
    assert found == {name: data for name, data, _ in members if not name.endswith(".so")} | {
        "torch/version.py": b"__version__ = '2.13.0'\n"
    }
    assert remote.requests == len(handler.requests) <= 4  # end, (directory), before the big one, after it
    assert remote.downloaded < len(content) - len(NOISE) + 70_000


def test_a_damaged_member_is_noticed():
    content = bytearray(archive([("torch/include/a.h", b"abcdefgh", zipfile.ZIP_STORED)]))
    content[content.index(b"abcdefgh")] ^= 1
    with serving(bytes(content)) as (url, _), pytest.raises(PackageIndexError, match="CRC"):
        list(range_zip.RangeZip(url).read(lambda name: True, headers.LIMITS))


def test_a_server_without_ranges_and_a_page_that_is_no_archive():
    with (
        serving(NOISE, ranges=False) as (url, _),
        pytest.raises(PackageIndexError, match="does not serve ranges"),
    ):
        range_zip.RangeZip(url)
    with serving(b"no archive" * 100) as (url, _), pytest.raises(PackageIndexError, match="not a zip"):
        range_zip.RangeZip(url)


def test_a_closed_port_is_a_named_error():
    with serving(b"") as (url, _):
        pass
    with pytest.raises(PackageIndexError):
        range_zip.RangeZip(url)


VERSION_FILE = "__version__ = '2.99.0'\ndebug = False\ncuda: Optional[str] = None\ngit_version = 'abc'\n"


@pytest.fixture
def fake_torch(monkeypatch):
    """A wheel of torch 2.99.0 on a loopback server."""
    content = archive(
        [
            ("torch/version.py", VERSION_FILE.encode(), zipfile.ZIP_DEFLATED),
            ("torch/include/ATen/ATen.h", b"#pragma once\n", zipfile.ZIP_DEFLATED),
        ]
    )
    with serving(content) as (url, handler):
        file = package_index.IndexFile("torch-2.99.0-cp311-cp311-manylinux_2_28_x86_64.whl", url, "0" * 64)
        monkeypatch.setattr(package_index, "files", lambda project: [file])
        yield handler


def test_headers_are_fetched_once(fake_torch, store):
    found = headers.obtain("2.99.0", store)
    assert (found.version, found.git_version, found.cuda, found.minor) == ("2.99.0", "abc", None, "2.99")
    assert (found.include / "ATen/ATen.h").read_text() == "#pragma once\n"
    requests = len(fake_torch.requests)
    assert headers.obtain("2.99.0", store) == found
    assert len(fake_torch.requests) == requests


def test_headers_of_another_commit_than_the_pinned_one_stop_the_build(fake_torch, store, monkeypatch):
    pin = pins.Pin("linux", "pytorch", "torch-2.99.0", "v2.99.0", "def", "")
    monkeypatch.setattr(pins, "torch", lambda version: pin)
    with pytest.raises(PinError, match="pinned to def, have abc"):
        headers.obtain("2.99.0", store)


def test_a_release_that_no_index_holds_is_named(fake_torch, store):
    with pytest.raises(PackageIndexError, match="torch 2.98.0"):
        headers.obtain("2.98.0", store)


def test_pages_of_both_kinds_are_read():
    first = b'<a href="../../files/torch-1-py3-none-any.whl#sha256=' + b"a" * 64 + b'">torch</a>'
    page = first + b'<a href="x%2Bcpu.whl">x</a>'
    found = package_index._of_page(page, "https://index.example/simple/torch/")
    assert found[0] == package_index.IndexFile(
        "torch-1-py3-none-any.whl", "https://index.example/files/torch-1-py3-none-any.whl", "a" * 64
    )
    assert found[1].filename == "x+cpu.whl"
