"""Tables and paragraphs as pages of this project write them."""

from __future__ import annotations

import textwrap


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(text: str, hanging: str = "") -> str:
    """The text in lines within 120 columns, broken at spaces alone; `hanging` begins all but the first."""
    return textwrap.fill(text, 120, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
