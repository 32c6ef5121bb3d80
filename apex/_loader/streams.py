"""The standard streams of the command line: closed, full, or of an encoding that lacks a character."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def run(main: Callable[[], Any]) -> Any:
    """The exit code of `main()`, which prints.

    1 where the reader of a pipe went away, 2 with one line where what was printed could not be written.
    """
    open_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            code = main()
        except SystemExit as stop:  # argparse's, after --help
            code = stop.code
        sys.stdout.flush()
    except BrokenPipeError:  # `python -m apex | head`
        _drop_output()
        return 1
    except OSError as error:
        if error.filename is not None:  # a file, not the stream
            raise
        _drop_output()
        print(f"apex: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return code


def open_closed() -> None:
    """Opens /dev/null in the place of standard streams that the caller closed (`>&-`).

    Python has None for these; and the next file that anyone opens would get their number, and what C code prints.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  stays open


def _drop_output() -> None:
    """What is still to be written goes nowhere: the interpreter would try again at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
