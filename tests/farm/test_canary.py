"""What a wheel serves under the newest torch of the index (build_matrix/check/canary.py)."""

import contextlib
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from click.testing import CliRunner

from build_matrix import REPOSITORY
from build_matrix.check import canary
from build_matrix.commands import canary as canary_command
from build_matrix.commands import load_test
from build_matrix.errors import BuildError, LoadError, PackageIndexError, PinError, ToolchainMissing
from build_matrix.store import Store, WorkUnit
from build_matrix.toolchains import borrow, manage, package_index, pythons, slim_torch, torch_supply
from build_matrix.toolchains.package_index import IndexFile

from .test_archives import zipped
from .test_headers import VERSION_FILE, Ranges, serving

PYTHON = pythons.find(pythons.own_tag())
LINUX = "manylinux_2_28_x86_64"


def index_of(monkeypatch, *names):
    files = [IndexFile(f"torch-{name}.whl", f"https://example.org/{name}", "") for name in names]
    monkeypatch.setattr(package_index, "newest_of", lambda project: files)


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
            raise LoadError(error)
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
        assert isinstance(done.exception, LoadError) and "2.16.0" in str(done.exception)
        assert done.exception.exit_code == 5


def serves_but_under(torch, fault):
    """slim_torch.wheel_values of a wheel that serves, where one torch raises `fault`."""

    def values(version, python, installed, store):
        if version == torch:
            raise fault
        return "portable", EXPECTED

    return values


@pytest.mark.parametrize(
    "fault",
    [PackageIndexError("cut"), PinError("torch 2.17.0", "a", "b"), ToolchainMissing("g++", "x")],
    ids=str,
)
def test_a_torch_that_cannot_be_had_is_no_fault_of_the_wheel(monkeypatch, tmp_path, fault):
    """Its own exit code, and the report of the torches before and after it."""
    monkeypatch.setattr(slim_torch, "wheel_values", serves_but_under("2.17.0", fault))
    wheel, written = make_wheel(tmp_path / "apex.whl"), tmp_path / "new/report.json"
    torches = [f"--torch={version}" for version in ("2.16.0", "2.17.0", "2.18.0")]
    done = CliRunner().invoke(canary_command.command, [str(wheel), *torches, "--report", str(written)])
    assert done.exception is fault and "torch 2.17.0: not tried: " in done.output
    told = json.loads(written.read_text())
    assert [(one["torch"], one["tried"], one["well"]) for one in told] == [
        ("2.16.0", True, True),
        ("2.17.0", False, False),
        ("2.18.0", True, True),
    ]


def test_what_nobody_foresaw_leaves_the_report_of_the_torches_before_it(monkeypatch, tmp_path):
    monkeypatch.setattr(slim_torch, "wheel_values", serves_but_under("2.17.0", ZeroDivisionError()))
    wheel, written = make_wheel(tmp_path / "apex.whl"), tmp_path / "report.json"
    written.write_text("of last week")
    arguments = [str(wheel), "--torch=2.16.0", "--torch=2.17.0", "--report", str(written)]
    done = CliRunner().invoke(canary_command.command, arguments)
    assert isinstance(done.exception, ZeroDivisionError)
    assert [one["torch"] for one in json.loads(written.read_text())] == ["2.16.0"]


@pytest.mark.parametrize("text", ["", "abc", "2.13.0; x"])
@pytest.mark.parametrize("command", [canary_command.command, load_test.command], ids=["canary", "load-test"])
def test_what_is_no_version_of_torch_is_wrong_usage(command, text):
    done = CliRunner().invoke(command, ["--torch", text])
    assert done.exit_code == 2 and f"{text!r} is no version of torch" in done.output


# ---- what an index serves ----------------------------------------------------------------------------------


@contextlib.contextmanager
def index(monkeypatch, pages):
    """Index roots, each the answer to whoever asks for a project: (status, type, body), by name; None is no server."""

    class Index(Ranges):
        def do_GET(self):
            status, kind, body = pages[self.path.split("/")[1]]
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(b"", handler=Index) as (url, _):
        root = url.rpartition("/")[0]
        roots = [f"{root}/{name}" if page else "http://127.0.0.1:9" for name, page in pages.items()]
        monkeypatch.setattr(package_index, "urls", lambda: roots)
        yield


def listing(*files):
    return 200, package_index.JSON, json.dumps({"files": list(files)}).encode()


def row(version, **more):
    (name,) = wheels(version)
    return {"filename": f"torch-{name}.whl", "url": f"/{name}", **more}


PAGE = "".join(
    f'<a href="/torch-{wheels(version)[0]}.whl"{more}>x</a>'
    for version, more in (("2.15.0", ""), ("2.16.0", ' data-yanked=""'))
)


@pytest.mark.parametrize(
    "page",
    [
        listing(row("2.15.0", yanked=False), row("2.16.0", yanked="broken")),
        listing(row("2.15.0"), row("2.16.0", yanked=True)),
        listing(row("2.15.0"), row("2.16.0", yanked="")),
        (200, "text/html", PAGE.encode()),
    ],
    ids=["reason", "true", "no reason", "page"],
)
def test_a_yanked_release_is_not_the_newest(monkeypatch, page):
    """Whoever names it gets it."""
    with index(monkeypatch, {"main": page}):
        assert canary.newest(PYTHON) == ["2.15.0"]
        assert manage.newest_torch() == "2.15.0"
        assert slim_torch.wheel_of("2.16.0", PYTHON).yanked


def test_a_yanked_torch_is_not_installed_by_its_address(monkeypatch):
    def file(version, yanked):
        return IndexFile(f"torch-{version}+cpu-{PYTHON.tag}-{PYTHON.tag}-{LINUX}.whl", version, "", yanked)

    assert torch_supply._newest([file("2.9.0", False), file("2.9.1", True)], cpu=True).url == "2.9.0"


@pytest.mark.parametrize("down", [None, (500, "text/html", b"")], ids=["no server", "500"])
def test_the_newest_is_not_known_where_an_index_is_down(monkeypatch, caplog, down):
    with index(monkeypatch, {"main": down, "extra": listing(row("2.16.0.dev1"))}):
        for newest in (lambda: canary.newest(PYTHON), manage.newest_torch):
            with pytest.raises(PackageIndexError, match="does not answer: http://127.0.0.1"):
                newest()
        assert not caplog.records
        assert slim_torch.wheel_of("2.16.0.dev1", PYTHON)
        assert "an index does not answer, and is passed over: http://127.0.0.1" in caplog.text


def test_an_index_without_the_project_is_no_fault(monkeypatch, caplog):
    with index(monkeypatch, {"main": listing(row("2.15.0")), "extra": (404, "text/html", b"")}):
        assert canary.newest(PYTHON) == ["2.15.0"]
        assert slim_torch.wheel_of("2.15.0", PYTHON) and not caplog.records


@pytest.mark.parametrize(
    "page",
    [
        listing({"filename": 5, "url": "/x"}),
        listing({"filename": "x.whl", "url": ["/x"]}),
        listing({"filename": "x.whl", "url": "/x", "hashes": [1]}),
        (200, package_index.JSON, b"[" * 300_000),
        (200, package_index.JSON, b"5"),
        (200, "text/html", b"<![foo[bar"),
    ],
    ids=["name", "address", "hashes", "deep", "number", "section"],
)
def test_a_page_of_another_shape_is_a_fault_of_the_index(monkeypatch, page):
    with index(monkeypatch, {"main": page}), pytest.raises(PackageIndexError, match="no index holds torch"):
        canary.newest(PYTHON)


TORCH = "2.99.0"
BASE = {"torch/version.py": VERSION_FILE, "torch/__init__.py": "\nimport os\n", "torch/lib/x.py": ""}
RECORD = f"torch-{TORCH}.dist-info/RECORD"


@pytest.mark.parametrize(
    "files,words",
    [
        ({**BASE, RECORD: "torch/version.py,sha256=x\n"}, "its RECORD cannot be read"),
        ({**BASE, RECORD: "torch/version.py,sha256=A,1\n"}, "its RECORD cannot be read"),
        ({**BASE, RECORD: b"\xff\xfe,,\n"}, "its RECORD cannot be read"),
        ({"torch/version.py": VERSION_FILE}, "is no torch: it lacks torch/__init__.py and torch/lib"),
        ({**BASE, "torch/lib/libtorch_cpu.so": "no library"}, "no slim torch can be made of it: "),
        (
            {**BASE, "torch/lib/libtorch_cpu.so": b"\x7fELF\2\1\1" + bytes(20)},
            "no slim torch can be made of it: ",
        ),
        ({**BASE, "torch/__init__.py": "x = 1\n"}, "no slim torch can be made of it: "),
        ({**BASE, "torch/__init__.py": b"\xff\nimport os\n"}, "no slim torch can be made of it: "),
        ({"torch/version.py": VERSION_FILE, "torch/__init__.py": "", "torch/lib": ""}, "can be made of it: "),
    ],
    ids=["columns", "digest", "bytes", "bare", "no library", "cut", "no import", "encoding", "file"],
)
def test_a_wheel_that_is_no_torch_is_a_fault_of_the_index(monkeypatch, tmp_path, files, words):
    with serving(zipped(files.items())) as (url, _):
        file = IndexFile(f"torch-{wheels(TORCH)[0]}.whl", url, "0" * 64)
        monkeypatch.setattr(package_index, "files", lambda project: [file])
        with pytest.raises(PackageIndexError, match=words):
            slim_torch.unit(TORCH, PYTHON).make(tmp_path)


@pytest.mark.parametrize(
    "printed", ["", "5", "{}", '{"kind": "exact", "digests": 5}', "no JSON", "[" * 100_000]
)
def test_a_torch_that_ends_without_results_does_not_serve(monkeypatch, tmp_path, printed):
    monkeypatch.setattr(slim_torch, "_environment", lambda *arguments: {})
    monkeypatch.setattr(slim_torch, "_call", lambda *arguments: printed)
    found = canary.run("2.16.0", PYTHON, tmp_path, EXPECTED, None)
    assert not found.well and "ended without results" in str(found)


# ---- what is kept ------------------------------------------------------------------------------------------


@pytest.fixture
def slim(monkeypatch, tmp_path):
    """A store with a slim torch that Python can import."""

    def make(folder):
        (folder / "torch").mkdir()
        (folder / "torch/__init__.py").write_text("")

    unit = WorkUnit("slim", "torch", {}, make)
    monkeypatch.setattr(slim_torch, "unit", lambda version, python: unit)
    return Store(tmp_path), unit


def test_a_run_leaves_the_stored_torch_as_it_is(slim, tmp_path, caplog):
    store, unit = slim
    environment = slim_torch._environment(TORCH, PYTHON, tmp_path, store)
    slim_torch._call([PYTHON.program, "-c", "import torch"], environment, TORCH, PYTHON)
    assert store.find(unit) and not caplog.records
    assert not list(tmp_path.rglob("__pycache__"))


def test_links_of_lent_packages_are_made_anew(slim, tmp_path):
    """Those that lead nowhere, and those that lead to another place."""
    store, _ = slim
    lent = tmp_path / "lent" / PYTHON.tag
    lent.mkdir(parents=True)
    (lent / "sympy").symlink_to(tmp_path / "gone")
    (lent / "networkx").symlink_to(tmp_path)
    for _ in range(2):
        slim_torch._environment(TORCH, PYTHON, tmp_path, store)
        assert (lent / "sympy/__init__.py").is_file() and (lent / "networkx/__init__.py").is_file()
        assert not list(lent.glob(".*"))


def test_two_lend_one_package_at_once(tmp_path):
    places = [tmp_path / name for name in ("one", "other")]
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: borrow.link(tmp_path / "link", places[k % 2]), range(400)))
    assert (tmp_path / "link").resolve() in places and len(list(tmp_path.iterdir())) == 3


def test_it_runs_every_week_on_nightly_torches():
    said = yaml.safe_load((REPOSITORY / ".github/workflows/canary.yml").read_text(encoding="utf-8"))
    assert "schedule" in said[True]  # YAML reads `on` as true
    (step,) = [s for s in said["jobs"]["canary"]["steps"] if "nox -s canary" in s.get("run", "")]
    assert step["env"]["PIP_EXTRA_INDEX_URL"].endswith("/nightly/cpu")
