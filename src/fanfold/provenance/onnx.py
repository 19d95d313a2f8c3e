"""ONNX: one protobuf message. The stamp is an entry of `metadata_props`, appended: fields may be in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from .record import MAX_BYTES, NAME
from .replace import copy_rest, replacing
from .zips import broken, unreadable

_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _GRAPH, _OPSET, _METADATA = 1, 2, 3, 7, 8, 14
_TEXTS = {_PRODUCER: "producer", _PRODUCER_VERSION: "producer_version"}
_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_MAX_FIELDS, _MAX_OPSETS, _MAX_TEXT = 100_000, 100, 1000
_MAX_VALUE, _MAX_METADATA = 64 << 10, 2 << 20  # bytes kept of one metadata value, and of all of them
_KEY = 64  # bytes that are enough for the stamp's key


class _Field(NamedTuple):
    """One field of the model, from `start` to `end`. Its value is a number, or the length of its content."""

    number: int
    kind: int
    value: int
    start: int
    end: int


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return the format's name, the bytes of the stamp, and a few facts; the graph is skipped."""
    kept = _Kept(file)
    for field in _fields(file, path):
        if field.kind == _BYTES:
            kept.take(field)
        elif field.kind == _NUMBER and field.number == _IR_VERSION:
            kept.facts["ir_version"] = field.value
    if not kept.graph:
        raise broken(path, "it holds no ONNX graph")
    return "ONNX", kept.stamp_text(path), kept.facts


class _Kept:
    """The facts collected from a model: bounded, however many and long its fields are."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.facts: dict[str, Any] = {"metadata": {}, "opsets": {}}
        self.graph = False
        self.stamp: _Field | None = None
        self.opsets, self.room = 0, _MAX_METADATA

    def take(self, field: _Field) -> None:
        if field.number == _GRAPH:
            self.graph = True
        elif field.number in _TEXTS:
            self.facts[_TEXTS[field.number]] = _text(_read(self.file, field, _MAX_TEXT))
        elif field.number == _OPSET and self.opsets < _MAX_OPSETS:
            self.opsets += 1
            parts = dict(_pairs(_read(self.file, field, _MAX_TEXT)))
            self.facts["opsets"][_text(parts.get(1)) or "ai.onnx"] = parts[2] if isinstance(parts.get(2), int) else None
        elif field.number == _METADATA:
            self._metadata(field)

    def _metadata(self, field: _Field) -> None:
        room = self.room
        data = _read(self.file, field, max(_KEY, min(_MAX_VALUE, room)))
        self.room -= len(data) + _KEY  # an empty entry takes memory, too
        if _is_stamp(data):
            self.stamp = field  # the last one counts
        elif room > 0:
            parts = dict(_pairs(data))
            self.facts["metadata"][_text(parts.get(1))] = _text(parts.get(2)) + ("…" if len(data) < field.value else "")

    def stamp_text(self, path: Path) -> bytes | None:
        if self.stamp is None:
            return None
        if self.stamp.value > 2 * MAX_BYTES:
            raise unreadable(path, f"it has {self.stamp.value:,} bytes, and {MAX_BYTES:,} are read")
        found = dict(_pairs(_read(self.file, self.stamp, 2 * MAX_BYTES))).get(2, b"")
        return found if isinstance(found, bytes) else b""


def _read(file: BinaryIO, field: _Field, limit: int) -> bytes:
    file.seek(field.end - field.value)
    return file.read(min(field.value, limit))


def _text(data: Any) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else ""


def _is_stamp(entry: bytes) -> bool:
    """Return whether a metadata entry, of which the beginning is enough, is a stamp."""
    return next((value for number, value in _pairs(entry) if number == 1), None) == NAME.encode()


def _fields(file: BinaryIO, path: Path) -> Iterator[_Field]:
    """Iterate over the fields of the model, skipping their content (the graph, with its weights)."""
    size, end = file.seek(0, os.SEEK_END), 0
    for _ in range(_MAX_FIELDS):
        if end >= size:
            return
        start = file.seek(end)
        tag = _number(file, path)
        number, kind = tag >> 3, tag & 7
        if kind not in (_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES):
            raise broken(path, "it is not an ONNX model")
        value = _number(file, path) if kind in (_NUMBER, _BYTES) else 0
        end = file.tell() + {_NUMBER: 0, _EIGHT_BYTES: 8, _BYTES: value, _FOUR_BYTES: 4}[kind]
        if end > size:
            raise broken(path, "it was cut short")
        yield _Field(number, kind, value, start, end)
    raise broken(path, "it has more fields than any ONNX model")


def _number(file: BinaryIO, path: Path) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise broken(path, "it was cut short")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise broken(path, "it is not an ONNX model")


def _pairs(data: bytes) -> Iterator[tuple[int, Any]]:
    """Parse a small message into field numbers with ints or bytes; stop at other types. The last value may be cut short."""
    at = 0
    while at < len(data):
        number, kind = data[at] >> 3, data[at] & 7
        value, at = _varint(data, at + 1)
        if kind == 2:
            yield number, data[at : at + value]
            at += value
        elif kind == 0:
            yield number, value
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at


def entry(stamp: bytes) -> bytes:
    """Return the stamp as a field to append to the model."""
    key = NAME.encode()
    body = b"\x0a" + _length(key) + key + b"\x12" + _length(stamp) + stamp
    return bytes([_METADATA << 3 | 2]) + _length(body) + body


def _length(data: bytes) -> bytes:
    value, out = len(data), bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:  # noqa: ARG001 - every format's interface
    """Append the stamp in a copy that replaces the file, without earlier stamps: a key must not occur twice."""
    with path.open("rb") as source:
        cuts = _places(source, path)  # raises for a damaged file
        source.seek(0)
        with replacing(path) as target:
            for start, end in cuts:
                while chunk := source.read(min(1 << 20, start - source.tell())):
                    target.write(chunk)
                source.seek(end)
            copy_rest(source, source.tell(), target)
            target.write(entry(stamp))


def _places(file: BinaryIO, path: Path) -> list[tuple[int, int]]:
    """Return the start and end of each earlier stamp."""
    return [
        (field.start, field.end)
        for field in _fields(file, path)
        if field.kind == _BYTES and field.number == _METADATA and _is_stamp(_read(file, field, _MAX_VALUE))
    ]
