"""Checks on raw journal bytes: a node sends, and a gateway stores, only whole and sound frames."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import NamedTuple

from ..journal import Journal, packed
from ..journal.files import open_regular
from ..journal.format import HEAD_SIZE, MAGIC_BYTES, MAX_BODY, Kind, seed_of
from ..journal.walker import MAX_FRAME, Finder, all_spans, spans

_NAMING = frozenset({Kind.VALUES, Kind.INFO, Kind.EVENT})
_BLOB = re.compile(rb"\xd9\x40([0-9a-f]{64})")  # a msgpack string of 64 hexadecimal digits
_WINDOWS = (1 << 16, 1 << 20, 1 << 24, MAX_FRAME + (1 << 20))


class Walked(NamedTuple):
    """Where the last whole frame ends, what kind it is, and where the frames are that may name blobs."""

    end: int
    last: int
    naming: list[tuple[int, int]]


def walk(data: bytes, seed: int, *, first: bool = False) -> Walked:
    """Check frames; with `first`, the first may be the journal's header."""
    naming: list[tuple[int, int]] = []
    end = last = 0
    for span in spans(memoryview(data), 0, len(data), seed, header=first):
        end, last = span.end, span.kind
        if last in _NAMING:
            naming.append((span.at + HEAD_SIZE, end))
    return Walked(end, last, naming)


def sound_until(data: bytes, seed: int, *, first: bool) -> int:
    """Return where the last whole frame ends; with `first`, the first must be the journal's header."""
    return walk(data, seed, first=first).end if not first or data[2:3] == bytes([Kind.HEADER]) else 0


def length_at(head: bytes) -> int | None:
    """Return the length of the frame that starts with `head`; None if it is not the start of a frame."""
    if len(head) < HEAD_SIZE or head[:2] != MAGIC_BYTES:
        return None
    length = int.from_bytes(head[4:8], "little")
    return HEAD_SIZE + length if length <= MAX_BODY else None


def blobs_in(data: bytes, walked: Walked) -> set[str]:
    """Return candidate blob names: a name without a blob file is some other hash."""
    return {match.decode() for start, end in walked.naming for match in _BLOB.findall(data, start, end)}


def whole_end(fd: int, path: Path, size: int, seed: int) -> int:
    """Return where the last whole frame of a file ends, reading no more of its tail than needed."""
    for window in _WINDOWS:
        start = max(0, size - window)
        end = max((span.end for span in all_spans(os.pread(fd, size - start, start), seed, header=not start)), default=0)
        if end or not start:
            return start + end if end else 0
    journal = Journal(path)
    journal.refresh()
    return journal.verified


def next_whole(path: Path, offset: int) -> int | None:
    """Return where the next whole frame after damaged bytes begins; None if there is none yet."""
    with open_regular(packed.readable(path)) as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            found = Finder(data, view, size, seed_of(path.stem.rpartition("-")[2])).next(offset)
    return found if found >= 0 else None
