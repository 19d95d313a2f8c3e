"""Local databases of neptune-scale: operations as protobuf messages in SQLite. Pickled parts are never loaded."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..errors import outcome
from .events import Artifact, Event, Found, Values
from .neptune_run import STEP_KEY, Attributes, histogram
from .protobuf import Message, double, entries, inner, integer, integers, message, messages, packed, text, texts, timestamp
from .reading import Account, Gather, StepAxis, resumed
from .sqlite import BROKEN, SQLiteFile, opened, with_log

MICRO = 1_000_000
SCALES = (1, 10, 100, 1000, 10_000, 100_000, MICRO)
REST_SECONDS = 600.0  # a database has no status: one that has not grown for this long belongs to a run that has ended
UPDATE, CREATE = 0, 1
_ADD = 1  # of a set's changes; others remove


def find(path: Path) -> Iterator[Found]:
    """Yield the run of a database."""
    try:
        with opened(path) as database:
            if {"run_operations", "metadata"} <= database.tables.keys() and "run_id" in database.tables["metadata"]:
                for project, run in database.select("metadata", ("project", "run_id"), "LIMIT 1"):
                    home = str(project).rpartition("/")[2] or "neptune"
                    yield Found(kind="neptune", id=f"{project}/{run}", paths=with_log(path), project=home, name=str(run))
    except BROKEN:
        return


def read(found: Found, position: Any) -> Iterator[Event]:
    """Yield a run's events."""
    yield from resumed(_Local(found).events(), position)


class _Local:
    """The operations of one run."""

    def __init__(self, found: Found) -> None:
        self.found, self.account, self.gather = found, Account(), Gather()
        self.attributes = Attributes()
        self.finest = MICRO
        self.scale = 1
        self.axis = StepAxis(STEP_KEY)
        self.last: int | None = None

    def events(self) -> Iterator[Event]:
        """Yield everything: single values first, as they are facts of the whole run."""
        try:
            with opened(self.found.paths[0]) as database:
                for kind, operation in self._operations(database, Account()):
                    self._survey(kind, operation)
                self.scale = next(scale for scale in SCALES if self.finest % (MICRO // scale) == 0)
                yield from self.attributes.began()
                for kind, operation in self._operations(database, self.account):
                    if kind == UPDATE:
                        yield from self.account.all_or_none(self._appended(operation), "operations")
                yield from self.gather.flush()
                yield from self._files(database)
                for _ in database.select("operation_errors", ("error_id",)):
                    self.account.leave("errors of sending", "they are pickled, and loading them could run anything")
        except BROKEN as error:
            self.account.leave("the rest of the run", f"the database cannot be read: {error}", self.found.name)
        yield from self.gather.flush()
        yield from self.account.events()
        if time.time() - (self.last or 0) / 1e9 > REST_SECONDS:
            yield from self.attributes.ended(self.last)

    def _operations(self, database: SQLiteFile, account: Account) -> Iterator[tuple[int, Message]]:
        rows = database.select("run_operations", ("operation_type", "operation"), "ORDER BY t.sequence_id")
        for kind, data in rows:
            if kind not in (UPDATE, CREATE) or not isinstance(data, bytes):
                account.leave("requests to upload files", "they are pickled, and loading them could run anything")
                continue
            found, error = outcome(message, data)
            if found is None:
                account.leave("operations", f"cannot be read: {error}")
            else:
                yield kind, found

    def _survey(self, kind: int, operation: Message) -> None:
        """Take the single values of an operation, and see how fine its step is."""
        found, _ = outcome(self._single_values, kind, operation)
        if found is not None and found % self.finest:
            self.finest = math.gcd(self.finest, found)

    def _single_values(self, kind: int, operation: Message) -> int:
        values = self.attributes.values
        if kind == CREATE:
            values["sys/custom_run_id"] = text(operation, 1)
            values |= {"sys/name": text(operation, 5)} if text(operation, 5) else {}
            created = timestamp(operation, 3)
            values |= {"sys/creation_time": _moment(created)} if created else {}
            fork = inner(operation, 2)
            if fork:
                values["sys/forking/parent"] = text(fork, 2)
                values["sys/forking/step"] = _step(inner(fork, 4)) / MICRO
            return MICRO
        for key, value in entries(operation, 4):
            values[key] = _value(value)
        for key, changes in entries(operation, 5):
            have = values.get(key)
            words = set(have) if isinstance(have, list) else set()
            for change in messages(inner(changes, 1), 1):
                words = words | {text(change, 1)} if integer(change, 2) == _ADD else words - {text(change, 1)}
            values[key] = sorted(words)
        return _step(inner(operation, 1)) if 1 in operation else MICRO

    def _appended(self, operation: Message) -> Iterator[Event]:
        time_ns, exact = timestamp(operation, 2), _step(inner(operation, 1)) if 1 in operation else None
        self.last = max(self.last or 0, time_ns or 0) or None
        step = None if exact is None else exact // (MICRO // self.scale)
        columns: dict[str, Any] = {}
        for key, value in entries(operation, 8):
            if 1 in value or 3 in value:
                columns[key] = double(value, 1) if 1 in value else float(integer(value, 3))
            elif 6 in value:
                yield Values(step=step, time_ns=time_ns, values={key: text(value, 6)})
            elif 14 in value:
                made = histogram(key, _histogram(inner(value, 14)), self.account)
                if made is not None:
                    yield Values(step=step, time_ns=time_ns, values={key: made})
            elif 13 not in value:
                self.account.leave("values", "of a type that is not known", key)
        if columns and self.scale > 1 and exact is not None:
            yield from self.axis.of(tuple(columns))
            columns[STEP_KEY] = exact / MICRO
        yield from self.gather.add(step, time_ns, columns)

    def _files(self, database: SQLiteFile) -> Iterator[Event]:
        """Yield files that are still where the client found them, if that is beside the database."""
        home = self.found.paths[0].resolve().parent
        for source, target, temporary in database.select("file_upload_requests", ("source_path", "destination", "is_temporary")):
            place = Path(str(source)).resolve()
            if place.is_file() and place.is_relative_to(home):
                yield Artifact(name=str(target).split("/")[1] if "/" in str(target) else place.name, files=[(place.name, place)])
            else:
                kind = "temporary files" if temporary else "files"
                self.account.leave(kind, "only their place was recorded, and that is outside of Neptune's folder", str(source))


def _value(value: Message) -> Any:
    if 1 in value:
        return double(value, 1)
    if 3 in value:
        return integer(value, 3)
    if 5 in value:
        return bool(integer(value, 5))
    if 8 in value:
        found = timestamp(value, 8)
        return _moment(found) if found else None
    if 12 in value:
        return texts(inner(value, 12), 1)
    return text(inner(value, 13), 1) if 13 in value else text(value, 6)


def _histogram(value: Message) -> dict[str, Any]:
    edges = _doubles(value)
    counts = integers(inner(value, 4), 1) if 4 in value else _doubles(inner(value, 5))
    return {"edges": edges, "values": counts}


def _doubles(found: Message) -> list[float]:
    data = packed(found, 1)
    return list(struct.unpack(f"<{len(data) // 8}d", data[: len(data) // 8 * 8]))


def _step(found: Message) -> int:
    """Return a step in millionths."""
    return integer(found, 1) * MICRO + integer(found, 2)


def _moment(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds // 1000 / 1e6, timezone.utc)
