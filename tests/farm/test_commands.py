"""What the commands are told wrongly, and what lies where they look, is named in words: no command ends in a
traceback."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from build_matrix import REPOSITORY
from build_matrix.commands import quickstart
from build_matrix.errors import BuildError, PackageIndexError, PinError, StoreError, ToolchainMissing
from build_matrix.spec import pins, toml
from build_matrix.store import DigestCache, Store, engine
from build_matrix.toolchains import find, package_index, provision, torch_supply


def said(*arguments, **variables):
    """(exit code, standard error) of a command of the farm."""
    done = subprocess.run(
        [sys.executable, "-m", "build_matrix", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | variables,
        text=True,
        capture_output=True,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        *(
            f"{command} --dist"
            for command in ("wheel cpu", "wheel npu", "farm", "index", "publish", "variants", "bake cpu")
        ),
        *(f"{command} --target" for command in ("farm", "index", "publish", "variants", "serve", "tree")),
        *(
            "receipts merge x.json --into",
            "receipts merge",
            "tier L0 --out",
            "tier L0 --wheel",
            "bake cpu --archive",
        ),
        *(
            "farm --store",
            "canary --report",
            "explain",
            "explain x.whl --key",
            "sign x.whl --key",
            "sign",
            "verify",
        ),
    ],
)
def test_a_path_that_is_empty_is_no_folder(words, tmp_path):
    """As "$NOT_SET" gives it: it would be the folder that the command runs in."""
    command = [sys.executable, "-m", "build_matrix", *words.split(), ""]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 2 and "it is empty: say a path, or leave the option out" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("plan --workers 0", 2, "Invalid value for '--workers': 0 is not in the range x>=1"),
        ("plan --measure 0", 2, "Invalid value for '--measure'"),
        ("serve --port 70000", 2, "Invalid value for '--port'"),
        ("serve --target {empty}", 1, "there is no index in {empty}. Run: python -m build_matrix index"),
        ("index --dist {empty}", 1, "there is no wheel in {empty}. Run: nox -s build-cpu"),
        ("variants --dist {empty}", 1, "there is no wheel in {empty}. Run: nox -s build-cpu"),
        (
            "index --dist {dist} --target {file}/whl",
            1,
            "nothing can be written to {file}: Not a directory; name",
        ),
        ("farm --test gfx908", 3, "L0(gfx908): no such card is here"),
        ("wheel cpu --python 3.9", 1, "Python cp39 is not in matrix.toml; there are cp310,"),
        ("wheel cpu --python 3.9 --container", 1, "Python cp39 is not in matrix.toml"),
        ("tree --python 3.9 --torch 2.13.0", 1, "Python cp39 is not in matrix.toml"),
        ("farm --only bindings --torch 2.8.0 --python 3.14 --available", 1, "nothing is left to be made"),
        ("plan --only bindings --torch 2.8.0 --python 3.14 --available", 1, "nothing is left to be made"),
        ("farm --scheduler tcp://127.0.0.1:9 --jobs 2", 2, "--jobs counts workers of this machine"),
        ("plan --format github --only packs", 2, "do not go with --format github"),
        ("plan --format github --measure 1", 2, "do not go with --format github"),
        ("plan --accelerator npu --arch sm_90", 1, "sm_90 does not go into apex-npu, but into apex-cuda"),
        ("plan --accelerator cpu --arch gfx942", 1, "gfx942 does not go into apex-cpu, but into apex-rocm"),
        (
            "farm --accelerator npu --torch 2.13.0",
            1,
            "--torch does not belong to apex-npu: it is Python alone",
        ),
        ("plan --accelerator npu --python 3.11 --format github", 1, "--python does not belong to apex-npu"),
        ("plan --accelerator npu --only packs", 1, "--only does not belong to apex-npu"),
        ("compat --table --json", 64, "--table prints Markdown of all cells, and takes nothing beside it"),
    ],
)
def test_options_and_places_that_cannot_be_are_named(tmp_path, arguments, code, words):
    places = {"empty": tmp_path / "empty", "dist": tmp_path / "dist", "file": tmp_path / "file"}
    places["dist"].mkdir()
    (places["dist"] / "apex_cpu-x.whl").write_text("")
    places["file"].write_text("")
    exit_code, errors = said(*(word.format(**places) for word in arguments.split()))
    assert exit_code == code and words.format(**places) in errors


def test_a_connection_that_breaks_is_named():
    """click by itself ends with 1 and without a word."""
    code = (
        "import socket, sys; from apex._loader import streams; from build_matrix import __main__\n"
        "from build_matrix.serve import compat\n"
        "def send(arguments):\n    a, b = socket.socketpair()\n    b.close()\n    a.send(b'x')\n"
        "compat.main = send\n"
        "sys.argv[1:] = ['compat', '--torch', '2.13']\n"
        "sys.exit(streams.run(__main__.run, 'build_matrix'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 1
    assert done.stderr == "build_matrix: who was written to went away: [Errno 32] Broken pipe\n"


def test_an_interrupted_farm_says_so_and_goes_on(tmp_path):
    pytest.importorskip("distributed")
    command = ["farm", "--only=library", "--platform=linux_x86_64", "--jobs=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "build_matrix", *command],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "APEX_STORE": str(tmp_path)},
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches every process of a terminal's group
        # Whatever runs the tests in the background made the signal one that is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 600  # the first object is one of the longest, and the machine may be busy
        while not list(tmp_path.glob("object/*/unit.json")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    finally:
        if process.poll() is None:  # a fault of the test must not leave a farm behind
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert "interrupted; the same command goes on from what is stored" in errors


def test_a_port_that_is_taken_is_named(tmp_path):
    (tmp_path / "whl").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = said("serve", "--port", port, "--target", tmp_path)
    assert (
        code == 1
        and f"port {port} cannot be had: Address already in use; --port 0 takes a free one" in errors
    )


INDEXES = ("index --dist {dist} --target", "publish --dist {dist} --target", "farm --target")
FOLDERS = (
    *("wheel cpu --dist", "wheel npu --dist", "wheel cpu --container --dist", "farm --available --dist"),
    *("variants --dist {dist} --target", "receipts merge {dist} --into", "tier L0 --out", "tree --target"),
)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        *((words, place) for words in FOLDERS for place in ("/dev/null", "/proc/x", "{link}")),
        *((words, "/proc/x") for words in INDEXES),
        *((f"bake cpu --archive {place}", "below") for place in ("/dev/null/", "/proc/x/")),
    ],
)
def test_a_place_that_cannot_be_written_is_named_before_anything_is_begun(tmp_path, words, place):
    """Before 100 seconds of compiling, and before a toolchain is asked for."""
    dist, link = tmp_path / "dist", tmp_path / "link"
    dist.mkdir()
    (dist / "apex_cpu-x.whl").write_text("")
    link.symlink_to("nowhere/below")
    before = sorted(tmp_path.rglob("*"))
    arguments = f"{words} {place}".replace("/ ", "/").split()
    environment = {"APEX_STORE": str(tmp_path / "store"), "PATH": "/nowhere"}
    code, errors = said(*(word.format(dist=dist, link=link) for word in arguments), **environment)
    assert code == 1 and "nothing can be written to" in errors and errors.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.5"])
def test_a_number_of_compilers_that_is_none_is_named(monkeypatch, text):
    monkeypatch.setenv("APEX_JOBS", text)
    with pytest.raises(BuildError, match=f"APEX_JOBS={text} is no number of compilers: say 1 or more"):
        engine.jobs_of()
    monkeypatch.setenv("APEX_JOBS", " 3 ")
    assert (engine.jobs_of(), engine.jobs_of(2)) == (3, 2)
    monkeypatch.setenv("APEX_JOBS", "")
    assert engine.jobs_of() == os.cpu_count()


def test_a_store_that_cannot_be_is_named_before_anything_is_begun(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for root in (file, file / "below"):
        words = f"nothing can be written .* in the store {root}. APEX_STORE names another place"
        for use in (lambda root: engine.Engine(Store(root)), lambda root: DigestCache(root).of_files([file])):
            with pytest.raises(StoreError, match=words):
                use(root)
        assert Store(root).journal() == []
    code, errors = said("tree", "--torch=2.13.0", APEX_STORE=str(file))
    assert code == StoreError.exit_code and f"in the store {file}" in errors


def test_a_python_without_venv_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "PLACE", tmp_path)
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(quickstart.subprocess, "run", lambda command, **options: failed)
    with pytest.raises(BuildError, match="`python -m venv` failed.*apt-get install python3-venv"):
        quickstart._environment()


def test_a_file_that_is_no_toml_is_named(tmp_path):
    file = tmp_path / "yanked.toml"
    file.write_text("[[yanked]]\nwheels = \n")
    with pytest.raises(BuildError, match="yanked.toml is no TOML: Invalid value .*line 2"):
        toml.read(file)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Toolchains are provisioned into an empty folder, by a pip that writes down what it was to bring; the machine has
    those of that folder alone, by the version in a file."""

    def run(command):
        place = command[command.index("--target") + 1]
        os.makedirs(place)
        listed = pathlib.Path(command[command.index("--requirement") + 1]).read_text()
        pathlib.Path(f"{place}/version").write_text(listed.partition("==")[2].split()[0])
        return subprocess.CompletedProcess(command, 0)

    def find_here(name):
        file = tmp_path / name / "version"
        if not file.is_file():
            raise ToolchainMissing(name, "")
        if (have := file.read_text()) != provision.pins.toolchain(name).sha:
            raise PinError(name, "", have, verifiable=False)

    monkeypatch.setattr(provision.subprocess, "run", run)
    monkeypatch.setattr(provision, "find", find_here)
    monkeypatch.setattr(provision, "provisioned_root", lambda: tmp_path)
    return tmp_path


def test_a_toolchain_of_another_version_is_replaced_by_the_pinned_one(elsewhere):
    place = elsewhere / "nvrtc-12.8"
    place.mkdir()
    (place / "version").write_text("12.8.1")
    provision.provision("nvrtc-12.8")
    assert (place / "version").read_text() == provision.pins.toolchain("nvrtc-12.8").sha
    assert [path.name for path in elsewhere.iterdir()] == ["nvrtc-12.8"]
    (place / "kept").write_text("")
    provision.provision("nvrtc-12.8")  # is there: nothing is brought
    assert (place / "kept").is_file()
    (elsewhere / "rocm").mkdir()
    with pytest.raises(
        BuildError, match="rocm does not hold the pinned clang-hip-7.2: remove it, and run this"
    ):
        provision.provision("clang-hip-7.2")


def test_two_that_bring_one_toolchain_do_not_take_each_other_s_half(elsewhere, monkeypatch):
    run, inside, go = provision.subprocess.run, threading.Event(), threading.Event()

    def slow(command):
        if not inside.is_set():
            inside.set()
            assert go.wait(60)
        return run(command)

    monkeypatch.setattr(provision.subprocess, "run", slow)
    first = threading.Thread(target=provision.provision, args=("nvrtc-12.8",))
    first.start()
    assert inside.wait(60)
    provision.provision("nvrtc-12.8")
    place = elsewhere / "nvrtc-12.8"
    (place / "in use").write_text("")
    go.set()
    first.join(60)
    assert (place / "in use").is_file() and list(elsewhere.iterdir()) == [place]


def test_a_compiler_of_another_version_names_the_command_that_brings_the_pinned_one(monkeypatch):
    class Other:
        version = "13.0.1"

    monkeypatch.setattr(sys.modules[find.__module__], "_of_compiler", lambda compiler: [Other()])
    with pytest.raises(PinError) as fault:
        find.__wrapped__("nvcc-13.0")
    assert (
        "have 13.0.1. Run: nox -s toolchain -- nvcc-13.0, or move the pin: nox -s toolchain -- --update"
        in str(fault.value)
    )


def test_a_program_that_is_no_compiler_is_named():
    none = f"CXX names {__file__}, which is no program here"
    for program, words in (("false", "false is no C++ compiler: it refuses"), (__file__, none)):
        code, errors = said("plan", "--only=library", "--platform=linux_x86_64", CXX=program)
        assert code == 1 and words in errors


def test_a_torch_that_does_not_come_is_named(monkeypatch):
    supply = torch_supply.Supply("torch.whl", "http://127.0.0.1:9/torch.whl", 0)
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(torch_supply.subprocess, "run", lambda command, **options: failed)
    with pytest.raises(PackageIndexError, match="torch did not come: .* ended with 1; it says why above"):
        torch_supply.install(supply)
    with pytest.raises(PackageIndexError, match="http://127.0.0.1:9/torch.whl: "):
        package_index.size(supply.url)


def test_pins_are_moved_by_a_rename(tmp_path, monkeypatch):
    file = tmp_path / "related_commits"
    file.write_text("ubuntu|toolchain|nvcc-13.0|x|13.0.1|url\n")
    before = os.stat(file).st_ino
    assert pins.move("toolchain", "nvcc-13.0", "13.0.2", file)
    assert os.stat(file).st_ino != before and "13.0.2" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["related_commits"]


def test_a_list_of_checks_asks_for_no_torch(monkeypatch):
    """`nox -s release-check -- --list` brings what the farm needs, and neither torch nor the packages of the tests."""
    pytest.importorskip("nox")
    import noxfile  # running the file again would put other functions into nox's registry, for tests after this one

    ran, installed = [], []

    class Session:
        posargs = ["--list"]

    monkeypatch.setattr(noxfile, "prepare", lambda session, *groups: installed.extend(groups))
    monkeypatch.setattr(noxfile, "farm", lambda session, *arguments: ran.append(arguments))
    noxfile.release_check.func(Session())
    assert (installed, ran) == (["farm"], [("release-check", "--list")])
    Session.posargs = []
    noxfile.release_check.func(Session())
    assert ran[1:] == [("ensure-torch",), ("release-check",)] and "tests" in installed
