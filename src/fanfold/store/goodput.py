"""Goodput: where the time of a run went, computed from its journals.

Every rank has a timeline from the start of the first attempt to the last sign of life. It is cut at the points of the metric that
the rank logged most often; what was timed in between (saving, evaluating, waiting: `probes/spans.py`) is subtracted, and the rest
is time of steps. All arithmetic is in whole nanoseconds, so that the parts add up to the wall time exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..journal import Journal, Kind
from ..journal.bodies import SpanEvent
from . import deadline
from .attempts import Attempt
from .run import StoredRun

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PARTS: dict[str, str] = {
    "productive": "steps",
    "repeated": "steps done again after a restart",
    "restart": "between attempts",
    "startup": "start-up and compilation",
    "checkpoint": "saving checkpoints",
    "evaluation": "evaluation",
    "data": "waiting for data",
    "ranks": "waiting for other ranks",
    "idle": "idle at the end",
    "unknown": "unknown",
}
PREFIX = "goodput/"  # of the names of these parts in filters
KINDS = {"checkpoint": "checkpoint", "evaluation": "evaluation", "compile": "startup", "startup": "startup", "data": "data",
         "ranks": "ranks"}  # fmt: skip
# A step is not called productive beyond this: something took place that was not timed.
LONG_RATIO, LONG_NS = 5.0, 1_000_000_000
LATEST = 1 << 62  # the year 2116: journals are untrusted, and times are subtracted
FALLBACKS = {"data": (("rank/data_seconds", None), ("time/data", None)), "ranks": (("time/step", "time/compute"),)}


class Timeline(msgspec.Struct):
    """One rank in one attempt: nanoseconds by part, which add up to `until - since`, and the steps it did that count."""

    attempt: int
    rank: int
    node: str
    gpu: int
    since: int
    until: int
    ns: dict[str, int]
    steps: int = 0
    seen: set[str] = set()  # kinds of spans that were recorded, or known from metrics


class Goodput(msgspec.Struct):
    """A run's wall time by part: the mean over its ranks, exact to the nanosecond."""

    wall_ns: int
    ns: dict[str, int]
    ranks: int
    attempts: int
    steps: int
    unmeasured: list[str]

    @property
    def share(self) -> float:
        return self.ns["productive"] / self.wall_ns if self.wall_ns else 0.0

    def facts(self) -> dict[str, Any]:
        """Return it as plain data, in seconds."""
        wall = self.wall_ns or 1
        return {
            "wall_seconds": self.wall_ns / 1e9, "goodput": self.share, "ranks": self.ranks, "attempts": self.attempts,
            "steps": self.steps, "seconds": {part: ns / 1e9 for part, ns in self.ns.items()},
            "shares": {part: ns / wall for part, ns in self.ns.items()}, "unmeasured": self.unmeasured,
        }  # fmt: skip


def goodput(run: StoredRun) -> Goodput:
    """Return where a run's wall time went, as the mean over its ranks."""
    found = timelines(run)
    total = dict.fromkeys(PARTS, 0)
    wall = 0
    for group in _grouped(found).values():
        wall += group[0].until - group[0].since
        for part, ns in _mean([one.ns for one in group]).items():
            total[part] += ns
    steps = max((sum(one.steps for one in found if one.rank == rank) for rank in {one.rank for one in found}), default=0)
    ranks = len({one.rank for one in found})
    return Goodput(wall, total, ranks, len(_grouped(found)), steps, unmeasured(found))


def statistics(run: StoredRun, key: str) -> dict[str, Any] | None:
    """Return a share of the wall time (`goodput/productive`) in the form of a metric's statistics."""
    part = key.removeprefix(PREFIX)
    if part not in PARTS:
        return None
    spent = goodput(run)
    share = spent.ns[part] / spent.wall_ns if spent.wall_ns else 0.0
    return {**dict.fromkeys(("min", "max", "mean", "first", "last"), share), "count": 1}


def unmeasured(found: Sequence[Timeline]) -> list[str]:
    """Return the kinds that nothing was recorded of: if they took time, it is in `productive` or `unknown`."""
    seen = {kind for one in found for kind in one.seen}
    alone = len({one.rank for one in found}) <= 1
    kinds = ("checkpoint", "evaluation", "data") if alone else ("checkpoint", "evaluation", "data", "ranks")
    return [kind for kind in kinds if kind not in seen]


def _grouped(found: Iterable[Timeline]) -> dict[int, list[Timeline]]:
    groups: dict[int, list[Timeline]] = {}
    for one in found:
        groups.setdefault(one.attempt, []).append(one)
    return groups


def _mean(all_ns: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the mean of each part; what whole nanoseconds leave over goes to the largest."""
    sums = {part: sum(ns.get(part, 0) for ns in all_ns) for part in PARTS}
    means = {part: total // len(all_ns) for part, total in sums.items()}
    largest = max(sums, key=sums.__getitem__)
    means[largest] += sum(sums.values()) // len(all_ns) - sum(means.values())
    return means


# Timelines


class _Cut(NamedTuple):
    """One rank in one attempt, before its intervals are judged: those between points, with what is left after the spans."""

    window: tuple[int, int]
    steps: NDArray[np.int64]  # of its points
    left: NDArray[np.int64]  # of each interval: before the first point, between points, after the last
    ns: dict[str, int]
    seen: set[str]
    began: int  # ns of the first interval before init()


def timelines(run: StoredRun) -> list[Timeline]:
    """Return the timeline of each rank in each attempt. Time between attempts belongs to the later one."""
    attempts = [attempt for attempt in run.attempts if attempt.mains]
    windows = _windows(attempts)
    by_rank = [_by_rank(attempt) for attempt in attempts]
    found: list[Timeline] = []
    clocks: dict[int, tuple[str | None, int]] = {}  # by rank: the metric that shows its steps, and the rank that logged it
    everyone = sorted({rank for ranks in by_rank for rank in ranks})
    for rank in everyone:
        deadline.check()
        clocks[rank] = (_clock([journal for ranks in by_rank for journal in ranks.get(rank, ())]), rank)
    logging = next((rank for rank in everyone if clocks[rank][0] is not None), None)
    for rank in everyone:
        deadline.check()
        key, source = clocks[rank]
        if key is None and logging is not None:  # only some ranks log: the others step with them
            key, source = clocks[logging]
        found += _of_rank(attempts, rank, key, windows, by_rank, source)
    return sorted(found, key=lambda one: (one.attempt, one.rank))


def _by_rank(attempt: Attempt) -> dict[int, list[Journal]]:
    ranks: dict[int, list[Journal]] = {}
    for journal in attempt.mains:
        ranks.setdefault(journal.header.rank, []).append(journal)
    return ranks


def _windows(attempts: Sequence[Attempt]) -> list[tuple[int, int, int]]:
    """Return when each attempt's time begins, when its first process began, and its last sign of life, without overlaps."""
    found: list[tuple[int, int, int]] = []
    for attempt in attempts:
        began = min((_born(journal) for journal in attempt.mains), default=attempt.started)
        since = found[-1][2] if found else began
        began = min(max(began, since, 0), LATEST)
        found.append((min(since, began), began, min(max(attempt.seen, began), LATEST)))
    return found


def _born(journal: Journal) -> int:
    header = journal.header
    return header.born if header.born and 0 < header.born <= header.started else header.started


def _clock(journals: Sequence[Journal]) -> str | None:
    """Return the metric with the most points: it shows best when steps ended."""
    counts: dict[str, int] = {}
    for journal in journals:
        for key in journal.keys(""):
            counts[key] = counts.get(key, 0) + journal.count(key)
    return max(counts, key=counts.__getitem__) if any(counts.values()) else None


def _of_rank(
    attempts: Sequence[Attempt], rank: int, key: str | None, windows: Sequence[tuple[int, int, int]],
    by_rank: Sequence[dict[int, list[Journal]]], source: int,
) -> Iterator[Timeline]:  # fmt: skip
    """Yield the timelines of a rank, whose steps are shown by a metric of the rank `source`."""
    import numpy as np

    cuts: dict[int, _Cut] = {}
    for number, (since, began, until) in enumerate(windows):
        if rank in by_rank[number]:
            cuts[number] = _cut(by_rank[number][rank], key, by_rank[number].get(source, []), (since, began, until))
    pace = _pace(list(cuts.values()))
    limit = 1 << 62  # the lowest step that a later attempt did again
    hidden: dict[int, NDArray[np.bool_]] = {}
    for number in reversed(cuts):
        hidden[number] = cuts[number].steps >= limit
        if len(cuts[number].steps):
            limit = min(limit, int(cuts[number].steps[0]))
    for number, cut in cuts.items():
        status = attempts[number].verdict()["status"]
        _judge(cut, hidden[number], pace, status, later=number + 1 < len(windows), logs=key is not None)
        header = by_rank[number][rank][0].header
        gpu = header.local_rank if header.local_rank is not None else 0
        done = int((~hidden[number]).sum())
        steps = int(np.clip(np.diff(cut.steps), 1, 1 << 31)[~hidden[number][1:]].sum()) + bool(done) if done else 0
        yield Timeline(number, rank, header.node or "", gpu, *cut.window, cut.ns, steps, cut.seen)


def _cut(journals: Sequence[Journal], key: str | None, clock: Sequence[Journal], window: tuple[int, int, int]) -> _Cut:
    import numpy as np

    since, began, until = window
    steps, times = _points(clock, key)
    inside = (times >= began) & (times <= until)
    steps, times = steps[inside], np.maximum.accumulate(times[inside]) if inside.any() else times[inside]
    edges = np.concatenate([[began], times, [until]]).astype(np.int64)
    left = np.diff(edges)
    ns = dict.fromkeys(PARTS, 0)
    ns["restart"] = began - since
    spent = _spans(journals)
    for kind in FALLBACKS:
        if not any(span[0] == kind for span in spent):
            spent += _from_metrics(journals, kind)
    for kind, name in KINDS.items():  # those that hold training up as a whole first: waits within them are not recorded
        part = _per_interval([span for span in spent if span[0] == kind], edges)
        part = np.minimum(part, left)
        left = left - part
        ns[name] += int(part.sum())
    before_init = max(0, min(min((journal.header.started for journal in journals), default=began), until) - began)
    return _Cut((since, until), steps, left, ns, {span[0] for span in spent}, before_init)


def _points(journals: Sequence[Journal], key: str | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return steps and times (ns) of a metric in the order of time."""
    import numpy as np

    columns = [journal.column(key) for journal in journals if key is not None and journal.count(key)]
    if not columns:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    steps = np.concatenate([column.steps for column in columns]).astype(np.int64)
    times = (np.concatenate([column.times for column in columns]) * 1e9).astype(np.int64)
    order = np.argsort(times, kind="stable")
    return steps[order], times[order]


_Span = tuple[str, int, int, int]  # kind, since, until, ns


def _spans(journals: Sequence[Journal]) -> list[_Span]:
    found: list[_Span] = []
    for journal in journals:
        for record in journal.records(Kind.EVENT):
            event = record.data
            if isinstance(event, SpanEvent) and event.kind in KINDS and event.since < event.t:
                found.append((event.kind, event.since, event.t, min(event.ns, event.t - event.since)))
    return found


def _from_metrics(journals: Sequence[Journal], kind: str) -> list[_Span]:
    """Return waits known only from a metric that callbacks log: seconds per step, over the steps since its last point."""
    import numpy as np

    for key, less in FALLBACKS[kind]:
        columns = [(journal.column(key), journal.column(less) if less else None) for journal in journals if journal.count(key)]
        found: list[_Span] = []
        for column, other in columns:
            values = column.values.astype(np.float64)
            if other is not None:
                if len(other.values) != len(values):
                    continue
                values = values - other.values.astype(np.float64)
            spent = np.nan_to_num(values[1:] * np.maximum(np.diff(column.steps), 0) * 1e9, posinf=0.0, neginf=0.0)
            times = (column.times * 1e9).astype(np.int64)
            for begin, end, ns in zip(times[:-1].tolist(), times[1:].tolist(), spent.tolist(), strict=True):
                if end > begin and ns > 0:
                    found.append((kind, begin, end, min(int(ns), end - begin)))
        if found:
            return found
    return []


def _per_interval(spent: Sequence[_Span], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how much of some spans falls into each interval between edges; the time of a sum of short spans is spread evenly."""
    import numpy as np

    if not spent:
        return np.zeros(len(edges) - 1, np.int64)
    begins, ends, ns = (np.array(column, np.int64) for column in list(zip(*spent, strict=True))[1:])
    base = edges[0]
    slopes = ns / (ends - begins)
    places = np.concatenate([begins, ends]) - base
    order = np.argsort(places, kind="stable")
    at = places[order].astype(np.float64)
    slope = np.cumsum(np.concatenate([slopes, -slopes])[order])
    height = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(at))])
    result: NDArray[np.int64] = np.diff(np.round(np.interp((edges - base).astype(np.float64), at, height)).astype(np.int64))
    return np.maximum(result, 0)


def _pace(cuts: Sequence[_Cut]) -> tuple[float, float] | None:
    """Return the usual time of a step (ns), and how many steps usually are between two points; None if there are too few."""
    import numpy as np

    gaps = [np.maximum(np.diff(cut.steps), 1) for cut in cuts]
    left = [cut.left[1:-1] for cut in cuts if len(cut.steps)]
    if not any(len(one) for one in left):
        return None
    many = np.concatenate([one for one in gaps if len(one)])
    return float(np.median(np.concatenate(left) / many)), float(np.median(many))


def _judge(
    cut: _Cut, hidden: NDArray[np.bool_], pace: tuple[float, float] | None, status: str, *, later: bool, logs: bool
) -> None:  # fmt: skip
    """Divide what is left of each interval among steps, start-up, the end, and what is not known."""
    import numpy as np

    ns, left = cut.ns, cut.left
    if not len(cut.steps):  # it never came to a step, or nobody logs any
        begun = int(left.sum()) if logs else min(cut.began, int(left.sum()))
        ns["startup"] += begun
        ns["unknown"] += int(left.sum()) - begun
        return
    usual = int(pace[0] * pace[1]) if pace else 0
    first, last = int(left[0]), int(left[-1])
    work = min(first, usual)
    ns["repeated" if hidden[0] else "productive"] += work
    known = first - work if pace else min(cut.began, first)
    ns["startup"] += known
    ns["unknown"] += first - work - known
    middle = left[1:-1]
    if len(middle) and pace:
        expected = pace[0] * np.maximum(np.diff(cut.steps), 1)
        long = middle > np.maximum(LONG_RATIO * expected, expected + LONG_NS)
        kept = np.where(long, np.minimum(middle, expected.astype(np.int64)), middle)
        ns["repeated"] += int(kept[hidden[1:]].sum())
        ns["productive"] += int(kept[~hidden[1:]].sum())
        ns["unknown"] += int((middle - kept).sum())
    # A step was in progress when the process died: it is done again. In a live run it still counts.
    begun = 0 if status == "finished" else min(last, usual)
    ns["productive" if status == "running" and not later else "repeated"] += begun
    ns["idle"] += last - begun
