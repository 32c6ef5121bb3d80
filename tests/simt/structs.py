"""Argument structs as ctypes, read from the device headers, so that a test's layout is the kernel's."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re

from simt.build import DEVICE

_TYPES = {
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
}
_MEMBERS = re.compile(r"^(?:const )?(?:gpu::)?(\w+)(\*?) ([^;]+)$")


def _declared(name: str, lines: str) -> list[tuple[str, type]]:
    fields = []
    for declaration in filter(None, (part.strip() for part in re.sub(r"//.*", "", lines).split(";"))):
        match = _MEMBERS.match(declaration)
        if not match or match[1] not in _TYPES or "(" in declaration:
            raise ValueError(f"struct {name}: cannot read {declaration!r}")
        kind = ctypes.c_uint64 if match[2] else _TYPES[match[1]]
        for member in map(str.strip, match[3].split(",")):
            plain, _, length = member.rstrip("]").partition("[")
            fields.append((plain, kind * int(length) if length else kind))
    return fields


@functools.cache
def struct(name: str, header: str | pathlib.Path) -> type[ctypes.Structure]:
    """A struct of scalars, pointers (addresses, uint64) and arrays of them.

    Args:
        name: of the struct.
        header: path, or name in csrc/device.

    Raises:
        ValueError: it is not there, or has members of another kind.
    """
    text = (DEVICE / header).read_text()
    body = re.search(rf"^struct {name} \{{(?:\n(.*?)^|(.*?))\}};$", text, re.MULTILINE | re.DOTALL)
    if not body:
        raise ValueError(f"no struct {name} in {header}")
    return type(name, (ctypes.Structure,), {"_fields_": _declared(name, body[1] or body[2])})


def make(name: str, header: str | pathlib.Path, **values) -> ctypes.Structure:
    """One such struct; buffers become their addresses, None a null pointer, tuples arrays, what is not named zero."""
    made = struct(name, header)
    kinds = dict(made._fields_)
    return made(
        **{
            k: kinds[k](*v) if isinstance(v, tuple) else getattr(v, "address", v) or 0
            for k, v in values.items()
        }
    )
