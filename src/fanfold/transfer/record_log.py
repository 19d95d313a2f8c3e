"""Logs of records in the form of LevelDB: blocks of 32 KiB with chunks of checksum, length, type and data."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import IO

from .reading import Account

BLOCK = 32768
MOST_RECORD = 64 << 20
CUT = "the last record is incomplete: still being written, or cut off"
_CHUNK = struct.Struct("<IHB")
_KINDS = _FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(file: IO[bytes], start: int, account: Account) -> Iterator[tuple[bytes, int]]:
    """Yield each complete record from an offset on, and where the next one begins.

    A damaged block is counted, and reading continues with the next one. A torn end is counted, and read the next time.
    """
    file.seek(start)
    at = whole_to = start
    joined, full = _Joined(), True
    # Behind a block that is not full is the end of the file, even if it has grown since: what was read may be half a chunk.
    while full and (block := file.read(BLOCK - at % BLOCK)):
        begin, full = at, (at + len(block)) % BLOCK == 0
        at += len(block)
        for kind, data, offset in _chunks(block, full=full):
            if kind not in _KINDS:
                account.leave("parts of the log", "they are damaged", f"at byte {begin + offset}")
                joined, whole_to = _Joined(torn=True), at
                break
            record = data if kind == _FULL and not joined.size else joined.add(kind, data)
            if joined.size > MOST_RECORD:
                account.leave("parts of the log", f"a record is longer than {MOST_RECORD >> 20} MiB", f"at byte {begin}")
                joined = _Joined(torn=True)
            if kind in (_FULL, _LAST):
                whole_to = begin + offset
            if record is not None:
                yield record, whole_to
        if full and not joined.size:
            whole_to = at  # the last few bytes of a block are padding
    if at > whole_to:
        account.leave("bytes", CUT, f"at byte {whole_to}", at - whole_to)


def _chunks(block: bytes, *, full: bool) -> Iterator[tuple[int, bytes, int]]:
    """Yield the type and data of each chunk in a block, and where the next one begins; type 0, and where, for damage."""
    offset = 0
    while len(block) - offset >= _CHUNK.size:
        crc, length, kind = _CHUNK.unpack_from(block, offset)
        data = block[offset + _CHUNK.size : offset + _CHUNK.size + length]
        if len(data) < length and not full:
            return
        if len(data) < length or kind not in _KINDS or crc != zlib.crc32(data, zlib.crc32(bytes([kind]))):
            yield 0, b"", offset
            return
        offset += _CHUNK.size + length
        yield kind, data, offset


class _Joined:
    """The chunks of one record. After damage, chunks are passed over until a record begins."""

    def __init__(self, *, torn: bool = False) -> None:
        self.parts: list[bytes] = []
        self.size, self.torn = 0, torn

    def add(self, kind: int, data: bytes) -> bytes | None:
        """Take a chunk; return the record if it is complete."""
        if kind in (_FULL, _FIRST):
            self.parts, self.size, self.torn = [], 0, False
        if not self.torn:
            self.parts.append(data)
            self.size += len(data)
        if self.torn or kind not in (_FULL, _LAST):
            return None
        record = b"".join(self.parts)
        self.parts, self.size = [], 0
        return record
