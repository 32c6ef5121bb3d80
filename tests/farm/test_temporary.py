"""Folders that live as long as a command: gone when a signal ends it, and after a kill when the next one comes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from build_matrix import REPOSITORY
from build_matrix.store import files

WAITS = """
import sys, time
from build_matrix import __main__ as command
from build_matrix.check import verify
verify.run = lambda *arguments: time.sleep(60)
sys.argv = ["build_matrix", "verify", __file__]
command.run()
"""
HOLDS = """
import sys, time
from build_matrix.store import files
with files.temporary("verify"):
    time.sleep(60)
"""
WRITES = """
import sys
from pathlib import Path
from build_matrix.store import files
path, letter = Path(sys.argv[1]), sys.argv[2]
for _ in range(300):
    files.write(path, letter * 50_000)
"""
STOPS = """
import sys, time
from pathlib import Path
from build_matrix.store import files
with files.beside(Path(sys.argv[1])):
    time.sleep(60)
"""
COMPILES = """
import subprocess, sys
from pathlib import Path
from build_matrix import __main__ as command
from build_matrix.commands import tree
from build_matrix.store import Store, WorkUnit, engine
def make(folder):
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=True)
tree.tree.fill = lambda *arguments: engine.Engine(Store(Path(sys.argv[-1]))).run([WorkUnit("code", "x", {}, make)])
sys.argv = ["build_matrix", "tree", "--torch=2.13.0", "--target", sys.argv[1]]
command.run()
"""


def begin(program, place, *arguments):
    """A process of `program`, whose temporary folder is `place`."""
    script = place / "program.py"
    script.write_text(program)
    environment = os.environ | {"TMPDIR": str(place), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, script, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stderr=subprocess.PIPE, preexec_fn=_heed
    )


def _heed():
    """Children of nohup, and of a shell's background, do not heed these of themselves."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(place, pattern):
    """The first path that matches, as soon as there is one."""
    for _ in range(600):
        if found := list(place.glob(pattern)):
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} came")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_a_signal_ends_leaves_no_folder(number, tmp_path):
    process = begin(WAITS, tmp_path)
    wait_for(tmp_path, "apex-verify-*")
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number and not list(tmp_path.glob("*apex-*")), said
    assert "the same command goes on from what is stored" in said.splitlines()[-1] and "Traceback" not in said


def test_a_compiler_ends_with_the_command(tmp_path):
    """It is a process that a thread waits for; what the unit had begun goes, too."""
    process = begin(COMPILES, tmp_path, tmp_path / "store")
    wait_for(tmp_path, "store/code/.partial-*")
    time.sleep(1)
    begun = time.monotonic()
    process.terminate()
    _, said = process.communicate(timeout=50)
    assert time.monotonic() - begun < 20 and process.returncode == 128 + signal.SIGTERM, said
    assert not list(tmp_path.glob("store/code/.partial-*"))


def test_what_a_killed_command_left_goes_with_the_next_and_what_is_in_use_stays(tmp_path):
    killed = begin(HOLDS, tmp_path)
    try:
        left = wait_for(tmp_path, "apex-verify-*")
        with files.temporary("verify", tmp_path) as own:
            assert left.is_dir() and own.is_dir()
        assert left.is_dir() and not own.exists()
        killed.kill()
        killed.wait()
        (tmp_path / "apex-tree-0.held").mkdir()  # of another purpose
        with files.temporary("verify", tmp_path) as own:
            assert not left.exists() and list(tmp_path.glob("apex-verify-*")) == [own]
        assert (tmp_path / "apex-tree-0.held").is_dir()
    finally:
        killed.kill()
        killed.communicate()


def test_two_that_write_one_file_at_once_leave_and_show_it_whole(tmp_path):
    path = tmp_path / "out/a.json"
    path.parent.mkdir()
    files.write(path, "a" * 50_000)
    writers = [begin(WRITES, tmp_path, path, letter) for letter in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        text = path.read_text()
        seen.add((text[:1], len(text), len(set(text))))
    for writer in writers:
        assert writer.communicate()[1] == "" and writer.returncode == 0
    assert seen <= {("a", 50_000, 1), ("b", 50_000, 1)} and list(path.parent.iterdir()) == [path]


def test_a_file_is_written_through_no_link_and_is_any_new_file_s(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "out/a.json"
    path.parent.mkdir()
    victim.write_text("kept")
    for link in (path, path.with_name(".a.json.partial")):
        link.symlink_to(victim)
    before = os.umask(0o027)
    try:
        files.write(path, "new")
    finally:
        os.umask(before)
    assert victim.read_text() == "kept" and path.read_text() == "new"
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o640


def test_half_a_file_goes_after_a_failure_and_a_kill(tmp_path):
    path = tmp_path / "out/[a].json"
    path.parent.mkdir()
    with pytest.raises(UnicodeEncodeError):
        files.write(path, "\ud800")
    assert not list(path.parent.iterdir())
    killed = begin(STOPS, tmp_path, path)
    try:
        left = wait_for(tmp_path, "out/.*.partial")
        theirs = path.with_name(".[a].json.partial")
        theirs.write_text("of somebody else")
        files.write(path, "1")
        assert left.is_file()  # in use
        killed.kill()
        killed.wait()
        files.write(path, "2")
        assert path.read_text() == "2" and sorted(path.parent.iterdir()) == [theirs, path]
    finally:
        killed.kill()
        killed.communicate()


def test_no_half_file_has_a_name_that_another_writer_has():
    """What writes beside a file goes by way of files.beside."""
    fixed = re.compile(r"""f?["']\.\{?[\w.]*\}?\.partial["']""")
    paths = [p for p in (REPOSITORY / "build_matrix").rglob("*.py")]
    found = [p.relative_to(REPOSITORY).as_posix() for p in paths if fixed.search(p.read_text("utf-8"))]
    assert found == []


def test_no_other_temporary_folders_are_made():
    """Those that lie beside what they become are swept by their own names: the store's, a tree's, an index'."""
    own = {"build_matrix/store/files.py", "build_matrix/store/store.py", "build_matrix/serve/index.py"}
    paths = [p for folder in ("build_matrix", "ci", "scripts") for p in (REPOSITORY / folder).rglob("*.py")]
    makes = re.compile(r"TemporaryDirectory|mkdtemp")
    found = {
        p.relative_to(REPOSITORY).as_posix() for p in paths if makes.search(p.read_text(encoding="utf-8"))
    }
    assert found == own
