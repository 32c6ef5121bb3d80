"""The tables of README and of the release notes are what the registry, the matrix, the receipts and the recorded
measurements say."""

import pytest

from build_matrix.site import readme


@pytest.mark.parametrize("page", readme.SECTIONS, ids=lambda page: page.name)
def test_tables_are_current(page):
    assert readme.render(page) == page.read_text(encoding="utf-8"), "run: python -m build_matrix readme"
