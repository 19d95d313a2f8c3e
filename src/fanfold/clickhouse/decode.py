"""Pieces of journals as columns: every frame is checked once, rows of many journals are collected into one block of points."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import JournalError
from ..journal import format as fmt
from ..journal.format import HEAD_SIZE, Kind, Layout, Shape
from ..journal.walker import NO_STEP, spans

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Caches hold what the ranks of a job share, and nothing large: a client must not be able to fill memory by sending data.
SHORT_KEY = 256  # characters
SMALL_SHAPE = 1 << 14  # bytes
FEW_KEYS = 256
KINDS = {"d": 0, "f": 0, "q": 1, "?": 2}
Given = TypeVar("Given")
Found = TypeVar("Found")


def _kept_if(small: Callable[[Any], bool], most: int) -> Callable[[Callable[[Given], Found]], Callable[[Given], Found]]:
    """Cache a function's results for small arguments only."""

    def decorated(function: Callable[[Given], Found]) -> Callable[[Given], Found]:
        kept = lru_cache(maxsize=most)(function)

        @wraps(function)
        def call(given: Given) -> Found:
            return kept(given) if small(given) else function(given)

        call.kept = kept  # type: ignore[attr-defined]
        return call

    return decorated


def run_number(project: str, run: str) -> int:
    """Return a run's number in the tables."""
    return _run_number(f"{project}\0{run}")


@_kept_if(lambda text: len(text) <= SHORT_KEY, 1 << 14)
def _run_number(text: str) -> int:
    return _number(text)


@_kept_if(lambda key: len(key) <= SHORT_KEY, 1 << 16)
def series_number(key: str) -> int:
    """Return a key's number in the tables."""
    return _number(key)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class Other(NamedTuple):
    """A frame that is not a row."""

    kind: int
    flags: int
    pos: int
    body: bytes


@dataclass(slots=True)
class Scanned:
    """The content of a piece: runs of equal rows, each as shape, place and number, and all other frames.

    `named`: shapes that are defined in it, if they were to be kept apart. `end`: how far it is valid. There is one of these for
    each process and second, so it consists of few objects: the garbage collector looks at each.
    """

    data: bytes
    base: int  # offset in the journal at which data begins
    rows: list[tuple[Shape, int, int]]
    others: Sequence[Other] = ()
    named: MutableMapping[int, Shape] | None = None
    unnamed: int = 0  # rows with an unknown shape
    points: int = 0
    runs: int = 0  # of equal frames
    crowded: bool = False
    end: int = 0


MOST_FRAMES = 1 << 17  # per request, other than rows, and runs of rows: a batch of a megabyte has fewer
MOST_POINTS = 1 << 21
_ROW = int(Kind.ROW)
_NUMBER = struct.Struct("<I").unpack_from


def scan(
    data: bytes, base: int, seed: int, shapes: MutableMapping[int, Shape], heads: dict[int, Any] | None = None, *,
    apart: bool = False,
) -> Scanned:  # fmt: skip
    """Scan and check whole frames. Shapes defined on the way are added to `shapes`, unless kept `apart`; heads to `heads`.

    It stops early if a piece expands to too many table rows: one byte of a row can be a point.
    """
    found = Scanned(data, base, [], named=None if apart else shapes)
    others: list[Other] | None = None
    for kind, flags, at, end, stride in spans(memoryview(data), 0, len(data), seed, header=not base, heads=heads):
        found.runs += 1
        if kind == _ROW:
            number, count = _NUMBER(data, at + HEAD_SIZE)[0], (end - at) // stride
            shape = shapes.get(number) or (found.named.get(number) if found.named else None)
            if shape is None or HEAD_SIZE + shape.size != stride or shape.layout != flags:
                found.unnamed += count  # their keys are unknown: every reader of the journal counts them as damage
            else:
                found.rows.append((shape, at, count))
                found.points += count * len(shape.keys)
        else:
            body = data[at + HEAD_SIZE : end]
            if kind == Kind.SHAPE:
                found.named = {} if found.named is None else found.named
                learn(found.named, body)
            if others is None:
                found.others = others = []
            others.append(Other(kind, flags, base + at, body))
        if found.runs > MOST_FRAMES or found.points > MOST_POINTS:
            found.crowded = True
            break
        found.end = end
    return found


def learn(shapes: MutableMapping[int, Shape], body: bytes) -> None:
    """Add a shape. The first of each number counts; an unreadable one is ignored."""
    shape = _parsed(body)
    if shape is not None:
        shapes.setdefault(shape.id, shape)


@_kept_if(lambda body: len(body) <= SMALL_SHAPE, 4096)
def _parsed(body: bytes) -> Shape | None:
    """Parse a shape. Cached because a job's ranks define the same ones."""
    try:
        return Shape.parse(body)
    except JournalError:
        return None


class Rows:
    """The rows of one shape, collected from many pieces."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.parts: list[tuple[int, int, int, int, bytes]] = []  # run, journal, offset there, number of frames, equal frames

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns of all points, in the order in which the table keeps them: the database need not sort them."""
        import numpy as np

        *parts, data = zip(*sorted(self.parts), strict=True)
        run, journal, at, counts = (np.frombuffer(array("Q", part), np.uint64) for part in parts)
        rows = np.frombuffer(b"".join(data), _row_type(self.shape))
        if len(rows) > len(counts):
            counts = counts.astype(np.int64)
            inside = np.arange(len(rows)) - (np.cumsum(counts) - counts).repeat(counts)
            run, journal, at = run.repeat(counts), journal.repeat(counts), at.repeat(counts)
            at += inside.astype(np.uint64) * np.uint64(HEAD_SIZE + self.shape.size)
        series, places = _series(self.shape)
        order = Order(run, len(series))
        cell = order.row * len(places)
        cell += order.by_key(places)
        columns = {
            "run": order.by_run(run),
            "journal": journal.take(order.row),
            "series": order.by_key(series),
            "pos": at.take(order.row),
            "step": _steps(self.shape, rows).take(order.row),
            "time": rows["time"].take(order.row),
            "value": _floats(self.shape, rows).take(cell),
        }
        if not set(self.shape.types) <= {"d", "f"}:
            columns["kind"] = order.by_key(np.array([KINDS[code] for code in self.shape.types], np.uint8)[places])
            columns["whole"] = _wholes(self.shape, rows).take(cell)
        return columns


class PointBlock:
    """Columns of points, collected from many pieces: those of one shape are decoded together."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self.count = 0

    def add(self, run: int, journal: int, scanned: Scanned) -> None:
        """Add a piece's rows."""
        data, base = scanned.data, scanned.base
        for shape, at, count in scanned.rows:
            if not shape.keys:
                continue
            rows = self._rows.get(id(shape))
            if rows is None:
                rows = self._rows[id(shape)] = Rows(shape)
            rows.parts.append((run, journal, base + at, count, data[at : at + count * (HEAD_SIZE + shape.size)]))
            self.count += count * len(shape.keys)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns of all points. `kind` and `whole` are left out if they would be all zeros."""
        import numpy as np

        found = [rows.columns() for rows in self._rows.values()]
        if len(found) <= 1:
            return found[0] if found else {}
        names = dict.fromkeys(name for columns in found for name in columns)
        types = {"kind": np.uint8, "whole": np.int64}
        return {
            name: np.concatenate([one[name] if name in one else np.zeros(len(one["pos"]), types[name]) for one in found])
            for name in names
        }


class Order:
    """The order of the points of rows that are sorted by run: run by run, and in a run key by key. `row`: of each point."""

    def __init__(self, run: NDArray[np.uint64], keys: int) -> None:
        import numpy as np

        self._begin = np.concatenate([[0], np.flatnonzero(run[1:] != run[:-1]) + 1])
        sizes = np.diff(self._begin, append=len(run))
        self._points = sizes * keys  # of each run
        self._each = sizes.repeat(keys)  # points of each key of each run
        before = np.cumsum(self._each) - self._each
        self.row = np.arange(len(run) * keys)
        self.row -= (before - self._begin.repeat(keys)).repeat(self._each)

    def by_run(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return for each point what the rows of its run have in common."""
        common: NDArray[Any] = rows[self._begin].repeat(self._points)
        return common

    def by_key(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return for each point the value of its key."""
        import numpy as np

        return np.tile(values, len(self._begin)).repeat(self._each)


@_kept_if(lambda shape: len(shape.keys) <= FEW_KEYS, 1024)
def _row_type(shape: Shape) -> Any:
    """Return the dtype of a row's frame: its fields, and one per key."""
    import numpy as np

    names, kinds, offsets = ["time"], ["<i8"], [HEAD_SIZE + 4]
    if not shape.layout & Layout.STEP_NONE:
        names, kinds = [*names, "step"], [*kinds, "<i8" if shape.layout & Layout.STEP_WIDE else "<i4"]
        offsets.append(HEAD_SIZE + 12)
    at = HEAD_SIZE + shape.size - sum(fmt.TYPE_SIZE[code] for code in shape.types)
    if _floats_alone(shape):
        names, kinds, offsets = [*names, "values"], [*kinds, f"({len(shape.types)},){fmt.DTYPE[shape.types[0]]}"], [*offsets, at]
    else:
        for index, code in enumerate(shape.types):
            names, kinds, offsets = [*names, f"v{index}"], [*kinds, fmt.DTYPE[code]], [*offsets, at]
            at += fmt.TYPE_SIZE[code]
    return np.dtype({"names": names, "formats": kinds, "offsets": offsets, "itemsize": HEAD_SIZE + shape.size})


@_kept_if(lambda shape: len(shape.keys) <= FEW_KEYS, 1024)
def _series(shape: Shape) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """Return the numbers of a shape's keys, sorted, and the place of each in a row."""
    import numpy as np

    numbers = np.array([series_number(key) for key in shape.keys], np.uint64)
    places = np.argsort(numbers)
    return numbers[places], places


def _steps(shape: Shape, rows: NDArray[Any]) -> NDArray[np.int64]:
    import numpy as np

    if shape.layout & Layout.STEP_NONE:
        return np.full(len(rows), NO_STEP, np.int64)
    return rows["step"].astype(np.int64)


def _floats_alone(shape: Shape) -> bool:
    """Return whether all values are floats of the same size."""
    return set(shape.types) in ({"d"}, {"f"})


def _floats(shape: Shape, rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return the values as a matrix: a row for each row, a column for each key."""
    import numpy as np

    if _floats_alone(shape):
        return np.ascontiguousarray(rows["values"], np.float64).reshape(len(rows), -1)
    return np.stack([rows[f"v{index}"].astype(np.float64) for index in range(len(shape.types))], axis=1)


def _wholes(shape: Shape, rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return integers unchanged: beyond 2**53 a float cannot represent them."""
    import numpy as np

    none = np.zeros(len(rows), np.int64)
    return np.stack([rows[f"v{index}"] if code == "q" else none for index, code in enumerate(shape.types)], axis=1)
