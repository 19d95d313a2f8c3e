"""The dashboard's queries, answered as plain data: runs, one run, table columns, series, alerts, console, media, profile."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import FanfoldError, RunNotFound, SettingError
from ..journal import Kind, directory
from ..media import Table
from ..plain import flat
from ..store.buckets import Buckets
from ..store.ops import steps_of
from ..store.query import Store
from ..store.rows import Row
from ..store.run import MediaPoint, StoredRun
from . import wire

MOST_SERIES = 50_000  # in one response; the dashboard shows fewer
MOST_BUCKETS = 20_000
MOST_IN_ALL = 8_000_000  # buckets of all series in one response; with more series, each gets fewer
MOST_RUNS = 20_000  # named in one request
MOST_CELLS = 10_000_000  # of the run table in one response
MOST_MEDIA = 400  # the newest of one key and run
MOST_ALERTS = 500
MOST_ROWS = 1_000
CONSOLE_BYTES = 256 << 10
BASICS = ("id", "name", "status", "created", "seen", "duration", "tags", "notes", "group", "ranks", "attempts")


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
    """Which columns of the run table: `config:lr`, `metric:loss`."""

    project: str
    names: list[str]


def open_run(store: Store, project: str, id: str) -> StoredRun:
    """Open a run by its exact project and id; a symlinked folder is not a run."""
    run = store.run(project, id)
    if run.path.is_symlink() or run.path.parent.is_symlink():
        raise RunNotFound(f"{directory.encode_name(id)} is a link, not a run. Nothing was read. Copy the run instead.")
    return run


def safe(value: Any) -> Any:
    """Return JSON-serializable data: NaN and infinities become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): safe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [safe(item) for item in value]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def runs(store: Store, project: str, filter: str, sort: str) -> dict[str, Any]:
    """Return a project's runs with the fields the run list shows, and the available columns and keys."""
    rows = store.runs(project, filter, sort)
    listed = [{**{name: row[name] for name in BASICS}, "archived": row.archived, "failed": _failed(row)}
              for row in rows]  # fmt: skip
    settings = dict.fromkeys(f"config:{path}" for row in rows for path in flat(row.config))
    logged, figures = _keys(rows, "latest"), _keys(rows, "summary")
    seen = dict.fromkeys(key for row in rows for key in row.media)
    return {
        "runs": safe(listed),
        "keys": [key for key, number in logged.items() if number],
        "media": [*seen, *(key for key, number in logged.items() if not number)],
        "columns": [*settings, *(f"metric:{key}" for key in {**logged, **figures})],
        "unreadable": rows.unreadable,
    }


def passing(store: Store, project: str, filter: str) -> dict[str, Any]:
    """Return the ids of the runs that pass a filter; the dashboard already has everything else."""
    return {"ids": [row.id for row in store.runs(project, filter)]}


def _keys(rows: Sequence[Row], part: str) -> dict[str, bool]:
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


def _figure(row: Row, key: str) -> Any:
    """Return a metric's value from the user's summary, else its latest one."""
    return row.summary[key] if key in row.summary else row.latest.get(key)


def columns(store: Store, query: ColumnQuery) -> bytes:
    """Return columns of the run table, one number or text per run, in the order of the header's `runs`."""
    import numpy as np

    rows = store.runs(query.project)
    if len(query.names) * len(rows) > MOST_CELLS:
        raise SettingError(f"that is more than {MOST_CELLS} cells. None was read. Ask for fewer columns at a time.")
    settings = [flat(row.config) for row in rows] if any(name.startswith("config:") for name in query.names) else []
    items = []
    for name in query.names:
        origin, _, path = name.partition(":")
        cells = [_figure(row, path) for row in rows] if origin == "metric" else [config.get(path) for config in settings]
        if all(cell is None or _is_number(cell) for cell in cells):
            numbers = np.array([math.nan if cell is None else float(cell) for cell in cells], np.float64)
            missing = [i for i, cell in enumerate(cells) if cell is None]
            items.append(({"name": name, "missing": missing}, {"values": numbers}))
        else:
            items.append(({"name": name, "texts": [_text(cell) for cell in cells]}, {}))
    return wire.encode({"runs": [row.id for row in rows]}, items)


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def _text(cell: Any) -> str | None:
    if cell is None or isinstance(cell, str):
        return cell
    return msgspec.json.encode(safe(cell)).decode()


def series(store: Store, query: SeriesQuery) -> bytes:
    """Return series of many runs and keys, downsampled to the pixels that show them. Missing runs are left out."""
    return wire.encode({"axis": query.x}, [_packed(id, one) for id, _, one in found_series(store, query)])


def found_series(store: Store, query: SeriesQuery, buckets: int | None = None) -> list[tuple[str, StoredRun, Buckets]]:
    """Return the requested series that exist, with their runs."""
    if len(query.runs) * len(query.keys) > MOST_SERIES:
        raise SettingError(f"that is more than {MOST_SERIES} series. None was read. Ask for fewer runs or keys at a time.")
    opened = _several(store, query.project, query.runs)
    room = MOST_IN_ALL // max(1, len(query.runs) * len(query.keys))
    buckets = buckets or max(1, min(query.n, MOST_BUCKETS, room))
    asked = [(id, run, key) for key in query.keys for id, run in opened.items()]
    found = store.series_many([(run, key) for _, run, key in asked], buckets=buckets, x=query.x, rank=query.rank,
                              fold=query.fold, lo=query.lo, hi=query.hi, log=query.log)  # fmt: skip
    return [(id, run, one) for (id, run, _), one in zip(asked, found, strict=True) if one is not None]


def _several(store: Store, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
    """Open the requested runs that exist; a symlinked folder is not a run."""
    if len(ids) > MOST_RUNS:
        raise SettingError(f"that is more than {MOST_RUNS} runs. None was read. Ask for fewer at a time.")
    found = store.several(project, ids)
    linked = {folder: folder.is_symlink() for folder in {run.path.parent for run in found.values()}}
    return {id: run for id, run in found.items() if not linked[run.path.parent] and not os.path.islink(run.path)}  # noqa: PTH114 - faster, for hundreds of runs


def _packed(id: str, one: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    import numpy as np

    facts = {"run": id, "key": one.key, "total": one.total, "raw": one.raw, "axis": one.axis,
             "marks": one.marks, "marked": one.marked, "restarts": one.restarts}  # fmt: skip
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
    return safe({  # type: ignore[no-any-return]
        "id": one.id, "project": one.project, "name": one.name, "status": one.status, "verdict": one.verdict,
        "created": one.started, "seen": one.seen, "tags": one.tags, "notes": one.notes, "group": one.group,
        "archived": bool(one.info.get("archived")), "config": flat(one.config), "values": one.latest,
        "summary": one.summary, "facts": one.facts, "attempts": attempts, "ranks": one.ranks, "dropped": one.dropped,
        "damaged": one.damaged, "artifacts": one.artifacts, "files": one.files, "alerts": one.alerts, "path": str(one.path),
        "keys": {kind: one.keys(kind) for kind in ("number", "system", "text", "media")},
        "console": any(True for j in one.journals for _ in j.records(Kind.CONSOLE)),
    })  # fmt: skip


def alerts(store: Store, project: str) -> list[dict[str, Any]]:
    """Return a project's alerts, newest first, with their runs."""
    found = []
    rows = store.runs(project)
    opened = _several(store, project, [row.id for row in rows])
    for row in rows:
        one = opened.get(row.id)
        found += [{**alert, "run": row.id, "name": row.name} for alert in (one.alerts if one else ())]
        if _failed(row):
            found.append(_ending(row))
    return safe(sorted(found, key=lambda alert: -alert["t"])[:MOST_ALERTS])  # type: ignore[no-any-return]


def _failed(row: Row) -> bool:
    """Return whether a run failed, was killed or got lost; stopping it with Ctrl-C does not count."""
    stopped = (row.error or "").rstrip().rpartition("\n")[2].startswith("KeyboardInterrupt")
    return row.status in ("failed", "killed", "lost") and not stopped


def _ending(row: Row) -> dict[str, Any]:
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
        found.append({"run": id, "points": safe(shown), "total": len(points)})
    return found


def media_point(store: Store, project: str, id: str, key: str, n: int) -> MediaPoint:
    """Return one media point by its index under a key."""
    points = open_run(store, project, id).media(key)
    if not 0 <= n < len(points):
        raise RunNotFound(f"there is no medium {n} under {key!r}. Nothing was read. The run has {len(points)} there.")
    return points[n]


def table(store: Store, project: str, id: str, key: str, n: int, start: int, count: int) -> dict[str, Any]:
    """Return some rows of a logged table."""
    point = media_point(store, project, id, key, n)
    loaded = point.load()
    if not isinstance(loaded, Table):
        raise FanfoldError(f"{point.key!r} is a {point.kind}, not a table. Nothing was read.")
    rows = loaded.rows
    cells = [[_shown(cell) for cell in row] for row in rows[max(0, start) : max(0, start) + min(count, MOST_ROWS)]]
    return {"columns": loaded.columns, "rows": cells, "total": len(rows)}


def _shown(cell: Any) -> Any:
    kind = getattr(cell, "kind", None)
    return f"({kind})" if isinstance(kind, str) else safe(cell)


def profile(store: Store, project: str, id: str) -> dict[str, Any]:
    """Return a run's operator profile and the steps it is based on; both are empty if none was recorded."""
    stored = open_run(store, project, id)
    return {"steps": steps_of(stored), "ops": safe(stored.ops())}
