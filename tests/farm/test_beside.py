"""Builds that run beside each other, and what a killed one left: neither gets into a tree or a wheel."""

import threading
import types

import pytest

from build_matrix.errors import BuildError
from build_matrix.parts import host_library, tree
from build_matrix.wheels import build


def test_builds_of_one_accelerator_and_python_beside_each_other_keep_to_their_own_tree(tmp_path, monkeypatch):
    """Another build filled the same folder between a tree and its wheel."""
    places = []

    def fill(made, target, engine):
        places.append(target)
        (target / "apex").mkdir()
        (target / "apex/packs").write_text(" ".join(made.archs))
        return {}

    def unit(target, facts, python, **more):
        if len(places) == 1:
            build.one_wheel(request("sm_80"), python, runs, tmp_path)
        assert (target / "apex/packs").read_text() == ("sm_80" if target == places[-1] else "sm_90")
        return "unit"

    def request(arch):
        return build.tree.Request(accelerator="cuda", archs=(arch,))

    runs = types.SimpleNamespace(store=None, one=lambda unit: types.SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr(build.tree, "fill", fill)
    monkeypatch.setattr(build.wheel, "unit", unit)
    monkeypatch.setattr(build.wheel, "publish", lambda folder, dist: dist / "wheel")
    build.one_wheel(request("sm_90"), types.SimpleNamespace(tag="cp311"), runs, tmp_path)
    assert len(set(places)) == 2 and not any(place.exists() for place in places)


def test_trees_are_filled_one_after_the_other_and_what_a_killed_run_left_goes(tmp_path, monkeypatch):
    inside, go, at_work = threading.Event(), threading.Event(), []

    def place(library, folder):
        at_work.append(folder)
        folder.mkdir(parents=True)
        inside.set()
        assert go.wait(60) and at_work[-1] == folder

    monkeypatch.setattr(host_library, "build", lambda *arguments: "unit")
    monkeypatch.setattr(host_library, "place", place)
    monkeypatch.setattr(tree, "_inputs", lambda *arguments: {})
    monkeypatch.setattr(tree, "_facts", lambda *arguments: {})
    monkeypatch.setattr(tree, "_lay_data", lambda root, *more: (root / "build.json").write_text("{}"))
    engine = types.SimpleNamespace(
        store=None, run=lambda units: [], one=lambda unit: types.SimpleNamespace(folder=tmp_path)
    )
    (tmp_path / ".apex-1/packs").mkdir(parents=True)
    (tmp_path / ".apex-1-old").mkdir()
    threads = [threading.Thread(target=tree.fill, args=(tree.Request(), tmp_path, engine)) for _ in range(2)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    threads[1].join(0.5)
    assert len(at_work) == 1
    go.set()
    for thread in threads:
        thread.join(60)
    assert len(at_work) == 2 and sorted(p.name for p in tmp_path.iterdir()) == [".lock", "apex"]


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (
            lambda place: (place / "__init__.py").write_text("mine"),
            "holds '__init__.py'",
        ),  # --target . of a checkout
        (lambda place: (place / "lib").mkdir(), "has no build.json"),
    ],
)
def test_a_folder_that_is_no_tree_is_refused_and_stays(tmp_path, fill, words):
    """Before anything is built: there is no engine."""
    place = tmp_path / "apex"
    place.mkdir()
    tree.check_target(tmp_path)  # an empty folder will do
    (tmp_path / ".apex-mine").mkdir()
    fill(place)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BuildError, match=f"{place} {words}, and a tree would take its place"):
        tree.fill(tree.Request(), tmp_path, None)
    assert sorted(tmp_path.rglob("*")) == before
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BuildError, match=f"{place} is no folder"):
        tree.fill(tree.Request(), tmp_path, None)
