"""Structs and functions of libapex's C interface, as the library describes them (`apex_interface` in apex.h)."""

from __future__ import annotations

import ctypes
import functools
import json
import struct

from apex._loader import layout as places
from apex._loader import library, remedies
from apex._loader.errors import InstallationError

_CTYPES = {
    "d": ctypes.c_double, "f": ctypes.c_float, "?": ctypes.c_bool, "N": ctypes.c_size_t, "i": ctypes.c_int32,
    "I": ctypes.c_uint32, "q": ctypes.c_int64, "Q": ctypes.c_uint64, "P": ctypes.c_void_p, "z": ctypes.c_char_p,
    "v": None,
}  # fmt: skip


def exists():
    """Whether the installed libapex describes itself: one that was built before this module does not."""
    return hasattr(library.load().c, "apex_interface")


@functools.cache
def _described():
    text = library.load().c.apex_interface
    text.restype, text.argtypes = ctypes.c_char_p, []
    return json.loads(text())


def _other_version(what):
    remedy = "python -m build_matrix tree" if places.checkout() else remedies.reinstall()
    return InstallationError(
        f"the installed libapex is of another version than apex beside it: it has no {what}",
        wanted=what,
        found=str(places.libraries()),
        remedy=remedy,
    )


def _of(kind, name):
    """What the library says of a function or a struct. Raises InstallationError where it has none of that name."""
    found = _described()[f"{kind}s"].get(name)
    if found is None:
        raise _other_version(f"{kind} {name}")
    return found


@functools.cache
def function(name):
    """The C function of that name with its signature. A pointer takes an address, bytes or a ctypes buffer. Other
    Python threads run meanwhile: CPU variants compute for long."""
    codes = _of("function", name)
    found = library.load().c[name]  # by index: an object of our own, so that signatures are not shared
    found.restype, found.argtypes = _CTYPES[codes[0]], [_CTYPES[code] for code in codes[1:]]
    return found


class Layout:
    """One struct of the interface. Fields that are not named are 0."""

    def __init__(self, name):
        fields = _of("struct", name)
        widest = max((code for _, code in fields), key=lambda code: struct.calcsize(code[-1]))[-1]
        self.name, self.codes = name, dict(fields)
        self._format = "@" + "".join(code for _, code in fields) + f"0{widest}"
        self.size = struct.calcsize(self._format)

    def packer(self, *names):
        """A function of these fields, in this order, that returns the struct as bytes: positional values packed by one
        compiled expression, six times as fast as setting fields one by one. Of an array all elements are given."""
        unknown = set(names) - set(self.codes)
        if unknown:
            raise _other_version(f"{', '.join(sorted(unknown))} in struct {self.name}")

        def value(name, count):
            one = name if name in names else f"(0,) * {count}" if count else "0"
            return f"*{one}" if count else one

        values = ", ".join(value(name, code[:-1]) for name, code in self.codes.items())
        return eval(f"lambda {', '.join(names)}: pack({values})", {"pack": struct.Struct(self._format).pack})


@functools.cache
def layout(name):
    """The Layout of a struct, by its name in the headers."""
    return Layout(name)


@functools.cache
def structure(name):
    """The struct as a class of ctypes, for those with arrays and for calls that are rare."""
    kinds = (
        (field, _CTYPES[code[-1]] * int(code[:-1]) if len(code) > 1 else _CTYPES[code])
        for field, code in _of("struct", name)
    )
    return type(name, (ctypes.Structure,), {"_fields_": list(kinds)})
