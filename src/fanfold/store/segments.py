"""Column segments: a byte range of a journal, converted from rows to columns. A cache; the journal stays the truth.

A segment is in the user's cache folder under `segments/<journal id>/<first byte>-<end>.ffs`. It is written to a temporary file
and renamed, never changed, and each column is checked when it is first read. Keys that were always logged together share their
steps and times. docs/store.md describes the file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ..errors import JournalError, notices
from ..journal import Journal
from ..journal import format as fmt
from ..journal.mapping import map_file
from ..settings import cache_directory

if TYPE_CHECKING:
    import mmap

    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"FFSEG\x01\r\n"
SUFFIX = ".ffs"
WORTH_BYTES = 1 << 20  # a shorter end of a journal is read from the journal directly
TAIL = 24  # footer offset u64, length u32, crc u32, magic
TICK = 2.0**-22  # seconds; the spacing of floats at current dates, so that times are whole multiples of it


class Damaged(Exception):
    """A segment that cannot be used."""


class EvenSteps:
    """Evenly spaced steps, without an array."""

    def __init__(self, base: int, stride: int, count: int) -> None:
        self.base, self.stride, self.count = base, stride, count
        self.dtype = _int64()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: Any) -> Any:
        import numpy as np

        if isinstance(place, slice):
            start, stop, _ = place.indices(self.count)
            return EvenSteps(self.base + start * self.stride, self.stride, max(0, stop - start))
        if isinstance(place, np.ndarray):
            return self.base + place.astype(np.int64) * self.stride
        return np.int64(self.base + (place if place >= 0 else self.count + place) * self.stride)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        import numpy as np

        return (self.base + np.arange(self.count, dtype=np.int64) * self.stride).astype(dtype or np.int64, copy=False)

    def find(self, steps: NDArray[np.int64], side: str) -> NDArray[np.int64]:
        """Return insertion positions of steps, like searchsorted."""
        import numpy as np

        if self.stride == 0:
            hit = steps <= self.base if side == "left" else steps < self.base
            return np.where(hit, 0, self.count).astype(np.int64)
        # The difference may exceed 64 bits, and Python's integers would be slow, so steps are clipped to the line's ends first.
        near = np.clip(steps, self.base - self.stride, self.base + self.count * self.stride)
        apart = near - self.base
        found = -(-apart // self.stride) if side == "left" else apart // self.stride + 1
        return np.clip(found, 0, self.count)


def _int64() -> Any:
    import numpy as np

    return np.dtype(np.int64)


def positions(steps: Any, wanted: NDArray[np.int64], side: Any = "left") -> NDArray[np.int64]:
    """Find steps among ascending ones of any integer type, without numpy copying all of them to the wider type."""
    import numpy as np

    if isinstance(steps, EvenSteps):
        return steps.find(wanted, side)
    found: NDArray[np.int64]
    if steps.dtype == np.int64:
        found = np.searchsorted(steps, wanted, side)
        return found
    known = np.iinfo(steps.dtype)
    found = np.searchsorted(steps, np.clip(wanted, known.min, known.max).astype(steps.dtype), side)
    found[wanted > known.max] = len(steps)
    found[wanted < known.min] = 0
    return found


def place(steps: Any, step: int) -> int:
    """Return the insertion position of a step among ascending steps."""
    import numpy as np

    return int(positions(steps, np.array([step], np.int64))[0])


class SegmentChunk:
    """A chunk of points in a segment; its columns are decoded when accessed."""

    def __init__(self, segment: Segment, family: dict[str, Any], key: str, start: int = 0, stop: int | None = None) -> None:
        self._segment, self._family, self._key = segment, family, key
        self._start, self._stop = start, family["count"] if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def whole(self) -> bool:
        return len(self) == int(self._family["count"])

    @property
    def axis(self) -> Any:
        """The steps, in their stored form."""
        return self._segment.read(self._family["steps"])[self._start : self._stop]

    @property
    def steps(self) -> NDArray[np.int64]:
        import numpy as np

        return np.asarray(self.axis, np.int64)

    @property
    def times(self) -> NDArray[np.float64]:
        return self._segment.read(self._family["times"])[self._start : self._stop]  # type: ignore[no-any-return]

    @property
    def began(self) -> float:
        return float(self.times[0]) if self._start else float(self._family["began"])

    @property
    def narrow(self) -> NDArray[Any]:
        """The values in their stored type: equal to `values`, and faster to get."""
        return self._segment.read(self._family["keys"][self._key])[self._start : self._stop]  # type: ignore[no-any-return]

    @property
    def values(self) -> NDArray[Any]:
        return self.narrow.astype(self.kind)

    @property
    def kind(self) -> np.dtype[Any]:
        import numpy as np

        return np.dtype(str(self._family["keys"][self._key]["as"]))

    @property
    def ascending(self) -> bool:
        return bool(self._family["ascending"])

    @property
    def bounds(self) -> tuple[int, int]:
        if self.whole or not self.ascending:  # bounds of a part that is out of order may be wider than needed
            return self._family["low"], self._family["high"]
        axis = self.axis
        return int(axis[0]), int(axis[-1])

    def cut(self, start: int, stop: int) -> SegmentChunk:
        return SegmentChunk(self._segment, self._family, self._key, self._start + start, self._start + stop)


@dataclass
class Segment:
    """One memory-mapped segment file."""

    path: Path
    start: int
    end: int
    footer: dict[str, Any]
    _map: mmap.mmap
    _sound: set[int] = field(default_factory=set)
    _keys: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, start: int, end: int) -> Segment:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < TAIL + len(MAGIC):
                    raise Damaged("it is too short")
                view = map_file(file.fileno(), size)
        except OSError as error:
            raise Damaged(str(error)) from error
        return cls(path, start, end, _footer(view, size), view).ready()

    def ready(self) -> Segment:
        self._keys = {key: family for family in self.footer["families"] for key in family["keys"]}
        return self

    def chunk(self, key: str) -> SegmentChunk | None:
        """Return a key's points, after verifying their checksums."""
        family = self._keys.get(key)
        if family is None:
            return None
        for column in (family["steps"], family["times"], family["keys"][key]):
            self._check(column)
        return SegmentChunk(self, family, key)

    def _check(self, column: dict[str, Any]) -> None:
        at, size = column.get("at", 0), column.get("size", 0)
        if not size or at in self._sound:
            return
        with memoryview(self._map) as view, view[at : at + size] as data:
            if len(data) != size or crc32(data) != column["crc"]:
                raise Damaged(f"the bytes at {at} are not what was written")
        self._sound.add(at)

    def read(self, column: dict[str, Any]) -> Any:
        """Decode a column."""
        import numpy as np

        how, count = column["how"], column["count"]
        if how == "line":
            return EvenSteps(column["base"], column["stride"], count)
        if how == "same":
            return np.full(count, np.frombuffer(column["value"], column["type"])[0])
        data = np.frombuffer(self._map, column["type"], column["length"], column["at"])
        if how == "flat":
            return data
        ticks = np.empty(count, np.int64)
        ticks[0] = column["base"]
        np.cumsum(data, out=ticks[1:], dtype=np.int64)
        ticks[1:] += column["base"]
        if column["stride"]:
            ticks += np.arange(count) * column["stride"]
        return ticks * TICK


def _footer(view: mmap.mmap, size: int) -> dict[str, Any]:
    tail = view[size - TAIL :]
    at, length = int.from_bytes(tail[:8], "little"), int.from_bytes(tail[8:12], "little")
    if view[: len(MAGIC)] != MAGIC or tail[16:] != MAGIC or at + length + TAIL != size:
        raise Damaged("it is not a segment of this version")
    data = view[at : at + length]
    if crc32(data) != int.from_bytes(tail[12:16], "little"):
        raise Damaged("its footer is damaged")
    try:
        found: dict[str, Any] = fmt.unpack(data)
    except JournalError as error:
        raise Damaged("its footer is damaged") from error
    return found


# The segments of a journal


class Chain:
    """The segments of one journal that follow each other without a gap from its first byte."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.bad: set[str] = set()
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        return self.segments[-1].end if self.segments else 0

    def extend(self, journal: Journal, cache: Path) -> Chain:
        """Find segments written since the last call."""
        if journal.verified - self.end < WORTH_BYTES:
            return self
        with self._lock:
            self._extend(journal, cache)
        return self

    def _extend(self, journal: Journal, cache: Path) -> None:
        there = ranges(cache, journal.id)
        while fitting := [end for start, end in there if start == self.end < end <= journal.verified]:
            segment = self._open(journal, cache, max(fitting))
            if segment is None:
                there.remove((self.end, max(fitting)))
            else:
                self.segments = [*self.segments, segment]  # a new list: a thread may be iterating over the old one

    def _open(self, journal: Journal, cache: Path, end: int) -> Segment | None:
        path = path_of(cache, journal.id, self.end, end)
        if path.name in self.bad:
            return None
        try:
            segment = Segment.open(path, self.end, end)
            if segment.footer.get("journal") != journal.id or segment.footer.get("mark") != journal.print_of(end):
                raise Damaged("it was made from other content")
        except Damaged as error:
            self.refuse(path, error)
            return None
        return segment

    def refuse(self, path: Path, error: Damaged) -> None:
        """Drop an unusable segment and all after it, so that the journal is read instead."""
        self.bad.add(path.name)
        self.segments = [one for one in self.segments if one.end <= _start_of(path)]
        notices.once(
            f"segment:{path}",
            f"the segment {path} cannot be used: {error}. Nothing is lost: the journal is read instead, which is slower. "
            "The next `fanfold merge` rebuilds it.",
        )
        with contextlib.suppress(OSError):
            path.unlink()


_chains: weakref.WeakKeyDictionary[Journal, Chain] = weakref.WeakKeyDictionary()
_looking = threading.Lock()


def chain_of(journal: Journal, cache: Path | None = None) -> Chain:
    with _looking:
        chain = _chains.setdefault(journal, Chain())
    return chain.extend(journal, cache or cache_directory())


def stored(journal: Journal, key: str) -> tuple[list[SegmentChunk], int]:
    """Return a key's points that are in segments, and the byte of the journal where the segments end."""
    if journal.verified < WORTH_BYTES or not journal.on_disk:
        return [], 0
    chain = chain_of(journal)
    found: list[SegmentChunk] = []
    end = 0
    for segment in chain.segments:
        try:
            chunk = segment.chunk(key)
        except Damaged as error:
            chain.refuse(segment.path, error)
            break
        end = segment.end
        if chunk is not None:
            found.append(chunk)
    return found, end


def folder_of(cache: Path, journal_id: str) -> Path:
    return cache / "segments" / fmt.check_id(journal_id)


def path_of(cache: Path, journal_id: str, start: int, end: int) -> Path:
    return folder_of(cache, journal_id) / f"{start}-{end}{SUFFIX}"


def _start_of(path: Path) -> int:
    return int(path.stem.partition("-")[0])


def ranges(cache: Path, journal_id: str) -> list[tuple[int, int]]:
    """Return the byte ranges of a journal that have segments."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder_of(cache, journal_id)) as entries:
        for entry in entries:
            start, _, end = entry.name.removesuffix(SUFFIX).partition("-")
            if entry.name.endswith(SUFFIX) and start.isdecimal() and end.isdecimal():
                found.append((int(start), int(end)))
    return sorted(found)


def discard(cache: Path, journal_id: str) -> None:
    """Delete a journal's segments."""
    folder = folder_of(cache, journal_id)
    names: Iterable[Path] = folder.iterdir() if folder.is_dir() else ()
    for path in list(names):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
