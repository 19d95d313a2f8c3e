"""Protobuf messages without their definitions: the fields of a message by number. Enough to read logs of other tools."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MOST_FIELDS = 1 << 20  # of a message: each takes more memory than its bytes

Field = int | bytes
Message = dict[int, list[Field]]


def message(data: bytes) -> Message:
    """Return a message's fields by number: integers as stored, everything else as bytes. Raise ValueError if it is none."""
    found: Message = {}
    at = count = 0
    while at < len(data):
        tag, at = varint(data, at)
        number, kind = tag >> 3, tag & 7
        value: Field
        if kind == 0:
            value, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        elif kind == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"a field of type {kind}")
        if at > len(data) or not number:
            raise ValueError("a field is cut short")
        found.setdefault(number, []).append(value)
        count += 1
        if count > MOST_FIELDS:
            raise ValueError(f"more than {MOST_FIELDS} fields")
    return found


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an unsigned number and where it ends; raise ValueError if it is cut short."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise ValueError("a number is cut short")


def raw(found: Message, number: int) -> bytes:
    """Return the last value of a field of bytes; b"" if there is none."""
    value = found.get(number, [b""])[-1]
    return value if isinstance(value, bytes) else b""


def text(found: Message, number: int) -> str:
    """Return a text; "" if there is none."""
    return raw(found, number).decode("utf-8", "replace")


def texts(found: Message, number: int) -> list[str]:
    """Return a list of texts."""
    return [value.decode("utf-8", "replace") for value in found.get(number, []) if isinstance(value, bytes)]


def messages(found: Message, number: int) -> Iterator[Message]:
    """Yield a list of messages."""
    return (message(value) for value in found.get(number, []) if isinstance(value, bytes))


def entries(found: Message, number: int) -> Iterator[tuple[str, Message]]:
    """Yield the entries of a map from texts to messages."""
    return ((text(pair, 1), inner(pair, 2)) for pair in messages(found, number))


def integers(found: Message, number: int) -> list[int]:
    """Return a list of signed integers, packed or not."""
    values: list[int] = []
    for part in found.get(number, []):
        at = 0
        while isinstance(part, bytes) and at < len(part):
            value, at = varint(part, at)
            values.append(value)
        values += [] if isinstance(part, bytes) else [part]
    return [value - (1 << 64) if value >= 1 << 63 else value for value in values]


def packed(found: Message, number: int) -> bytes:
    """Return the bytes of a packed list of floats or doubles."""
    return b"".join(value for value in found.get(number, []) if isinstance(value, bytes))


def integer(found: Message, number: int) -> int:
    """Return a signed integer; 0 if there is none."""
    value = found.get(number, [0])[-1]
    return 0 if isinstance(value, bytes) else value - (1 << 64) if value >= 1 << 63 else value


def double(found: Message, number: int) -> float:
    """Return a double; 0.0 if there is none."""
    data = raw(found, number)
    return float(struct.unpack("<d", data)[0]) if len(data) == 8 else 0.0


def inner(found: Message, number: int) -> Message:
    """Return a message inside this one; an empty one if there is none."""
    return message(raw(found, number))


def timestamp(found: Message, number: int) -> int | None:
    """Return a google.protobuf.Timestamp in nanoseconds; None if there is none."""
    if number not in found:
        return None
    moment = inner(found, number)
    value = integer(moment, 1) * 1_000_000_000 + integer(moment, 2)
    return value if 0 < value < 1 << 63 else None
