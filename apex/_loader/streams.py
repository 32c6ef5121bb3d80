"""The standard streams of the command line: closed, full, or of an encoding that lacks a character."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

OUTPUT = "standard output"  # the `filename` of every OSError that writing to it raises


def run(main: Callable[[], Any], program: str = "apex") -> Any:
    """The exit code of `main()`, which prints.

    1 where the reader of a pipe went away, 2 with one line, by `program`, where what was printed could not be written.
    Any other OSError of `main`, that of a socket too, goes on.
    """
    open_closed()
    _name_output()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            code = main()
        except SystemExit as stop:  # argparse's, after --help
            code = stop.code
        sys.stdout.flush()
    except OSError as error:
        if error.filename != OUTPUT:
            raise
        _drop_output()
        if isinstance(error, BrokenPipeError):  # `python -m apex | head`
            return 1
        print(f"{program}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return code


class _Output(io.FileIO):
    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = OUTPUT
            raise


def _name_output() -> None:
    """Lets errors of standard output bear its name: they have none, as those of sockets and of pipes to a child."""
    plain = sys.stdout
    if plain is not sys.__stdout__ or not isinstance(plain, io.TextIOWrapper):
        return  # somebody else's: a notebook's
    plain.flush()
    raw = _Output(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if plain.write_through else io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=plain.encoding,
        line_buffering=plain.line_buffering,
        write_through=plain.write_through,
    )


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
