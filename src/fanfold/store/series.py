"""The complete series of a key: the points of one rank, or of all ranks folded to one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from ..errors import MetricNotFound
from ..fold import Folded, check, fold
from ..journal.walker import NO_STEP
from .points import Points, holders, points, points_by_rank
from .run import Series, StoredRun


def series(run: StoredRun, key: str, *, rank: int | None, fold: str | None, raw: bool, own: bool) -> Series:
    """Return the series of a key; see StoredRun.series."""
    if fold is not None:
        check(fold)
        gathered = list(points_by_rank(run, key, raw=raw, own=own))
        if not gathered:
            no_numbers(run, key)
        done = folded(fold, gathered)
        return Series(key, done.steps, done.times, done.values, done.min, done.max, done.min_rank, done.max_rank, done.count)
    ranks = holders(run, key, own=own)
    if not ranks or (rank is not None and rank not in ranks):
        no_numbers(run, key, rank)
    return _series(points(run, key, ranks[0] if rank is None else rank, raw=raw, own=own))


def series_by_rank(run: StoredRun, key: str, *, own: bool = False) -> Iterator[tuple[int, Series]]:
    """Yield the series of each rank that has a key."""
    return ((found.rank, _series(found)) for found in points_by_rank(run, key, own=own))


def _series(found: Points) -> Series:
    import numpy as np

    steps, times, values = found.columns()
    if len(steps) and steps.min() == NO_STEP:
        steps = np.where(steps == NO_STEP, -1, steps)
    return Series(found.key, steps, times, values)


def folded(how: str, gathered: Sequence[Points]) -> Folded:
    """Fold the points of several ranks."""
    import numpy as np

    columns = [one.columns() for one in gathered]
    ranks = np.concatenate([np.full(len(one), one.rank, np.int64) for one in gathered])
    return fold(how, ranks, *(np.concatenate([column[i] for column in columns]) for i in range(3)))


def no_numbers(run: StoredRun, key: str, rank: int | None = None) -> NoReturn:
    """Raise the error that names the ranks that have a key, or else the keys that a run has."""
    ranks = holders(run, key)
    if ranks:
        raise MetricNotFound(
            f"rank {rank} of run {run.id} has no numbers under {key!r}. Nothing was read. "
            f"Ranks that have it: {', '.join(map(str, ranks))}."
        )
    raise no_metric([run], key, run.keys() + run.keys("system"), "read")


def no_metric(runs: Sequence[StoredRun], pattern: str, known: Sequence[str], undone: str) -> MetricNotFound:
    """Return the error for a metric, or a pattern such as `val/*`, that no run has; it names similar ones."""
    close = [key for key in known if pattern.strip("*").lower() in key.lower()][:8] or known[:8]
    there = f"Its metrics: {', '.join(close)}" if known else "It has no metrics"
    more = f" and {len(known) - len(close)} more" if len(known) > len(close) else ""
    names = ", ".join(run.id for run in runs)
    return MetricNotFound(f"run {names} has no numbers under {pattern!r}. Nothing was {undone}. {there}{more}.")
