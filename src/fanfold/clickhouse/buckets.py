"""Thinning where the points are: one query makes the buckets of many series, each with exact extremes.

It answers for step axes of single ranks, which is what a page of charts asks. Other axes and folds are thinned here, out of
the points themselves, by the code that does so for a directory of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..journal.reader import NO_STEP
from ..store.buckets import Buckets, Piece, bucket
from ..store.points import holders
from ..store.run import StoredRun
from .database import Database
from .decode import series_number
from .run import FleetJournal, FleetRun, typed
from .schema import CELL

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_PARTS = 1500  # journals in one query: they travel in its address
COARSE = 4  # a bucket must be this many cells wide before rollups stand for points
FAR = 1 << 62


class Part(NamedTuple):
    """One journal's share of a series: the points before `limit`, which a later attempt logged again from there on."""

    journal: FleetJournal
    limit: int


@dataclass
class Plan:
    """One series that is to be thinned by the database."""

    run: FleetRun
    key: str
    parts: list[Part]
    restarts: list[float]
    low: float
    high: float
    lo: float | None
    hi: float | None

    @property
    def most(self) -> int:
        """How many points there can be."""
        return sum(part.journal.extents[self.key].number for part in self.parts)

    @property
    def exact(self) -> bool:
        """Tell whether rollups can stand for the points: none hidden, none twice, none cut off."""
        whole = self.lo is None and self.hi is None
        return whole and all(part.limit == FAR and not part.journal.twice for part in self.parts)


def thin_many(
    database: Database, wanted: Sequence[tuple[StoredRun, str]], *, buckets: int = 330, x: str = "step", rank: int | None = None,
    fold: str | None = None, lo: float | None = None, hi: float | None = None,
) -> list[Buckets | None]:  # fmt: skip
    """Return the buckets of the series that can be made in the database; None for the others."""
    if x != "step" or fold is not None:
        return [None] * len(wanted)
    plans = [_plan(run, key, rank, lo, hi) for run, key in wanted]
    found: dict[int, Buckets] = {}
    count = max(buckets, 1)
    small = [i for i, plan in enumerate(plans) if plan is not None and plan.most <= count]
    large = [i for i, plan in enumerate(plans) if plan is not None and plan.most > count]
    coarse = {i for i in large if (plan := plans[i]) and plan.exact and (plan.high - plan.low) / count >= COARSE * CELL}
    for some, sql in ((sorted(coarse), _FROM_ROLLUPS), ([i for i in large if i not in coarse], _FROM_POINTS)):
        for group in _groups(some, plans):
            found |= _thinned(database, {i: plan for i in group if (plan := plans[i])}, count, sql)
    few = [i for i, one in found.items() if one.total <= count and not one.raw]
    for group in _groups(sorted({*small, *few}), plans):
        found |= _raw(database, {i: plan for i in group if (plan := plans[i])}, count)
    return [found.get(i) for i in range(len(wanted))]


def _plan(run: StoredRun, key: str, rank: int | None, lo: float | None, hi: float | None) -> Plan | None:
    """Work out which journals' points count, as `store.points` does; None where the steps do not tell."""
    if not isinstance(run, FleetRun):
        return None
    ranks = holders(run, key)
    if not ranks or (rank is not None and rank not in ranks):
        return None
    of = ranks[0] if rank is None else rank
    parts: list[Part] = []
    restarts: list[float] = []
    for attempt in run.attempts:
        own = [j for j in attempt.journals if isinstance(j, FleetJournal) and j.header.get("rank") == of and key in j.extents]
        if not own:
            continue
        first = own[0].extents[key].first[1]
        if any(journal.extents[key].low == NO_STEP for journal in own):
            return None  # without steps: drawn over time
        if parts:
            restarts.append(float(first))
            parts = [Part(part.journal, min(part.limit, first)) for part in parts if part.journal.extents[key].low < first]
            parts = [Part(part.journal, FAR if part.journal.extents[key].high < part.limit else part.limit) for part in parts]
        parts += [Part(journal, FAR) for journal in own]
    extents = [part.journal.extents[key] for part in parts]
    low = min(one.low for one in extents)
    high = max(min(one.high, part.limit - 1) for one, part in zip(extents, parts, strict=True))
    return Plan(run, key, parts, restarts, low if lo is None else lo, high if hi is None else hi, lo, hi)


def _groups(which: Sequence[int], plans: Sequence[Plan | None]) -> list[list[int]]:
    """Cut what is asked into queries of bearable length."""
    groups: list[list[int]] = [[]]
    size = 0
    for i in which:
        parts = len(plan.parts) if (plan := plans[i]) else 0
        if groups[-1] and size + parts > MOST_PARTS:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += parts
    return [group for group in groups if group]


# One row of `w` for each journal of each series: which series it belongs to, its place among that one's journals, which
# steps count, and how the axis is cut.
_WANTED = (
    "WITH arrayJoin(arrayZip({i:Array(UInt32)}, {runs:Array(UInt64)}, {series:Array(UInt64)}, {journals:Array(UInt64)}, "
    "{orders:Array(UInt16)}, {limits:Array(Int64)}, {los:Array(Int64)}, {his:Array(Int64)}, {lows:Array(Float64)}, "
    "{spans:Array(Float64)})) AS t SELECT t.1 AS i, t.2 AS run, t.3 AS series, t.4 AS journal, t.5 AS ord, t.6 AS lim, "
    "t.7 AS lo, t.8 AS hi, t.9 AS low, t.10 AS span"
)
_WHERE = "run IN {all_runs:Array(UInt64)} AND series IN {all_series:Array(UInt64)}"
_PLACE = (
    "multiIf({x} < lo, toInt64(-1), {x} > hi, toInt64({{n:UInt32}}), "
    "least(toInt64({{n:UInt32}}) - 1, toInt64(floor(({x} - low) * {{n:UInt32}} / span))))"
)
_FROM_POINTS = (
    "SELECT i, b, min(step) AS x, max(step) AS x_last, min(if(isFinite(value), value, inf)) AS l, "
    "max(if(isFinite(value), value, -inf)) AS h, argMinIf(value, (step, ord, pos), isFinite(value) OR out) AS f, "
    "argMaxIf(value, (step, ord, pos), isFinite(value) OR out) AS s, count() AS count, countIf(isFinite(value)) AS sound, "
    "minIf(step, isNaN(value)) AS nan_at, countIf(isNaN(value)) AS nans, minIf(step, value = inf) AS inf_at, "
    "countIf(value = inf) AS infs, minIf(step, value = -inf) AS neg_at, countIf(value = -inf) AS negs "
    "FROM (SELECT i, ord, step, pos, value, " + _PLACE.format(x="step") + " AS b, b < 0 OR b >= {n:UInt32} AS out "
    "FROM (SELECT run, series, journal, step, pos, value FROM points{final} WHERE " + _WHERE + ") AS p "
    "INNER JOIN (" + _WANTED + ") AS w ON p.run = w.run AND p.series = w.series AND p.journal = w.journal WHERE step < lim) "
    "GROUP BY i, b ORDER BY i, b"
)  # fmt: skip
_FROM_ROLLUPS = (
    "SELECT i, b, min(since) AS x, max(until) AS x_last, min(p.low_) AS l, max(p.high_) AS h, min(p.first).3 AS f, "
    "max(p.last).3 AS s, sum(count) AS count, sum(count - odd) AS sound, 0 AS nan_at, sum(odd) AS nans, 0 AS inf_at, 0 AS infs, "
    "0 AS neg_at, 0 AS negs FROM (SELECT i, since, until, low_, high_, first, last, count, odd, "
    + _PLACE.format(x="since") + " AS b "
    "FROM (SELECT run, series, journal, cell, min(low) AS low_, max(high) AS high_, min(first) AS first, max(last) AS last, "
    "min(since) AS since, max(until) AS until, sum(count) AS count, sum(odd) AS odd FROM rollups WHERE " + _WHERE + " "
    "GROUP BY run, series, journal, cell) AS p "
    "INNER JOIN (" + _WANTED + ") AS w ON p.run = w.run AND p.series = w.series AND p.journal = w.journal) AS p "
    "GROUP BY i, b ORDER BY i, b"
)  # fmt: skip


def _asked(plans: dict[int, Plan]) -> dict[str, Any]:
    rows = [(i, plan, part, order) for i, plan in plans.items() for order, part in enumerate(plan.parts)]
    return {
        "i": [i for i, *_ in rows],
        "runs": [plan.run.number for _, plan, _, _ in rows],
        "series": [series_number(plan.key) for _, plan, _, _ in rows],
        "journals": [part.journal.number for _, _, part, _ in rows],
        "orders": [order for *_, order in rows],
        "limits": [part.limit for _, _, part, _ in rows],
        "los": [_whole(math.ceil, plan.lo, -FAR) for _, plan, _, _ in rows],
        "his": [_whole(math.floor, plan.hi, FAR) for _, plan, _, _ in rows],
        "lows": [float(plan.low) for _, plan, _, _ in rows],
        "spans": [max(float(plan.high) - float(plan.low), 1e-9) for _, plan, _, _ in rows],
        "all_runs": sorted({plan.run.number for plan in plans.values()}),
        "all_series": sorted({series_number(plan.key) for plan in plans.values()}),
    }


def _whole(rounded: Any, edge: float | None, default: int) -> int:
    if edge is None:
        return default
    return int(max(-FAR, min(FAR, rounded(edge)))) if math.isfinite(edge) else (FAR if edge > 0 else -FAR)


def _thinned(database: Database, plans: dict[int, Plan], count: int, sql: str) -> dict[int, Buckets]:
    import numpy as np

    twice = any(part.journal.twice for plan in plans.values() for part in plan.parts)
    found = database.ask(sql.replace("{final}", " FINAL" if twice else ""), n=count, **_asked(plans))
    starts = np.searchsorted(found["i"], list(plans))
    stops = np.searchsorted(found["i"], list(plans), "right")
    result: dict[int, Buckets] = {}
    again: dict[int, Plan] = {}
    for (i, plan), start, stop in zip(plans.items(), starts, stops, strict=True):
        rows = {name: column[start:stop] for name, column in found.items()}
        if sql is _FROM_ROLLUPS and rows["nans"].sum():
            again[i] = plan  # which of them are NaN and where, only the points know
        else:
            result[i] = _buckets(plan, rows, count)
    if again:
        result |= _thinned(database, again, count, _FROM_POINTS)
    return result


def _buckets(plan: Plan, rows: dict[str, NDArray[Any]], count: int) -> Buckets:
    """Make of a query's rows what the page gets."""
    import numpy as np

    before, after = rows["b"] < 0, rows["b"] >= count
    inside = ~(before | after)
    one = {name: column[inside] for name, column in rows.items()}
    none = one["sound"] == 0
    low, high, first, last = (np.where(none, np.nan, one[name]) for name in ("l", "h", "f", "s"))
    marks = sorted(
        (float(at), kind)
        for kind, where, times in (("nan", "nan_at", "nans"), ("inf", "inf_at", "infs"), ("-inf", "neg_at", "negs"))
        for at in one[where][one[times] > 0].tolist()
    )
    marked = sum(int(one[name].sum()) for name in ("nans", "infs", "negs"))
    x, x_last = one["x"].astype(np.float64), one["x_last"].astype(np.float64)
    return Buckets(
        plan.key, x, x_last, low, high, first, last, one["count"].astype(np.int64), int(one["count"].sum()), raw=False,
        marks=marks, marked=marked, restarts=_shown(plan), axis="step",
        before=_end(rows, before, "x_last", "s"), after=_end(rows, after, "x", "f"),
    )  # fmt: skip


def _end(rows: dict[str, NDArray[Any]], which: NDArray[Any], x: str, value: str) -> tuple[float, float] | None:
    return (float(rows[x][which][0]), float(rows[value][which][0])) if which.any() else None


def _shown(plan: Plan) -> list[float]:
    return [x for x in plan.restarts if (plan.lo is None or x >= plan.lo) and (plan.hi is None or x <= plan.hi)]


_RAW = (
    "SELECT i, ord, step, value, kind, whole FROM (SELECT run, series, journal, pos, step, value, kind, whole FROM points{final} "
    "WHERE " + _WHERE + ") AS p INNER JOIN (" + _WANTED + ") AS w ON p.run = w.run AND p.series = w.series AND "
    "p.journal = w.journal WHERE step < lim ORDER BY i, step, ord, pos"
)  # fmt: skip


def _raw(database: Database, plans: dict[int, Plan], count: int) -> dict[int, Buckets]:
    """Return series that have no more points than buckets as they are; of a zoom, with the point before and the one after."""
    import numpy as np

    twice = any(part.journal.twice for plan in plans.values() for part in plan.parts)
    found = database.ask(_RAW.replace("{final}", " FINAL" if twice else ""), **_asked(plans))
    starts = np.searchsorted(found["i"], list(plans))
    stops = np.searchsorted(found["i"], list(plans), "right")
    result = {}
    for (i, plan), start, stop in zip(plans.items(), starts, stops, strict=True):
        values = typed(*(found[name][start:stop] for name in ("value", "kind", "whole")))
        piece = Piece(found["step"][start:stop].astype(np.int64), values)
        result[i] = bucket(plan.key, [piece], buckets=count, lo=plan.lo, hi=plan.hi, restarts=plan.restarts)
    return result
