"""Answers about runs as plain data, shared by the command line and MCP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..store.buckets import Buckets
from ..store.changes import Changes, checked_facts
from ..store.compare import compare
from ..store.diagnose import diagnose
from ..store.query import Store
from ..store.run import StoredRun

Change = Callable[[StoredRun], dict[str, Any]]  # returns what an edit of a run sets
AROUND = 20  # points on either side of a place in a curve
OUTCOMES = ("finished", "met", "failed", "killed", "preempted", "lost", "not met", "timeout")  # the worst last


def named(run: StoredRun) -> dict[str, Any]:
    """Return which run it is, and its status."""
    return {"id": run.id, "name": run.name, "project": run.project, "status": run.status}


def became(run: StoredRun) -> dict[str, Any]:
    """Return what became of a run: its status and cause, how long it took, and its latest values."""
    verdict, latest = run.verdict, run.row().latest
    return {
        **named(run),
        **{name: verdict.get(name) for name in ("rank", "signal", "error")},
        "duration": run.duration,
        "latest": {key: value for key, value in latest.items() if not key.startswith("system/")},
    }


def outcome(run: StoredRun, *, met: bool, conditional: bool) -> str | None:
    """Return what waiting for a run came to, or None while it is open."""
    if met:
        return "met"
    status = run.status
    if status == "running":
        return None
    return "not met" if conditional and status == "finished" else status


def compared(a: StoredRun, b: StoredRun) -> dict[str, Any]:
    """Return what differs between two runs."""
    return {"runs": [named(a), named(b)], **compare(a, b)}


def diagnosis(store: Store, run: StoredRun) -> dict[str, Any]:
    """Return what went wrong in a run, or limits it."""
    return {"run": named(run), "findings": [msgspec.structs.asdict(one) for one in diagnose(store, run)]}


def curve(
    store: Store, run: StoredRun, key: str, *, buckets: int, lo: float | None = None, hi: float | None = None,
    around: float | None = None, **how: Any,
) -> Buckets:  # fmt: skip
    """Return a metric's curve in a few buckets, or every point around a place."""
    if around is None:
        return store.series(run, key, buckets=buckets, lo=lo, hi=hi, **how)
    every = store.series(run, key, buckets=1 << 62, **how)
    place = int(every.x.searchsorted(around))
    near = every.x[max(0, place - AROUND) : place + AROUND + 1]
    if not len(near):
        return every
    return store.series(run, key, buckets=1 << 62, lo=float(near[0]), hi=float(near[-1]), **how)


def points(run: StoredRun, key: str, found: Buckets) -> dict[str, Any]:
    """Return a curve as plain data: each point, or each bucket with its exact extremes."""
    columns: dict[str, Any] = {"x": found.x, "count": found.count, "first": found.first, "last": found.last}
    columns |= {"min": found.min, "max": found.max}
    if not found.raw:
        columns |= {"x_last": found.x_last, "x_min": found.x_min, "x_max": found.x_max}
    if found.low is not None:
        columns |= {"rank_min": found.low_rank, "rank_max": found.high_rank}
    names = ("x", "value") if found.raw else tuple(columns)
    columns["value"] = found.first
    values = (_list(columns[name], len(found)) for name in names)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    return {
        "run": run.id, "key": key, "axis": found.axis, "total": found.total, "every_point": found.raw, "points": rows,
        "restarts": found.restarts, "not_finite": [{"x": x, "value": value} for x, value in found.marks],
    }  # fmt: skip


def _list(column: Any, length: int) -> list[Any]:
    return column.tolist() if column is not None else [None] * length


def edit(changes: Changes, runs: Sequence[StoredRun], change: Change) -> list[dict[str, Any]]:
    """Edit runs, and return what they are now. All edits are checked first: either every run is changed, or none."""
    new = [checked_facts(change(run)) for run in runs]
    for run, facts in zip(runs, new, strict=True):
        if facts:
            changes.edit(run, facts)
    return [edited(run.reopened()) for run in runs]


def tagged(run: StoredRun, add: Sequence[str], remove: Sequence[str]) -> dict[str, Any]:
    """Return the edit that adds and removes tags."""
    tags = [tag for tag in dict.fromkeys([*run.tags, *add]) if tag not in remove]
    return {"tags": tags} if tags != run.tags else {}


def noted(run: StoredRun, text: str, *, append: bool) -> dict[str, Any]:
    """Return the edit that sets the notes, or adds a line to them."""
    return {"notes": f"{run.notes}\n{text}" if append and run.notes else text}


def edited(run: StoredRun) -> dict[str, Any]:
    """Return what can be changed about a stored run."""
    return {name: getattr(run, name) for name in ("id", "name", "project", "tags", "notes", "archived")}
