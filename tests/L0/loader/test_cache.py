"""The disk cache: damage, kill -9, read-only folders, many processes at once."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from apex._loader import layout, system
from apex._loader.jit import cache

from .described import ROOT

KEY = cache.key(unit="u", source="s", arch="sm_90")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never():
    raise AssertionError("made again")


def test_made_once(folder):
    assert cache.fetch(KEY, lambda: b"payload") == b"payload"
    assert cache.fetch(KEY, never) == b"payload"
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


def test_the_key_depends_on_every_part():
    parts = {"unit": "u", "source": "s", "arch": "a", "options": ("x",), "compiler": [1], "driver": None}
    keys = {cache.key(**parts)} | {cache.key(**{**parts, name: "other"}) for name in parts}
    assert len(keys) == len(parts) + 1


@pytest.mark.parametrize(
    "damage", [lambda d: b"", lambda d: d[:-1], lambda d: d[:-1] + b"!", lambda d: b"?" + d[1:]]
)
def test_a_damaged_entry_is_made_again(folder, damage):
    cache.fetch(KEY, lambda: b"payload")
    file = folder / KEY
    file.write_bytes(damage(file.read_bytes()))
    assert cache.fetch(KEY, lambda: b"second") == b"second"
    assert cache.fetch(KEY, never) == b"second"


def test_no_folder_can_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cache.fetch(KEY, lambda: b"payload") == b"payload"
    assert not cache.usable()


def test_a_home_that_no_shell_has_written_out(tmp_path, monkeypatch):
    """Report: a file of variables said ~/cache, and each folder that a program began in got a folder called ~."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name, found in (
        ("APEX_CACHE_DIR", cache.folder),
        ("APEX_TREE", lambda: layout.built().parent),
    ):
        monkeypatch.setenv(name, "~/place")
        assert found() == tmp_path / "home/place", name
        monkeypatch.setenv(name, "~nobody-of-this-name/place")
        assert found() == Path("~nobody-of-this-name/place"), name
    monkeypatch.setenv("APEX_CACHE_DIR", "~/place")
    assert cache.usable() and not (tmp_path / "~").exists()


def test_a_read_only_folder_is_read_but_not_written(folder):
    cache.fetch(KEY, lambda: b"payload")
    os.chmod(folder, 0o555)
    code = f"""
from apex._loader.jit import cache
print(cache.fetch({KEY!r}, lambda: b"other"), cache.fetch("f" * 64, lambda: b"other"), cache.usable())
"""
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:  # root writes anywhere, unless this right is taken away
        if not shutil.which("setpriv"):
            pytest.skip("run by root, without setpriv: no folder is read-only")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    os.chmod(folder, 0o755)
    assert done.stdout.split() == ["b'payload'", "b'other'", "False"], done.stderr
    assert sorted(os.listdir(folder)) == sorted([KEY, f"{KEY}.lock"])


def test_a_home_that_cannot_be_written(monkeypatch):
    monkeypatch.delenv("APEX_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    assert cache.fetch(KEY, lambda: b"payload") == b"payload"


def test_kill_9_in_the_middle(folder):
    """The lock of a killed process is free at once, and its partial work is not taken for an entry."""
    code = f"""
import sys, time
from apex._loader.jit import cache
def make():
    print("holding", flush=True)
    time.sleep(600)
cache.fetch({KEY!r}, make)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert child.stdout.readline() == b"holding\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    begin = time.monotonic()
    assert cache.fetch(KEY, lambda: b"payload") == b"payload"
    assert time.monotonic() - begin < 2


def test_a_holder_that_never_ends_does_not_block_for_ever(folder, monkeypatch):
    import fcntl

    monkeypatch.setattr(cache, "_LONGEST_WAIT", 0.2)
    folder.mkdir()
    with open(folder / f"{KEY}.lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cache.fetch(KEY, lambda: b"payload") == b"payload"


def test_abandoned_partial_files_go_away(folder):
    folder.mkdir()
    old, young = folder / ".partial-old", folder / ".partial-young"
    old.write_text("x")
    young.write_text("x")
    os.utime(old, (0, 0))
    cache.fetch(KEY, lambda: b"payload")
    assert not old.exists() and young.exists()


def _fetch_and_log(log):
    def make():
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(0.3)
        return b"payload" * 1000

    assert cache.fetch(KEY, make) == b"payload" * 1000


def test_many_processes_make_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    children = [context.Process(target=_fetch_and_log, args=(log,)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert log.read_text() == "made\n"


def test_threads_make_it_once():
    import threading

    made = []

    def make():
        made.append(1)
        time.sleep(0.1)
        return b"payload"

    threads = [threading.Thread(target=cache.fetch, args=(KEY, make)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_what_make_raises_comes_out_and_leaves_nothing(folder):
    with pytest.raises(ZeroDivisionError):
        cache.fetch(KEY, lambda: 1 // 0)
    assert not (folder / KEY).exists()
    assert cache.fetch(KEY, lambda: b"payload") == b"payload"


OTHERS = 1234  # a user that runs nothing here
ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def foreign_entry(folder):
    """An entry with the right digest, as somebody who knows the key can write it."""
    import hashlib

    folder.mkdir(exist_ok=True)
    payload = b"somebody else's machine code"
    (folder / KEY).write_bytes(cache._MAGIC + hashlib.sha256(payload).digest() + payload)
    return folder / KEY


def fetched_here():
    """What fetch gives; its warning says why the cache was passed over."""
    with pytest.warns(RuntimeWarning) as said:
        assert cache.fetch(KEY, lambda: b"compiled here") == b"compiled here"
    return str(said[0].message)


@ROOT_ALONE
def test_an_entry_of_another_user_is_not_run(folder):
    os.chown(foreign_entry(folder), OTHERS, OTHERS)
    assert f"belongs to user {OTHERS}" in fetched_here()
    assert cache.fetch(KEY, never) == b"compiled here"  # written anew, and ours


@ROOT_ALONE
def test_a_folder_of_another_user_is_neither_read_nor_written(folder):
    foreign_entry(folder)
    os.chown(folder, OTHERS, OTHERS)
    said = fetched_here()
    assert f"belongs to user {OTHERS}" in said and "APEX_CACHE_DIR" in said
    assert sorted(os.listdir(folder)) == [KEY] and not cache.usable()
    assert cache.refusal() in said


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o770])
def test_a_folder_that_others_can_write_is_not_trusted(folder, mode):
    foreign_entry(folder)
    os.chmod(folder, mode)
    assert "can be written by other users" in fetched_here()
    assert os.listdir(folder) == [KEY]


@pytest.mark.parametrize("mode", [0o666, 0o660])
def test_an_entry_that_others_can_write_is_not_run(folder, mode):
    os.chmod(foreign_entry(folder), mode)
    assert "can be written by other users" in fetched_here()


def test_a_link_is_not_followed(folder, tmp_path):
    foreign_entry(folder).rename(tmp_path / "elsewhere")
    (folder / KEY).symlink_to(tmp_path / "elsewhere")
    assert "is passed over" in fetched_here()
    assert (tmp_path / "elsewhere").exists() and not (folder / KEY).is_symlink()


@pytest.mark.parametrize("name", [KEY, f"{KEY}.lock"])
def test_a_fifo_in_the_place_of_an_entry_or_a_lock_does_not_hang(folder, name):
    folder.mkdir()
    os.mkfifo(folder / name)
    code = f"from apex._loader.jit import cache; print(cache.fetch({KEY!r}, lambda: b'compiled here'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "b'compiled here'", done.stderr
    assert name != KEY or "is no regular file" in done.stderr


@ROOT_ALONE
def test_roots_cache_in_an_image_serves_other_users(folder):
    """A baked image: entries of root, which the user who runs can read and not write."""
    python = shutil.which("python3", path="/usr/bin:/bin")  # one that other users can run too
    if not shutil.which("setpriv") or not python:
        pytest.skip("no setpriv, or no Python of the system: nothing can be run as another user")
    assert cache.fetch(KEY, lambda: b"payload") == b"payload"
    shared = tempfile.mkdtemp(prefix="apex-baked-")  # pytest's own folders are closed to others
    try:
        os.makedirs(f"{shared}/apex/_loader")
        shutil.copyfile(folder / KEY, f"{shared}/{KEY}")
        shutil.copyfile(cache.__file__, f"{shared}/cache.py")  # the checkout may be closed to others too
        shutil.copyfile(system.__file__, f"{shared}/apex/_loader/system.py")  # what the cache imports
        for place, _, files in os.walk(shared):
            os.chmod(place, 0o755)
            for file in files:
                os.chmod(os.path.join(place, file), 0o644)
        as_other = ["setpriv", f"--reuid={OTHERS}", f"--regid={OTHERS}", "--clear-groups"]
        code = f"import cache; print(cache.fetch({KEY!r}, lambda: b'again'), cache.usable())"
        done = subprocess.run(
            [*as_other, python, "-B", "-c", code],
            capture_output=True,
            text=True,
            cwd=shared,
            env={"APEX_CACHE_DIR": shared, "PYTHONPATH": shared},
        )
    finally:
        shutil.rmtree(shared)
    assert done.stdout.split() == ["b'payload'", "False"], done.stderr
    assert not done.stderr
