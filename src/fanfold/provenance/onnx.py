"""ONNX: one protobuf message. The stamp is an entry of `metadata_props`, added at the end: a message may be written in parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .anew import anew
from .record import MAX_BYTES, NAME
from .zips import broken

_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _GRAPH, _OPSET, _METADATA = 1, 2, 3, 7, 8, 14
_MAX_FIELDS = 100_000


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return the format's name, the bytes of the stamp, and a few facts; the graph is passed over."""
    told: dict[str, Any] = {"metadata": {}, "opsets": {}}
    stamp, graph = None, False
    for number, value in _fields(file, path):
        if number == _GRAPH:
            graph = True
        elif number == _IR_VERSION and isinstance(value, int):
            told["ir_version"] = value
        elif number in (_PRODUCER, _PRODUCER_VERSION) and isinstance(value, bytes):
            told[{_PRODUCER: "producer", _PRODUCER_VERSION: "producer_version"}[number]] = value.decode("utf-8", "replace")
        elif number == _OPSET and isinstance(value, bytes):
            parts = dict(_pairs(value))
            told["opsets"][parts.get(1, b"").decode("utf-8", "replace") or "ai.onnx"] = parts.get(2)
        elif number == _METADATA and isinstance(value, bytes):
            parts = dict(_pairs(value))
            key = parts.get(1, b"").decode("utf-8", "replace")
            if key == NAME:
                stamp = parts.get(2, b"")  # the last one counts
            else:
                told["metadata"][key] = parts.get(2, b"").decode("utf-8", "replace")
    if not graph:
        raise broken(path, "it holds no ONNX graph")
    return "ONNX", stamp, told


def _fields(file: BinaryIO, path: Path) -> Iterator[tuple[int, int | bytes | None]]:
    """Walk the fields of the model; long ones (the graph, with its weights) are skipped without being read."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    for _ in range(_MAX_FIELDS):
        if file.tell() >= size:
            return
        tag = _number(file, path)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            yield number, _number(file, path)
        elif kind == 2:
            length = _number(file, path)
            if file.tell() + length > size:
                raise broken(path, "it was cut short")
            if number == _GRAPH or length > 2 * MAX_BYTES:
                file.seek(length, os.SEEK_CUR)
                yield number, None
            else:
                yield number, file.read(length)
        elif kind in (1, 5):
            file.seek(8 if kind == 1 else 4, os.SEEK_CUR)
            yield number, None
        else:
            raise broken(path, "it is no ONNX model")
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
    raise broken(path, "it is no ONNX model")


def _pairs(data: bytes) -> Iterator[tuple[int, Any]]:
    """Read a small message: numbers and strings by field number; what is not whole is left out."""
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
    """Return the stamp as a field of the model, to be put behind its other bytes."""
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


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:
    """Add the stamp behind the model, in the place of an earlier one: no key may be there twice."""
    with path.open("rb") as buffered:
        size = buffered.seek(0, os.SEEK_END)
        old = _places(buffered, path)  # a damaged file is not made longer
    if old and old[0][1] < size:
        _rewrite(path, old, entry(stamp))
        return
    start = old[0][0] if old else size
    before = os.pread(file.fileno(), size - start, start)
    data = entry(stamp)
    if os.pwrite(file.fileno(), data, start) != len(data):
        os.pwrite(file.fileno(), before, start)
        file.truncate(size)
        raise broken(path, "no space is left to stamp it")
    file.truncate(start + len(data))


def _places(file: BinaryIO, path: Path) -> list[tuple[int, int]]:
    """Return where earlier stamps begin and end."""
    found, start = [], 0
    for number, value in _fields(file, path):
        if number == _METADATA and isinstance(value, bytes) and dict(_pairs(value)).get(1) == NAME.encode():
            found.append((start, file.tell()))
        start = file.tell()
    return found


def _rewrite(path: Path, cuts: list[tuple[int, int]], added: bytes) -> None:
    """Write the model anew without its earlier stamps, beside itself, then in its place."""
    with path.open("rb") as source, anew(path) as target:
        for start, end in [*cuts, (-1, -1)]:
            while chunk := source.read(1 << 20 if start < 0 else min(1 << 20, start - source.tell())):
                target.write(chunk)
            source.seek(max(end, source.tell()))
        target.write(added)
