"""Docstrings as reStructuredText. They are plain text with `code` in backquotes and indented examples, so that
they read well in an editor; what reStructuredText would take for markup in them is told apart here."""

from __future__ import annotations

import re

CODE = re.compile(r"(`+[^`]*`+)")
# |p| is a norm, clip_grad_norm_ a name, 2**16 a power, *shape many sizes.
MARKUP = re.compile(r"\||(?<=\w)_(?!\w)|\*")


def convert(lines: list[str]) -> list[str]:
    """The lines of a docstring, without its own indentation: an indented block after an empty line is an example."""
    found: list[str] = []
    outside = 0  # the indentation of the text that an example stands in
    example = False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            found.append(line)
            continue
        if example and indent <= outside:
            example = False
        if not example:
            if number and not lines[number - 1].strip() and indent > outside and any(found):
                found += [" " * outside + "::", ""]
                example = True
            else:
                outside = indent
        found.append(line if example else _escaped(line))
    return found


def _escaped(line: str) -> str:
    parts = CODE.split(line)
    return "".join(part if n % 2 else MARKUP.sub(r"\\\g<0>", part) for n, part in enumerate(parts))
