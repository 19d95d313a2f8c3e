"""Runs written quickly, with the bytes a process would write, and the expected results, computed in plain Python."""

from __future__ import annotations

import math
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

from fanfold.journal import Writer
from fanfold.journal import format as fmt

START = 1_790_000_000_000_000_000
NO_STEP = -(1 << 63)
CODES = {float: "d", int: "q", bool: "?"}


class Call(NamedTuple):
    """One log() call: attempt, rank, step (None for a probe), ns since the previous call, and values."""

    attempt: int
    rank: int
    step: int | None
    wait: int
    values: dict[str, Any]


def write_run(root: Path, calls: list[Call], *, project: str = "p", id: str = "r", end: bool = True) -> Path:
    """Write the journals of a run; return its folder."""
    folder = root / project / id
    sheets: dict[tuple[int, int], Writer] = {}
    clock = START
    for call in calls:
        clock += call.wait
        codes = "".join(CODES[type(value)] for value in call.values.values())
        for rank in (0, call.rank):  # rank 0 starts in every attempt, and assigns its number
            if (call.attempt, rank) not in sheets:
                sheets[call.attempt, rank] = Writer(folder / "journal", _header(project, id, call.attempt, rank))
        sheets[call.attempt, call.rank].row(call.values, codes, time_ns=clock, step=call.step)
    for sheet in sheets.values():
        sheet.close({"status": "finished", "t": clock} if end else None)
    return folder


def _header(project: str, id: str, attempt: int, rank: int) -> dict[str, Any]:
    return {
        "format": [fmt.MAJOR, fmt.MINOR], "rank": rank, "role": "main", "attempt": f"a{attempt}", "run": id, "project": project,
        "ordinal": attempt + 1, "mono": attempt,
    }  # fmt: skip


def write_journal(folder: Path, number: int, *frames: tuple[int, object], started: int, **header: object) -> Path:
    """Write one journal like a process of another node, including frames that are not rows."""
    id = f"{number:016x}"
    whole = {"format": [fmt.MAJOR, fmt.MINOR], "journal": id, "run": folder.name, "project": folder.parent.name, "attempt": "a",
             "role": "main", "rank": 0, "ordinal": 1, "node": "far", "boot": "another", "started": started, **header}  # fmt: skip
    path = folder / "journal" / f"{whole['rank']}-{id}{fmt.SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    bodies = [fmt.frame(kind, fmt.pack(body), fmt.seed_of(id)) for kind, body in frames]
    path.write_bytes(fmt.frame(fmt.Kind.HEADER, fmt.pack(whole), 0) + b"".join(bodies))
    return path


def beat(when: int) -> tuple[int, object]:
    return fmt.Kind.BEAT, [when, 1, 0, 0]


def end(when: int, status: str = "finished") -> tuple[int, object]:
    return fmt.Kind.END, {"t": when, "status": status}


class Point(NamedTuple):
    step: int
    time: float
    value: Any


def visible(calls: list[Call], key: str, rank: int) -> tuple[list[Point], list[Point]]:
    """Return the visible points by step, and the first of each later attempt: a plain version of the attempt rules."""
    kept: list[Point] = []
    restarts: list[Point] = []
    clock = START
    stamped = []
    for call in calls:
        clock += call.wait
        stamped.append((call, float(clock) / 1e9))
    for attempt in sorted({call.attempt for call in calls}):
        own = [
            Point(NO_STEP if call.step is None else call.step, when, call.values[key])
            for call, when in stamped
            if (call.attempt, call.rank) == (attempt, rank) and key in call.values
        ]
        if not own:
            continue
        if kept:
            restarts.append(own[0])
        if own[0].step != NO_STEP:
            kept = [point for point in kept if point.step < own[0].step]
        kept += own
    return sorted(kept, key=lambda point: point.step), restarts


def thinned(pairs: list[tuple[float, float]], buckets: int, lo: float | None, hi: float | None) -> list[dict[str, Any]]:
    """Downsample (x, value) pairs in order, one point at a time."""
    inside = [(x, v) for x, v in pairs if (lo is None or x >= lo) and (hi is None or x <= hi)]
    if len(inside) <= buckets:
        return [_raw(x, v) for x, v in inside]
    low, high = inside[0][0] if lo is None else lo, inside[-1][0] if hi is None else hi
    edges = [low + (high - low) * (i / buckets) for i in range(1, buckets)]
    groups: dict[int, list[tuple[float, float]]] = {}
    for x, value in inside:
        groups.setdefault(bisect_right(edges, x), []).append((x, value))
    return [_bucket(group) for _, group in sorted(groups.items())]


def _bucket(group: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the four points of a bucket, each with its own x: the first, the last, and the first lowest and highest."""
    finite = [pair for pair in group if math.isfinite(pair[1])]
    if not finite:
        nothing = _raw(group[0][0], math.nan)
        return {**nothing, "x_last": group[-1][0], "count": len(group)}
    low, high = min(finite, key=lambda pair: pair[1]), max(finite, key=lambda pair: pair[1])
    return {
        "x": finite[0][0], "x_last": finite[-1][0], "x_min": low[0], "x_max": high[0], "min": low[1], "max": high[1],
        "first": finite[0][1], "last": finite[-1][1], "count": len(group),
    }  # fmt: skip


def _raw(x: float, v: float) -> dict[str, Any]:
    return {"x": x, "x_last": x, "x_min": x, "x_max": x, "min": v, "max": v, "first": v, "last": v, "count": 1}
