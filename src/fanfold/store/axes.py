"""A series over any axis: step, wall time, time since the start, or another key; of one rank, or folded over all.

`auto` is the axis that `define_metric` chose for the key, or the step if it chose none.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .. import fold as folding
from ..errors import FanfoldError
from ..journal.walker import NO_STEP
from .buckets import Buckets, Piece, bucket
from .points import Points, holders, joined, points
from .run import StoredRun
from .segments import positions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PLAIN = ("step", "time", "relative")
AUTO = "auto"
MOST_FOLDED = 100_000_000  # points of all ranks; each takes about 100 bytes during folding


def axis_of(run: StoredRun, key: str, x: str) -> str:
    """Return the x axis of a key: for `auto`, the one `define_metric` chose if the run has it, else the step."""
    if x != AUTO:
        return x
    chosen = run.metric(key).get("x") if run.metrics else None
    known = isinstance(chosen, str) and chosen != key and (chosen in PLAIN or bool(holders(run, chosen)))
    return str(chosen) if known else "step"


def curve(run: StoredRun, key: str, *, buckets: int, x: str) -> Buckets | None:
    """Return a key's series for a chart: the mean over ranks if several have it, None if there are no points."""
    ranks = holders(run, key)
    if not ranks:
        return None
    fold = "mean" if len(ranks) > 1 and not key.startswith("system/") else None
    try:
        found = thin(run, key, buckets=buckets, x=x, rank=None, fold=fold, lo=None, hi=None)
    except FanfoldError:  # the run has no points under the key requested as x
        return None
    return found if len(found) else None


def thin(
    run: StoredRun,
    key: str,
    *,
    buckets: int,
    x: str,
    rank: int | None,
    fold: str | None,
    lo: float | None,
    hi: float | None,
    log: bool = False,
) -> Buckets:
    """Return a key's series in buckets of x; see Store.series."""
    x = axis_of(run, key, x)
    ranks = holders(run, key)
    if not ranks or (rank is not None and rank not in ranks):
        run.series(key, rank=rank)  # raises the error that lists the existing keys
    if fold is not None:
        axis, pieces, restarts = _folded(run, key, folding.check(fold), ranks, x)
    else:
        found = points(run, key, ranks[0] if rank is None else rank)
        axis, pieces, restarts = _over_key(run, found, x) if x not in PLAIN else _plain(run, found, x)
    zero = run.started if axis == "relative" else 0.0
    return bucket(key, pieces, buckets=buckets, lo=lo, hi=hi, zero=zero, restarts=restarts, axis=axis, log=log)


def _plain(run: StoredRun, found: Points, x: str) -> tuple[str, list[Piece], list[float]]:
    """Return the pieces over step or time, in order. Metrics without steps (system metrics) are returned over time."""
    if x == "step":
        stepped = [part for part in map(_stepped, found.chunks) if len(part)]
        if stepped:
            return x, [Piece(part.axis, part.narrow) for part in stepped], _restarts(run, found, x)
        x = "relative"
    pieces = [Piece(part.times, part.narrow) for part in found.chunks]
    inner = all(bool((piece.x[1:] >= piece.x[:-1]).all()) for piece in pieces)
    if not inner or not all(one.x[-1] <= two.x[0] for one, two in pairwise(pieces)):
        whole = joined(found.chunks)
        pieces = [_sorted(whole.times, whole.values)]
    return x, pieces, _restarts(run, found, x)


def _restarts(run: StoredRun, found: Points, x: str) -> list[float]:
    zero = run.started if x == "relative" else 0.0
    return [float(step) if x == "step" else when - zero for step, when in found.restarts]


def _stepped(chunk: Any) -> Any:
    """Leave out points without a step; they come first in a sorted chunk."""
    if chunk.bounds[0] != NO_STEP:
        return chunk
    import numpy as np

    return chunk.cut(int(positions(chunk.axis, np.array([NO_STEP]), "right")[0]), len(chunk))


def _sorted(x: NDArray[Any], values: NDArray[Any]) -> Piece:
    import numpy as np

    if len(x) < 2 or bool((x[1:] >= x[:-1]).all()):
        return Piece(x, values)
    order = np.argsort(x, kind="stable")
    return Piece(x[order], values[order])


def _over_key(run: StoredRun, found: Points, x: str) -> tuple[str, list[Piece], list[float]]:
    import numpy as np

    whole = joined(found.chunks)
    at, known = _places(run, x, found.rank, whole.steps)
    starts = np.searchsorted(whole.steps, np.array([step for step, _ in found.restarts], np.int64))
    restarts = [float(at[place]) for place in starts if place < len(at) and known[place]]
    return x, [_sorted(at[known], whole.values[known])], restarts


def _places(run: StoredRun, x: str, rank: int, steps: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the x of points over another key, matched by step, and which of them have a finite x."""
    import numpy as np

    ranks = holders(run, x)
    if not ranks:
        run.series(x)
    others = joined(points(run, x, rank if rank in ranks else ranks[0]).chunks)
    place = np.searchsorted(others.steps, steps, "right") - 1
    at = np.asarray(others.values, np.float64)[np.maximum(place, 0)]
    return at, (place >= 0) & np.isfinite(at) & (steps != NO_STEP)


def _folded(run: StoredRun, key: str, how: str, ranks: Iterable[int], x: str) -> tuple[str, list[Piece], list[float]]:
    """Fold all ranks by step, then place the result over x. Times of a fold are those of its last rank."""
    import numpy as np

    gathered = [points(run, key, rank) for rank in ranks]
    total = sum(map(len, gathered))
    if total > MOST_FOLDED:
        raise FanfoldError(
            f"{key!r} has {total} points on {len(gathered)} ranks, and at most {MOST_FOLDED} are folded for a chart. "
            "Nothing was read. Look at one rank instead."
        )
    columns = [one.columns() for one in gathered]
    holder = np.concatenate([np.full(len(c[0]), one.rank, np.int64) for one, c in zip(gathered, columns, strict=True)])
    done = folding.fold(how, holder, *(np.concatenate([c[i] for c in columns]) for i in range(3)))
    at: Any = done.times
    known = np.ones(len(at), bool)
    if x == "step" and done.steps[-1] != NO_STEP:
        at, known = done.steps, done.steps != NO_STEP
    elif x not in PLAIN:
        at, known = _places(run, x, gathered[0].rank, done.steps)
    elif x == "step":
        x = "relative"
    order = np.flatnonzero(known)
    order = order[np.argsort(at[order], kind="stable")]
    band = (done.min[order], done.max[order], done.min_rank[order], done.max_rank[order])
    return x, [Piece(at[order], done.values[order], band)], _restarts(run, gathered[0], x) if x in PLAIN else []
