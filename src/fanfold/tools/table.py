"""The tools that agents have: one row per tool, with its arguments and what it answers. `mcp.py` serves them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import FanfoldError, SettingError
from ..journal.requests import Value, checked_id
from ..media import Table
from ..store import sql
from ..store.filter import Filter
from ..store.move import found
from ..store.query import Store, find
from ..store.rows import cause
from ..store.run import MediaPoint, StoredRun
from ..store.tell import answer_so_far, tell
from . import answers

MAX_LISTED, MAX_KEYS, MAX_RUNS, MAX_SECONDS = 200, 20, 20, 50.0
MAX_IMAGE_BYTES = 1 << 20
MAX_ROWS = 50  # of a logged table
MOST = sql.Most(rows=1_000, seconds=30.0, memory="512MB")
IMAGES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}

Run = Annotated[str, Meta(description="A run: its id, the beginning of it, its name, PROJECT/ID, or - for the newest")]
Project = Annotated[str | None, Meta(description="Only this project")]
FilterText = Annotated[str, Meta(description="Such as: status=failed and lr<1e-3 and tag:base and val/loss.min<0.2 and age<2d")]


class ListQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which runs to list."""

    project: Project = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    archived: bool = False


class FindQuery(ListQuery, forbid_unknown_fields=True):
    """Which runs to find, in which order."""

    filter: FilterText = ""
    sort: Annotated[str, Meta(description="A field, config value or metric: val/loss.min; -KEY is highest first")] = ""


class RunQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which run."""

    run: Run


class PointsQuery(RunQuery, forbid_unknown_fields=True):
    """Which metrics of a run, and how much of them."""

    keys: Annotated[list[str], Meta(min_length=1, max_length=MAX_KEYS, description="Metrics, by their exact names")]
    buckets: Annotated[int, Meta(ge=1, le=1_000)] = 50
    lo: Annotated[float | None, Meta(description="From this x on")] = None
    hi: Annotated[float | None, Meta(description="Up to this x")] = None
    around: Annotated[float | None, Meta(description="Every point near this x instead")] = None
    x: Annotated[str, Meta(description="step, time, relative, or any metric")] = "auto"
    rank: int | None = None
    fold: Annotated[str | None, Meta(description="All ranks as one: mean, min, max, sum, std or last")] = None


class CompareQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which two runs."""

    a: Run
    b: Run


class WaitQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which runs to wait for, for what, and how long."""

    runs: Annotated[list[Run], Meta(min_length=1, max_length=MAX_RUNS)]
    until: FilterText = ""
    timeout: Annotated[float, Meta(ge=0, le=MAX_SECONDS, description="Seconds; ask again if it is not enough")] = 30.0


class SqlQuery(msgspec.Struct, forbid_unknown_fields=True):
    """One SELECT."""

    sql: Annotated[str, Meta(description="Tables: " + "; ".join(f"{name}({', '.join(row)})" for name, row in sql.TABLES.items()))]
    project: Project = None


class MediaQuery(RunQuery, forbid_unknown_fields=True):
    """Which media of a run; without a key, which there are."""

    key: str | None = None
    step: int | None = None
    limit: Annotated[int, Meta(ge=1, le=20)] = 3


class TellQuery(RunQuery, forbid_unknown_fields=True):
    """What to ask of a job; or, with `id`, which earlier request to look up."""

    action: Annotated[str, Meta(description="stop, save, evaluate, log or set")] = ""
    values: Annotated[dict[str, Value], Meta(description="For set: what to change, such as {'lr': 0.001}")] = {}
    timeout: Annotated[float, Meta(ge=0, le=MAX_SECONDS, description="Seconds to wait for the answer")] = 30.0
    id: Annotated[str, Meta(description="Of an earlier request: return its answer, and ask nothing")] = ""


class TagQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which tags to add and remove."""

    runs: Annotated[list[Run], Meta(min_length=1, max_length=MAX_RUNS)]
    add: list[str] = []
    remove: list[str] = []


class NoteQuery(RunQuery, forbid_unknown_fields=True):
    """The notes of a run."""

    text: str
    append: bool = False


class RenameQuery(RunQuery, forbid_unknown_fields=True):
    """The name of a run."""

    name: str


class ArchiveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which runs to archive, or to list again."""

    runs: Annotated[list[Run], Meta(min_length=1, max_length=MAX_RUNS)]
    archived: bool = True


class MoveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which runs to move, and where."""

    runs: Annotated[list[Run], Meta(min_length=1, max_length=MAX_RUNS)]
    project: Annotated[str, Meta(description="The project they go to")]


class Picture(msgspec.Struct):
    """An image in an answer, beside the text."""

    data: str  # base64
    kind: str


@dataclass(frozen=True)
class Tool:
    """One tool: its name, what it is for, its arguments, and the function that answers."""

    name: str
    meaning: str
    arguments: type[msgspec.Struct]
    function: Callable[[Store, Any], Any]
    writes: bool = False
    waits: bool = False  # called again while its answer is open, until the caller's time is up
    destructive: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the arguments."""
        _, found = msgspec.json.schema_components([self.arguments])
        return dict(found[self.arguments.__name__])

    def read(self, arguments: Any) -> Any:
        """Check arguments; raise an error that names a wrong one."""
        try:
            return msgspec.convert(arguments or {}, self.arguments)
        except msgspec.ValidationError as error:
            raise SettingError(f"the arguments of {self.name} are not right: {error}. Nothing was done.") from error


def _row(row: Any) -> dict[str, Any]:
    names = ("id", "name", "project", "status", "created", "seen", "duration", "tags", "group", "notes", "ranks", "archived")
    latest = {key: value for key, value in row.latest.items() if not key.startswith("system/")}
    return {**{name: row[name] for name in names}, "config": row.config, "summary": row.summary or latest}


def _list(store: Store, query: ListQuery) -> dict[str, Any]:
    projects = [{"name": one.name, "runs": one.runs, "last": one.last} for one in store.projects()]
    return {"projects": projects, **_find(store, FindQuery(query.project, query.limit, query.archived))}


def _find(store: Store, query: FindQuery) -> dict[str, Any]:
    rows = [row for row in store.runs(query.project, query.filter, query.sort) if query.archived or not row.archived]
    return {"total": len(rows), "runs": [_row(row) for row in rows[: query.limit]]}


def _show(store: Store, query: RunQuery) -> dict[str, Any]:
    run = find(store, query.run)
    keys = {kind: run.keys(kind) for kind in ("number", "system", "text", "media")}
    console = run.console()[-4_000:].decode("utf-8", "replace").splitlines()[-40:]
    events: dict[str, Any] = {"alerts": [_event(one) for one in run.alerts], "artifacts": [_event(one) for one in run.artifacts]}
    events |= {"requests": run.requests, "adjustable": run.info.get("knobs") or {}}
    return {
        **_row(run.row()), "cause": cause(run.verdict), "attempts": len(run.attempts), "ranks": run.ranks, "keys": keys, **events,
        "dropped": run.dropped, "damaged": run.damaged, "console": console,
        "facts": {name: fact for name, fact in run.facts.items() if name != "packages"},
    }  # fmt: skip


def _event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event with its time in seconds, like every other time here, and its step by that name."""
    named = {"t": "time", "s": "step"}
    return {named.get(name, name): value / 1e9 if name == "t" else value for name, value in event.items()}


def _points(store: Store, query: PointsQuery) -> list[dict[str, Any]]:
    run = find(store, query.run)
    how = {name: getattr(query, name) for name in ("buckets", "lo", "hi", "around", "x", "rank", "fold")}
    return [answers.points(run, key, answers.curve(store, run, key, **how)) for key in query.keys]


def _compare(store: Store, query: CompareQuery) -> dict[str, Any]:
    return answers.compared(find(store, query.a), find(store, query.b))


def _diagnose(store: Store, query: RunQuery) -> dict[str, Any]:
    return answers.diagnosis(store, find(store, query.run))


def _wait(store: Store, query: WaitQuery) -> dict[str, Any]:
    condition = Filter(query.until) if query.until else None
    found = [find(store, word) for word in query.runs]
    every = []
    for run in found:
        met = condition is not None and condition.matches(run.row(), stats=store.statistics)
        every.append(answers.outcome(run, met=met, conditional=condition is not None) or "timeout")
    runs = [{**answers.became(run), "outcome": one} for run, one in zip(found, every, strict=True)]
    return {"outcome": max(every, key=answers.OUTCOMES.index), "runs": runs}


def _sql(store: Store, query: SqlQuery) -> dict[str, Any]:
    found = sql.query(query.sql, store=store, project=query.project, most=MOST)
    return {"columns": found.columns, "rows": [list(row) for row in found.rows], "cut": len(found.rows) == MOST.rows}


def _media(store: Store, query: MediaQuery) -> Any:
    run = find(store, query.run)
    if query.key is None:
        return {"media": {key: len(run.media(key)) for key in run.keys("media")},
                "texts": {key: len(run.texts(key)) for key in run.keys("text")}}  # fmt: skip
    every: list[Any] = [*run.media(query.key), *run.texts(query.key)]
    points = [one for one in every if query.step in (None, one.step)]
    if not points:
        there = ", ".join([*run.keys("media"), *run.keys("text")][:20]) or "none"
        raise FanfoldError(f"run {run.id} has no media under {query.key!r} there. Nothing was read. It has: {there}.")
    return {"total": len(points), "points": [_medium(run, one) for one in points[-query.limit :]]}


def _medium(run: StoredRun, point: Any) -> dict[str, Any]:
    found = {"step": point.step, "time": point.time, "rank": point.rank}
    if not isinstance(point, MediaPoint):
        return {**found, "kind": "text", "text": point.text}
    found |= {"kind": point.kind, "entry": point.entry}
    if point.kind == "table":
        table = point.load()
        if isinstance(table, Table):
            found |= {
                "columns": table.columns,
                "rows": [list(map(str, row)) for row in table.rows[:50]],
                "total": len(table.rows),
            }
    elif point.kind == "image" and point.entry.get("blob") and _size(run, str(point.entry["blob"])) <= MAX_IMAGE_BYTES:
        data = run.blob(str(point.entry["blob"]))
        kind = next((kind for magic, kind in IMAGES.items() if data.startswith(magic)), None)
        if kind is not None:
            found["picture"] = Picture(base64.b64encode(data).decode("ascii"), kind)
    return found


def _size(run: StoredRun, blob: str) -> int:
    """Return how large a medium is, before it is read."""
    return run.artifact_file(blob).stat().st_size


def _tell(store: Store, query: TellQuery) -> dict[str, Any]:
    run = find(store, query.run)
    if query.id:
        found = answer_so_far(run.reopened(), checked_id(query.id))
        found = found if found.action else msgspec.structs.replace(found, action=query.action, values=query.values)
    else:
        found = tell(run, query.action, query.values, wait=False, leave=partial(store.changes.ask, run))
        query.id = found.id  # the next call looks up the answer
    return msgspec.structs.asdict(found)


def is_open(answer: dict[str, Any]) -> bool:
    """Return whether a tool that waits would answer something else later."""
    return answer.get("outcome") == "timeout" or answer.get("state") == "asked"


def _tag(store: Store, query: TagQuery) -> list[dict[str, Any]]:
    return _edit(store, query.runs, lambda run: answers.tagged(run, query.add, query.remove))


def _note(store: Store, query: NoteQuery) -> list[dict[str, Any]]:
    return _edit(store, [query.run], lambda run: answers.noted(run, query.text, append=query.append))


def _rename(store: Store, query: RenameQuery) -> list[dict[str, Any]]:
    return _edit(store, [query.run], lambda _: {"name": query.name})


def _archive(store: Store, query: ArchiveQuery) -> list[dict[str, Any]]:
    return _edit(store, query.runs, lambda _: {"archived": query.archived})


def _move(store: Store, query: MoveQuery) -> list[dict[str, Any]]:
    named = [found(partial(find, store), word, query.project, store) for word in query.runs]
    runs = {(run.project, run.id): run for run in named}
    store.changes.move(list(runs.values()), query.project)
    return [{**answers.edited(store.run(query.project, id)), "moved": old != query.project} for old, id in runs]


def _edit(store: Store, words: list[str], change: answers.Change) -> list[dict[str, Any]]:
    return answers.edit(store.changes, [find(store, word) for word in words], change)


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("list", "List the projects and the newest runs, with config and summary.", ListQuery, _list),
        Tool("find", "Find runs by a filter over status, config, tags and metrics, sorted by any of them.", FindQuery, _find),
        Tool("show", "Show one run: status and cause, config, latest values, metric names, alerts, code, machine, last console "
             "lines.", RunQuery, _show),
        Tool("points", "Return curves of metrics in a few buckets with exact extremes, or every point around a step.",
             PointsQuery, _points),
        Tool("compare", "Show what differs between two runs: config, metrics, code, packages, environment.", CompareQuery,
             _compare),
        Tool("diagnose", "Say what went wrong in a run or limits it, each finding with its evidence.", RunQuery, _diagnose),
        Tool("wait", f"Wait until runs have ended, or until a filter holds for all; at most {MAX_SECONDS:.0f} s at a time. "
             "Outcome timeout: ask again.", WaitQuery, _wait, waits=True),
        Tool("query", "Answer one SELECT over all runs and points (DuckDB).", SqlQuery, _sql),
        Tool("media", "Return logged images, tables and texts of a run; without a key, which there are.", MediaQuery, _media),
        Tool("tell", "Ask the running job of a run to stop, save, evaluate, log, or set adjustable values; all ranks act after "
             "the same step. State asked: call again with its id.", TellQuery, _tell, writes=True, waits=True, destructive=True),
        Tool("tag", "Add tags to runs and remove tags.", TagQuery, _tag, writes=True),
        Tool("note", "Set or append to the notes of a run.", NoteQuery, _note, writes=True),
        Tool("rename", "Give a run another name; its id stays.", RenameQuery, _rename, writes=True),
        Tool("archive", "Hide runs from lists, or show them again; nothing is deleted.", ArchiveQuery, _archive, writes=True),
        Tool("move", "Move runs that have ended to another project.", MoveQuery, _move, writes=True),
    )
}  # fmt: skip


def asked(store: Store, name: str, arguments: Any, *, write: bool) -> tuple[Tool, partial[Any]]:
    """Return a tool and the call that answers; raise for one that does not exist or is not allowed."""
    tool = TOOLS.get(name)
    if tool is None or (tool.writes and not write):
        why = "changes runs, and only reading is allowed here" if tool else "does not exist"
        known = ", ".join(one.name for one in TOOLS.values() if write or not one.writes)
        raise SettingError(f"the tool {name[:100]!r} {why}. Nothing was done. Tools: {known}.")
    return tool, partial(tool.function, store, tool.read(arguments))
