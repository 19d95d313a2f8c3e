"""Pieces of journals as columns: every frame is checked once, rows of many journals are collected into one block of points."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
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


@dataclass
class Scanned:
    """The content of a piece: rows by shape, each as runs of equal frames, and all other frames. `end`: how far it is valid."""

    data: bytes
    base: int  # offset in the journal at which data begins
    rows: dict[int, list[list[int]]] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(default_factory=dict)  # of the rows
    others: list[Other] = field(default_factory=list)
    unnamed: int = 0  # rows with an unknown shape
    points: int = 0
    runs: int = 0  # of equal frames
    crowded: bool = False
    end: int = 0


MOST_FRAMES = 1 << 17  # per request, other than rows, and runs of rows: a batch of a megabyte has fewer
MOST_POINTS = 1 << 21


def scan(
    data: bytes, base: int, seed: int, shapes: MutableMapping[int, Shape], named: MutableMapping[int, Shape] | None = None,
    heads: dict[int, Any] | None = None,
) -> Scanned:  # fmt: skip
    """Scan and check whole frames. Shapes defined on the way are added to `named` (None: to `shapes`), heads to `heads`.

    It stops early if a piece expands to too many table rows: one byte of a row can be a point.
    """
    found, named = Scanned(data, base), shapes if named is None else named
    for span in spans(memoryview(data), 0, len(data), seed, header=not base, heads=heads):
        found.runs += 1
        if span.kind == Kind.ROW:
            number = int.from_bytes(data[span.at + HEAD_SIZE : span.at + HEAD_SIZE + 4], "little")
            shape = found.shapes.get(number)
            if shape is None and (shape := shapes.get(number) or named.get(number)) is not None:
                found.shapes[number] = shape
            if shape is None or HEAD_SIZE + shape.size != span.stride or shape.layout != span.flags:
                found.unnamed += span.number  # their keys are unknown: every reader of the journal counts them as damage
            else:
                found.rows.setdefault(number, []).append([span.at, span.number])
                found.points += span.number * len(shape.keys)
        else:
            body = data[span.at + HEAD_SIZE : span.end]
            if span.kind == Kind.SHAPE:
                learn(named, body)
            found.others.append(Other(span.kind, span.flags, base + span.at, body))
        found.crowded = found.runs > MOST_FRAMES or found.points > MOST_POINTS
        if found.crowded:
            break
        found.end = span.end
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

        parts = sorted(self.parts)
        rows = np.frombuffer(b"".join([part[4] for part in parts]), _row_type(self.shape))
        counts = np.array([part[3] for part in parts])
        run, journal, at = np.array([part[:3] for part in parts], np.uint64).repeat(counts, axis=0).T
        inside = np.arange(len(rows)) - (np.cumsum(counts) - counts).repeat(counts)
        pos = at + inside.astype(np.uint64) * np.uint64(HEAD_SIZE + self.shape.size)
        series, places = _series(self.shape)
        row, key = _by_run(run, len(series))
        cell = row * len(places) + places[key]
        columns = {
            "run": run[row],
            "journal": journal[row],
            "series": series[key],
            "pos": pos[row],
            "step": _steps(self.shape, rows)[row],
            "time": rows["time"][row],
            "value": _floats(self.shape, rows).ravel()[cell],
        }
        if not set(self.shape.types) <= {"d", "f"}:
            columns["kind"] = np.array([KINDS[code] for code in self.shape.types], np.uint8)[places[key]]
            columns["whole"] = _wholes(self.shape, rows).ravel()[cell]
        return columns


class PointBlock:
    """Columns of points, collected from many pieces: those of one shape are decoded together."""

    def __init__(self) -> None:
        self._rows: dict[int, Rows] = {}
        self.count = 0

    def add(self, run: int, journal: int, scanned: Scanned) -> None:
        """Add a piece's rows."""
        for number, places in scanned.rows.items():
            shape = scanned.shapes[number]
            if not shape.keys:
                continue
            rows = self._rows.get(id(shape))
            if rows is None:
                rows = self._rows[id(shape)] = Rows(shape)
            stride = HEAD_SIZE + shape.size
            for at, count in places:
                rows.parts.append((run, journal, scanned.base + at, count, scanned.data[at : at + count * stride]))
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


def _by_run(run: NDArray[np.uint64], keys: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the row and the key of each point of rows that are sorted by run: run by run, and in a run key by key."""
    import numpy as np

    first = np.flatnonzero(run[1:] != run[:-1]) + 1
    begin = np.concatenate([[0], first]).astype(np.int32)
    sizes = np.diff(begin, append=np.int32(len(run)))
    points = sizes * keys
    begins = begin.repeat(points)
    key, row = np.divmod(np.arange(len(run) * keys, dtype=np.int32) - begins * np.int32(keys), sizes.repeat(points))
    return row + begins, key


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
