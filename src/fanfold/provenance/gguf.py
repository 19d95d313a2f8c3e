"""GGUF, the format of llama.cpp: key-value pairs, tensor entries, tensors. The stamp is one of the values.

Parsed in bounded memory: a model file is untrusted input.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import FanfoldError
from .record import MAX_BYTES
from .replace import copy_rest, replacing
from .zips import broken

KEY = "fanfold.producer_info"
FIXED = 24  # magic, version, number of tensors, number of values
MAX_ITEMS = 4_000_000  # a large vocabulary has half a million entries, and as many merges
MAX_TEXT = 4096  # bytes shown of a string
MAX_ALIGNMENT = 1 << 20
BLOCK = 4096  # of a filesystem
CHUNK = 1 << 20
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# By tensor type: how many numbers a block holds, and its size in bytes. The size of newer types is not known.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip
_ALIGNMENT, _SHOWN = "general.alignment", ("general.architecture", "general.name")


class GgufHeader(NamedTuple):
    """The content of the header, and where our key-value pair begins and ends in it (0 if there is none)."""

    order: str
    tensors: int
    values: int
    alignment: int
    stamp: bytes | None
    begin: int
    end: int
    told: dict[str, Any]


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return the format's name, the bytes of the stamp, and a few facts."""
    found = _header(file, path)
    return "GGUF", found.stamp, {"tensors": found.tensors, "values": found.values - (found.stamp is not None), **found.told}


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:
    """Write the stamp as the first value, in a copy that replaces the file.

    It is padded so that tensors move by whole blocks: they stay aligned, and on filesystems with shared blocks none is copied.
    """
    with path.open("rb") as buffered:
        found = _header(buffered, path)
        buffered.seek(FIXED)
        between = buffered.read(max(0, found.begin - FIXED))
    key = KEY.encode()
    fields = struct.pack(f"{found.order}Q", len(key)) + key + struct.pack(f"{found.order}I", _STRING)
    gone = found.end - found.begin
    step = math.lcm(BLOCK, found.alignment)
    room = max(0, -(-(len(fields) + 8 + len(stamp) - gone) // step)) * step + gone  # moved by whole blocks, or not at all
    text = stamp.ljust(room - len(fields) - 8)
    if len(text) > MAX_BYTES + step:
        raise FanfoldError(f"{path} could not be stamped: its tensors are aligned in an unusual way. The file is as it was.")
    count = found.values + (found.stamp is None)
    with replacing(path) as target:
        file.seek(0)
        target.write(file.read(8) + struct.pack(f"{found.order}QQ", found.tensors, count))
        target.write(fields + struct.pack(f"{found.order}Q", len(text)) + text + between)
        copy_rest(file, found.end or FIXED, target)


def _header(file: BinaryIO, path: Path) -> GgufHeader:
    walk = _Walk(file, path)
    begin, end, stamp, alignment = 0, 0, None, 32
    told: dict[str, Any] = {}
    for key, kind, at in walk.values():
        if key == KEY and kind == _STRING:
            stamp, begin, end = walk.text(2 * MAX_BYTES), at, walk.tell()
        elif key == _ALIGNMENT and kind == 4:
            alignment = walk.unpack("I")
        elif key in _SHOWN and kind == _STRING:
            told[key.partition(".")[2]] = walk.shown()
        else:
            walk.skip(kind)
    if not 0 < alignment <= MAX_ALIGNMENT:
        raise broken(path, f"its tensors are aligned to {alignment} bytes, which none are")
    walk.tensors(alignment)
    return GgufHeader(walk.order, walk.tensor_count, walk.value_count, alignment, stamp, begin, end, told)


class _Walk:
    """One pass over a header; everything it states is checked against the file before it is used."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.items = 0
        file.seek(0)
        head = file.read(8)
        self.order = "<" if int.from_bytes(head[4:8], "little") in (2, 3) else ">"
        self.tensor_count, self.value_count = self.unpack("Q"), self.unpack("Q")

    def tell(self) -> int:
        return self.file.tell()

    def unpack(self, form: str) -> int:
        data = self.file.read(struct.calcsize(self.order + form))
        if len(data) < struct.calcsize(self.order + form):
            raise self.cut()
        return int(struct.unpack(self.order + form, data)[0])

    def cut(self) -> FanfoldError:
        return broken(self.path, "it was cut short within its header")

    def values(self) -> Iterator[tuple[str, int, int]]:
        """Yield each key, the type of its value, and where the pair begins; the caller must read or skip the value."""
        for _ in range(self.value_count):
            self.count(1)
            at = self.tell()
            key = self.text(1 << 16).decode("utf-8", "replace")
            yield key, self.unpack("I"), at

    def tensors(self, alignment: int) -> None:
        """Read the tensor entries; raise if the file ends before the last tensor does."""
        last = 0
        for _ in range(self.tensor_count):
            self.count(1)
            self.text(1 << 16)
            dimensions = self.unpack("I")
            if dimensions > 64:
                raise broken(self.path, "its header gives a tensor a shape that no tensor has")
            numbers = math.prod(self.unpack("Q") for _ in range(dimensions))
            of_block, size = _BLOCKS.get(self.unpack("I"), (1, 0))
            last = max(last, self.unpack("Q") + numbers // of_block * size)
        if -(-self.tell() // alignment) * alignment + last > self.size and last:
            raise broken(self.path, "it was cut short: tensors that its header names are missing")

    def text(self, limit: int) -> bytes:
        length = self.unpack("Q")
        if length > limit:
            raise broken(self.path, f"its header has a text of {length:,} bytes")
        data = self.file.read(length)
        if len(data) < length:
            raise self.cut()
        return data

    def shown(self) -> str:
        """Return the beginning of a string, and skip the rest."""
        length = self.unpack("Q")
        data = self.file.read(min(length, MAX_TEXT))
        self.jump(length - len(data))
        return data.decode("utf-8", "replace")

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skip a value."""
        if kind == _STRING:
            self.jump(self.unpack("Q"))
        elif kind == _ARRAY and depth < 4:
            inner, count = self.unpack("I"), self.unpack("Q")
            if inner in _SIZES:
                self.jump(_SIZES[inner] * count)
                return
            self.count(count)
            if inner == _STRING:
                self.skip_texts(count)
                return
            for _ in range(count):
                self.skip(inner, depth + 1)
        elif kind in _SIZES:
            self.jump(_SIZES[kind])
        else:
            raise broken(self.path, "its header has a value of a kind that is not known here")

    def skip_texts(self, count: int) -> None:
        """Skip many strings, such as a vocabulary's, without a file operation for each."""
        length = struct.Struct(self.order + "Q")
        data, at = b"", 0
        for _ in range(count):
            if at + 8 > len(data):
                self.jump(at - len(data))
                data, at = self.file.read(CHUNK), 0
                if len(data) < 8:
                    raise self.cut()
            at += 8 + length.unpack_from(data, at)[0]
        self.jump(at - len(data))

    def count(self, items: int) -> None:
        self.items += items
        if self.items > MAX_ITEMS:
            raise broken(self.path, "its header has more entries than any model's")

    def jump(self, length: int) -> None:
        if self.tell() + length > self.size:
            raise self.cut()
        self.file.seek(length, os.SEEK_CUR)
