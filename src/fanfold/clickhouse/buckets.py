"""Downsampling in the database: one query returns the buckets of many series, each with exact extremes.

It handles step axes of single ranks, which is what a page of charts needs. Other axes and folds are downsampled here from the
points, by the same code as for a directory of runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..journal.walker import NO_STEP
from ..store.axes import axis_of
from ..store.buckets import Buckets, SeriesPiece, bucket
from ..store.forks import ancestors
from ..store.points import holders
from ..store.run import StoredRun
from .cells import MADE, TAIL, parameters
from .database import Database
from .decode import series_number
from .run import FleetJournal, FleetRun, typed
from .schema import CELL, CELL_COLUMNS, COMBINED, EDGE_VALUE, HIGHEST, LOWEST, POINT_CELL

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_PARTS = 1500  # journals in one query: they are sent in its URL
FEW_POINTS = 2_000_000  # up to this many are fetched and downsampled here
FINE = 0.75  # a bucket must be at least this fraction of a cell wide before cells can replace it
LONG = 4096  # points; shorter series are fetched, and cut exactly at the bucket
FEW_CELLS = 2  # as a power of two
FAR = 1 << 62
UNKNOWN = (1 << 63) - 1  # not a step of any cell
ANYWHERE = {"least": -(1 << 63), "most": (1 << 63) - 1}


class JournalPart(NamedTuple):
    """One journal's part of a series: the points before `limit`, from where on a later attempt logged them again."""

    journal: FleetJournal
    limit: int


@dataclass
class SeriesPlan:
    """One series to be downsampled by the database."""

    run: FleetRun
    key: str
    parts: list[JournalPart]
    restarts: list[float]
    low: float
    high: float
    lo: float | None
    hi: float | None
    log: bool = False

    @property
    def most(self) -> int:
        """The maximum number of points."""
        return sum(part.journal.extents[self.key].number for part in self.parts)

    @property
    def exact(self) -> bool:
        """Whether cells can replace the points: none hidden, none stored twice, none cut off."""
        whole = self.lo is None and self.hi is None
        return whole and all(part.limit == FAR and not part.journal.twice for part in self.parts)


def thin_many(
    database: Database, wanted: Sequence[tuple[StoredRun, str]], *, buckets: int = 330, whole: int = 0, x: str = "step",
    rank: int | None = None, fold: str | None = None, lo: float | None = None, hi: float | None = None, log: bool = False,
) -> list[Buckets | None]:  # fmt: skip
    """Return the buckets of the series that the database can downsample; None for the others."""
    if fold is not None:
        return [None] * len(wanted)
    stepped = [i for i, (run, key) in enumerate(wanted) if axis_of(run, key, x) == "step"]
    plans = {i: plan for i in stepped if (plan := _plan(*wanted[i], rank, lo, hi, log)) is not None}
    count = max(buckets, 1)
    found: dict[int, Buckets] = {}
    for shift, some in _by_width(plans, count, whole).items():
        for group in _groups(some):
            found |= _from_cells(database, group, shift)
    rest = {i: plan for i, plan in plans.items() if i not in found}
    here = {i: plan for i, plan in rest.items() if plan.most <= max(count, whole) or (plan.lo is None and plan.hi is None)}
    if sum(plan.most for plan in here.values()) > FEW_POINTS:
        here = {i: plan for i, plan in here.items() if plan.most <= count}
    for group in _groups({i: plan for i, plan in rest.items() if i not in here}):
        found |= _from_points(database, group, count)
    few = {i: plans[i] for i, one in found.items() if one.total <= count and not one.raw}
    for group in _groups({**here, **few}):
        found |= _here(database, group, count, whole)
    return [found.get(i) for i in range(len(wanted))]


def _by_width(plans: dict[int, SeriesPlan], count: int, whole: int) -> dict[int, dict[int, SeriesPlan]]:
    """Group the series for which cells can replace buckets by the number of cells per bucket, as a power of two."""
    found: dict[int, dict[int, SeriesPlan]] = {}
    for i, plan in plans.items():
        cells = (plan.high - plan.low) / count / CELL
        if plan.most > max(count, whole, LONG) and plan.exact and cells >= FINE and not plan.log:
            found.setdefault(max(0, math.ceil(math.log2(cells))), {})[i] = plan
    return found


def _plan(run: StoredRun, key: str, rank: int | None, lo: float | None, hi: float | None, log: bool) -> SeriesPlan | None:
    """Determine which journals' points are visible, as `store.points` does; return None if steps do not decide it."""
    if not isinstance(run, FleetRun) or ancestors(run):
        return None
    if log and (lo is None or lo <= 0):
        lo = 1.0  # the smallest step that a logarithmic axis can show
    ranks = holders(run, key)
    if not ranks or (rank is not None and rank not in ranks):
        return None
    of = ranks[0] if rank is None else rank
    lives: list[list[FleetJournal]] = []
    for attempt in run.attempts:
        own = [j for j in attempt.journals if isinstance(j, FleetJournal) and j.header.rank == of and key in j.extents]
        if any(journal.extents[key].low == NO_STEP for journal in own):
            return None  # without steps: drawn over time
        if own:
            lives.append(own)
    parts: list[JournalPart] = []
    limit = FAR
    for own in reversed(lives):
        parts += [_before(limit, journal, key) for journal in reversed(own)
                  if limit == FAR or journal.extents[key].low < limit]  # fmt: skip
        limit = min(limit, own[0].extents[key].first)
    parts.reverse()
    restarts = [float(own[0].extents[key].first) for own in lives[1:]]
    extents = [part.journal.extents[key] for part in parts]
    low = min(one.low for one in extents)
    high = max(min(one.high, part.limit - 1) for one, part in zip(extents, parts, strict=True))
    return SeriesPlan(run, key, parts, restarts, low if lo is None else lo, high if hi is None else hi, lo, hi, log)


def _before(limit: int, journal: FleetJournal, key: str) -> JournalPart:
    """Return the part of a journal before a step."""
    return JournalPart(journal, FAR if journal.extents[key].high < limit else limit)


def _groups(plans: dict[int, SeriesPlan]) -> list[dict[int, SeriesPlan]]:
    """Split the plans into queries of limited length."""
    groups: list[dict[int, SeriesPlan]] = [{}]
    size = 0
    for i, plan in plans.items():
        if groups[-1] and size + len(plan.parts) > MOST_PARTS:
            groups.append({})
            size = 0
        groups[-1][i] = plan
        size += len(plan.parts)
    return [group for group in groups if group]


# Cells as buckets

_OF = "WHERE run IN {runs:Array(UInt64)} AND series IN {series:Array(UInt64)} AND journal IN {journals:Array(UInt64)}"
_NAMES = ", ".join(CELL_COLUMNS)
_ALL_CELLS = (
    f"(SELECT run, series, journal, cell, {_NAMES} FROM cells FINAL {_OF} AND {MADE} UNION ALL "
    f"SELECT run, series, journal, cell, {COMBINED} FROM "
    f"(SELECT run, series, journal, {POINT_CELL} FROM points {_OF} AND {TAIL}) GROUP BY run, series, journal, cell)"
)
# A few cells per bucket are fetched as they are and combined here: grouping them in the database costs five times as much.
_CELLS = (
    "SELECT run, series, bitShiftRight(cell, {shift:UInt8}) AS c, since AS x, until AS x_last, low AS l, high AS h, "
    + LOWEST.format("lowest") + ", " + HIGHEST.format("highest") + ", "
    + EDGE_VALUE.format("first") + " AS f, " + EDGE_VALUE.format("last") + " AS s, count AS n, odd AS odds "
    "FROM " + _ALL_CELLS + " ORDER BY run, series, cell, since"
)  # fmt: skip
_GROUPED = (
    "SELECT run, series, bitShiftRight(cell, {shift:UInt8}) AS c, min(since) AS x, max(until) AS x_last, min(low) AS l, "
    "max(high) AS h, " + LOWEST.format("min(lowest)") + ", " + HIGHEST.format("max(highest)") + ", "
    + EDGE_VALUE.format("min(first)") + " AS f, " + EDGE_VALUE.format("max(last)") + " AS s, "
    "sum(count) AS n, sum(odd) AS odds FROM " + _ALL_CELLS + " GROUP BY run, series, c ORDER BY run, series, c"
)  # fmt: skip


def _sets(plans: dict[int, SeriesPlan]) -> dict[str, Any]:
    return {
        "runs": sorted({plan.run.number for plan in plans.values()}),
        "series": sorted({series_number(plan.key) for plan in plans.values()}),
        "journals": sorted({part.journal.number for plan in plans.values() for part in plan.parts}),
    }


def _bounds(found: dict[str, NDArray[Any]], *names: str) -> dict[tuple[int, ...], slice]:
    """Return the position of each group among rows sorted by group."""
    import numpy as np

    if not len(found[names[0]]):
        return {}
    change = np.any([np.diff(found[name]) != 0 for name in names], axis=0)
    edges = [0, *(np.flatnonzero(change) + 1).tolist(), len(change) + 1]
    return {tuple(int(found[name][at]) for name in names): slice(at, end) for at, end in pairwise(edges)}


def _from_cells(database: Database, plans: dict[int, SeriesPlan], shift: int) -> dict[int, Buckets]:
    """Return the buckets of series with whole cells per bucket. Series with NaN or infinities are left out."""
    import numpy as np

    sets = _sets(plans)
    asked = {**sets, **parameters(database, sets["runs"], sets["journals"])}
    found = database.ask(_CELLS if shift <= FEW_CELLS else _GROUPED, shift=shift, **asked)
    places = _bounds(found, "run", "series")
    result = {}
    for i, plan in plans.items():
        where = places.get((plan.run.number, series_number(plan.key)))
        if where is None or found["odds"][where].any():
            continue  # only the points show which values are NaN, and where
        rows = {name: column[where] for name, column in found.items()}
        starts = np.flatnonzero(np.append(True, np.diff(rows["c"]) != 0))
        count = np.add.reduceat(rows["n"].astype(np.int64), starts)
        until = np.maximum.reduceat(rows["x_last"], starts)
        ends = _last_of(rows["x_last"], until, starts)
        low, high = np.minimum.reduceat(rows["l"], starts), np.maximum.reduceat(rows["h"], starts)
        result[i] = Buckets(
            plan.key, rows["x"][starts].astype(np.float64), until.astype(np.float64), low, high, rows["f"][starts],
            rows["s"][ends], count, int(count.sum()), raw=False, restarts=_shown(plan),
            x_min=_first_at(rows["v_low"], rows["x_low"], low, starts),
            x_max=_first_at(rows["v_high"], rows["x_high"], high, starts),
        )  # fmt: skip
    return result


def _first_at(values: NDArray[Any], steps: NDArray[Any], wanted: NDArray[Any], starts: NDArray[Any]) -> NDArray[Any] | None:
    """Return the first step at which each bucket has its extreme; None if a cell from before version 2 lacks it."""
    import numpy as np

    spread = np.repeat(wanted, np.diff(np.append(starts, len(values))))
    found = np.minimum.reduceat(np.where(values == spread, steps, UNKNOWN), starts)
    return None if (found == UNKNOWN).any() else found.astype(np.float64)


def _last_of(values: NDArray[Any], wanted: NDArray[Any], starts: NDArray[Any]) -> NDArray[Any]:
    """Return the last row of each bucket that has the wanted value: journals may overlap within a cell."""
    import numpy as np

    spread = np.repeat(wanted, np.diff(np.append(starts, len(values))))
    return np.maximum.reduceat(np.where(values == spread, np.arange(len(values)), -1), starts)


# Points fetched from the database

_POINTS = (
    "SELECT run, series, journal, step, value{more} FROM points{final} WHERE run IN {{runs:Array(UInt64)}} AND series IN "
    "{{series:Array(UInt64)}} AND journal IN {{journals:Array(UInt64)}} AND step BETWEEN {{least:Int64}} AND {{most:Int64}} "
    "ORDER BY run, series, journal, pos"
)  # fmt: skip


def _here(database: Database, plans: dict[int, SeriesPlan], count: int, whole: int) -> dict[int, Buckets]:
    """Fetch the points of short series, and downsample them as for a directory."""
    import numpy as np

    parts = [(plan, part) for plan in plans.values() for part in plan.parts]
    kinds = any(part.journal.extents[plan.key].kinds != 1 for plan, part in parts)
    final = " FINAL" if any(part.journal.twice for _, part in parts) else ""
    question = _POINTS.format(more=", kind, whole" if kinds else "", final=final)
    found = database.ask(question, **_sets(plans), **_reach(database, plans))
    places = _bounds(found, "run", "series", "journal")
    result = {}
    for i, plan in plans.items():
        pieces = [_piece(found, places.get((plan.run.number, series_number(plan.key), p.journal.number)), p) for p in plan.parts]
        steps = np.concatenate([steps for steps, _ in pieces])
        values = np.concatenate([values for _, values in pieces])
        if (steps[1:] < steps[:-1]).any():
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        result[i] = bucket(
            plan.key, [SeriesPiece(steps, values)], buckets=count, whole=whole, lo=plan.lo, hi=plan.hi, restarts=plan.restarts,
            log=plan.log,
        )  # fmt: skip
    return result


def _piece(found: dict[str, NDArray[Any]], where: slice | None, part: JournalPart) -> tuple[NDArray[Any], NDArray[Any]]:
    import numpy as np

    if where is None:
        return np.empty(0, np.int64), np.empty(0)
    steps, values = found["step"][where], found["value"][where]
    if "kind" in found:
        values = typed(values, found["kind"][where], found["whole"][where])
    if part.limit != FAR:
        kept = steps < part.limit
        steps, values = steps[kept], values[kept]
    return steps, values


# Buckets computed by the database

# One row of `w` per journal of each series: its series, its position among that series' journals, the visible steps, and how the
# axis is divided.
_WANTED = (
    "WITH arrayJoin(arrayZip({i:Array(UInt32)}, {runs:Array(UInt64)}, {series:Array(UInt64)}, {journals:Array(UInt64)}, "
    "{orders:Array(UInt16)}, {limits:Array(Int64)}, {los:Array(Int64)}, {his:Array(Int64)}, {lows:Array(Float64)}, "
    "{spans:Array(Float64)})) AS t SELECT t.1 AS i, t.2 AS run, t.3 AS series, t.4 AS journal, t.5 AS ord, t.6 AS lim, "
    "t.7 AS lo, t.8 AS hi, t.9 AS low, t.10 AS span"
)
_WHERE = "run IN {all_runs:Array(UInt64)} AND series IN {all_series:Array(UInt64)}"
_PLACE = (
    "multiIf({x} < lo, toInt64(-1), {x} > hi, toInt64({{n:UInt32}}), "
    "least(toInt64({{n:UInt32}}) - 1, toInt64(floor(({place} - low) * {{n:UInt32}} / span))))"
)
_FROM_POINTS = (
    "SELECT i, b, min(step) AS since, max(step) AS until, minIf(step, isFinite(value) OR out) AS x, "
    "maxIf(step, isFinite(value) OR out) AS x_last, argMinIf(step, (value, step), isFinite(value)) AS x_low, "
    "argMinIf(step, (-value, step), isFinite(value)) AS x_high, min(if(isFinite(value), value, inf)) AS l, "
    "max(if(isFinite(value), value, -inf)) AS h, argMinIf(value, (step, ord, pos), isFinite(value) OR out) AS f, "
    "argMaxIf(value, (step, ord, pos), isFinite(value) OR out) AS s, count() AS count, countIf(isFinite(value)) AS sound, "
    "minIf(step, isNaN(value)) AS nan_at, countIf(isNaN(value)) AS nans, minIf(step, value = inf) AS inf_at, "
    "countIf(value = inf) AS infs, minIf(step, value = -inf) AS neg_at, countIf(value = -inf) AS negs "
    "FROM (SELECT i, ord, step, pos, value, " + _PLACE.format(x="step", place="{place}") + " AS b, "
    "b < 0 OR b >= {n:UInt32} AS out "
    "FROM (SELECT run, series, journal, step, pos, value FROM points{final} WHERE " + _WHERE + " AND step BETWEEN "
    "{least:Int64} AND {most:Int64}) AS p "
    "INNER JOIN (" + _WANTED + ") AS w ON p.run = w.run AND p.series = w.series AND p.journal = w.journal WHERE step < lim) "
    "GROUP BY i, b ORDER BY i, b"
)  # fmt: skip


# The neighbours just outside of a range are in the nearest cells, which begin and end with points.
_REACH = (
    "SELECT min(a) AS least, max(b) AS most FROM (SELECT ifNull(maxOrNullIf(since, since < least(lo, lim)), any(lo)) AS a, "
    "ifNull(minOrNullIf(until, until > hi), any(hi)) AS b FROM (SELECT run, series, journal, since, until FROM cells WHERE "
    + _WHERE + f" AND {MADE} UNION ALL SELECT run, series, journal, step, step FROM points WHERE " + _WHERE + f" AND {TAIL}"
    ") AS r INNER JOIN (" + _WANTED + ") AS w ON r.run = w.run AND r.series = w.series AND r.journal = w.journal "
    "GROUP BY i, ord)"
)  # fmt: skip


def _reach(database: Database, plans: dict[int, SeriesPlan]) -> dict[str, int]:
    """Return the step range of the requested points, including the neighbours just outside of it."""
    if not any(plan.most > LONG and (plan.lo is not None or plan.hi is not None) for plan in plans.values()):
        return ANYWHERE
    asked = _asked(plans)
    found = database.one(_REACH, **asked, **parameters(database, asked["all_runs"], asked["journals"]))
    return {name: int(step) for name, step in found.items()}


def _asked(plans: dict[int, SeriesPlan]) -> dict[str, Any]:
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
        "lows": [_along(plan, plan.low) for _, plan, _, _ in rows],
        "spans": [max(_along(plan, plan.high) - _along(plan, plan.low), 1e-9) for _, plan, _, _ in rows],
        "all_runs": sorted({plan.run.number for plan in plans.values()}),
        "all_series": sorted({series_number(plan.key) for plan in plans.values()}),
    }


def _along(plan: SeriesPlan, step: float) -> float:
    """Return the position of a step along the axis."""
    return math.log(max(step, 1.0)) if plan.log else float(step)


def _whole(rounded: Any, edge: float | None, default: int) -> int:
    if edge is None:
        return default
    return int(max(-FAR, min(FAR, rounded(edge)))) if math.isfinite(edge) else (FAR if edge > 0 else -FAR)


def _from_points(database: Database, plans: dict[int, SeriesPlan], count: int) -> dict[int, Buckets]:
    """Let the database scan the points of long series to which cells do not apply, such as a zoom."""
    import numpy as np

    twice = any(part.journal.twice for plan in plans.values() for part in plan.parts)
    place = "log(step)" if any(plan.log for plan in plans.values()) else "step"
    question = _FROM_POINTS.replace("{final}", " FINAL" if twice else "").replace("{place}", place)
    found = database.ask(question, n=count, **_asked(plans), **_reach(database, plans))
    starts = np.searchsorted(found["i"], list(plans))
    stops = np.searchsorted(found["i"], list(plans), "right")
    return {
        i: _buckets(plan, {name: column[start:stop] for name, column in found.items()}, count)
        for (i, plan), start, stop in zip(plans.items(), starts, stops, strict=True)
    }


def _buckets(plan: SeriesPlan, rows: dict[str, NDArray[Any]], count: int) -> Buckets:
    """Convert a query's rows to buckets."""
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
    ends = (("x", "since"), ("x_last", "until"), ("x_low", "since"), ("x_high", "since"))
    x, x_last, x_min, x_max = (np.where(none, one[end], one[name]).astype(np.float64) for name, end in ends)
    return Buckets(
        plan.key, x, x_last, low, high, first, last, one["count"].astype(np.int64), int(one["count"].sum()), raw=False,
        marks=marks, marked=marked, restarts=_shown(plan), axis="step",
        before=_end(rows, before, "x_last", "s"), after=_end(rows, after, "x", "f"), x_min=x_min, x_max=x_max,
    )  # fmt: skip


def _end(rows: dict[str, NDArray[Any]], which: NDArray[Any], x: str, value: str) -> tuple[float, float] | None:
    return (float(rows[x][which][0]), float(rows[value][which][0])) if which.any() else None


def _shown(plan: SeriesPlan) -> list[float]:
    return [x for x in plan.restarts if (plan.lo is None or x >= plan.lo) and (plan.hi is None or x <= plan.hi)]
