"""Walk raw journal bytes, frame by frame, checking each crc: what leaves a node and what a gateway keeps is whole frames only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ..journal import Journal
from ..journal.format import HEAD, HEAD_SIZE, MAGIC, MAGIC_BYTES, MAX_BODY, Kind, covered

MAX_FRAME = HEAD_SIZE + MAX_BODY
_NAMING = frozenset({Kind.VALUES, Kind.INFO, Kind.EVENT})
_BLOB = re.compile(rb"\xd9\x40([0-9a-f]{64})")  # a msgpack text of 64 hexadecimal digits
_WINDOWS = (1 << 16, 1 << 20, 1 << 24, MAX_FRAME + (1 << 20))


class Walked(NamedTuple):
    """How far whole frames reach, what kind the last is, and where those stand that may name blobs."""

    end: int
    last: int
    naming: list[tuple[int, int]]


class _Start(NamedTuple):
    length: int
    crc: int
    names: bool


def walk(data: bytes, seed: int, *, first: bool = False, at: int = 0) -> Walked:
    """Check frames from `at` on; `first`: the journal's header must be the first of them."""
    view, size = memoryview(data), len(data)
    starts: dict[bytes, _Start] = {}  # frames of one shape share their head: its part of the crc is computed once
    naming: list[tuple[int, int]] = []
    last = 0
    while at + HEAD_SIZE <= size:
        head = data[at : at + 8]
        start = starts.get(head)
        if start is None:
            start = _start(head, seed, header=first and not at)
            if start is None:
                break
            if len(starts) < 4096 and not (first and not at):
                starts[head] = start
        end = at + HEAD_SIZE + start.length
        if end > size or crc32(view[at + HEAD_SIZE : end], start.crc) != int.from_bytes(data[at + 8 : at + HEAD_SIZE], "little"):
            break
        if start.names:
            naming.append((at + HEAD_SIZE, end))
        at, last = end, head[2]
    return Walked(at, last, naming)


def _start(head: bytes, seed: int, *, header: bool) -> _Start | None:
    """Read a frame's head; None if it is none, or a header where none may stand."""
    magic, kind, flags, length, _ = HEAD.unpack(head + b"\0\0\0\0")
    if magic != MAGIC or length > MAX_BODY or (kind == Kind.HEADER) != header:
        return None
    return _Start(length, covered(kind, length, 0 if header else seed, flags), kind in _NAMING)


def length_at(head: bytes) -> int | None:
    """Return how long the frame is that begins so; None if no frame does."""
    if len(head) < HEAD_SIZE or head[:2] != MAGIC_BYTES:
        return None
    length = int.from_bytes(head[4:8], "little")
    return HEAD_SIZE + length if length <= MAX_BODY else None


def blobs_in(data: bytes, walked: Walked) -> set[str]:
    """Return what may be names of blobs; whether a file of that name exists tells them from other hashes."""
    return {match.decode() for start, end in walked.naming for match in _BLOB.findall(data, start, end)}


def whole_end(fd: int, path: Path, size: int, seed: int) -> int:
    """Return where the last whole frame of a file ends, from as much of its tail as it takes."""
    for window in _WINDOWS:
        if window >= size:
            return _last_end(os.pread(fd, size, 0), seed, first=True) or 0
        found = _last_end(os.pread(fd, window, size - window), seed)
        if found is not None:
            return size - window + found
    journal = Journal(path)
    journal.refresh()
    return journal.verified


def _last_end(data: bytes, seed: int, *, first: bool = False) -> int | None:
    """Return the end of the last chain of whole frames in `data`, looking for where one begins."""
    at, last = 0, None
    while at >= 0:
        end = walk(data, seed, first=first, at=at).end
        if end > at:
            last = end
        at = data.find(MAGIC_BYTES, max(end, at + 1))
    return last


def next_whole(path: Path, offset: int) -> int | None:
    """Return where the next whole frame behind damage begins; None if there is none yet."""
    journal = Journal(path)
    journal.refresh()
    return next((at for at, *_ in journal.walk(offset)), None)
