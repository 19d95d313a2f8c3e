"""Exact downsampling: a series as one bucket per pixel, each with its first, last, lowest and highest point.

A chart of the buckets looks like a chart of all points at any zoom. Each of the four is a point that was logged, with its own x
and value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .segments import positions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

KINDS = ("nan", "inf", "-inf")
LARGE = 128  # from this many points per bucket on, searching each bucket separately is faster than one search over all


@dataclass(frozen=True)
class Buckets:
    """A series downsampled to buckets of equal width in x (or in its logarithm); empty buckets are left out.

    `raw`: every point is included, one per bucket, and min = max = first = last = the value, NaN and infinities included.
    Otherwise first, last, min and max are those of the bucket's finite values (NaN if it has none), and `marks` lists the first
    NaN, inf and -inf of each bucket; `marked` counts them all. `x`, `x_last`, `x_min` and `x_max` are where those four values
    were logged (the first of equal extremes; x and x_last are the bucket's ends if no value is finite). `x_min` and `x_max` are
    None if a database of an older version stored the extremes without their steps. `before` and `after` are the neighbours just
    outside of lo and hi, so that a line can be drawn to the edge. `restarts`: where later attempts begin. `axis` is the x in use:
    a key without steps (system metrics) requested by step is returned over `relative` time. `forked`: in a fork, where its own
    points begin; those before are its parent's. A fold adds per bucket the lowest and
    highest value of any rank, and which rank that was.
    """

    key: str
    x: Floats
    x_last: Floats
    min: Floats
    max: Floats
    first: Floats
    last: Floats
    count: Ints
    total: int
    raw: bool
    marks: list[tuple[float, str]] = field(default_factory=list)
    marked: int = 0
    restarts: list[float] = field(default_factory=list)
    axis: str = "step"
    before: tuple[float, float] | None = None
    after: tuple[float, float] | None = None
    low: Floats | None = None
    high: Floats | None = None
    low_rank: Ints | None = None
    high_rank: Ints | None = None
    x_min: Floats | None = None
    x_max: Floats | None = None
    forked: float | None = None

    def __len__(self) -> int:
        return len(self.x)


class SeriesPiece(NamedTuple):
    """Points in ascending order of x. `band`, for a fold: the extremes over ranks, and which ranks hold them."""

    x: Any
    values: NDArray[Any]
    band: tuple[Floats, Floats, Ints, Ints] | None = None

    def cut(self, start: int, stop: int) -> SeriesPiece:
        band = None if self.band is None else tuple(column[start:stop] for column in self.band)
        return SeriesPiece(self.x[start:stop], self.values[start:stop], band)  # type: ignore[arg-type]


def bucket(
    key: str,
    pieces: Sequence[SeriesPiece],
    *,
    buckets: int = 330,
    whole: int = 0,
    lo: float | None = None,
    hi: float | None = None,
    zero: float = 0.0,
    restarts: Sequence[float] = (),
    axis: str = "step",
    log: bool = False,
) -> Buckets:
    """Downsample pieces in ascending order of x. `zero` is subtracted from every x; lo, hi and restarts are relative to it.

    Up to `whole` points in the range are returned as they are, as are up to as many as there are buckets.

    log: buckets have equal width in the logarithm of x; points at x <= 0 are left out because a logarithmic axis cannot show
    them.
    """
    pieces = [piece for piece in pieces if len(piece.x)]
    if log and (lo is None or lo <= 0):
        lo = _least_positive(pieces, zero)
    inside, left, right = _cut(pieces, lo, hi, zero)
    total = sum(len(piece.x) for piece in inside)
    before = _neighbour(left, -1, zero)
    if log and before is not None and before[0] <= 0:
        before = None
    ends = {"axis": axis, "before": before, "after": _neighbour(right, 0, zero)}
    shown = [x for x in restarts if (lo is None or x >= lo) and (hi is None or x <= hi)]
    if total <= max(buckets, whole, 1):
        return _raw(key, inside, total, zero, shown, ends)
    low = float(inside[0].x[0]) - zero if lo is None else lo
    high = float(inside[-1].x[-1]) - zero if hi is None else hi
    edges = _edges(low, high, max(buckets, 1), zero, log)
    return _thinned(key, inside, edges, total, zero, shown, ends)


def _least_positive(pieces: Sequence[SeriesPiece], zero: float) -> float:
    """Return a bound just below the first x above zero, or infinity if there is none."""
    import numpy as np

    for piece in pieces:
        place = _position(piece.x, zero, "right")
        if place < len(piece.x):
            return float(np.nextafter(float(piece.x[place]) - zero, 0.0))
    return math.inf


def _cut(
    pieces: Sequence[SeriesPiece], lo: float | None, hi: float | None, zero: float
) -> tuple[list[SeriesPiece], SeriesPiece | None, SeriesPiece | None]:
    """Return the pieces within lo and hi, and the pieces just before and after them."""
    inside: list[SeriesPiece] = []
    left = right = None
    for piece in pieces:
        start = 0 if lo is None else _position(piece.x, lo + zero, "left")
        stop = len(piece.x) if hi is None else max(start, _position(piece.x, hi + zero, "right"))
        if start:
            left = piece.cut(0, start)
        if stop < len(piece.x) and right is None:
            right = piece.cut(stop, len(piece.x))
        if stop > start:
            inside.append(piece.cut(start, stop))
    return inside, left, right


def _neighbour(piece: SeriesPiece | None, place: int, zero: float) -> tuple[float, float] | None:
    return None if piece is None else (float(piece.x[place]) - zero, float(piece.values[place]))


def _position(x: Any, edge: float, side: Any) -> int:
    return int(_positions(x, [edge], side)[0])


def _positions(x: Any, edges: Any, side: Any = "left") -> Ints:
    """Find edges among ascending x. Edges are converted to the type of x: a different type would make numpy copy all of x."""
    import numpy as np

    edges = np.asarray(edges, np.float64)
    if x.dtype.kind == "f":
        return np.asarray(np.searchsorted(x, edges, side), np.int64)
    whole = np.ceil(edges) if side == "left" else np.floor(edges)
    # The largest float64 below 2**63: 2**63 itself would overflow.
    found = positions(x, np.clip(whole, -(2.0**63), 2.0**63 - 1024).astype(np.int64), side)
    found[whole >= 2.0**63] = len(x)
    return found


@lru_cache(maxsize=64)
def _edges(low: float, high: float, buckets: int, zero: float, log: bool) -> Floats:
    """Return the inner edges of buckets of equal width. Cached because runs of one project mostly share them."""
    import numpy as np

    part = np.arange(1, buckets) / buckets
    low, high = (low, high) if log else (low + zero, high + zero)
    edges: Floats = zero + low * (high / low) ** part if log else low + (high - low) * part
    edges.flags.writeable = False
    return edges


def _raw(
    key: str, pieces: Sequence[SeriesPiece], total: int, zero: float, restarts: list[float], ends: dict[str, Any]
) -> Buckets:
    import numpy as np

    x = np.concatenate([np.asarray(p.x, np.float64) for p in pieces]) - zero if pieces else np.empty(0)
    values = np.concatenate([np.asarray(p.values, np.float64) for p in pieces]) if pieces else np.empty(0)
    odd = np.flatnonzero(~np.isfinite(values))
    marks = [(float(x[i]), _kind(values[i])) for i in odd]
    band: dict[str, Any] = {}
    if pieces and pieces[0].band is not None:
        columns = zip(*(p.band for p in pieces if p.band is not None), strict=True)
        band = dict(zip(("low", "high", "low_rank", "high_rank"), (np.concatenate(c) for c in columns), strict=True))
    one = np.ones(total, np.int64)
    return Buckets(
        key, x, x, values, values, values, values, one, total, True, marks, len(marks), restarts, **ends, **band,
        x_min=x, x_max=x,
    )  # fmt: skip


def _kind(value: Any) -> str:
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


class _Part(NamedTuple):
    """The contribution of one piece to the buckets it touches."""

    where: Ints
    x: Floats
    x_last: Floats
    x_min: Floats
    x_max: Floats
    min: Floats
    max: Floats
    first: Floats
    last: Floats
    size: Ints
    marks: list[tuple[int, float, str]]
    marked: int
    band: tuple[Floats, Floats, Ints, Ints] | None


def _thinned(
    key: str, pieces: Sequence[SeriesPiece], edges: Floats, total: int, zero: float, restarts: list[float], ends: dict[str, Any]
) -> Buckets:
    parts = [_part(piece, edges) for piece in pieces]
    whole = parts[0] if len(parts) == 1 else _united(parts)
    found = {(bucket, kind): x for bucket, x, kind in reversed(whole.marks)}
    marks = [(x - zero, kind) for (_, kind), x in sorted(found.items(), key=lambda mark: mark[1])]
    band: dict[str, Any] = dict(zip(("low", "high", "low_rank", "high_rank"), whole.band or (), strict=False))
    return Buckets(
        key, whole.x - zero, whole.x_last - zero, whole.min, whole.max, whole.first, whole.last, whole.size,
        total, False, marks, whole.marked, restarts, **ends, **band, x_min=whole.x_min - zero, x_max=whole.x_max - zero,
    )  # fmt: skip


def _united(parts: Sequence[_Part]) -> _Part:
    """Combine the parts of several pieces; a bucket may have points of two of them."""
    import numpy as np

    where, x, x_last, x_min, x_max, low, high, first, last, size = (
        np.concatenate([part[i] for part in parts]) for i in range(10)
    )
    starts = np.flatnonzero(np.append(True, where[1:] != where[:-1]))
    stops = np.append(starts[1:], len(where)) - 1
    begin, end = _chosen(first, starts, stops, last=False), _chosen(last, starts, stops, last=True)
    low, x_min = extremes(low, x_min, starts, np.fmin)
    high, x_max = extremes(high, x_max, starts, np.fmax)
    return _Part(
        where[starts], x[begin], x_last[end], x_min, x_max, low, high, first[begin], last[end], np.add.reduceat(size, starts),
        [mark for part in parts for mark in part.marks],
        sum(part.marked for part in parts),
        _bands(parts, starts),
    )  # fmt: skip


def _chosen(values: Floats, starts: Ints, stops: Ints, *, last: bool) -> Ints:
    """Return the index of each bucket's first or last part that is not NaN; if all are NaN, that of any part."""
    import numpy as np

    place = np.arange(len(values))
    if last:
        found = np.maximum.reduceat(np.where(np.isnan(values), -1, place), starts)
        return np.where(found < 0, stops, found)
    found = np.minimum.reduceat(np.where(np.isnan(values), len(values), place), starts)
    return np.where(found == len(values), starts, found)


def _bands(parts: Sequence[_Part], starts: Ints) -> tuple[Floats, Floats, Ints, Ints] | None:
    import numpy as np

    if parts[0].band is None:
        return None
    low, high, low_rank, high_rank = (np.concatenate(c) for c in zip(*(p.band for p in parts if p.band), strict=True))
    least, most = extremes(low, low_rank, starts, np.fmin), extremes(high, high_rank, starts, np.fmax)
    return least[0], most[0], least[1], most[1]


def extremes(values: Floats, holders: NDArray[Any], starts: Ints, better: Any) -> tuple[Floats, Any]:
    """Return each bucket's extreme, and its first holder: a rank, or an x."""
    import numpy as np

    best = better.reduceat(values, starts)
    spread = np.repeat(best, np.diff(np.append(starts, len(values))))
    holds = np.where((values == spread) | np.isnan(spread), np.arange(len(values)), len(values))
    return best, holders[np.minimum.reduceat(holds, starts)]


def _part(piece: SeriesPiece, edges: Floats) -> _Part:
    """Reduce one piece to the buckets it touches."""
    import numpy as np

    bounds = np.concatenate(([0], _positions(piece.x, edges), [len(piece.x)]))
    where = np.flatnonzero(bounds[1:] > bounds[:-1])
    starts, stops = bounds[where], bounds[where + 1] - 1
    values = piece.values.view(np.uint8) if piece.values.dtype == np.bool_ else piece.values
    at = starts, stops, *_extremes_at(values, starts)
    first, last, low, high = (values[places].astype(np.float64) for places in at)
    marks: list[tuple[int, float, str]] = []
    marked = 0
    if not (np.isfinite(low).all() and np.isfinite(high).all()):  # NaN or infinity is then its bucket's extreme
        at, (first, last, low, high), marks, marked = _with_gaps(piece, where, starts, stops)
    x, x_last, x_min, x_max = (piece.x[places].astype(np.float64) for places in at)
    band = None
    if piece.band is not None:
        lows, highs, low_ranks, high_ranks = piece.band
        least, most = extremes(lows, low_ranks, starts, np.fmin), extremes(highs, high_ranks, starts, np.fmax)
        band = (least[0], most[0], least[1], most[1])
    return _Part(where, x, x_last, x_min, x_max, low, high, first, last, stops - starts + 1, marks, marked, band)


def _extremes_at(values: NDArray[Any], starts: Ints) -> tuple[Ints, Ints]:
    """Return the index at which each bucket's minimum and maximum first occur, or its first NaN if it has one."""
    import numpy as np

    if len(values) > LARGE * len(starts):
        ends = [*starts[1:].tolist(), len(values)]
        values = np.ascontiguousarray(values)  # a journal's values are not adjacent in memory: one pass makes them so
        parts = [values[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
        return starts + [part.argmin() for part in parts], starts + [part.argmax() for part in parts]
    sizes = np.diff(np.append(starts, len(values)))
    return _first_of(values, starts, sizes, np.minimum), _first_of(values, starts, sizes, np.maximum)


def _first_of(values: NDArray[Any], starts: Ints, sizes: Ints, better: Any) -> Ints:
    import numpy as np

    spread = np.repeat(better.reduceat(values, starts), sizes)
    same = (values == spread) | ((values != values) if values.dtype.kind == "f" else False)  # noqa: PLR0124 - true only of NaN
    places = np.flatnonzero(same)
    return np.asarray(places[np.searchsorted(places, starts)], np.int64)


def _with_gaps(piece: SeriesPiece, where: Ints, starts: Ints, stops: Ints) -> tuple[Any, ...]:
    """Reduce values of which some are NaN or infinite: these are skipped and listed as marks. Return positions, then values."""
    import numpy as np

    values = np.asarray(piece.values, np.float64)
    finite = np.isfinite(values)
    place = np.arange(len(values))
    none = ~np.logical_or.reduceat(finite, starts)
    at = (
        np.where(none, starts, np.minimum.reduceat(np.where(finite, place, len(values)), starts)),
        np.where(none, stops, np.maximum.reduceat(np.where(finite, place, -1), starts)),
        _extremes_at(np.where(finite, values, np.inf), starts)[0],
        _extremes_at(np.where(finite, values, -np.inf), starts)[1],
    )
    found = [values[places] for places in at]
    for column in found:
        column[none] = np.nan
    return at, found, _marks(piece.x, values, ~finite, where, starts), int((~finite).sum())


def _marks(x: Any, values: Floats, odd: NDArray[np.bool_], where: Ints, starts: Ints) -> list[tuple[int, float, str]]:
    """List the first NaN, inf and -inf of each bucket: more would fall on the same pixel."""
    import numpy as np

    places = np.flatnonzero(odd)
    inside = np.searchsorted(starts, places, "right") - 1
    kinds = np.where(np.isnan(values[places]), 0, np.where(values[places] > 0, 1, 2))
    _, firsts = np.unique(inside * 3 + kinds, return_index=True)
    return [(int(where[inside[i]]), float(x[places[i]]), KINDS[kinds[i]]) for i in sorted(firsts)]
