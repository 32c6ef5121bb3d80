"""The store: a unit is run once, whatever happens while it runs."""

import errno
import json
import logging
import os
import threading

import pytest

from build_matrix.errors import StoreError
from build_matrix.store import Store, WorkUnit
from build_matrix.store.engine import Engine
from build_matrix.store.store import DigestCache, default_root


def unit(inputs, make, name="x"):
    return WorkUnit("test", name, inputs, make)


def write(text, calls=None):
    def make(folder):
        if calls is not None:
            calls.append(text)
        (folder / "out").write_text(text)

    return make


def test_a_home_in_its_address_is_the_user_s(monkeypatch, tmp_path):
    """Report: where no shell had written out the ~, a folder of that name was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("APEX_STORE", "~/store")
    assert default_root() == tmp_path / "store"


def test_same_inputs_run_once(tmp_path):
    store, calls = Store(tmp_path), []
    first = store.build(unit({"a": 1}, write("one", calls)))
    again = Store(tmp_path).build(unit({"a": 1}, write("one", calls)))
    assert calls == ["one"] and not first.stored and again.stored
    assert (again.folder / "out").read_text() == "one" and again.size == 3


def test_other_inputs_run_again(tmp_path):
    store, calls = Store(tmp_path), []
    store.build(unit({"a": 1}, write("one", calls)))
    store.build(unit({"a": 2}, write("two", calls)))
    store.build(unit({"a": 1}, write("three", calls), name="y"))
    assert calls == ["one", "two", "three"]


def test_a_unit_that_fails_leaves_nothing(tmp_path):
    store = Store(tmp_path)

    def fail(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("compiler died")

    with pytest.raises(RuntimeError):
        store.build(unit({}, fail))
    assert not [p for p in (tmp_path / "test").iterdir() if p.is_dir()]
    assert not store.build(unit({}, write("ok"))).stored


def test_a_torn_folder_is_made_again(tmp_path):
    store = Store(tmp_path)
    made = store.build(unit({}, write("ok")))
    (made.folder / "unit.json").unlink()
    assert not store.build(unit({}, write("ok"))).stored


@pytest.mark.parametrize("file, text", [("unit.json", "{"), ("unit.json", "[]"), ("out", "o"), ("out", None)])
def test_a_damaged_output_is_made_again(tmp_path, file, text):
    store = Store(tmp_path)
    damaged = store.build(unit({}, write("ok"))).folder / file
    damaged.unlink() if text is None else damaged.write_text(text)
    assert not store.build(unit({}, write("ok"))).stored
    assert (damaged.parent / "out").read_text() == "ok" and store.build(unit({}, write("ok"))).stored


def test_a_flipped_bit_is_told_and_made_again(tmp_path, caplog):
    """Same size, same time of change: what a disk does, not a program. The next process must notice."""
    made = Store(tmp_path).build(unit({}, write("ok"))).folder / "out"
    before = made.stat()
    made.write_text("oj")
    os.utime(made, ns=(before.st_atime_ns, before.st_mtime_ns))
    Store._sound.clear()
    with caplog.at_level(logging.WARNING):
        again = Store(tmp_path).build(unit({}, write("ok")))
    assert not again.stored and made.read_text() == "ok"
    assert "is damaged" in caplog.text and str(made.parent) in caplog.text


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    def fill(folder):
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match="no space is left for test x in the store .* APEX_STORE"):
        Store(tmp_path).build(unit({}, fill))
    assert not [p for p in (tmp_path / "test").iterdir() if p.is_dir()]


def test_the_journal_has_a_line_for_each_that_was_made(tmp_path):
    store = Store(tmp_path)
    assert store.journal() == []
    for inputs in ({"a": 1}, {"a": 1}, {"a": 2}):
        store.build(unit(inputs, write("x")))
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"kind": "te')  # a kill in mid-line
    assert [(line["kind"], line["name"]) for line in store.journal()] == [("test", "x")] * 2
    assert len({json.dumps(line["key"]) for line in store.journal()}) == 2


def test_what_a_killed_build_left_goes_when_the_unit_is_made(tmp_path):
    store, wanted = Store(tmp_path), unit({}, write("ok"))
    left = tmp_path / "test" / f".partial-{wanted.key[:40]}-abc"
    left.mkdir(parents=True)
    (left / "out").write_text("o")
    store.build(wanted)
    assert not left.exists()


def test_threads_that_want_one_unit_share_it(tmp_path):
    store, calls = Store(tmp_path), []
    threads = [threading.Thread(target=lambda: store.build(unit({}, write("x", calls)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["x"]


def test_the_engine_keeps_order_and_reports_what_was_made(tmp_path):
    told = []
    engine = Engine(Store(tmp_path), jobs=4, tell=told.append)
    results = engine.run([unit({"n": n}, write(str(n))) for n in range(10)])
    assert [(r.folder / "out").read_text() for r in results] == [str(n) for n in range(10)]
    assert results == engine.finished
    assert sorted(told, key=results.index) == results  # each once, as they were done


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "7", '{"bytes": NaN, "seconds": 1}'])
def test_a_record_that_is_none_is_made_again(tmp_path, text):
    store = Store(tmp_path)
    wanted = WorkUnit("test", "x", {}, lambda folder: (folder / "out").write_text("made"))
    made = store.build(wanted)
    (made.folder / "unit.json").write_text(text)
    assert store.find(wanted) is None
    assert not store.build(wanted).stored


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "7", ""])
def test_digests_that_are_none_are_taken_again(tmp_path, text):
    (tmp_path / "digests.json").write_text(text)
    assert DigestCache(tmp_path).of_files([]) == DigestCache(tmp_path).of_files([])
