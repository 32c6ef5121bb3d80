"""The index as package managers use it: a static web server, a folder, object storage; yanked and damaged wheels."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile

import pytest

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError
from build_matrix.serve import index, server
from build_matrix.wheels import wheel

REASON = "adam & <sgd> step twice"


def make(folder, version, size=100):
    tag = "py3-none-any"
    path = folder / f"apex_cpu-{version}-{tag}.whl"
    wheel.write(path, "apex-cpu", version, tag, {"apex/__init__.py": b"#" * size + b"\n"})
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """1.11.0 is yanked, so 1.10.0 is the newest."""
    folder = tmp_path_factory.mktemp("index")
    (folder / "dist").mkdir()
    (folder / "yanked.toml").write_text(
        f"[[yanked]]\nwheels = 'apex_cpu-1.11.0+cpu-*'\nreason = '{REASON}'\n"
    )
    wheels = [make(folder / "dist", f"{version}+cpu") for version in ("1.9.0", "1.10.0", "1.11.0")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "YANKED", folder / "yanked.toml")
        index.write(wheels, folder / ".whl")
    return folder / ".whl"


@pytest.fixture(scope="module")
def static(published):
    """The folder behind a web server that knows nothing of indexes."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(published))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def objects(published):
    """The folder as objects of a bucket, each under its path; nothing lists them, and a + must be quoted."""
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys)
    client.create_bucket(Bucket="release", ACL="public-read")
    for path in sorted(p for p in published.rglob("*") if p.is_file()):
        kind = {"ContentType": "text/html"} if path.suffix == ".html" else {}
        key = path.relative_to(published).as_posix()
        client.put_object(Bucket="release", Key=key, Body=path.read_bytes(), ACL="public-read", **kind)
    yield f"http://{host}:{port}/release"
    server.stop()


def pip(*arguments):
    return [sys.executable, "-m", "pip", "--isolated", "install", "--no-cache-dir", *arguments]


def uv(*arguments):
    program = shutil.which("uv", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    if not program:
        pytest.skip("uv is not here: pip install uv")
    return [program, "pip", "install", "--no-config", "--no-cache", "--python", sys.executable, *arguments]


@pytest.fixture(params=[pip, uv], ids=["pip", "uv"])
def install(request, tmp_path):
    """Installs into a folder; gives the version that came, and what was said."""

    def install(*arguments):
        where = tmp_path / "site"
        shutil.rmtree(where, ignore_errors=True)
        command = request.param("--no-deps", "--target", str(where), *arguments)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_"))}
        done = subprocess.run(command, env=clean, text=True, capture_output=True)
        found = [p.name.split("-")[1].removesuffix(".dist") for p in where.glob("*.dist-info")]
        return (found[0] if found else None), done.stdout + done.stderr

    return install


@pytest.mark.parametrize("where", ["static", "published", "objects"])
def test_a_release_that_is_not_yanked_is_installed(install, request, where):
    place = request.getfixturevalue(where)
    if where == "objects":  # nothing answers for a folder: the page is named
        options = ["--no-index", "--find-links", f"{place}/whl/cpu/apex-cpu/index.html"]
    else:
        options = ["--index-url", f"{place if where == 'static' else place.as_uri()}/whl/cpu/"]
    if "uv" not in request.node.name or where != "objects":  # uv heeds it on pages of an index alone
        assert install("apex-cpu", *options)[0] == "1.10.0+cpu"
        version, said = install("apex-cpu==1.11.0+cpu", *options)
        assert version == "1.11.0+cpu" and "adam & <sgd> step twice" in said
    assert install("apex-cpu==1.9.0", *options)[0] == "1.9.0+cpu"


def test_a_damaged_wheel_is_not_installed(install, published, tmp_path):
    shutil.copytree(published, tmp_path / "copy")
    victim = tmp_path / "copy/files/apex_cpu-1.10.0+cpu-py3-none-any.whl"
    shutil.copyfile(make(tmp_path, "1.10.0+cpu", size=99), victim)
    version, said = install("apex-cpu==1.10.0", "--index-url", f"{(tmp_path / 'copy').as_uri()}/whl/cpu/")
    assert version is None and "hash" in said.lower()


@pytest.mark.parametrize("accept", ["*/*", server.JSON])
@pytest.mark.parametrize(
    "path", ["/files/%00", "/%00/", f"/{'x' * 300}", f"/{'x' * 300}/", "/files/fifo", "/none"]
)
def test_what_can_be_no_file_is_not_found(published, path, accept, capfd):
    """And the server serves on, without a traceback in what it prints."""
    fifo = published / "files/fifo"
    os.mkfifo(fifo)
    try:
        with server.background(published) as address:
            asked = urllib.request.Request(address + path, headers={"Accept": accept})
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(asked, timeout=20)
            assert caught.value.code == 404
            page = urllib.request.Request(f"{address}/whl/cpu/", headers={"Accept": accept})
            answer = urllib.request.urlopen(page, timeout=20)
            assert b"apex-cpu" in answer.read()
            assert (answer.headers["Content-Type"] == server.JSON) == (accept == server.JSON)
    finally:
        fifo.unlink()
    assert "Traceback" not in capfd.readouterr().err


def test_names_are_quoted_in_links(static):
    page = urllib.request.urlopen(f"{static}/whl/cpu/apex-cpu/").read().decode()
    assert "files/apex_cpu-1.10.0%2Bcpu-py3-none-any.whl#sha256=" in page


def test_the_index_that_is_there_stays_until_the_new_one_is_whole(published, tmp_path):
    good, target = make(tmp_path, "1.10.0+cpu"), tmp_path / ".whl"
    index.write([good], target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    cut = tmp_path / "apex_cpu-1.12.0+cpu-py3-none-any.whl"
    cut.write_bytes(good.read_bytes()[:200])
    (tmp_path / "..whl-abc.partial/new").mkdir(parents=True)  # of one that was killed
    with pytest.raises(BuildError, match=r"apex_cpu-1.12.0\+cpu-py3-none-any.whl is damaged, or no wheel"):
        index.write([good, cut], target)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob("*.partial"))


def test_the_index_of_a_run_that_was_killed_between_its_renames_comes_back(tmp_path, monkeypatch):
    good, target = make(tmp_path, "1.10.0+cpu"), tmp_path / ".whl"
    index.write([good], target)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    scratch = tmp_path / "..whl-abc.partial"
    scratch.mkdir()
    target.rename(scratch / "old")
    with pytest.raises(BuildError, match="no wheel here is of"):
        index.write([], target)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert not scratch.exists()


def everything(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def photos(place):
    (place / "photos").mkdir(parents=True)
    (place / "photos/a.jpg").write_bytes(b"jpeg")


def with_more(place):
    index.write([make(place.parent, "1.9.0+cpu")], place)
    (place / "files/notes.txt").write_text("mine")


def with_a_link(place):
    index.write([make(place.parent, "1.9.0+cpu")], place)
    (place / "whl/mine").symlink_to(place.parent)


def without_pages(place):
    (place / "files").mkdir(parents=True)
    (place / "files/mine.whl").write_bytes(b"1")


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (photos, "holds 'photos/'"),
        (lambda place: place.write_text("a file"), "is no folder"),
        (with_more, "holds 'files/notes.txt'"),
        (with_a_link, "holds 'whl/mine/'"),
        (without_pages, "is no whole index"),
        (lambda place: place.symlink_to(place), "is a link that leads to itself"),
    ],
)
def test_a_target_that_is_no_index_is_refused_and_stays(tmp_path, fill, words):
    good, target = make(tmp_path, "1.10.0+cpu"), tmp_path / "mine/X"
    target.parent.mkdir()
    fill(target)
    for path in target.parent.glob("*.lock"):
        path.unlink()
    before = everything(tmp_path)
    with pytest.raises(BuildError, match=f"--target {target} {words}.*name a"):
        index.write([good], target)
    assert everything(tmp_path) == before


def test_an_index_is_written_in_the_place_of_an_empty_folder_of_an_index_and_where_a_link_leads(tmp_path):
    good, target, link = make(tmp_path, "1.10.0+cpu"), tmp_path / "there/X", tmp_path / "link"
    target.mkdir(parents=True)
    link.symlink_to(target)
    for place in (target, target, link):
        index.write([good], place, "<p>page")
        assert link.is_symlink() and (target / "whl/index.html").read_text() == "<p>page"


def test_a_folder_of_somebody_else_s_beside_an_index_is_not_swept(tmp_path):
    target = tmp_path / "X"
    photos(tmp_path / ".X-trip.partial")
    index.write([make(tmp_path, "1.10.0+cpu")], target)
    assert (tmp_path / ".X-trip.partial/photos/a.jpg").is_file()


@pytest.mark.parametrize("command", ["index", "publish", "farm"])
def test_a_target_and_dist_are_apart(tmp_path, command):
    dist = tmp_path / "a/dist"
    dist.mkdir(parents=True)
    make(dist, "1.10.0+cpu")
    before = everything(tmp_path)
    for target in (dist, dist.parent, dist / "whl"):
        said = words_of(command, "--dist", dist, "--target", target, cwd=tmp_path.parent)
        assert "is, holds or lies in --dist" in said
    assert everything(tmp_path) == before


@pytest.mark.parametrize("target", [".", "..", "../here"])
def test_the_folder_that_this_runs_in_is_no_target(tmp_path, target):
    (tmp_path / "here").mkdir()
    said = words_of("index", "--dist", tmp_path.parent / "dist", "--target", target, cwd=tmp_path / "here")
    assert "is, or holds, the folder that this runs in" in said and not list((tmp_path / "here").iterdir())


def words_of(*arguments, cwd):
    """What a command that fails says: never a traceback."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "build_matrix", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1 and done.stderr.startswith("build_matrix: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_an_entry_of_yanked_wheels_says_why(tmp_path):
    assert index.yanked() == {}
    file = tmp_path / "yanked.toml"
    file.write_text("[[yanked]]\nwheels = 'apex_cpu-1.9*'\nreason = ''\n")
    with pytest.raises(BuildError, match="yanked.toml: an entry names `wheels` and a `reason`"):
        index.yanked(file)
    file.write_text("[[yanked]]\nwheels = ['apex_cpu-1.9*', 'apex_cpu-1.8*']\nreason = 'x'\n")
    with pytest.raises(BuildError, match="yanked.toml: an entry names `wheels` and a `reason`"):
        index.yanked(file)


@pytest.mark.parametrize(
    "text",
    [
        "yanked = [1]\n",
        "yanked = 'x'\n",
        "[yanked]\nwheels = 'x'\nreason = 'y'\n",
        "[[yank]]\nwheels = 'x'\n",
    ],
)
def test_a_file_of_yanked_wheels_is_tables(tmp_path, text):
    """What is written otherwise would be passed over in silence."""
    (tmp_path / "yanked.toml").write_text(text)
    with pytest.raises(BuildError, match=r"yanked.toml: .*\[\[yanked\]\]"):
        index.yanked(tmp_path / "yanked.toml")


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        ("x", b"", r"it has 0 files \*.dist-info/METADATA, not one"),
        ("x-1.dist-info/METADATA", b"Metadata-Version: 2.4\nVersion: 1\n\n", "its METADATA has no Name"),
        ("x-1.dist-info/METADATA", b"Name: \xff\n\n", "'utf-8' codec can't decode"),
    ],
)
def test_metadata_that_is_none_is_named(tmp_path, name, contents, words):
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, contents)
    with pytest.raises(BuildError, match=f"x-1-py3-none-any.whl is damaged, or no wheel: {words}"):
        index.read(path)


def test_a_wheel_of_another_project_is_told_and_never_empties_an_index(tmp_path):
    good, target = make(tmp_path, "1.10.0+cpu"), tmp_path / ".whl"
    other = tmp_path / "other-1-py3-none-any.whl"
    wheel.write(other, "other", "1", "py3-none-any", {"other.py": b""})
    listed = {found.name for wheels in index.write([good, other], target).values() for found in wheels}
    assert good.name in listed and other.name not in listed
    assert not list((target / "files").glob("other*"))
    with pytest.raises(BuildError, match="no wheel here is of apex-cpu.*what is there stays"):
        index.write([other], target)
    assert list((target / "files").glob("apex_cpu*"))


def test_an_index_that_is_being_written_is_not_swept_away(tmp_path, monkeypatch):
    """Two at once: the second waits, and does not take the first one's folder for one of a killed run."""
    good, target = make(tmp_path, "1.10.0+cpu"), tmp_path / ".whl"
    inside, go = threading.Event(), threading.Event()
    read = index.read

    def slow(*arguments):
        inside.set()
        assert go.wait(60)
        return read(*arguments)

    monkeypatch.setattr(index, "read", slow)
    first = threading.Thread(target=index.write, args=([good], target))
    first.start()
    assert inside.wait(60)
    (scratch,) = tmp_path.glob("*.partial")
    second = threading.Thread(target=index.write, args=([good], target))
    second.start()
    second.join(0.5)
    assert second.is_alive() and scratch.is_dir()
    go.set()
    for thread in (first, second):
        thread.join(60)
    assert list((target / "files").glob("*.whl")) and not list(tmp_path.glob("*.partial"))
