"""The reading end of a journal: every byte is walked and checked once, then values are gathered through strided views.

No lock is taken and nothing is written: a live journal can be read from another process while it grows. Damage is
skipped up to the next valid frame, and counted. A journal is untrusted input: lengths are capped and nothing in it is
executed.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from zlib import crc32

from ..errors import JournalError
from . import bodies, packed, walker
from . import format as fmt
from .bodies import Header
from .files import open_regular
from .format import HEAD_SIZE, Kind, Layout, Shape
from .mapping import map_file
from .walker import NO_STEP, LoggedRow, Record, RowReader, Walker

if TYPE_CHECKING:
    import mmap

    import numpy as np
    from numpy.typing import NDArray

_ROW_HEAD = HEAD_SIZE + 12  # frame head, shape id, time
_WINDOW = 1 << 16
_LAST_FRAMES = 64  # searched for the newest time
_SMALL = 1 << 14  # bytes up to which reading a file is faster than mapping it
_BLOCK = 1 << 13  # rows gathered at a time: such a block stays in the CPU cache


class Columns(NamedTuple):
    """One key's points in one journal, in the order they were written; times in seconds since 1970."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    values: NDArray[Any]


@dataclass
class ShapeRows:
    """The positions of the rows of one shape: runs of equal frames, each an offset and a count."""

    shape: Shape
    stride: int
    runs: list[list[int]] = field(default_factory=list)

    def add(self, offset: int, count: int) -> None:
        if self.runs and self.runs[-1][0] + self.runs[-1][1] * self.stride == offset:
            self.runs[-1][1] += count
        else:
            self.runs.append([offset, count])

    def __len__(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def last(self) -> int:
        """Return the offset of the last row."""
        offset, count = self.runs[-1]
        return offset + (count - 1) * self.stride

    def since(self, offset: int, until: int | None = None) -> list[list[int]]:
        """Return the runs between two offsets of the file, the first and the last cut to fit."""
        found = []
        for start, count in self.runs:
            skip = max(0, -(-(offset - start) // self.stride))
            stop = count if until is None else min(count, -(-(until - start) // self.stride))
            if skip < stop:
                found.append([start + skip * self.stride, stop - skip])
        return found

    @cached_property
    def step_code(self) -> str | None:
        if self.shape.layout & Layout.STEP_NONE:
            return None
        return "<i8" if self.shape.layout & Layout.STEP_WIDE else "<i4"

    def value_offset(self, index: int) -> int:
        """Return the offset within a frame of the value of the key at `index`."""
        return self.stride - sum(map(fmt.TYPE_SIZE.__getitem__, self.shape.types[index:]))


class Journal:
    """One journal file, read up to its last complete frame. `refresh()` reads further."""

    on_disk = True  # as a file that can be mapped; a fleet's store keeps its journals elsewhere

    def __init__(self, path: Path | str) -> None:
        self.path = path if isinstance(path, Path) else Path(path)
        rank, _, id = self.path.stem.rpartition("-")
        self.id = fmt.check_id(id)
        self.seed = fmt.seed_of(self.id)
        self.header = self._salvaged_header(
            rank.partition("-")[0]
        )  # until the real one is read; `begun` tells whether anything was read
        self.rows: dict[int, ShapeRows] = {}
        self._by_key: dict[str, list[tuple[ShapeRows, int]]] = {}
        self._unnamed: list[ShapeRows] = []  # not indexed by key yet: listing thousands of runs never needs it
        self.frames: list[tuple[int, int, int]] = []  # kind, offset of the body, length
        self.verified = 0
        self.damaged = 0
        self.size = 0
        self.seen = 0  # the newest time in its frames (ns since 1970): the last sign of life of its process
        self.grown: float | None = None  # when this reader last saw it grow (monotonic clock)
        self._map: mmap.mmap | bytes | None = None
        self._walker = Walker(self.id)
        # Threads may share a journal: one reads further, while others look at what is before `verified`.
        self._reading = threading.Lock()
        self._naming = threading.Lock()

    def refresh(self) -> bool:
        """Read what was added since the last call; return whether there was anything."""
        with self._reading:
            before = self.verified
            for found in self._read_on():
                if isinstance(found, walker.RowSpan):
                    self._rows_of(found.shape).add(found.offset, found.number)
                else:
                    self._note(found)
        return self.verified > before

    def stream(self, *, most: int = walker.MOST_ROWS) -> Iterator[walker.RowSpan | Record]:
        """Read further, one item at a time, without remembering positions: for a single pass."""
        yield from self._read_on(most=most)

    def seek(self, offset: int) -> None:
        """Make `stream` continue at a frame that was read before."""
        self._walker.at = self.verified = offset

    def look(self) -> int:
        """Return the current size of the journal."""
        return self._remap()

    def _read_on(self, *, most: int = walker.MOST_ROWS) -> Iterator[walker.RowSpan | Record]:
        size = self._remap()
        if self._map is None:
            return
        try:
            for found in self._walker.read(self._map, size, most=most):
                if isinstance(found, Record) and isinstance(found.data, Header):
                    self.header = found.data
                self.seen = max(self.seen, found.time)
                self.verified = self._walker.at
                yield found
        except bodies.NewerFormat as error:
            raise bodies.NewerFormat(f"{self.path}: {error}") from error
        finally:
            self.verified, self.damaged = self._walker.at, self._walker.damaged

    @property
    def begun(self) -> bool:
        """Return whether anything was read."""
        return self.verified > 0

    def _salvaged_header(self, rank: str) -> Header:
        """Return a header from the file name: a damaged header loses facts about the process, but not its points."""
        known = int(rank) if rank.isdecimal() and len(rank) < 10 else 0
        return Header(format=[fmt.MAJOR, fmt.MINOR], journal=self.id, role="main", rank=known, salvaged=True)

    def _remap(self) -> int:
        if self._map is not None and self.path.suffix == fmt.PACKED:
            return self.size  # packed journals do not grow
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.verified:
                raise JournalError(f"{self.path} became shorter while it was read; a journal is never truncated. Open it again.")
            if size > self.size:
                self.grown = time.monotonic() if self.size else None
                # The old map is left to the garbage collector: arrays returned earlier may still refer to it.
                self._map = map_file(file.fileno(), size) if size > _SMALL else _read_whole(file.fileno(), size)
                size = len(self._map)
                self.size = size
        return self.size

    def _open(self) -> BinaryIO:
        """Open the file with the journal's raw bytes; the journal may have been packed since it was listed."""
        try:
            return open_regular(packed.readable(self.path), buffering=0)
        except FileNotFoundError:
            self.path = packed.present(self.path)
            return open_regular(packed.readable(self.path), buffering=0)

    def status(self) -> str:
        """Return the status of a journal without an END frame: running, killed, or lost (reversible)."""
        from .liveness import status_of

        return status_of(self.path, self.header, seen=self.seen, grown=self.grown)

    @property
    def tail(self) -> int:
        """Return how many bytes at the end are not (yet) complete frames."""
        return self.size - self.verified

    # Recording positions

    def _note(self, record: Record) -> None:
        if isinstance(record.data, Shape):
            self._rows_of(record.data)
        self.frames.append((record.kind, record.offset + HEAD_SIZE, record.end - record.offset - HEAD_SIZE))

    def _rows_of(self, shape: Shape) -> ShapeRows:
        rows = self.rows.get(shape.id)
        if rows is None:
            rows = self.rows[shape.id] = ShapeRows(shape, HEAD_SIZE + shape.size)
            self._unnamed.append(rows)
        return rows

    @property
    def by_key(self) -> dict[str, list[tuple[ShapeRows, int]]]:
        """Return where each key's values are: the rows, and the key's index in them."""
        if self._unnamed:
            with self._naming:
                fresh, added = self._unnamed[:], dict[str, list[tuple[ShapeRows, int]]]()
                for rows in fresh:
                    for index, key in enumerate(rows.shape.keys):
                        added.setdefault(key, []).append((rows, index))
                found = {**self._by_key, **{key: [*self._by_key.get(key, ()), *places] for key, places in added.items()}}
                self._by_key = found  # a new dict each time: another thread may be iterating over the last one
                del self._unnamed[: len(fresh)]
        return self._by_key

    def print_of(self, end: int) -> int:
        """Return a fingerprint of the last bytes before `end`, which shows whether an index matches this content."""
        assert self._map is not None
        return crc32(self._map[max(0, end - _WINDOW) : end])

    def adopt(self, frames: list[tuple[int, int, int]], runs: list[Any], verified: int, damaged: int, mark: int) -> bool:
        """Adopt an index that an earlier reader made of this file, instead of walking it again."""
        if self._remap() < verified or self.print_of(verified) != mark:
            return False
        known = Walker(self.id, at=verified)
        for kind, offset, length in frames:
            if kind in (Kind.SHAPE, Kind.HEADER):
                data = self.body(kind, offset, length)
                if isinstance(data, Header):
                    self.header = known.header = data
                else:
                    self._rows_of(data)
                    known.shapes[data.id] = data
        for shape_id, places in runs:
            self.rows[shape_id].runs = [[int(offset), int(count)] for offset, count in places]
        known.damaged = damaged
        self.frames, self.verified, self.damaged, self._walker = frames, verified, damaged, known
        self.seen = max(self._times(), default=0)
        return True

    def _times(self) -> Iterator[int]:
        """Yield the times of the last row of each shape and of the last frames of other kinds, in nanoseconds."""
        for rows in self.rows.values():
            if rows.runs:
                yield int(struct.unpack_from("<q", self._map, rows.last + HEAD_SIZE + 4)[0])  # type: ignore[arg-type]
        last = {kind: (offset, length) for kind, offset, length in (self.frames[:1] + self.frames[-_LAST_FRAMES:])}
        for kind, place in last.items():
            yield bodies.time_of(self.body(kind, *place))

    # Reading

    def records(self, *kinds: int) -> Iterator[Record]:
        """Yield the decoded frames of these kinds, in order."""
        for kind, offset, length in self.frames:
            if kind in kinds:
                yield Record(kind, offset - HEAD_SIZE, self.body(kind, offset, length), offset + length)

    def body(self, kind: int, offset: int, length: int) -> Any:
        assert self._map is not None
        with memoryview(self._map) as view, view[offset : offset + length] as body:
            return bodies.decode(kind, body)

    def walk(self, start: int) -> Iterator[walker.RowSpan | Record]:
        """Yield what was read from `start` on, in order."""
        if self._map is not None:
            again = Walker(self.id, at=start, shapes=self._walker.shapes)
            yield from again.read(self._map, self.verified)

    def walk_rows(self, start: int) -> Iterator[LoggedRow]:
        """Yield the rows that were read from `start` on, in order."""
        readers: dict[int, RowReader] = {}
        for found in self.walk(start):
            if isinstance(found, walker.RowSpan):
                reader = readers.get(found.shape.id) or readers.setdefault(found.shape.id, RowReader(found.shape))
                yield from reader.rows(found.view)

    def keys(self, origin: str | None = None) -> list[str]:
        """Return the numeric keys that have points, in order of first appearance."""
        return [
            key
            for key, places in self.by_key.items()
            if any(rows.runs and (origin is None or rows.shape.origin == origin) for rows, _ in places)
        ]

    def count(self, key: str) -> int:
        return sum(len(rows) for rows, _ in self.by_key.get(key, ()))

    def latest(self) -> dict[str, tuple[int, int, Any]]:
        """Return each key's last written point: step, time, value."""
        written = [rows for rows in list(self.rows.values()) if rows.runs]
        found: dict[str, Any] = dict.fromkeys(key for rows in written for key in rows.shape.keys) if len(written) > 1 else {}
        for at, rows in sorted(((rows.last, rows) for rows in written), key=lambda place: place[0]):
            _, when, *rest = struct.unpack_from(rows.shape.codes, self._map, at + HEAD_SIZE)  # type: ignore[arg-type]
            step = NO_STEP if rows.shape.layout & Layout.STEP_NONE else rest[0]
            values = rest[len(rest) - len(rows.shape.keys) :]
            found.update(zip(rows.shape.keys, zip(repeat(step), repeat(when), values), strict=False))  # repeat has no end
        return found

    def back(self, keys: Sequence[str], count: int) -> int:
        """Return the offset from which on each key still has `count` rows."""
        starts = [self.verified]
        for rows in {id(rows): rows for key in keys for rows, _ in self.by_key.get(key, ())}.values():
            left = count
            for offset, length in reversed(rows.runs):
                starts.append(offset + max(0, length - left) * rows.stride)
                left -= length
                if left <= 0:
                    break
        return min(starts)

    def column(self, key: str, *, since: int = 0, until: int | None = None) -> Columns:
        """Return one key's points from byte `since` on (and before `until`), in the order they were written."""
        import numpy as np

        until = self.verified if until is None else until  # another thread may be reading further
        places = [(rows, index, runs) for rows, index in self.by_key.get(key, ()) if (runs := rows.since(since, until))]
        if not places:
            return Columns(np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.float64))
        parts = [self._gather(rows, index, runs) for rows, index, runs in places]
        if len(parts) == 1:
            return parts[0]
        # Several shapes contain the key: sort their points into file order.
        order = np.argsort(np.concatenate([_offsets(rows.stride, runs) for rows, _, runs in places]), kind="stable")
        steps, times, values = (np.concatenate([part[i] for part in parts])[order] for i in range(3))
        return Columns(steps, times, values)

    def _gather(self, rows: ShapeRows, index: int, runs: Sequence[Sequence[int]]) -> Columns:
        """Read one key of one shape: long runs by strided views, many short ones by their offsets."""
        count = sum(length for _, length in runs)
        if count < 256 * len(runs) and len(runs) > 1:
            return self._picked(rows, index, _offsets(rows.stride, runs))
        return self._strided(rows, index, runs, count)

    def _strided(self, rows: ShapeRows, index: int, runs: Sequence[Sequence[int]], count: int) -> Columns:
        """Read runs of equal rows in blocks, so that the three fields of a row come from one visit to memory."""
        import numpy as np

        kind = rows.shape.types[index]
        code = fmt.DTYPE[kind]
        steps = np.empty(count, np.int64) if rows.step_code else np.full(count, NO_STEP)
        times, values = np.empty(count), np.empty(count, fmt.READ_AS[kind])
        done = 0
        for offset, length in runs:
            fields = [
                (np.ndarray((length,), kind, self._map, offset + place, (rows.stride,)), column)
                for place, kind, column in (
                    (_ROW_HEAD, rows.step_code, steps), (HEAD_SIZE + 4, "<i8", times), (rows.value_offset(index), code, values)
                ) if kind
            ]  # fmt: skip
            for start in range(0, length, _BLOCK):
                for view, column in fields:
                    column[done + start : done + min(start + _BLOCK, length)] = view[start : start + _BLOCK]
            done += length
        times /= 1e9
        return Columns(steps, times, values)

    def _picked(self, rows: ShapeRows, index: int, offsets: NDArray[np.int64]) -> Columns:
        import numpy as np

        flat = np.frombuffer(self._map, np.uint8)  # type: ignore[arg-type]

        def pick(place: int, code: str) -> NDArray[Any]:
            return _column(flat[(offsets + place)[:, None] + np.arange(np.dtype(code).itemsize)], 0, code)

        steps = pick(_ROW_HEAD, rows.step_code).astype(np.int64) if rows.step_code else np.full(len(offsets), NO_STEP)
        kind = rows.shape.types[index]
        values = pick(rows.value_offset(index), fmt.DTYPE[kind])
        return Columns(steps, pick(HEAD_SIZE + 4, "<i8") / 1e9, values.astype(fmt.READ_AS[kind]))


def _read_whole(fd: int, size: int) -> bytes:
    """Read a small file's first bytes."""
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def _offsets(stride: int, runs: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the offset of each row of these runs."""
    import numpy as np

    starts, counts = np.array(runs, np.int64).T
    first = np.cumsum(counts) - counts
    return np.repeat(starts - first * stride, counts) + np.arange(int(counts.sum()), dtype=np.int64) * stride


def _column(block: NDArray[np.uint8], start: int, code: str) -> NDArray[Any]:
    """Read one little-endian field of every row of a two-dimensional block of bytes."""
    import numpy as np

    width = np.dtype(code).itemsize
    return np.ascontiguousarray(block[:, start : start + width]).view(code).ravel()
