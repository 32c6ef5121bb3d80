"""libapex describes itself: which structs its C functions take, field by field, and the functions' signatures.

Read from the headers of csrc/host and csrc/device when the library is built, and compiled into it as a text
(`apex_interface()`), beside assertions that the compiler lays every struct out as the text says. So who calls the
library without its headers, as apex/_portable does from Python, can never fill in another build's structs.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path

from build_matrix import REPOSITORY
from build_matrix.errors import BuildError

CSRC = REPOSITORY / "csrc"
# C type -> character of Python's struct module. The last one is a pointer to a function.
CODES = {
    "double": "d", "float": "f", "bool": "?", "size_t": "N", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q", "apex_take_workspace": "P",
}  # fmt: skip
POINTER, TEXT = "P", "z"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_STRUCT = re.compile(r"(?:typedef\s+)?struct\s+(\w+)\s*\{")
_FUNCTION = re.compile(r"APEX_EXPORT\s+([\w\s*]+?)\s*(apex_\w+)\(([^)]*)\)\s*;")
_FIELDS = re.compile(r"(?:const\s+)?(?:\w+::)?(\w+)\s*(\*?)\s*(.+)", re.S)
_NAME = re.compile(r"(\*?)\s*(\w+)(?:\[(\d+)\])?")


def headers() -> list[Path]:
    """The headers that are read: all of csrc/host, and those of csrc/device that hold arguments."""
    return sorted([*CSRC.glob("host/*.h"), *CSRC.glob("device/*.h")])


def _read(path: Path) -> str:
    return _COMMENT.sub("", path.read_text(encoding="utf-8"))


def _body(text: str, start: int) -> str:
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    raise BuildError("a struct of csrc does not end")


def _fields(body: str) -> list[list[str]] | None:
    """[[name, code]] of a plain struct; None where it holds more than numbers and pointers."""
    found = []
    for statement in filter(None, map(str.strip, body.split(";"))):
        matched = _FIELDS.fullmatch(statement)
        if not matched or re.search(r"[({]|\bstatic\b", statement):
            return None
        kind, star, names = matched.groups()
        for name in map(str.strip, names.split(",")):
            one = _NAME.fullmatch(name)
            code = POINTER if star or (one and one[1]) else CODES.get(kind)
            if one is None or code is None:
                return None
            found.append([one[2], f"{one[3]}{code}" if one[3] else code])
            star = ""  # of `T *a, b` the first alone is a pointer
    return found


def structs() -> dict[str, tuple[str, list[list[str]]]]:
    """{name: (its name in C++, [[field, code]])} of every struct that is plain data."""
    found: dict[str, tuple[str, list[list[str]]]] = {}
    for path in headers():
        text = _read(path)
        for matched in _STRUCT.finditer(text):
            fields = (
                None
                if text[: matched.start()].rstrip().endswith(">")
                else _fields(_body(text, matched.end()))
            )
            if fields:
                space = (
                    ""
                    if matched[1].startswith("apex_")
                    else "gpu::"
                    if path.parent.name == "device"
                    else "apex::"
                )
                found[matched[1]] = (space + matched[1], fields)
    return found


def functions() -> dict[str, str]:
    """{name: codes of the result and the arguments} of every exported function; "v" is no result. Functions that take
    a struct by value are left out: they are for C++."""
    found = {}
    for path in sorted(CSRC.glob("host/*.h")):
        for result, name, arguments in _FUNCTION.findall(_read(path)):
            listed = [text.strip() for text in arguments.split(",") if text.strip() not in ("", "void")]
            codes = [_code(result, True), *(_code(text, False) for text in listed)]
            if None not in codes:
                found[name] = "".join(map(str, codes))
    return found


def _code(text: str, result: bool) -> str | None:
    if "*" in text:
        return TEXT if re.match(r"const char\s*\*", text) else POINTER
    kind = text.split()[0].rpartition("::")[2]
    if kind in ("apex_resolver", "apex_executor", "apex_parallel_for"):
        return POINTER
    return "v" if result and kind == "void" else CODES.get(kind)


def used() -> dict[str, tuple[str, list[list[str]]]]:
    """The structs that exported functions take by pointer."""
    texts = "".join(
        ",".join(arguments for _, _, arguments in _FUNCTION.findall(_read(path))) + "," for path in headers()
    )
    wanted = set(re.findall(r"(\w+)\s*\*", texts))
    return {name: found for name, found in sorted(structs().items()) if name in wanted}


def description() -> str:
    """What apex_interface() returns: JSON of structs and functions."""
    fields = {name: found for name, (_, found) in used().items()}
    return json.dumps(
        {"structs": fields, "functions": dict(sorted(functions().items()))}, separators=(",", ":")
    )


def digest(text: str) -> str:
    """What apex_interface_digest() returns."""
    return hashlib.sha256(text.encode()).hexdigest()


def format_of(fields: list[list[str]]) -> str:
    """The struct as a format of Python's struct module, with C's alignment and size."""
    widest = max((code[-1] for _, code in fields), key=struct.calcsize)
    return "@" + "".join(code for _, code in fields) + f"0{widest}"


def source() -> str:
    """The C++ file that is compiled into libapex.so."""
    text, chosen = description(), used()
    lines = ["#include <cstddef>", '#include "host/apex.h"']
    lines += [f'#include "{path.relative_to(CSRC)}"' for path in _holding(chosen)]
    for cpp, fields in chosen.values():
        lines.append(f'static_assert(sizeof({cpp}) == {struct.calcsize(format_of(fields))}, "{cpp}");')
        before = "@"
        for name, code in fields:
            at = struct.calcsize(f"{before}{code}") - struct.calcsize(f"@{code}")
            lines.append(f'static_assert(offsetof({cpp}, {name}) == {at}, "{cpp}::{name}");')
            before += code
    parts = "\n".join(f'R"apex({text[at : at + 8000]})apex"' for at in range(0, len(text), 8000))
    lines.append(f'extern "C" const char* apex_interface(void) {{ return\n{parts}; }}')
    lines.append(f'extern "C" const char* apex_interface_digest(void) {{ return "{digest(text)}"; }}')
    return "\n".join(lines) + "\n"


def _holding(chosen) -> list[Path]:
    return [path for path in headers() if set(chosen) & {m[1] for m in _STRUCT.finditer(_read(path))}]
