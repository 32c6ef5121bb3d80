"""What an import of an absent extension name says.

The finder stands last in sys.meta_path, so it is asked only for modules that nothing else has. For an import
statement it raises ModuleNotFoundError with the release that brings the module. For everyone who merely looks
(importlib.util.find_spec, pkgutil) it answers None as any finder would. The two are told apart by the
caller's frame, because the import system offers no other way; where the frame is not recognised the answer is
None, and Python's own "No module named ..." follows.
"""

from __future__ import annotations

import sys


class Finder:
    """Never finds a module."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is not None or not _is_import(sys._getframe(1)):
            return None
        text = _message(name)
        if text:
            raise ModuleNotFoundError(text, name=name)
        return None


def _is_import(frame):
    """Whether `frame` (importlib's _find_spec) was called to carry out an import."""
    caller = frame.f_back if frame else None
    return (
        caller is not None
        and caller.f_code.co_name == "_find_and_load_unlocked"
        and caller.f_globals.get("__name__") == "importlib._bootstrap"
    )


def _message(name):
    from apex._legacy import message

    try:
        return message(name)
    except Exception:  # a damaged registry must not change what an unrelated import does
        return None


def install():
    """Appends the finder to sys.meta_path, once."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
