"""Ranks folded to one number: the values of many ranks for one key and step, and which rank was lowest and highest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import SettingError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FOLDS = ("mean", "min", "max", "sum", "std", "last")


@dataclass(frozen=True)
class Folded:
    """One point per step, over ranks. `min_rank` and `max_rank` identify the stragglers; `count` is the number of ranks."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    min_rank: NDArray[np.int64]
    max_rank: NDArray[np.int64]
    count: NDArray[np.int64]


def check(how: str) -> str:
    """Return the name of a fold; raise an error that lists the known ones if it is unknown."""
    if how not in FOLDS:
        raise SettingError(f"fold={how!r} is not known. Nothing was read. Known: {', '.join(FOLDS)}.")
    return how


def fold(how: str, ranks: NDArray[np.int64], steps: NDArray[np.int64], times: NDArray[Any], values: NDArray[Any]) -> Folded:
    """Reduce the points of many ranks to one per step. If a rank logged a step twice, its last value counts.

    mean, sum and std propagate a NaN of any rank; min and max, and the ranks that hold them, ignore it unless all values are
    NaN.
    """
    import numpy as np

    check(how)
    values = values.astype(np.float64, copy=False)
    if width := _width(ranks, steps):
        return _fold_table(how, ranks[::width], steps[:width], times.reshape(-1, width), values.reshape(-1, width))
    ranks, steps, times, values = _by_step(ranks, steps, times, values)
    starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1])) if len(steps) else np.empty(0, np.int64)
    if not len(starts):
        none, zero = np.empty(0, np.float64), np.empty(0, np.int64)
        return Folded(zero, none, none, none, none, zero, zero, zero)
    count = np.diff(np.append(starts, len(steps)))
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return Folded(
        steps=steps[starts],
        times=np.maximum.reduceat(times, starts),
        values=_reduce(how, starts, count, times, values, low, high),
        min=low,
        max=high,
        min_rank=_holder(ranks, values, low, starts, count),
        max_rank=_holder(ranks, values, high, starts, count),
        count=count,
    )


def _fold_table(how: str, ranks: Any, steps: Any, times: Any, values: Any) -> Folded:
    """Fold ranks that all have the same steps, a row each: without sorting, and a few times sooner than `_reduce`."""
    import numpy as np

    low, high, newest = np.fmin.reduce(values, axis=0), np.fmax.reduce(values, axis=0), times.max(axis=0)
    if how in ("min", "max"):
        folded = low if how == "min" else high
    elif how == "last":
        place = len(ranks) - 1 - (times == newest)[::-1].argmax(axis=0)
        folded = values[place, np.arange(len(steps))]
    else:
        starts = np.arange(0, values.size, len(ranks))  # added up in the same order as there, so to the same bits
        folded = _reduce(how, starts, len(ranks), newest, values.T.ravel(), low, high)
    first_low, first_high = (((values == one) | np.isnan(one)).argmax(axis=0) for one in (low, high))
    count = np.full(len(steps), len(ranks))
    return Folded(steps, newest, folded, low, high, ranks[first_low], ranks[first_high], count)


def _by_step(ranks: Any, steps: Any, times: Any, values: Any) -> tuple[Any, Any, Any, Any]:
    """Return the points by step, then rank, the last one of each."""
    import numpy as np

    # Stable sort: points of one (step, rank) stay in the order they were written, and the last one counts.
    order = np.lexsort((ranks, steps))
    ranks, steps, times, values = ranks[order], steps[order], times[order], values[order]
    if len(steps):
        last = np.append((steps[1:] != steps[:-1]) | (ranks[1:] != ranks[:-1]), True)
        ranks, steps, times, values = ranks[last], steps[last], times[last], values[last]
    return ranks, steps, times, values


def _width(ranks: Any, steps: Any) -> int:
    """Return the number of steps if the ranks, one after the other, logged the same steps in order; else 0."""
    changes = (ranks[1:] != ranks[:-1]).nonzero()[0]
    width = int(changes[0]) + 1 if len(changes) else len(steps)
    if not width or len(steps) % width or len(changes) != len(steps) // width - 1:
        return 0
    table, first = steps.reshape(-1, width), ranks[::width]
    same = (
        bool((ranks.reshape(-1, width) == first[:, None]).all()) and bool((first[1:] > first[:-1]).all())
        and bool((table[0, 1:] > table[0, :-1]).all()) and bool((table == table[0]).all())
    )  # fmt: skip
    return width if same else 0


def _reduce(how: str, starts: Any, count: Any, times: Any, values: Any, low: Any, high: Any) -> Any:
    import numpy as np

    if how in ("min", "max"):
        return low if how == "min" else high
    if how == "last":
        newest = np.repeat(np.maximum.reduceat(times, starts), count)
        place = np.where(times == newest, np.arange(len(times)), -1)
        return values[np.maximum.reduceat(place, starts)]
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, which is the correct result
        total = np.add.reduceat(values, starts)
        if how == "sum":
            return total
        mean = total / count
        if how == "mean":
            return mean
        return np.sqrt(np.add.reduceat((values - np.repeat(mean, count)) ** 2, starts) / count)


def _holder(ranks: Any, values: Any, extreme: Any, starts: Any, count: Any) -> Any:
    """Return the lowest rank that has the extreme value of each step; if all are NaN, the lowest rank."""
    import numpy as np

    target = np.repeat(extreme, count)
    holds = (values == target) | np.isnan(target)
    return np.minimum.reduceat(np.where(holds, ranks, np.iinfo(np.int64).max), starts)
