"""A series over any axis: step, wall time, time since the start, or another key; of one rank, or folded over all.

`auto` is the axis that `define_metric` chose for the key, or the step if it chose none.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .. import fold as folding
from ..errors import FanfoldError
from ..journal.walker import NO_STEP
from . import deadline
from .buckets import Buckets, SeriesPiece, bucket
from .points import Points, holders, joined, points, points_by_rank, stepped
from .run import StoredRun
from .series import folded, no_numbers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PLAIN = ("step", "time", "relative")
AUTO = "auto"
_Placed = tuple[str, list[SeriesPiece], list[float], float | None]  # axis, pieces, restarts, where a fork's own points begin
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
    fold = "mean" if len(holders(run, key)) > 1 and not key.startswith("system/") else None
    found = thin_or_none(run, key, buckets=buckets, x=x, fold=fold)
    return found if found is not None and len(found) else None


def thin(
    run: StoredRun,
    key: str,
    *,
    buckets: int = 330,
    whole: int = 0,
    x: str = "step",
    rank: int | None = None,
    fold: str | None = None,
    lo: float | None = None,
    hi: float | None = None,
    log: bool = False,
) -> Buckets:
    """Return a key's series in buckets of x; see Store.series."""
    x = axis_of(run, key, x)
    ranks = holders(run, key)
    if not ranks or (rank is not None and rank not in ranks):
        no_numbers(run, key, rank)
    if fold is not None:
        axis, pieces, restarts, forked = _folded(run, key, folding.check(fold), x)
    else:
        found = points(run, key, ranks[0] if rank is None else rank)
        axis, pieces, restarts, forked = _over_key(run, found, x) if x not in PLAIN else _plain(run, found, x)
    zero = run.started if axis == "relative" else 0.0
    thinned = bucket(key, pieces, buckets=buckets, whole=whole, lo=lo, hi=hi, zero=zero, restarts=restarts, axis=axis, log=log)
    return thinned if forked is None else replace(thinned, forked=forked)


def thin_or_none(run: StoredRun, key: str, **how: Any) -> Buckets | None:
    """Return a key's series in buckets; None if the run has no points for it, or not the requested rank or x."""
    if run.fork is None and not any(journal.count(key) for _, journal in run.holding(key)):
        return None
    try:
        return thin(run, key, **how)
    except deadline.TookTooLong:
        raise
    except FanfoldError:
        return None


def _plain(run: StoredRun, found: Points, x: str) -> _Placed:
    """Return the pieces over step or time, in order. Metrics without steps (system metrics) are returned over time."""
    if x == "step":
        parts = [part for part in map(stepped, found.chunks) if len(part)]
        if parts:
            return x, [SeriesPiece(part.axis, part.narrow) for part in parts], *_changes(run, found, x)
        x = "relative"
    if x == "relative" and found.forked is not None:
        whole = joined(found.chunks)
        return x, [_sorted(_continued(found.forked, whole.steps, whole.times), whole.values)], *_changes(run, found, x)
    pieces = [SeriesPiece(part.times, part.narrow) for part in found.chunks]
    inner = all(bool((piece.x[1:] >= piece.x[:-1]).all()) for piece in pieces)
    if not inner or not all(one.x[-1] <= two.x[0] for one, two in pairwise(pieces)):
        whole = joined(found.chunks)
        pieces = [_sorted(whole.times, whole.values)]
    return x, pieces, *_changes(run, found, x)


def _changes(run: StoredRun, found: Points, x: str) -> tuple[list[float], float | None]:
    """Return where on an axis later attempts begin, and where a fork's own points begin."""
    zero = run.started if x == "relative" else 0.0
    placed = [float(step) if x == "step" else when - zero for step, when in (*found.restarts, *filter(None, [found.forked]))]
    return (placed, None) if found.forked is None else (placed[:-1], placed[-1])


def _continued(forked: tuple[int, float], steps: NDArray[np.int64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return times in which a fork's inherited points end where its own begin: days may have passed in between."""
    import numpy as np

    inherited = (steps < forked[0]) & (steps != NO_STEP)
    return np.where(inherited, times + (forked[1] - times[inherited].max(initial=-np.inf)), times) if inherited.any() else times


def _sorted(x: NDArray[Any], values: NDArray[Any]) -> SeriesPiece:
    import numpy as np

    if len(x) < 2 or bool((x[1:] >= x[:-1]).all()):
        return SeriesPiece(x, values)
    order = np.argsort(x, kind="stable")
    return SeriesPiece(x[order], values[order])


def _over_key(run: StoredRun, found: Points, x: str) -> _Placed:
    import numpy as np

    whole = joined(found.chunks)
    at, known = _places(run, x, found.rank, whole.steps)

    def begin(step: int) -> float | None:
        place = int(np.searchsorted(whole.steps, step))
        return float(at[place]) if place < len(at) and known[place] else None

    restarts = [at_ for step, _ in found.restarts if (at_ := begin(step)) is not None]
    forked = None if found.forked is None else begin(found.forked[0])
    return x, [_sorted(at[known], whole.values[known])], restarts, forked


def _places(run: StoredRun, x: str, rank: int, steps: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the x of points over another key, matched by step, and which of them have a finite x."""
    import numpy as np

    ranks = holders(run, x)
    if not ranks:
        no_numbers(run, x)
    others = joined(points(run, x, rank if rank in ranks else ranks[0]).chunks)
    place = np.searchsorted(others.steps, steps, "right") - 1
    at = np.asarray(others.values, np.float64)[np.maximum(place, 0)]
    return at, (place >= 0) & np.isfinite(at) & (steps != NO_STEP)


def _folded(run: StoredRun, key: str, how: str, x: str) -> _Placed:
    """Fold all ranks by step, then place the result over x. Times of a fold are those of its last rank."""
    import numpy as np

    gathered = list(points_by_rank(run, key))
    if not gathered:
        no_numbers(run, key)
    total = sum(map(len, gathered))
    if total > MOST_FOLDED:
        raise FanfoldError(
            f"{key!r} has {total} points on {len(gathered)} ranks, and at most {MOST_FOLDED} are folded for a chart. "
            "Nothing was read. Look at one rank instead."
        )
    done = folded(how, gathered)
    at: Any = done.times
    known = np.ones(len(at), bool)
    if x == "step" and done.steps[-1] != NO_STEP:
        at, known = done.steps, done.steps != NO_STEP
    elif x not in PLAIN:
        at, known = _places(run, x, gathered[0].rank, done.steps)
    elif x == "step":
        x = "relative"
    first = next((one.forked for one in gathered if one.forked is not None), None)
    if x == "relative" and first is not None:
        at = _continued(first, done.steps, done.times)
    order = np.flatnonzero(known)
    order = order[np.argsort(at[order], kind="stable")]
    band = (done.min[order], done.max[order], done.min_rank[order], done.max_rank[order])
    restarts, forked = _changes(run, replace(gathered[0], forked=first), x) if x in PLAIN else ([], None)
    return x, [SeriesPiece(at[order], done.values[order], band)], restarts, forked
