"""README's tables are what the registry, the matrix and the recorded measurements say."""

from build_matrix import readme


def test_tables_are_current():
    text = readme.README.read_text(encoding="utf-8")
    assert readme.render(text) == text, "run: python -m build_matrix.readme"


def test_every_section_is_there():
    text = readme.README.read_text(encoding="utf-8")
    for name in readme.SECTIONS:
        assert f"<!-- begin: {name} -->" in text and f"<!-- end: {name} -->" in text
