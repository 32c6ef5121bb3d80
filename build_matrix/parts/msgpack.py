"""Decodes the MessagePack of AMD's metadata note. Only the types that the note uses (no floats, no
extensions)."""

from __future__ import annotations


def decode(data: bytes) -> object:
    """The one value in `data`. Raises ValueError on a type the note does not use."""
    return _value(memoryview(data), 0)[0]


def _number(data: memoryview, at: int, size: int, signed: bool = False) -> tuple[int, int]:
    return int.from_bytes(data[at : at + size], "big", signed=signed), at + size


def _value(data: memoryview, at: int) -> tuple[object, int]:
    tag, at = data[at], at + 1
    if tag <= 0x7F:
        return tag, at
    if tag <= 0x8F:
        return _map(data, at, tag & 0x0F)
    if tag <= 0x9F:
        return _list(data, at, tag & 0x0F)
    if tag <= 0xBF:
        return _text(data, at, tag & 0x1F)
    if tag >= 0xE0:
        return tag - 256, at
    if tag == 0xC0:
        return None, at
    if tag in (0xC2, 0xC3):
        return tag == 0xC3, at
    if 0xCC <= tag <= 0xCF:
        return _number(data, at, 1 << (tag - 0xCC))
    if 0xD0 <= tag <= 0xD3:
        return _number(data, at, 1 << (tag - 0xD0), signed=True)
    if 0xD9 <= tag <= 0xDB:
        size, at = _number(data, at, 1 << (tag - 0xD9))
        return _text(data, at, size)
    if tag in (0xDC, 0xDD):
        size, at = _number(data, at, 2 << (tag - 0xDC))
        return _list(data, at, size)
    if tag in (0xDE, 0xDF):
        size, at = _number(data, at, 2 << (tag - 0xDE))
        return _map(data, at, size)
    raise ValueError(f"MessagePack type 0x{tag:02x} at byte {at - 1}")


def _text(data: memoryview, at: int, size: int) -> tuple[str, int]:
    return bytes(data[at : at + size]).decode(), at + size


def _list(data: memoryview, at: int, size: int) -> tuple[list, int]:
    items = []
    for _ in range(size):
        item, at = _value(data, at)
        items.append(item)
    return items, at


def _map(data: memoryview, at: int, size: int) -> tuple[dict, int]:
    pairs = {}
    for _ in range(size):
        key, at = _value(data, at)
        pairs[key], at = _value(data, at)
    return pairs, at
