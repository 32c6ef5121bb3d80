"""A store that machines share: a folder by fsspec's file system, and S3 against a real server on loopback."""

import logging
import tarfile
import threading

import pytest

from build_matrix.errors import RequirementMissing, StoreError
from build_matrix.store import Store, WorkUnit


def unit(name="x", calls=None):
    def make(folder):
        if calls is not None:
            calls.append(name)
        (folder / "deep").mkdir()
        (folder / "deep/out").write_text(name * 1000)

    return WorkUnit("test", name, {"a": 1}, make)


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path):
    """The address of an empty shared store."""
    if request.param == "folder":
        return f"file://{tmp_path}/shared"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


def at(place, root, monkeypatch):
    monkeypatch.setenv("APEX_STORE", str(root))
    return Store.at(place)


def test_what_one_machine_made_another_takes(place, tmp_path, monkeypatch):
    calls = []
    one, two = (at(place, tmp_path / name, monkeypatch) for name in "12")
    made = one.build(unit(calls=calls))
    taken = two.build(unit(calls=calls))
    assert calls == ["x"] and taken.stored and not made.stored
    assert taken.folder == two.root / "test" / taken.unit.key[:40]
    assert (taken.folder / "deep/out").read_text() == "x" * 1000 and taken.size == made.size == 1000
    assert two.output("test", made.unit.key) == taken.folder and two.place == place
    assert two.journal() == [] and len(one.journal()) == 1


def test_what_was_here_before_goes_there_too(place, tmp_path, monkeypatch):
    """A machine with a warm store joins; so does one that was killed between making and giving."""
    Store(tmp_path / "1").build(unit())
    assert at(place, tmp_path / "1", monkeypatch).build(unit()).stored
    assert at(place, tmp_path / "2", monkeypatch).build(unit()).stored


@pytest.mark.parametrize("damage", ["cut", "other contents", "nothing"])
def test_a_damaged_archive_is_told_and_made_again(place, tmp_path, monkeypatch, caplog, damage):
    one = at(place, tmp_path / "1", monkeypatch)
    made = one.build(unit())
    name = one.shared._name("test", made.folder.name)
    if damage == "cut":
        data = one.shared.system.cat_file(name)
        one.shared.system.pipe_file(name, data[: len(data) // 2])
    elif damage == "nothing":
        one.shared.system.pipe_file(name, b"")
    else:  # a whole archive that is not what was stored
        (made.folder / "deep/out").write_text("y" * 1000)
        packed = tmp_path / "other.tar.gz"
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(made.folder, arcname=".")
        one.shared.system.put_file(str(packed), name)
    two = at(place, tmp_path / "2", monkeypatch)
    with caplog.at_level(logging.WARNING):
        again = two.build(unit())
    assert not again.stored and (again.folder / "deep/out").read_text() == "x" * 1000
    assert "is damaged" in caplog.text
    assert not list((two.root / "test").glob(".*"))


def test_a_place_that_can_be_asked_is_no_fault(place, tmp_path, monkeypatch):
    at(place, tmp_path / "1", monkeypatch).check()


def test_an_output_that_nobody_made_is_named(place, tmp_path, monkeypatch):
    with pytest.raises(StoreError, match=f"there is no test/{'0' * 40} in the store {place}"):
        at(place, tmp_path / "1", monkeypatch).output("test", "0" * 64)


def test_threads_of_one_machine_share_one_download(place, tmp_path, monkeypatch):
    at(place, tmp_path / "1", monkeypatch).build(unit())
    two, results = at(place, tmp_path / "2", monkeypatch), []
    threads = [threading.Thread(target=lambda: results.append(two.build(unit()).stored)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_a_bucket_that_is_not_there_is_named(s3, tmp_path, monkeypatch):
    store = at("s3://nowhere/x", tmp_path, monkeypatch)
    for use in (store.check, lambda: store.build(unit())):
        with pytest.raises(
            StoreError, match="be .* in the store s3://nowhere/x. --store names another"
        ) as fault:
            use()
        assert "AWS_ENDPOINT_URL" in str(fault.value) and "APEX_STORE" not in str(fault.value)


def test_a_server_that_does_not_answer_is_named(s3, tmp_path, monkeypatch):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 0)
    store = at("s3://farm", tmp_path, monkeypatch)
    for use in (store.check, lambda: store.build(unit())):
        with pytest.raises(StoreError, match="can(not)? be looked up .* in the store s3://farm"):
            use()
    s3fs.S3FileSystem.clear_instance_cache()


def test_an_address_of_no_file_system_is_named(tmp_path):
    with pytest.raises((StoreError, RequirementMissing), match="nosuch"):
        Store.at("nosuch://x")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("file:///proc/nothing", "nothing can be written"),
        ("http://127.0.0.1:9/x", "nothing can be (written|looked up)"),
        ("memory://x", "the memory of one process"),
        ("github://x", "missing 2 required positional arguments"),
        ("s3:/bucket/x", "a URL has two slashes after its protocol"),
    ],
)
def test_a_place_that_keeps_nothing_is_named_before_anything_is_made(tmp_path, monkeypatch, address, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((StoreError, RequirementMissing), match=f"{words}|is missing"):
        at(address, tmp_path / "1", monkeypatch).check()
    assert not list(tmp_path.glob("*:"))


def test_the_store_of_this_machine_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APEX_STORE", "s3://bucket/x")
    with pytest.raises(StoreError, match="APEX_STORE names a folder of this machine, and --store a URL"):
        Store()
    # Workers of a cluster have working folders of their own.
    assert Store.at("relative").place == str(tmp_path / "relative")
