"""Walk the frames of a journal: the one place where frames are found, checked and decoded, for every reader.

`spans` checks frames one after the other, rows of one shape together. `Finder` finds the next sound frame behind damage.
`Walker` puts both together and decodes what is not a row. Whatever the bytes are, the work is linear in their number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from mmap import mmap
from typing import Any, Final, NamedTuple
from zlib import crc32

from ..errors import JournalError
from . import bodies
from .bodies import Header
from .format import HEAD, HEAD_SIZE, MAGIC, MAGIC_BYTES, MAX_BODY, Kind, Layout, Shape, covered, seed_of

MAX_FRAME: Final = HEAD_SIZE + MAX_BODY
NO_STEP: Final = -(1 << 63)  # the step of a point that has none (probes)
MOST_ROWS: Final = 1 << 16  # in one span
_TIME: Final = struct.Struct("<q")
_SHORTEST_ROW: Final = 12  # shape id and time
_START: Final = struct.Struct("<QI")  # eight bytes of head, checksum
_MOST_HEADS: Final = 4096  # remembered: a forged file may hold any number of them
_CREDIT: Final = 1 << 20
_LONG: Final = 1 << 12
_LOOK: Final = 256  # what to look at a place costs, in bytes that could be checked instead


class Span(NamedTuple):
    """Sound frames of one kind, flags and length that follow each other; of rows, of one shape. Other frames stand alone."""

    kind: int
    flags: int
    at: int
    end: int
    stride: int

    @property
    def number(self) -> int:
        return (self.end - self.at) // self.stride


class _Head:
    """What all frames with the same first eight bytes have in common."""

    __slots__ = ("crc", "flags", "kind", "rows", "stride")

    def __init__(self, kind: int, flags: int, length: int, crc: int) -> None:
        self.kind, self.flags, self.stride, self.crc = kind, flags, HEAD_SIZE + length, crc
        row = kind == Kind.ROW and length > _SHORTEST_ROW
        self.rows = struct.Struct(f"<QI4s{length - 4}s").iter_unpack if row else None


def _head(first: int, seed: int, *, header: bool) -> _Head | None:
    """Read a frame's first eight bytes; None if no frame begins so, or a header where none may be."""
    magic, kind, flags, length, _ = HEAD.unpack(first.to_bytes(8, "little") + b"\0\0\0\0")
    if magic != MAGIC or length > MAX_BODY or (kind == Kind.HEADER) != header:
        return None
    return _Head(kind, flags, length, covered(kind, length, 0 if header else seed, flags))


def spans(
    view: memoryview, at: int, size: int, seed: int, *, header: bool = False, most: int = MOST_ROWS,
    heads: dict[int, _Head] | None = None, finder: Finder | None = None,
) -> Iterator[Span]:  # fmt: skip
    """Yield the sound frames from `at` on, up to the first bytes that are none. `header`: one may be the first of them.

    `finder`: who goes on there, and counts what was checked in vain.
    """
    heads = {} if heads is None else heads
    unpack = _START.unpack_from
    if header and (span := _header_span(view, at, size)) is not None:
        yield span
        at = span.end
    while at + HEAD_SIZE <= size:
        first, crc = unpack(view, at)
        known = heads.get(first)
        if known is None:
            known = _head(first, seed, header=False)
            if known is None:
                return
            if len(heads) < _MOST_HEADS:
                heads[first] = known
        end = at + known.stride
        if end > size or (finder is not None and finder.doubts(at, known.stride)):
            return
        if crc32(view[at + HEAD_SIZE : end], known.crc) != crc:
            if finder is not None:
                finder.work += known.stride
            return
        if known.rows is not None and end + known.stride <= size and unpack(view, end)[0] == first:
            end += known.stride * _equal_rows(view, at, end, size, known, first, most)
        yield Span(known.kind, known.flags, at, end, known.stride)
        at = end


def _header_span(view: memoryview, at: int, size: int) -> Span | None:
    """Return the header of a journal, whose checksum alone does not start from the journal's id."""
    if at + HEAD_SIZE > size:
        return None
    first, crc = _START.unpack_from(view, at)
    known = _head(first, 0, header=True)
    if known is None or at + known.stride > size or crc32(view[at + HEAD_SIZE : at + known.stride], known.crc) != crc:
        return None
    return Span(known.kind, known.flags, at, at + known.stride, known.stride)


def _equal_rows(view: memoryview, at: int, end: int, size: int, known: _Head, first: int, most: int) -> int:
    """Count the sound rows from `end` on that have the head and the shape of the one at `at`."""
    assert known.rows is not None
    shape = bytes(view[at + HEAD_SIZE : at + HEAD_SIZE + 4])
    start, crc32_ = crc32(shape, known.crc), crc32
    room = (size - end) // known.stride
    count = 0
    for head, crc, of, rest in islice(known.rows(view[end : end + room * known.stride]), most - 1):
        if head != first or of != shape or crc32_(rest, start) != crc:
            break
        count += 1
    return count


def sound_end(view: memoryview, at: int, size: int, seed: int) -> int:
    """Return where the frame at `at` ends, or 0 if no whole and sound frame (other than a header) is there."""
    if size - at < HEAD_SIZE:
        return 0
    first, crc = _START.unpack_from(view, at)
    known = _head(first, seed, header=False)
    if known is None or at + known.stride > size:
        return 0
    return at + known.stride if crc32(view[at + HEAD_SIZE : at + known.stride], known.crc) == crc else 0


class Finder:
    """Find sound frames behind damage, in bytes that do not change.

    Damage that happens leaves few places that look like a frame, and each is checked in full. Whoever forges a journal
    can put one into every few bytes, each as long as all the rest; when checking has cost more than twice the bytes
    passed, checksums are taken from sums over blocks, at a price per place that does not depend on its length.
    """

    def __init__(self, data: bytes | mmap, view: memoryview, size: int, seed: int) -> None:
        self.data, self.view, self.size, self.seed = data, view, size, seed
        self.work = 0  # bytes checked in full, in vain
        self.passed = 0
        self._blocks: Any = None

    @property
    def forged(self) -> bool:
        """Whether this holds more false frames than damage explains."""
        return self.work > _CREDIT + 2 * self.passed

    def next(self, start: int) -> int:
        """Return where the next sound frame begins, at or after `start`; -1: there is none yet."""
        at, since = self.data.find(MAGIC_BYTES, start, self.size), start
        while 0 <= at <= self.size - HEAD_SIZE:
            self.passed += at - since
            since = at
            if self.forged:
                return self._next_by_blocks(at)
            if sound_end(self.view, at, self.size, self.seed):
                return at
            length = int.from_bytes(self.view[at + 4 : at + 8], "little")
            self.work += _LOOK + (length if at + HEAD_SIZE + length <= self.size else 0)
            at = self.data.find(MAGIC_BYTES, at + 1, self.size)
        return -1

    def doubts(self, at: int, length: int) -> bool:
        """Tell whether a long frame is known to be none without checking it in full."""
        return length > _LONG and self.forged and self._next_by_blocks(at) != at

    def _next_by_blocks(self, at: int) -> int:
        from .checksums import Blocks

        if self._blocks is None:
            self._blocks = Blocks(self.view, self.size, self.seed)
        return int(self._blocks.next(at))


def all_spans(data: bytes, seed: int, *, header: bool = False) -> Iterator[Span]:
    """Yield all sound frames of a stretch of a journal that may begin and end anywhere. `header`: the journal begins with it."""
    view, size, at = memoryview(data), len(data), 0
    heads: dict[int, _Head] = {}
    finder = Finder(data, view, size, seed)
    while at >= 0:
        for span in spans(view, at, size, seed, header=header, heads=heads, finder=finder):
            yield span
            at = span.end
        header = False
        at = finder.next(at)


class Rows(NamedTuple):
    """Rows of one shape that follow each other: where the first begins and the last ends in the journal."""

    shape: Shape
    offset: int
    end: int
    stride: int
    view: memoryview  # their frames

    @property
    def number(self) -> int:
        return (self.end - self.offset) // self.stride

    @property
    def time(self) -> int:
        """The time of the last of them, in nanoseconds."""
        return int(_TIME.unpack_from(self.view, len(self.view) - self.stride + HEAD_SIZE + 4)[0])


class Record(NamedTuple):
    """A frame that is not a row; `data` is None for a kind nobody knows."""

    kind: int
    offset: int
    data: Any
    end: int = 0

    @property
    def time(self) -> int:
        """The time it tells, in nanoseconds; 0 where it tells none."""
        return bodies.time_of(self.data)


class Walker:
    """Read a journal's frames in order, each once. State is how far it is: the next bytes may come later, or elsewhere."""

    def __init__(self, journal_id: str, *, at: int = 0, shapes: dict[int, Shape] | None = None) -> None:
        self.seed = seed_of(journal_id)
        self.at = at
        self.shapes: dict[int, Shape] = {} if shapes is None else shapes
        self.header: Header | None = None
        self.damaged = 0  # bytes passed over
        self._heads: dict[int, _Head] = {}
        # Behind which byte a search found no frame, where the next one may begin, and how long a journal is worth another look.
        self._searched = (-1, 0, 0)

    def read(self, data: bytes | mmap, size: int, *, base: int = 0, most: int = MOST_ROWS) -> Iterator[Rows | Record]:
        """Yield what stands from `at` on. `data` holds the journal's bytes from `base` to `size`.

        Damage is passed over once a sound frame follows it. Before that it may be a frame that is still being written.
        """
        with memoryview(data) as view:
            finder = Finder(data, view, size - base, self.seed)
            while self.at < size:
                header = self.at == 0
                for span in spans(
                    view, self.at - base, size - base, self.seed, header=header, most=most, heads=self._heads, finder=finder
                ):
                    found = self._taken(view, base, span)
                    if found is not None:
                        yield found
                where, start, worth = self._searched if self._searched[0] == self.at else (self.at, self.at + 1, 0)
                if self.at >= size or size < worth:
                    return
                place = finder.next(start - base)
                if place < 0:  # frames that begin further back are whole, and none is sound
                    later = size + (size - self.at) // 4 if finder.forged else 0
                    self._searched = (where, max(start, size - MAX_FRAME), later)
                    return
                self.damaged += base + place - self.at
                self.at = base + place

    def _taken(self, view: memoryview, base: int, span: Span) -> Rows | Record | None:
        """Pass over a span; return what it holds, or None where that is damage."""
        self.at = base + span.end
        if span.kind == Kind.ROW:
            shape = self.shapes.get(int.from_bytes(view[span.at + HEAD_SIZE : span.at + HEAD_SIZE + 4], "little"))
            if shape is not None and HEAD_SIZE + shape.size == span.stride and shape.layout == span.flags:
                return Rows(shape, base + span.at, base + span.end, span.stride, view[span.at : span.end])
            self.damaged += span.end - span.at  # its shape was lost to damage: the numbers have no names
            return None
        try:
            data = bodies.decode(span.kind, view[span.at + HEAD_SIZE : span.end])
        except bodies.NewerFormat:
            raise
        except JournalError:
            self.damaged += span.end - span.at
            return None
        if isinstance(data, Shape) and self.shapes.setdefault(data.id, data) != data:
            self.damaged += span.end - span.at  # an id names one shape for ever
            return None
        if isinstance(data, Header):
            self.header = data
        return Record(span.kind, base + span.at, data, base + span.end)


class Row(NamedTuple):
    """One row: step (None for probes), time (ns), values, and the call whose late parts are to come or this is."""

    step: int | None
    time: int
    values: dict[str, Any]
    call: int
    parts: int
    late: bool
    origin: str


class RowReader:
    """How the rows of one shape are read: made once, because there may be millions of them."""

    def __init__(self, shape: Shape) -> None:
        self._unpack = struct.Struct(f"<{HEAD_SIZE + 4}x{shape.codes[2:]}").iter_unpack
        self.keys = shape.keys
        self.origin = shape.origin
        self.stepped = not shape.layout & Layout.STEP_NONE
        self.pending, self.late = bool(shape.layout & Layout.PENDING), bool(shape.layout & Layout.LATE)
        self.head = 1 + self.stepped + (2 if self.pending else 1 if self.late else 0)

    def rows(self, frames: memoryview) -> Iterator[Row]:
        """Read rows from their frames, one after the other."""
        keys, head, origin, late = self.keys, self.head, self.origin, self.late
        if self.stepped and head == 2:  # by far most of them
            for fields in self._unpack(frames):
                yield Row(fields[1], fields[0], dict(zip(keys, fields[2:], strict=True)), 0, 0, False, origin)
            return
        number, parts = 1 + self.stepped, 2 + self.stepped
        for fields in self._unpack(frames):
            yield Row(
                fields[1] if self.stepped else None,
                fields[0],
                dict(zip(keys, fields[head:], strict=True)),
                fields[number] if self.pending or late else 0,
                fields[parts] if self.pending else 0,
                late,
                origin,
            )
