"""The dashboard's queries, answered as plain data: runs, one run, table columns, series, alerts, console, media, profile."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec

from ..errors import RunNotFound, SettingError
from ..journal import Kind, directory
from ..plain import flat, json_safe
from ..store import forks
from ..store.blackbox import sections
from ..store.buckets import Buckets
from ..store.goodput import PARTS
from ..store.ops import steps_of
from ..store.query import Store
from ..store.rows import RunRow
from ..store.run import MediaPoint, StoredRun
from . import wire

MOST_SERIES = 50_000  # in one response; the dashboard shows fewer
MOST_BUCKETS = 20_000
POINTS = 4  # of a bucket: a series with no more than that in each takes less room as it is
MOST_IN_ALL = 8_000_000  # buckets of all series in one response; with more series, each gets fewer
MOST_RUNS = 20_000  # named in one request
MOST_CELLS = 10_000_000  # of the run table in one response
MOST_MEDIA = 400  # the newest of one key and run
MOST_ALERTS = 500
MOST_NODES = 64  # of one run, in charts of its system metrics
MOST_REQUESTS = 500  # the newest of one run
MOST_FLAGS = 100  # the newest of one series
CONSOLE_BYTES = 256 << 10
STATISTICS = ("min", "max", "mean", "first", "last", "count", "min_step", "max_step")  # columns of the run table, per metric
RUNS_IN_BLOCK = 250  # of a run list: a block that a page has already is not sent again


class SeriesQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which series, over which x, in which range, in how many buckets; with `log`, buckets for a logarithmic axis."""

    project: str
    runs: list[str]
    keys: list[str]
    n: int = 330
    x: str = "step"
    fold: str | None = None
    rank: int | None = None
    lo: float | None = None
    hi: float | None = None
    log: bool = False


class ColumnQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which columns of the run table: `config:lr`, `metric:loss` (from the summary), or a statistic such as `min:loss`.

    With `runs`, only the cells of these runs. Statistics are read from the points the first time, so ask for some runs at a time.
    """

    project: str
    names: list[str]
    runs: list[str] | None = None


def open_run(store: Store, project: str, id: str) -> StoredRun:
    """Open a run by its exact project and id; a symlinked folder is not a run."""
    run = store.run(project, id)
    if run.path.is_symlink() or run.path.parent.is_symlink():
        raise RunNotFound(f"{directory.encode_name(id)} is a link, not a run. Nothing was read. Copy the run instead.")
    return run


def runs(store: Store, project: str, filter: str, sort: str, count: int = 0, known: str = "") -> dict[str, Any]:
    """Return a project's runs with the fields the run list shows, and the available columns and keys.

    `count`: only the first runs. `known`: the names of the blocks of runs that the caller has, which are left out.
    """
    rows = store.runs(project, filter, sort)
    first = 0 < count < len(rows)
    listed = [_listed(row) for row in (rows[:count] if first else rows)]
    blocks = [] if first else _blocks(listed)
    had = known.split(",") if known and blocks else []
    fresh = [place for place, (name, _) in enumerate(blocks) if had[place : place + 1] != [name]]
    logged, figures = _keys(rows, "latest"), _keys(rows, "summary")
    seen = dict.fromkeys(key for row in rows for key in row.media)
    return {
        "runs": [run for place in reversed(fresh) for run in blocks[place][1]] if had else listed,
        "total": len(rows),
        "size": RUNS_IN_BLOCK,
        "blocks": [name for name, _ in blocks],
        "fresh": fresh,
        "keys": [key for key, number in logged.items() if number],
        "media": [*seen, *(key for key, number in logged.items() if not number)],
        "goals": {key: rule for row in rows for key, rule in row.rules.items()},
        "columns": [*(f"config:{path}" for path in _settings(rows)), *(f"metric:{key}" for key in {**logged, **figures})],
        "unreadable": rows.unreadable,
    }


def _listed(row: RunRow) -> dict[str, Any]:
    return {
        "id": row.id, "name": row.name, "status": row.status, "created": row.created, "seen": row.seen,
        "duration": row.duration, "tags": json_safe(row.tags), "notes": json_safe(row.notes), "group": json_safe(row.group),
        "ranks": row.ranks, "attempts": row.attempts, "archived": row.archived, "failed": _failed(row),
    }  # fmt: skip


def _blocks(listed: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Split a list into blocks, each named by its content. They are counted from the end: new runs come first in the list."""
    total = len(listed)
    ends = range(total, 0, -RUNS_IN_BLOCK)
    found = [listed[max(0, end - RUNS_IN_BLOCK) : end] for end in ends]
    return [(blake2b(msgspec.json.encode(block), digest_size=8).hexdigest(), block) for block in found]


def _settings(rows: Sequence[RunRow]) -> dict[str, None]:
    """Return the names of the runs' config values. Runs of a sweep share them, and they are joined only once."""
    found: dict[str, None] = {}
    known: set[Any] = set()
    for row in rows:
        form = _form(row.config)
        if form not in known:
            known.add(form)
            found.update(dict.fromkeys(flat(row.config)))
    return found


def _form(config: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple([(name, _form(value)) if isinstance(value, dict) else name for name, value in config.items()])


def passing(store: Store, project: str, filter: str) -> dict[str, Any]:
    """Return the ids of the runs that pass a filter; the dashboard already has everything else."""
    return {"ids": [row.id for row in store.runs(project, filter)]}


def _keys(rows: Sequence[RunRow], part: str) -> dict[str, bool]:
    """Return the runs' keys, and whether each is numeric. Runs of a sweep share the same keys, which are checked only once."""
    found: dict[str, bool] = {}
    known: set[tuple[str, ...]] = set()
    for row in rows:
        values = row[part]
        if part == "summary" and values is row.latest:
            continue  # the same dict
        names = tuple(values)
        if names not in known:
            known.add(names)
            found.update({key: found.get(key, False) or not isinstance(value, str) for key, value in values.items()})
    return found


def _figure(row: RunRow, key: str) -> Any:
    """Return a metric's value from the user's summary, else its latest one."""
    return row.summary[key] if key in row.summary else row.latest.get(key)


def columns(store: Store, query: ColumnQuery) -> bytes:
    """Return columns of the run table, one number or text per run, in the order of the header's `runs`."""
    import numpy as np

    rows = _rows(store, query)
    if len(query.names) * len(rows) > MOST_CELLS:
        raise SettingError(f"that is more than {MOST_CELLS} cells. None was read. Ask for fewer columns at a time.")
    settings = [flat(row.config) for row in rows] if any(name.startswith("config:") for name in query.names) else []
    items = []
    for name in query.names:
        cells = _cells(store, rows, settings, name)
        if all(cell is None or _is_number(cell) for cell in cells):
            numbers = np.array([math.nan if cell is None else float(cell) for cell in cells], np.float64)
            missing = [i for i, cell in enumerate(cells) if cell is None]
            items.append(({"name": name, "missing": missing}, {"values": numbers}))
        else:
            items.append(({"name": name, "texts": [_text(cell) for cell in cells]}, {}))
    return wire.encode({"runs": [row.id for row in rows]}, items)


def column(store: Store, query: ColumnQuery, name: str) -> tuple[Sequence[RunRow], list[Any]]:
    """Return the rows of the runs a query asks for, and one column of them."""
    rows = _rows(store, query)
    return rows, _cells(store, rows, [flat(row.config) for row in rows] if name.startswith("config:") else [], name)


def _cells(store: Store, rows: Sequence[RunRow], settings: Sequence[dict[str, Any]], name: str) -> list[Any]:
    origin, _, path = name.partition(":")
    if origin in STATISTICS:
        return [_statistic(store, row, path, origin) for row in rows]
    return [_figure(row, path) for row in rows] if origin == "metric" else [config.get(path) for config in settings]


def _rows(store: Store, query: ColumnQuery) -> Sequence[RunRow]:
    rows = store.runs(query.project)
    if query.runs is None:
        return rows
    wanted = set(query.runs)
    return [row for row in rows if row.id in wanted]


def _statistic(store: Store, row: RunRow, key: str, name: str) -> Any:
    return (store.statistics(row, key) or {}).get(name) if _is_number(row.latest.get(key)) else None


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def _text(cell: Any) -> str | None:
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, float) and not math.isfinite(cell):
        return str(cell)
    return msgspec.json.encode(json_safe(cell)).decode()


def series(store: Store, query: SeriesQuery) -> bytes:
    """Return series of many runs and keys, downsampled to the pixels that show them. Missing runs are left out."""
    found = found_series(store, query)
    return wire.encode({"axis": query.x}, [_packed(id, one, _flags(run, one.axis)) for id, run, one in found])


def _flags(run: StoredRun, axis: str) -> list[tuple[float, str]]:
    """Return where on an axis the newest alerts, checkpoints and requests to the job are, and which."""
    if axis == "step":
        return [(float(step), what) for step, _, what in run.milestones[-MOST_FLAGS:] if step is not None and step >= 0]
    zero = {"time": 0.0, "relative": run.started}.get(axis)
    return [] if zero is None else [(time - zero, what) for _, time, what in run.milestones[-MOST_FLAGS:]]


def found_series(store: Store, query: SeriesQuery, buckets: int | None = None) -> list[tuple[str, StoredRun, Buckets]]:
    """Return the requested series that exist, with their runs."""
    if len(query.runs) * len(query.keys) > MOST_SERIES:
        raise SettingError(f"that is more than {MOST_SERIES} series. None was read. Ask for fewer runs or keys at a time.")
    opened = _several(store, query.project, query.runs)
    room = MOST_IN_ALL // max(1, len(query.runs) * len(query.keys))
    points = 0 if buckets else POINTS
    buckets = buckets or max(1, min(query.n, MOST_BUCKETS, room))
    ranks: dict[int | None, list[str]] = {}
    for key in query.keys:
        ranks.setdefault(_rank_of(key), []).append(key)
    answer: list[tuple[str, StoredRun, Buckets]] = []
    for rank, keys in ranks.items():
        asked = [(id, run, key) for key in keys for id, run in opened.items()]
        names = [(run, key if rank is None else key.rpartition("@")[0]) for _, run, key in asked]
        found = store.series_many(names, buckets=buckets, whole=points * buckets, x=query.x,
                                  rank=query.rank if rank is None else rank, fold=query.fold if rank is None else None,
                                  lo=query.lo, hi=query.hi, log=query.log)  # fmt: skip
        pairs = zip(asked, found, strict=True)
        answer += [(id, run, one if rank is None else replace(one, key=key)) for (id, run, key), one in pairs if one is not None]
    return answer


def _rank_of(key: str) -> int | None:
    """Return the rank in the name of a system metric of one node: `system/cpu@8` is what rank 8 sampled on its node."""
    place = key.rpartition("@")[2] if key.startswith("system/") else ""
    return int(place) if place.isascii() and place.isdecimal() and len(place) < 10 else None


def _nodes(run: StoredRun) -> dict[str, int]:
    """Return the nodes of a run, with the lowest rank of each: the one that samples it."""
    found: dict[str, int] = {}
    for journal in run.journals:
        header = journal.header
        if header is not None and header.node and header.role == "main":
            found[header.node] = min(found.get(header.node, header.rank), header.rank)
    return dict(sorted(found.items(), key=lambda one: one[1])[:MOST_NODES])


def _several(store: Store, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
    """Open the requested runs that exist; a symlinked folder is not a run."""
    if len(ids) > MOST_RUNS:
        raise SettingError(f"that is more than {MOST_RUNS} runs. None was read. Ask for fewer at a time.")
    found = store.several(project, ids)
    linked = {folder: folder.is_symlink() for folder in {run.path.parent for run in found.values()}}
    return {id: run for id, run in found.items() if not linked[run.path.parent] and not os.path.islink(run.path)}  # noqa: PTH114 - faster, for hundreds of runs


def _packed(id: str, one: Any, flags: Sequence[tuple[float, str]] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    import numpy as np

    facts = {"run": id, "key": one.key, "total": one.total, "raw": one.raw, "axis": one.axis, "forked": one.forked,
             "marks": one.marks, "marked": one.marked, "restarts": one.restarts, "flags": flags}  # fmt: skip
    ends = [[end] if end is not None else [] for end in (one.before, one.after)]

    def reached(column: Any, place: int) -> Any:  # adds the points just outside the range, so that lines reach the edge
        if one.before is None and one.after is None:
            return column
        return np.concatenate([[end[place] for end in ends[0]], column, [end[place] for end in ends[1]]])

    last, x = reached(one.last, 1), reached(one.x, 0)
    if one.raw:
        found = {"x": x, "y": wire.small(last, last)[0]}
    else:
        low, high, first, last = wire.small(reached(one.min, 1), reached(one.max, 1), reached(one.first, 1), last)
        found = {"x": x, "xLast": reached(one.x_last, 0), "first": first, "y": last, "lo": low, "hi": high}
        if one.x_min is not None:
            found |= {"loAt": wire.offsets(reached(one.x_min, 0) - x), "hiAt": wire.offsets(reached(one.x_max, 0) - x)}
    if one.low is not None:
        edge = [np.full(len(end), -1) for end in ends]
        low, high = wire.small(reached(one.low, 1), reached(one.high, 1))
        found |= {"low": low, "high": high}
        found |= {name: np.concatenate([edge[0], ranks, edge[1]]).astype(np.int32)
                  for name, ranks in (("lowRank", one.low_rank), ("highRank", one.high_rank))}  # fmt: skip
    return facts, found


def run(store: Store, project: str, id: str) -> dict[str, Any]:
    """Return everything about one run except its points."""
    one = open_run(store, project, id)
    attempts = [{"key": a.key, "started": a.started / 1e9, **a.verdict()} for a in one.attempts]
    return json_safe({  # type: ignore[no-any-return]
        "id": one.id, "project": one.project, "name": one.name, "status": one.status, "verdict": one.verdict,
        "created": one.started, "seen": one.seen, "tags": one.tags, "notes": one.notes, "group": one.group,
        "archived": bool(one.info.get("archived")), "config": flat(one.config), "values": one.latest,
        "summary": one.summary, "facts": one.facts, "attempts": attempts, "fork": _fork(one), "ranks": one.ranks,
        "dropped": one.dropped, "damaged": one.damaged, "artifacts": one.artifacts, "files": one.files, "alerts": one.alerts,
        "requests": one.requests[-MOST_REQUESTS:], "knobs": one.info.get("knobs") or {}, "path": str(one.path),
        "keys": {kind: one.keys(kind) for kind in ("number", "system", "text", "media")},
        "blackbox": sections(one), "nodes": _nodes(one),
        "console": any(True for j in one.journals for _ in j.records(Kind.CONSOLE)),
    })  # fmt: skip


def _fork(run: StoredRun) -> dict[str, Any] | None:
    """Return which run a run continues, from which step, and why some of that is not shown."""
    if run.fork is None:
        return None
    parent = run.parent
    where = (run.fork.project, run.fork.run) if parent is None else (parent.project, parent.id)
    name = None if parent is None else parent.name
    return {"project": where[0], "run": where[1], "step": run.fork.step, "name": name, "missing": forks.missing(run)}


def opened(store: Store, project: str) -> list[StoredRun]:
    """Open all runs of a project."""
    return list(_several(store, project, [row.id for row in store.runs(project)]).values())


def alerts(store: Store, project: str) -> list[dict[str, Any]]:
    """Return a project's alerts, newest first, with their runs."""
    found = []
    rows = store.runs(project)
    runs = _several(store, project, [row.id for row in rows])
    for row in rows:
        one = runs.get(row.id)
        found += [{**alert, "run": row.id, "name": row.name} for alert in (one.alerts if one else ())]
        if _failed(row):
            found.append(_ending(row))
    return json_safe(sorted(found, key=lambda alert: -alert["t"])[:MOST_ALERTS])  # type: ignore[no-any-return]


def _failed(row: RunRow) -> bool:
    """Return whether a run failed, was killed or got lost; stopping it with Ctrl-C does not count."""
    stopped = (row.error or "").rstrip().rpartition("\n")[2].startswith("KeyboardInterrupt")
    return row.status in ("failed", "killed", "lost") and not stopped


def _ending(row: RunRow) -> dict[str, Any]:
    last = (row.error or "").strip().splitlines()[-1:]
    return {"t": int(row.seen * 1e9), "level": "error", "title": f"run {row.status}", "text": "".join(last),
            "run": row.id, "name": row.name, "event": "end"}  # fmt: skip


def console(store: Store, project: str, id: str, before: int | None) -> dict[str, Any]:
    """Return the end of a run's console output, or the end of its output before a time (ns)."""
    one = open_run(store, project, id)
    found = [(j.header.rank, record.data) for j in one.journals for record in j.records(Kind.CONSOLE)]
    chunks = sorted((chunk for chunk in found if before is None or chunk[1].t < before), key=lambda chunk: chunk[1].t)
    size = kept = 0
    for _, chunk in reversed(chunks):
        if size >= CONSOLE_BYTES:
            break
        size += len(chunk.b)
        kept += 1
    shown = chunks[len(chunks) - kept :]
    listed = [
        {"t": chunk.t, "stream": chunk.stream, "rank": rank, "text": chunk.b.decode("utf-8", "replace")} for rank, chunk in shown
    ]
    return {"chunks": listed, "more": kept < len(chunks)}


def media(store: Store, project: str, ids: Sequence[str], key: str) -> list[dict[str, Any]]:
    """Return the media or texts logged under a key, by run; their content is fetched by blob name."""
    found = []
    for id, one in _several(store, project, ids).items():
        points: list[dict[str, Any]] = [
            *({"n": n, "step": p.step, "time": p.time, "rank": p.rank, "kind": p.kind, "entry": p.entry}
              for n, p in enumerate(one.media(key))),
            *({"step": t.step, "time": t.time, "rank": t.rank, "kind": "text", "entry": {"text": t.text}}
              for t in one.texts(key)),
        ]  # fmt: skip
        shown = sorted(points, key=lambda point: point["step"])[-MOST_MEDIA:]
        found.append({"run": id, "points": json_safe(shown), "total": len(points)})
    return found


def media_point(store: Store, project: str, id: str, key: str, n: int) -> MediaPoint:
    """Return one media point by its index under a key."""
    points = open_run(store, project, id).media(key)
    if not 0 <= n < len(points):
        raise RunNotFound(f"there is no medium {n} under {key!r}. Nothing was read. The run has {len(points)} there.")
    return points[n]


def profile(store: Store, project: str, id: str) -> dict[str, Any]:
    """Return a run's operator profile and the steps it is based on; both are empty if none was recorded."""
    stored = open_run(store, project, id)
    return {"steps": steps_of(stored), "ops": json_safe(stored.ops())}


def goodput(store: Store, project: str, id: str) -> dict[str, Any]:
    """Return where a run's wall time went, part by part."""
    found = open_run(store, project, id).goodput()
    seconds, shares = found.pop("seconds"), found.pop("shares")
    parts = [
        {"name": part, "meaning": meaning, "seconds": seconds[part], "share": shares[part]} for part, meaning in PARTS.items()
    ]
    return {**found, "parts": parts}
