"""Pieces of journals as columns: every frame is checked once, rows of many journals are collected into one block of points."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
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
KINDS = {"d": 0, "q": 1, "?": 2}
DTYPES = ("<f8", "<i8", "?")
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
    return _number(f"{project}\0{run}")


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
    others: list[Other] = field(default_factory=list)
    unnamed: int = 0  # rows with an unknown shape
    points: int = 0
    runs: int = 0  # of equal frames
    crowded: bool = False
    end: int = 0


MOST_FRAMES = 1 << 17  # per request, other than rows, and runs of rows: a batch of a megabyte has fewer
MOST_POINTS = 1 << 21


def scan(data: bytes, base: int, seed: int, shapes: MutableMapping[int, Shape]) -> Scanned:
    """Scan and check whole frames; shapes defined on the way are added to `shapes`.

    It stops early if a piece expands to too many table rows: one byte of a row can be a point.
    """
    found = Scanned(data, base)
    for span in spans(memoryview(data), 0, len(data), seed, header=not base):
        found.runs += 1
        if span.kind == Kind.ROW:
            number = int.from_bytes(data[span.at + HEAD_SIZE : span.at + HEAD_SIZE + 4], "little")
            shape = shapes.get(number)
            if shape is None or HEAD_SIZE + shape.size != span.stride or shape.layout != span.flags:
                found.unnamed += span.number  # their keys are unknown: every reader of the journal counts them as damage
            else:
                found.rows.setdefault(number, []).append([span.at, span.number])
                found.points += span.number * len(shape.keys)
        else:
            body = data[span.at + HEAD_SIZE : span.end]
            if span.kind == Kind.SHAPE:
                learn(shapes, body)
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


class PointBlock:
    """Columns of points, collected from many pieces."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, NDArray[np.uint64], Shape, NDArray[Any], NDArray[np.int64]]] = []
        self.count = 0

    def add(self, run: int, journal: int, scanned: Scanned, shapes: Mapping[int, Shape]) -> None:
        """Add a piece's rows."""
        import numpy as np

        for number, places in scanned.rows.items():
            shape = shapes[number]
            stride = HEAD_SIZE + shape.size
            joined = scanned.data[places[0][0] : places[0][0] + places[0][1] * stride] if len(places) == 1 else b"".join(
                scanned.data[at : at + count * stride] for at, count in places
            )  # fmt: skip
            rows = np.frombuffer(joined, _row_type(shape))
            pos = np.concatenate([np.arange(at, at + count * stride, stride) for at, count in places]) + scanned.base
            series = _series(shape)
            self._parts.append((run, journal, series, shape, rows, pos))
            self.count += len(rows) * len(series)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns of all points. `kind` and `whole` are left out if they would be all zeros."""
        import numpy as np

        if not self._parts:
            return {}
        columns: dict[str, NDArray[Any]] = {
            "run": _repeated([part[0] for part in self._parts], self._sizes(), np.uint64),
            "journal": _repeated([part[1] for part in self._parts], self._sizes(), np.uint64),
            "series": np.concatenate([np.repeat(part[2], len(part[4])) for part in self._parts]),
            "pos": np.concatenate([np.tile(part[5], len(part[2])) for part in self._parts]).astype(np.uint64),
            "step": np.concatenate([np.tile(_steps(part[3], part[4]), len(part[2])) for part in self._parts]),
            "time": np.concatenate([np.tile(part[4]["time"], len(part[2])) for part in self._parts]),
            "value": np.concatenate([_floats(part[3], part[4]) for part in self._parts]),
        }
        if any(set(part[3].types) != {"d"} for part in self._parts):
            columns["kind"] = np.concatenate([_kinds(part[3], part[4]) for part in self._parts])
            columns["whole"] = np.concatenate([_wholes(part[3], part[4]) for part in self._parts])
        return columns

    def _sizes(self) -> list[int]:
        return [len(part[2]) * len(part[4]) for part in self._parts]


@_kept_if(lambda shape: len(shape.keys) <= FEW_KEYS, 1024)
def _row_type(shape: Shape) -> Any:
    """Return the dtype of a row's frame: its fields, and one per key."""
    import numpy as np

    names, kinds, offsets = ["time"], ["<i8"], [HEAD_SIZE + 4]
    if not shape.layout & Layout.STEP_NONE:
        names, kinds = [*names, "step"], [*kinds, "<i8" if shape.layout & Layout.STEP_WIDE else "<i4"]
        offsets.append(HEAD_SIZE + 12)
    at = HEAD_SIZE + shape.size - sum(fmt.TYPE_SIZE[code] for code in shape.types)
    if set(shape.types) == {"d"}:
        names, kinds, offsets = [*names, "values"], [*kinds, f"({len(shape.types)},)<f8"], [*offsets, at]
    else:
        for index, code in enumerate(shape.types):
            names, kinds, offsets = [*names, f"v{index}"], [*kinds, DTYPES[KINDS[code]]], [*offsets, at]
            at += fmt.TYPE_SIZE[code]
    return np.dtype({"names": names, "formats": kinds, "offsets": offsets, "itemsize": HEAD_SIZE + shape.size})


@_kept_if(lambda shape: len(shape.keys) <= FEW_KEYS, 4096)
def _series(shape: Shape) -> NDArray[np.uint64]:
    import numpy as np

    return np.array([series_number(key) for key in shape.keys], np.uint64)


def _repeated(values: Sequence[int], counts: Sequence[int], kind: Any) -> NDArray[Any]:
    import numpy as np

    return np.repeat(np.array(values, kind), counts)


def _steps(shape: Shape, rows: NDArray[Any]) -> NDArray[np.int64]:
    import numpy as np

    if shape.layout & Layout.STEP_NONE:
        return np.full(len(rows), NO_STEP, np.int64)
    return rows["step"].astype(np.int64)


def _floats(shape: Shape, rows: NDArray[Any]) -> NDArray[np.float64]:
    import numpy as np

    if not shape.types:
        return np.empty(0)
    if set(shape.types) == {"d"}:
        return np.ascontiguousarray(rows["values"].reshape(len(rows), -1).T).ravel()
    return np.concatenate([rows[f"v{index}"].astype(np.float64) for index in range(len(shape.types))])


def _kinds(shape: Shape, rows: NDArray[Any]) -> NDArray[np.uint8]:
    import numpy as np

    return np.repeat(np.array([KINDS[code] for code in shape.types], np.uint8), len(rows))


def _wholes(shape: Shape, rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return integers unchanged: beyond 2**53 a float cannot represent them."""
    import numpy as np

    none = np.zeros(len(rows), np.int64)
    parts = [rows[f"v{index}"].astype(np.int64) if code == "q" else none for index, code in enumerate(shape.types)]
    return np.concatenate(parts) if parts else none[:0]
