"""Which apex the running interpreter wants: one pip line, or the nearest cells and why. What `python -m apex which`
says, of this checkout's matrix."""

from __future__ import annotations

from apex._loader import ask


def main(arguments: list[str]) -> int:
    """The command. Returns the exit code."""
    return ask.which(arguments, "python -m build_matrix which")
