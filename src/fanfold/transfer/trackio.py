"""Trackio: one SQLite database per project, with the values of each call as JSON. Read without Trackio.

Databases before Trackio 0.24 know a run by its name only, later ones by an id.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import outcome
from ..media import Audio, Histogram, Html, Image, Media, Table, Text, Video
from ..plain import from_json
from ..process import digest
from .events import Alert, Artifact, End, Event, Facts, Found, Mark, Start, Values
from .reading import Account, Gather, Number, StepAxis, file_inside, nanoseconds, number, read_media
from .sqlite import BROKEN, SQLiteFile, opened, with_log

STEP_KEY = "trackio/step"  # the exact value of steps that are not whole numbers
MICRO = 1_000_000
RESERVED = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})
MOST_DEPTH = 16
_TRACKIO_ID = re.compile(r"[0-9a-f]{32}$")
_KINDS: dict[str, Callable[..., Media]] = {"trackio.image": Image, "trackio.audio": Audio, "trackio.video": Video}
_STATUSES = ("finished", "failed", "killed")


class TrackioImporter:
    """Runs of a Trackio database."""

    kind = "trackio"
    title = "Trackio"

    def find(self, path: Path) -> Iterator[Found]:
        """Yield the runs of a database."""
        if not path.is_file():
            return
        ours = False
        try:
            with opened(path) as database:
                ours = {"run_name", "timestamp", "metrics"} <= database.tables.get("metrics", set())
                yield from _runs(database, path) if ours else ()
        except BROKEN:
            if ours:  # what is damaged appears in the account
                yield Found(kind="trackio", id=f"{path.absolute()}", paths=(path,), project=path.stem, name=path.name)

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        """Yield a run's events."""
        state: dict[str, Any] = {"metrics": 0, "system_metrics": 0, "alerts": 0, "artifacts": 0, "scale": 0, "facts": ""}
        state |= position if isinstance(position, dict) else {}
        account = Account()
        try:
            with opened(found.paths[0]) as database:
                yield from _Run(database, found, state, account).events()
        except BROKEN as error:
            account.leave("the rest of the run", f"the database cannot be read: {error}", found.name)
        yield from account.events()
        if state != position:
            yield Mark(position=state)


def _runs(database: SQLiteFile, path: Path) -> Iterator[Found]:
    seen: dict[str, str] = {}
    by_id = "run_id" in database.tables["metrics"]
    columns = ("run_id", "run_name") if by_id else ("run_name", "run_name")
    for table in ("configs", "metrics", "system_metrics", "alerts"):
        if set(columns) <= database.tables.get(table, set()):
            for run, name in database.select(table, columns, "GROUP BY 1, 2"):
                seen[str(run)] = str(name)
    for run, name in seen.items():
        ours = by_id and not _TRACKIO_ID.match(run)  # Trackio's own ids are 32 digits
        yield Found(
            kind="trackio", id=run if by_id else f"{path.stem}/{run}", paths=with_log(path), project=path.stem, name=name,
            fanfold_id=run if ours else None,
        )  # fmt: skip


class _Run:
    """One run in an open database."""

    def __init__(self, database: SQLiteFile, found: Found, state: dict[str, Any], account: Account) -> None:
        self.database, self.found, self.state, self.account = database, found, state, account
        self.ours = found.fanfold_id is not None
        self.home = found.paths[0].parent
        by_id = "run_id" in database.tables.get("metrics", set())
        self.which, self.key = ("run_id", found.id) if by_id else ("run_name", found.name)  # the column that tells runs apart
        self.gather = Gather()
        self.axis = StepAxis(STEP_KEY)
        self.state["scale"] = self.scale = self.state["scale"] or self._scale()
        self.last: int | None = None

    def _scale(self) -> int:
        """Return by what steps are multiplied to be whole numbers: 1, unless some of the run's have a fraction."""
        rest = f"WHERE t.\"{self.which}\" = :run AND typeof(t.step) = 'real' LIMIT 1"
        return MICRO if next(self.database.select("metrics", ("step",), rest, run=self.key), None) else 1

    def rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows that are new, and note how far they go."""
        if "id" not in self.database.tables.get(table, set()):
            return
        which = self.which if self.which in self.database.tables[table] else "run_name"
        rest = f'WHERE t."{which}" = :run AND t."id" > :after ORDER BY t."id"'
        for row in self.database.select(table, ("id", *columns), rest, run=self.key, after=self.state[table]):
            yield row[1:]
            self.state[table] = row[0]

    def events(self) -> Iterator[Event]:
        """Yield everything."""
        config = self._config()
        described = digest(repr(config))
        if described != self.state["facts"]:
            yield Start(time_ns=nanoseconds(config.get("_Created")) or self._first())
            yield from self._facts(config)
        self.state["facts"] = described
        for count, (stamp, step, values) in enumerate(self.rows("metrics", "timestamp", "step", "metrics")):
            yield from self._row(stamp, step, values)
            if count % 16384 == 16383:
                yield from self.gather.flush()
                yield Mark(position=dict(self.state))
        yield from self.gather.flush()
        for stamp, values in self.rows("system_metrics", "timestamp", "metrics"):
            yield from self._system(stamp, values)
        yield from self.gather.flush()
        for stamp, title, text, level, step in self.rows("alerts", "timestamp", "title", "text", "level", "step"):
            moment = self._at(stamp)
            yield Alert(title=str(title), text=str(text or ""), level=str(level), step=self._step(step), time_ns=moment)
        yield from self._artifacts()
        self._traces()
        yield from self._end(config)

    def _config(self) -> dict[str, Any]:
        row = next(self.database.select("configs", ("config",), f'WHERE t."{self.which}" = :run', run=self.key), None)
        found = _json(row[0]) if row else {}
        return found if isinstance(found, dict) else {}

    def _first(self) -> int | None:
        rest = f'WHERE t."{self.which}" = :run LIMIT 1'
        row = next(self.database.select("metrics", ("timestamp",), rest, run=self.key), None)
        return nanoseconds(row[0]) if row else None

    def _facts(self, config: Mapping[str, Any]) -> Iterator[Event]:
        own = {key: value for key, value in config.items() if not key.startswith("_")}
        words = {name: own.pop(name, None) for name in ("tags", "notes", "summary", "status")} if self.ours else {}
        if self.ours:
            own = {key.removeprefix("config") if key.startswith("config_") else key: value for key, value in own.items()}
        group, user, tags, summary = config.get("_Group"), config.get("_Username"), words.get("tags"), words.get("summary")
        yield Facts(
            name=self.found.name, group=str(group) if group else None, config=own, facts={"user": user} if user else None,
            tags=[str(tag) for tag in tags] if isinstance(tags, list) else None,
            notes=str(words["notes"]) if words.get("notes") else None,
            summary={key: from_json(value) for key, value in summary.items()} if isinstance(summary, dict) else None,
        )  # fmt: skip

    # Values

    def _row(self, stamp: Any, step: Any, text: Any) -> Iterator[Event]:
        time_ns, values = self._at(stamp), _json(text)
        if not isinstance(values, dict):
            self.account.leave("rows", "their values are not JSON", str(text)[:80])
            return
        numbers: dict[str, Number] = {}
        others: dict[str, Any] = {}
        for key, value in _flat(values):
            made = from_json(value)
            plain = number(made)
            if plain is not None:
                numbers[key] = plain
            elif isinstance(made, str):
                others[key] = made
            elif (media := self._media(key, made)) is not None:
                others[key] = media
        at = self._step(step)
        if self.scale > 1 and isinstance(step, (int, float)):
            yield from self.axis.of(tuple(numbers))
            numbers[STEP_KEY] = float(step)
        yield from self.gather.add(at, time_ns, numbers)
        if others:
            yield Values(step=at, time_ns=time_ns, values=others)

    def _step(self, step: Any) -> int | None:
        if self.scale == 1 and isinstance(step, float):
            self.account.leave(
                "fractions of steps", "the run had none when it was first imported; delete it and import again", step
            )
        return _whole(step * self.scale if isinstance(step, (int, float)) else step)

    def _system(self, stamp: Any, text: Any) -> Iterator[Event]:
        values = _json(text)
        pairs = _flat(values) if isinstance(values, dict) else []
        found = {key: made for key, value in pairs if (made := number(from_json(value))) is not None}
        yield from self.gather.add(None, self._at(stamp), found, system=True)

    def _at(self, stamp: Any) -> int | None:
        found = nanoseconds(stamp)
        if found is not None:
            self.last = max(self.last or 0, found)
        return found

    # Media and files

    def _media(self, key: str, value: Any) -> Any:
        """Return the media that a value stands for, or None after counting what cannot be carried."""
        if value is None:
            self.account.leave("empty values", "None is not a value", key)
            return None
        if isinstance(value, dict) and "_type" in value:
            made, error = outcome(self._made, key, value)
            if made is None:
                self.account.leave(str(value["_type"])[:40], f"cannot be read: {error}", key)
            return made
        if isinstance(value, list):
            return json.dumps(value)
        self.account.leave("values", f"of type {type(value).__name__}", key)
        return None

    def _made(self, key: str, value: Mapping[str, Any]) -> Any:
        kind, caption = str(value["_type"]), value.get("caption")
        if kind == "trackio.histogram":
            return Histogram(np_histogram=(value["values"], value["bins"]))
        if kind == "trackio.markdown":
            return Text(value["_value"])
        if kind == "trackio.table":
            return self._table(key, value["_value"])
        data = read_media(file_inside(self.home, str(value["file_path"]), below="media"))
        if kind == "trackio.html":
            return Html(data.decode("utf-8", "replace") + "\n")
        if kind not in _KINDS:
            raise ValueError("fanfold has no such kind of value")
        return _KINDS[kind](data, caption=caption if isinstance(caption, str) else None)

    def _table(self, key: str, rows: Any) -> Any:
        columns = list(dict.fromkeys(str(name) for row in rows for name in row))
        data = [[self._cell(row.get(name)) for name in columns] for row in rows]
        if self.ours and columns == [key] and data and all(isinstance(row[0], Media) for row in data):
            return [row[0] for row in data]  # several media of one key
        return Table(columns=columns, data=data)

    def _cell(self, value: Any) -> Any:
        if isinstance(value, dict) and "_type" in value:
            return self._made("", value)
        return json.dumps(value) if isinstance(value, (dict, list)) else value

    def _artifacts(self) -> Iterator[Event]:
        links = [row for row in self._links() if isinstance(row[0], int) and row[0] > self.state["artifacts"]]
        for link, version in links:
            columns = ("artifact_id", "manifest", "metadata", "created_at", "version")
            found = next(self.database.select("artifact_versions", columns, 'WHERE t."id" = :id', id=version), None)
            about = found and next(self.database.select("artifacts", ("name", "type"), 'WHERE t."id" = :id', id=found[0]), None)
            self.state["artifacts"] = link
            if not found or not about:
                self.account.leave("artifacts", "they are not in the database", str(version))
                continue
            files = [one for entry in _json(found[1]) or [] if (one := self._artifact_file(entry)) is not None]
            metadata = _json(found[2]) if found[2] else None
            yield Artifact(
                name=str(about[0]), files=files, type=str(about[1]), metadata=metadata if isinstance(metadata, dict) else None,
                time_ns=nanoseconds(found[3]),
            )  # fmt: skip

    def _links(self) -> Iterator[tuple[Any, ...]]:
        rest = 'WHERE t."run_id" = :run AND t."direction" = \'output\' ORDER BY t."id"'
        return self.database.select("run_artifact_links", ("id", "artifact_version_id"), rest, run=self.key)

    def _artifact_file(self, entry: Any) -> tuple[str, Path] | None:
        digest = str(entry.get("digest")) if isinstance(entry, dict) else ""
        if re.match(r"[0-9a-f]{64}$", digest):
            with contextlib.suppress(OSError, ValueError):
                inner = f"artifacts/{self.found.project}/blobs/sha256/{digest[:2]}/{digest}"
                return str(entry.get("path")), file_inside(self.home, inner)
        self.account.leave("files of artifacts", "they are not beside the database", str(entry)[:80])
        return None

    def _traces(self) -> None:
        if self.which in self.database.tables.get("traces", set()):
            count = sum(1 for _ in self.database.select("traces", ("id",), f'WHERE t."{self.which}" = :run', run=self.key))
            if count:
                self.account.leave("traces", "fanfold has no traces", count=count)

    def _end(self, config: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the end of a run of ours: Trackio itself has no status."""
        status = config.get("status") if self.ours else None
        if status in _STATUSES:
            yield End(status=str(status), time_ns=self.last)


def _flat(values: Mapping[str, Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{before}{_key(name) if not before else name}"
        if isinstance(value, dict) and "_type" not in value and depth < MOST_DEPTH:
            yield from _flat(value, f"{key}/", depth + 1)
        else:
            yield key, value


def _key(name: str) -> str:
    """Return a key as it was logged: Trackio puts two underscores before the names it uses itself."""
    inside = name.removeprefix("__")
    return inside if inside != name and (inside in RESERVED or inside.startswith("__")) else name


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None


def _whole(step: Any) -> int | None:
    if not isinstance(step, (int, float)) or not abs(step) < 1 << 63:
        return None
    found = round(step)
    return found if -(1 << 63) <= found < 1 << 63 else None
