"""The frames of a journal: the one place where frames are found, checked and decoded, for every reader.

`spans` checks frames one after the other, rows of one shape together. `Finder` finds the next valid frame after damage.
`Walker` combines both and decodes frames that are not rows. Whatever the bytes, the work is linear in their number.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from ..errors import JournalError
from . import bodies
from .bodies import Header
from .format import HEAD, HEAD_SIZE, MAGIC, MAGIC_BYTES, MAX_BODY, Kind, Layout, Shape, covered, seed_of

if TYPE_CHECKING:
    from .checksums import EqualRows

MAX_FRAME: Final = HEAD_SIZE + MAX_BODY
NO_STEP: Final = -(1 << 63)  # the step of a point without one (probes)
MOST_ROWS: Final = 1 << 16  # in one span
_TIME: Final = struct.Struct("<q")
_SHORTEST_ROW: Final = 12  # shape id and time
_START: Final = struct.Struct("<QI")  # eight bytes of head, checksum
_MOST_HEADS: Final = 4096  # to cache: a forged file may contain any number of them
_CREDIT: Final = 1 << 20
_LONG: Final = 1 << 12
_FEW_ROWS: Final = 1 << 10  # are checked one by one; then blocks of more at once, each up to three times the rows before it
_MOST_TOGETHER: Final = 1 << 13
_WORTH_NUMPY: Final = 1 << 19  # rows whose check one by one takes as long as importing NumPy
_LOOK: Final = 256  # the cost of examining an offset, in bytes that could be checked instead


class FrameSpan(NamedTuple):
    """Consecutive valid frames of the same kind, flags and length (rows: also of the same shape). Other frames stand alone."""

    kind: int
    flags: int
    at: int
    end: int
    stride: int

    @property
    def number(self) -> int:
        return (self.end - self.at) // self.stride


class _Head:
    """The properties shared by all frames with the same first eight bytes."""

    __slots__ = ("blocks", "crc", "flags", "kind", "rows", "stride")

    def __init__(self, kind: int, flags: int, length: int, crc: int) -> None:
        self.kind, self.flags, self.stride, self.crc = kind, flags, HEAD_SIZE + length, crc
        row = kind == Kind.ROW and length > _SHORTEST_ROW
        self.rows = _rows_of(length) if row else None
        self.blocks: EqualRows | None = None


@lru_cache(maxsize=256)  # journals of one job have rows of the same lengths
def _rows_of(length: int) -> Callable[[memoryview], Iterator[tuple[Any, ...]]]:
    """Return what unpacks the rows of one shape: head, checksum, shape, the rest."""
    return struct.Struct(f"<QI4s{length - 4}s").iter_unpack


def _head(first: int, seed: int, *, header: bool) -> _Head | None:
    """Parse a frame's first eight bytes; None if no frame begins so, or a header where none is allowed."""
    magic, kind, flags, length, _ = HEAD.unpack(first.to_bytes(8, "little") + b"\0\0\0\0")
    if magic != MAGIC or length > MAX_BODY or (kind == Kind.HEADER) != header:
        return None
    return _Head(kind, flags, length, covered(kind, length, 0 if header else seed, flags))


def spans(
    view: memoryview, at: int, size: int, seed: int, *, header: bool = False, most: int = MOST_ROWS,
    heads: dict[int, _Head] | None = None, finder: Finder | None = None,
) -> Iterator[FrameSpan]:  # fmt: skip
    """Yield the valid frames from `at` on, up to the first invalid bytes. `header`: the first frame may be a header.

    `finder` continues from there, and counts the bytes that were checked in vain.
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
        yield FrameSpan(known.kind, known.flags, at, end, known.stride)
        at = end


def _header_span(view: memoryview, at: int, size: int) -> FrameSpan | None:
    """Return a journal's header, the only frame whose checksum does not start from the journal's id."""
    if at + HEAD_SIZE > size:
        return None
    first, crc = _START.unpack_from(view, at)
    known = _head(first, 0, header=True)
    if known is None or at + known.stride > size or crc32(view[at + HEAD_SIZE : at + known.stride], known.crc) != crc:
        return None
    return FrameSpan(known.kind, known.flags, at, at + known.stride, known.stride)


def _equal_rows(view: memoryview, at: int, end: int, size: int, known: _Head, first: int, most: int) -> int:
    """Count the valid rows from `end` on with the same head and shape as the row at `at`."""
    shape = bytes(view[at + HEAD_SIZE : at + HEAD_SIZE + 4])
    room = (size - end) // known.stride
    together = room > _FEW_ROWS and (room >= _WORTH_NUMPY or "numpy" in sys.modules)
    room = min(room, most - 1)
    few = min(room, _FEW_ROWS) if together else room
    count = _one_by_one(view[end : end + few * known.stride], known, first, shape)
    while together and count >= few and count < room:
        few = min(room, count + min(3 * count, _MOST_TOGETHER))
        block = view[end + count * known.stride : end + few * known.stride]
        sound = _blocks(known, first).sound(block, shape)
        count += len(block) // known.stride if sound else _one_by_one(block, known, first, shape)
    return count


def _one_by_one(view: memoryview, known: _Head, first: int, shape: bytes) -> int:
    """Count the valid rows at the start of some bytes."""
    assert known.rows is not None
    start, crc32_, count = crc32(shape, known.crc), crc32, 0
    for head, crc, of, rest in known.rows(view):
        if head != first or of != shape or crc32_(rest, start) != crc:
            break
        count += 1
    return count


def _blocks(known: _Head, first: int) -> EqualRows:
    if known.blocks is None:
        from .checksums import EqualRows

        known.blocks = EqualRows(first.to_bytes(8, "little"), known.crc, known.stride)
    return known.blocks


def sound_end(view: memoryview, at: int, size: int, seed: int) -> int:
    """Return where the frame at `at` ends, or 0 if there is no complete, valid frame (other than a header)."""
    if size - at < HEAD_SIZE:
        return 0
    first, crc = _START.unpack_from(view, at)
    known = _head(first, seed, header=False)
    if known is None or at + known.stride > size:
        return 0
    return at + known.stride if crc32(view[at + HEAD_SIZE : at + known.stride], known.crc) == crc else 0


class Finder:
    """A search for valid frames after damage, in bytes that do not change.

    Accidental damage leaves few offsets that look like a frame, and each is checked in full. A forged journal can contain
    one every few bytes, each as long as all the rest. When checking has cost more than twice the bytes passed, checksums are
    computed from block sums instead, at a cost per offset that does not depend on the frame's length.
    """

    def __init__(self, data: bytes | mmap, view: memoryview, size: int, seed: int) -> None:
        self.data, self.view, self.size, self.seed = data, view, size, seed
        self.work = 0  # bytes checked in full, in vain
        self.passed = 0
        self._blocks: Any = None

    @property
    def forged(self) -> bool:
        """Return whether there are more false frames than damage explains."""
        return self.work > _CREDIT + 2 * self.passed

    def next(self, start: int) -> int:
        """Return the offset of the next valid frame at or after `start`; -1 if there is none yet."""
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
        """Return whether a long frame is known to be invalid without checking it in full."""
        return length > _LONG and self.forged and self._next_by_blocks(at) != at

    def _next_by_blocks(self, at: int) -> int:
        from .checksums import Blocks

        if self._blocks is None:
            self._blocks = Blocks(self.view, self.size, self.seed)
        return int(self._blocks.next(at))


def all_spans(data: bytes, seed: int, *, header: bool = False) -> Iterator[FrameSpan]:
    """Yield all valid frames of part of a journal, cut anywhere. `header`: it starts with the journal's header."""
    view, size, at = memoryview(data), len(data), 0
    heads: dict[int, _Head] = {}
    finder = Finder(data, view, size, seed)
    while at >= 0:
        for span in spans(view, at, size, seed, header=header, heads=heads, finder=finder):
            yield span
            at = span.end
        header = False
        at = finder.next(at)


class RowSpan(NamedTuple):
    """Consecutive rows of one shape: where the first begins and the last ends in the journal."""

    shape: Shape
    offset: int
    end: int
    stride: int
    view: memoryview  # of all their frames

    @property
    def number(self) -> int:
        return (self.end - self.offset) // self.stride

    @property
    def time(self) -> int:
        """Return the time of the last row, in nanoseconds."""
        return int(_TIME.unpack_from(self.view, len(self.view) - self.stride + HEAD_SIZE + 4)[0])


class Record(NamedTuple):
    """A frame that is not a row; `data` is None for an unknown kind."""

    kind: int
    offset: int
    data: Any
    end: int = 0

    @property
    def time(self) -> int:
        """Return the time in the frame, in nanoseconds; 0 if it has none."""
        return bodies.time_of(self.data)


class Walker:
    """A reader of a journal's frames, in order. It remembers its position: the next bytes may come later, or from elsewhere."""

    def __init__(self, journal_id: str, *, at: int = 0, shapes: dict[int, Shape] | None = None) -> None:
        self.seed = seed_of(journal_id)
        self.at = at
        self.shapes: dict[int, Shape] = {} if shapes is None else shapes
        self.header: Header | None = None
        self.damaged = 0  # bytes skipped
        self._heads: dict[int, _Head] = {}
        # The offset after which a search found no frame, where to resume it, and the size at which that is worthwhile.
        self._searched = (-1, 0, 0)

    def read(self, data: bytes | mmap, size: int, *, base: int = 0, most: int = MOST_ROWS) -> Iterator[RowSpan | Record]:
        """Yield the frames from the current position on. `data` contains the journal's bytes from `base` to `size`.

        Damage is skipped once a valid frame follows it. Until then it may be a frame that is still being written.
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
                if place < 0:  # frames that begin earlier are complete, and none is valid
                    later = size + (size - self.at) // 4 if finder.forged else 0
                    self._searched = (where, max(start, size - MAX_FRAME), later)
                    return
                self.damaged += base + place - self.at
                self.at = base + place

    def _taken(self, view: memoryview, base: int, span: FrameSpan) -> RowSpan | Record | None:
        """Move past a span; return its content, or None if it is damaged."""
        self.at = base + span.end
        if span.kind == Kind.ROW:
            shape = self.shapes.get(int.from_bytes(view[span.at + HEAD_SIZE : span.at + HEAD_SIZE + 4], "little"))
            if shape is not None and HEAD_SIZE + shape.size == span.stride and shape.layout == span.flags:
                return RowSpan(shape, base + span.at, base + span.end, span.stride, view[span.at : span.end])
            self.damaged += span.end - span.at  # its shape was lost to damage: the values have no keys
            return None
        try:
            data = bodies.decode(span.kind, view[span.at + HEAD_SIZE : span.end])
        except bodies.NewerFormat:
            raise
        except JournalError:
            self.damaged += span.end - span.at
            return None
        if isinstance(data, Shape) and self.shapes.setdefault(data.id, data) != data:
            self.damaged += span.end - span.at  # an id refers to the same shape forever
            return None
        if isinstance(data, Header):
            self.header = data
        return Record(span.kind, base + span.at, data, base + span.end)


class LoggedRow(NamedTuple):
    """One row: step (None for probes), time (ns), values, and the call that it announces late parts of, or is a late part of."""

    step: int | None
    time: int
    values: dict[str, Any]
    call: int
    parts: int
    late: bool
    origin: str


class RowReader:
    """A reader for the rows of one shape, created once because there may be millions of them."""

    def __init__(self, shape: Shape) -> None:
        self._unpack = struct.Struct(f"<{HEAD_SIZE + 4}x{shape.codes[2:]}").iter_unpack
        self.keys = shape.keys
        self.origin = shape.origin
        self.stepped = not shape.layout & Layout.STEP_NONE
        self.pending, self.late = bool(shape.layout & Layout.PENDING), bool(shape.layout & Layout.LATE)
        self.head = 1 + self.stepped + (2 if self.pending else 1 if self.late else 0)

    def rows(self, frames: memoryview) -> Iterator[LoggedRow]:
        """Read rows from their frames, in order."""
        keys, head, origin, late = self.keys, self.head, self.origin, self.late
        if self.stepped and head == 2:  # by far the most common
            for fields in self._unpack(frames):
                yield LoggedRow(fields[1], fields[0], dict(zip(keys, fields[2:], strict=True)), 0, 0, False, origin)
            return
        number, parts = 1 + self.stepped, 2 + self.stepped
        for fields in self._unpack(frames):
            yield LoggedRow(
                fields[1] if self.stepped else None,
                fields[0],
                dict(zip(keys, fields[head:], strict=True)),
                fields[number] if self.pending or late else 0,
                fields[parts] if self.pending else 0,
                late,
                origin,
            )
