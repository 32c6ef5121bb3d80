"""The registry and the matrix do not change without a word in the changelog."""

import pytest

from build_matrix.errors import BuildError, GateError
from build_matrix.spec import changes, identity, matrix
from build_matrix.spec.registry import Registry


def test_every_change_has_its_entry():
    changes.check()


def test_the_inventory_is_the_matrix_and_the_registry():
    have = changes.inventory()
    axes = matrix.load()
    assert {f"torch {release}" for release in axes.torch} <= have
    assert sum(line.startswith("pack ") for line in have) == len(axes.packs)
    assert sum(line.startswith("op ") for line in have) == len(Registry.load().ops())
    assert "import name amp_C, complete" in have


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "changes.toml"
    path.write_text("# the changelog\n")
    return path


def test_entries_are_written_and_add_up(file, monkeypatch):
    have = {"op a", "import name x, planned"}
    monkeypatch.setattr(changes, "inventory", lambda: have)
    with pytest.raises(GateError, match="new: import name x, planned\n  new: op a\n  write an entry: python"):
        changes.check(file)
    changes.add('The first, "quoted".', "1.10.0", file)
    changes.check(file)
    with pytest.raises(BuildError, match="no entry is needed"):
        changes.add("Again.", "1.10.0", file)
    have.symmetric_difference_update({"import name x, planned", "import name x, complete", "op b"})
    with pytest.raises(
        GateError, match="new: import name x, complete\n  new: op b\n  gone: import name x, planned"
    ):
        changes.check(file)
    changes.add("x is whole.", "1.11.0", file)
    changes.check(file)
    first, second = changes.load(file)
    assert first.text == 'The first, "quoted".' and first.removed == ()
    assert (second.version, second.removed) == ("1.11.0", ("import name x, planned",))
    assert second.added == ("import name x, complete", "op b")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('version = "1"\ntext = "x"\nadded = ["op a"]', "adds what is there, or removes what is not: op a"),
        ('version = "1"\ntext = "x"\nremoved = ["op z"]', "adds what is there, or removes what is not: op z"),
        ('version = "1"\ntext = "x"', "says nothing, or names nothing"),
        ('version = "1"\ntext = " "\nadded = ["op c"]', "says nothing, or names nothing"),
        ('text = "x"\nadded = ["op c"]', "entry 'x': .*version"),
        ('version = "1"\ntext = "x"\nnew = ["op c"]', "entry 'x': .*new"),
    ],
)
def test_an_entry_that_is_wrong_is_named(file, entry, words):
    file.write_text(f'[[change]]\nversion = "1"\ntext = "a"\nadded = ["op a"]\n\n[[change]]\n{entry}\n')
    with pytest.raises(BuildError, match=words):
        changes.load(file)


def test_no_entry_is_of_a_later_version_than_this():
    assert all(matrix.numbers(c.version) <= matrix.numbers(identity.version()) for c in changes.load())


@pytest.mark.parametrize("text", ["", " \n", "a\x7fb", "\udcff"])
def test_an_entry_that_nobody_could_read_is_not_written(file, monkeypatch, text):
    monkeypatch.setattr(changes, "inventory", lambda: {"op a"})
    before = file.read_bytes() if file.exists() else None
    with pytest.raises(BuildError, match="says nothing that can be written down"):
        changes.add(text, "1.10.0", file)
    assert (file.read_bytes() if file.exists() else None) == before
