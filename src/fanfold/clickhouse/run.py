"""A run in ClickHouse, read like any other run: its journals' frames from one table, their points from another."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FanfoldError, JournalError
from ..journal import Journal, Kind, Record, bodies
from ..journal import format as fmt
from ..journal.bodies import Header
from ..journal.directory import run_path
from ..journal.format import HEAD_SIZE, Shape
from ..journal.liveness import LOST_SECONDS
from ..journal.reader import Columns
from ..journal.walker import RowSpan, Walker
from ..store.attempts import group
from ..store.rows import RunRow
from ..store.run import StoredRun
from .blobs import fetch, names_of
from .database import Database
from .decode import KINDS, series_number
from .names import RunName, look_up

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..journal.requests import JobRequest
    from ..store.changes import Changes

LAZY = (Kind.CONSOLE, Kind.BEAT)  # numerous and rarely needed
KEPT_BYTES = 256 << 20  # of columns, for each run


class Extent(NamedTuple):
    """The facts about one key in one journal that are known without its points."""

    first: int  # the step of the first point written
    step: int  # … and of the last one, with its time (ns) and value
    time: int
    value: Any
    low: int
    high: int
    kinds: int
    number: int


class FleetJournal(Journal):
    """One journal of a run in ClickHouse."""

    on_disk = False

    def __init__(self, owner: FleetRun, number: int, rank: int) -> None:
        super().__init__(owner.path / "journal" / f"{rank}-{number:016x}{fmt.SUFFIX}")
        self.owner, self.number = owner, number
        self.extents: dict[str, Extent] = {}
        self.bodies: dict[int, list[Record]] = {}  # by kind, in order
        self._known: set[tuple[int, int]] = set()
        self.arrived = 0.0  # when its last bytes arrived, by the database's clock
        self.twice = False  # some bytes were written more than once, so points must be deduplicated

    def take(self, kind: int, pos: int, body: bytes) -> None:
        """Add a frame unless it is known. Frames arrive in order, except when a gateway died and its bytes were sent again."""
        if (kind, pos) in self._known:
            return
        self._known.add((kind, pos))
        try:
            data = bodies.decode(kind, body)
        except JournalError:
            self.damaged += HEAD_SIZE + len(body)
            return
        kept = self.bodies.setdefault(kind, [])
        kept.append(Record(kind, pos, data, pos + HEAD_SIZE + len(body)))
        if len(kept) > 1 and pos < kept[-2].offset:
            kept.sort(key=lambda record: record.offset)
        if isinstance(data, Shape):
            self._rows_of(data)
        elif isinstance(data, Header):
            self.header = data

    def refresh(self) -> bool:
        return False  # the run reads all of its journals at once

    def look_at_times(self) -> None:
        """Set the newest time in its frames; the times of frames not loaded here are queried separately."""
        last = [bodies.time_of(records[-1].data) for records in self.bodies.values() if records]
        self.seen = max(self.seen, *last, *(one.time for one in self.extents.values()), 0)

    def status(self) -> str:
        return "running" if time.time() - self.arrived <= LOST_SECONDS else "lost"

    @property
    def tail(self) -> int:
        return 0

    def records(self, *kinds: int) -> Iterator[Record]:
        if set(kinds) & set(LAZY):
            self.owner.read_rest()
        found = (record for kind in kinds for record in self.bodies.get(kind, ()))
        return iter(sorted(found, key=lambda record: record.offset))

    def keys(self, origin: str | None = None) -> list[str]:
        return [
            key
            for key, places in self.by_key.items()
            if key in self.extents and any(origin is None or rows.shape.origin == origin for rows, _ in places)
        ]

    def count(self, key: str) -> int:
        found = self.extents.get(key)
        if found is None:
            return 0
        return len(self.column(key).steps) if self.twice else found.number

    def latest(self) -> dict[str, tuple[int, int, Any]]:
        there = [(key, self.extents[key]) for key in self.by_key if key in self.extents]  # in order of first appearance
        return {key: (one.step, one.time, one.value) for key, one in there}

    def column(self, key: str, *, since: int = 0, until: int | None = None) -> Columns:
        return self.owner.columns(key, since=since, until=until).get(self.number) or _nothing()

    def back(self, keys: Sequence[str], count: int) -> int:
        return self.owner.back(self.number, keys, count, self.verified)

    def walk(self, start: int) -> Iterator[RowSpan | Record]:
        """Yield everything from `start` on, decoded from the bytes themselves."""
        shapes = {number: rows.shape for number, rows in self.rows.items()}
        for at, data in self.owner.bytes_of(self.number, start):
            yield from Walker(self.id, at=at, shapes=shapes).read(data, min(at + len(data), self.verified), base=at)


def _nothing() -> Columns:
    import numpy as np

    return Columns(np.empty(0, np.int64), np.empty(0), np.empty(0))


class FleetRun(StoredRun):
    """A run in ClickHouse. Its path is a cache folder, into which blobs are downloaded when needed."""

    def __init__(self, database: Database, path: Path, name: RunName, *, row: RunRow | None = None) -> None:
        super().__init__(path, row)
        self.database = database
        self.name_now = name  # the store's: no journal knows of a move, and the folder's name may be a shortened one
        self.number = name.run
        self.lock = threading.RLock()  # one thread reads it at a time
        self.found: dict[int, FleetJournal] = {}
        self._columns: OrderedDict[tuple[str, int, int | None], dict[int, Columns]] = OrderedDict()
        self._size = 0
        self._rest: tuple[int, ...] = ()
        self.kin = self._parent

    def _parent(self, project: str, id: str) -> StoredRun | None:
        """Open the run it was forked from, also if it was moved since.

        It is opened for this run alone: waiting for a shared one could block two readers for ever.
        """
        name = look_up(self.database, [(project, id)])[project, id]
        found = FleetRun(self.database, run_path(self.path.parent.parent, name.project, name.id), name)
        asked = "SELECT count() AS n FROM deleted WHERE run = {run:UInt64}"
        return found if not self.database.one(asked, run=found.number)["n"] and found.refresh().journals else None

    def leave_request(self, request: JobRequest) -> None:
        from .gateway_tables import RequestTable

        RequestTable(self.database).put(self.number, request)

    def withdraw_request(self, id: str) -> bool:
        from .gateway_tables import RequestTable

        RequestTable(self.database).remove(self.number, id)
        return False  # its forwarder may have fetched it before

    def refresh(self) -> FleetRun:
        read([self])
        return self

    def renewed(self) -> None:
        """Sort the journals into attempts again after some were updated."""
        for journal in self.found.values():
            journal.look_at_times()
        self._read(group([journal for journal in self.found.values() if journal.begun]))
        self._columns.clear()
        self._size = 0

    @property
    def place(self) -> str:
        return self.database.address.shown

    @property
    def store(self) -> str:
        return self.database.address.text

    def reopened(self) -> FleetRun:
        run = FleetRun(self.database, self.path, self.name_now)
        run.kin = self.kin
        return run.refresh()

    def _changes(self) -> Changes:
        from .store import connect

        return connect(self.store).changes

    def artifact_file(self, blob: str) -> Path:
        fetch(self.database, self.number, self.path, blob)
        return super().artifact_file(blob)

    def pulled(self) -> Path:
        folder = self.path / "journal"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.refresh()
        for journal in self.found.values():
            with journal.path.open("r+b" if journal.path.exists() else "wb") as file:
                have = file.seek(0, os.SEEK_END)
                for at, data in self.bytes_of(journal.number, have):
                    file.seek(at)
                    file.write(data)
        for name in names_of(self.database, self.number):
            fetch(self.database, self.number, self.path, name)
        return self.path

    @cached_property
    def id(self) -> str:
        return self.name_now.id

    @cached_property
    def project(self) -> str:
        return self.name_now.project

    def _follow(self, project: str) -> None:
        self.name_now = self.name_now._replace(project=project)
        super()._follow(project)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(journal.verified for journal in self.found.values())

    # Loaded on demand

    def read_rest(self) -> None:
        """Read the frames that are numerous and rarely needed."""
        if self._rest == self.ends:
            return
        found = self.database.ask(
            "SELECT run, journal, kind, pos, body FROM frames WHERE run = {run:UInt64} AND kind IN {kinds:Array(UInt8)} "
            "ORDER BY journal, pos",
            run=self.number, kinds=[int(kind) for kind in LAZY],
        )  # fmt: skip
        for one, (kind, pos, body) in _each(found, {self.number: self}):
            if pos < one.verified:
                one.take(kind, pos, body)
        self._rest = self.ends

    def columns(self, key: str, *, since: int = 0, until: int | None = None) -> dict[int, Columns]:
        """Return a key's points by journal, in the order they were written."""
        asked = (key, since, until)
        if asked not in self._columns:
            self._columns[asked] = load(self, [key], since, until).get(key, {})
            self._size += sum(24 * len(one.steps) for one in self._columns[asked].values())
        self._columns.move_to_end(asked)
        while self._size > KEPT_BYTES and len(self._columns) > 1:
            _, gone = self._columns.popitem(last=False)
            self._size -= sum(24 * len(one.steps) for one in gone.values())
        return self._columns[asked]

    def back(self, journal: int, keys: Sequence[str], count: int, end: int) -> int:
        found = self.database.one(
            "SELECT min(pos) AS pos, count() AS n FROM (SELECT pos FROM points WHERE run = {run:UInt64} AND journal = "
            "{journal:UInt64} AND series IN {series:Array(UInt64)} ORDER BY series, pos DESC LIMIT {count:UInt64} BY series)",
            run=self.number, journal=journal, series=[series_number(key) for key in keys], count=count,
        )  # fmt: skip
        return int(found["pos"]) if found["n"] else end

    def bytes_of(self, journal: int, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield a journal's bytes from `start` on, piece by piece, each byte once."""
        done = start
        while True:
            found = self.database.ask(
                "SELECT start, gap, end, data FROM pieces WHERE run = {run:UInt64} AND journal = {journal:UInt64} AND "
                "end > {done:UInt64} AND start <= {done:UInt64} ORDER BY end DESC LIMIT 1",
                run=self.number, journal=journal, done=done,
            )  # fmt: skip
            if not len(found["end"]):
                return
            at, end, data = int(found["start"][0]) + int(found["gap"][0]), int(found["end"][0]), found["data"][0]
            yield max(at, done), data[max(0, done - at) :]
            done = end


def read(runs: Sequence[FleetRun]) -> None:
    """Update many runs with what was appended, in four queries."""
    if not runs:
        return
    database = runs[0].database
    by_number = {run.number: run for run in runs}
    asked = {"runs": list(by_number)}
    ends = database.ask(
        "SELECT run, journal, rank, max(end) AS end, toUnixTimestamp64Micro(max(seen)) AS seen FROM commits "
        "WHERE run IN {runs:Array(UInt64)} GROUP BY run, journal, rank", **asked,
    )  # fmt: skip
    moved = _take_ends(ends, by_number)
    if moved:
        try:
            _read_on(database, by_number, moved)
        except (FanfoldError, OSError):
            for number, journals in moved.items():  # restore the old ends, so that the next read finds the same changes
                for journal, end in journals.items():
                    by_number[number].found[journal].verified = end
            raise
    for run in runs:
        if run.number in moved or run._attempts is None:  # noqa: SLF001 - our own class
            run.renewed()


def _take_ends(ends: dict[str, NDArray[Any]], by_number: dict[int, FleetRun]) -> dict[int, dict[int, int]]:
    """Update how far journals are; return those that grew, and how far each was before."""
    moved: dict[int, dict[int, int]] = {}
    for number, journal, rank, end, seen in zip(*ends.values(), strict=True):
        run = by_number[int(number)]
        one = run.found.get(int(journal))
        if one is None:
            one = run.found[int(journal)] = FleetJournal(run, int(journal), int(rank))
        if int(end) > one.verified:
            moved.setdefault(int(number), {})[int(journal)] = one.verified
        one.verified, one.arrived = int(end), int(seen) / 1e6
    return moved


def _read_on(database: Database, runs: dict[int, FleetRun], moved: dict[int, dict[int, int]]) -> None:
    extents = database.later(_EXTENTS, runs=list(moved))
    twice = database.later(_TWICE, runs=list(moved))
    signs = database.later(_SIGNS, runs=list(moved), lazy=[int(kind) for kind in LAZY])
    _read_frames(database, runs, moved)
    _take_extents(extents.result(), runs, moved)
    _take_twice(twice.result(), runs)
    _take_signs(signs.result(), runs)


def _read_frames(database: Database, runs: dict[int, FleetRun], moved: dict[int, dict[int, int]]) -> None:
    since = {journal: pos for journals in moved.values() for journal, pos in journals.items()}
    new = all(pos == 0 for pos in since.values())
    more = "" if new else " AND journal IN {journals:Array(UInt64)}"
    found = database.ask(
        f"SELECT run, journal, kind, pos, body FROM frames WHERE run IN {{runs:Array(UInt64)}}{more} "
        "AND kind NOT IN {lazy:Array(UInt8)} ORDER BY run, journal, pos",
        runs=list(moved), lazy=[int(kind) for kind in LAZY], **({} if new else {"journals": list(since)}),
    )  # fmt: skip
    for one, (kind, pos, body) in _each(found, runs):
        if one.number in since and since[one.number] <= pos < one.verified:
            one.take(kind, pos, body)


def _each(found: dict[str, NDArray[Any]], runs: Mapping[int, FleetRun]) -> Iterator[tuple[FleetJournal, list[Any]]]:
    """Yield the journal of each row of an answer, and the other columns."""
    for number, journal, *rest in zip(*(column.tolist() for column in found.values()), strict=True):
        one = runs[number].found.get(journal)
        if one is not None:
            yield one, rest


_EXTENTS = (
    "SELECT run, journal, series, bitXor(toUInt64(f), 9223372036854775808) AS first, "
    "toUInt64(bitShiftRight(l, 192)) AS place, "
    "reinterpretAsInt64(bitXor(toUInt64(bitShiftRight(l, 128)), 9223372036854775808)) AS step, "
    "toInt64(toUInt64(bitShiftRight(l, 64))) AS time, reinterpretAsFloat64(toUInt64(l)) AS value, "
    "reinterpretAsInt64(toUInt64(l)) AS whole, low, high, kinds, count FROM (SELECT run, journal, series, min(first) AS f, "
    "max(last) AS l, min(low) AS low, max(high) AS high, groupBitOr(kinds) AS kinds, sum(count) AS count FROM latest "
    "WHERE run IN {runs:Array(UInt64)} GROUP BY run, journal, series)"
)  # fmt: skip


def _take_extents(found: dict[str, NDArray[Any]], runs: dict[int, FleetRun], moved: Iterable[int]) -> None:
    names: dict[tuple[int, int], str] = {}
    for number in moved:
        for journal in runs[number].found.values():
            names.update({(number, series_number(key)): key for key in journal.by_key})
    for one, (series, first, place, step, when, value, whole, *rest) in _each(found, runs):
        key = names.get((one.owner.number, series))
        if key is not None:
            kind = place % 4
            last = whole if kind == KINDS["q"] else bool(value) if kind == KINDS["?"] else value
            one.extents[key] = Extent(first - (1 << 64) if first >> 63 else first, step, when, last, *rest)


# Journals of which some bytes were written twice, because a gateway died before it could respond.
_TWICE = (
    "SELECT run, journal, toInt64(weight) - toInt64(reach) - toInt64(excess) > 0 AS twice FROM (SELECT run, journal, "
    "sum(end - start) AS weight, max(end) AS reach FROM pieces WHERE run IN {runs:Array(UInt64)} GROUP BY run, journal) AS p "
    "LEFT JOIN (SELECT run, journal, argMax(excess, version) AS excess FROM mended WHERE run IN {runs:Array(UInt64)} "
    "GROUP BY run, journal) AS m ON p.run = m.run AND p.journal = m.journal"
)  # fmt: skip


def _take_twice(found: dict[str, NDArray[Any]], runs: dict[int, FleetRun]) -> None:
    for one, (twice,) in _each(found, runs):
        one.twice = bool(twice)


# The last of the frames that are numerous and rarely needed: they show when a process was last alive.
_SIGNS = (
    "SELECT run, journal, kind, argMax(body, pos) AS body FROM frames WHERE run IN {runs:Array(UInt64)} "
    "AND kind IN {lazy:Array(UInt8)} GROUP BY run, journal, kind"
)


def _take_signs(found: dict[str, NDArray[Any]], runs: dict[int, FleetRun]) -> None:
    for one, (kind, body) in _each(found, runs):
        with contextlib.suppress(JournalError):
            one.seen = max(one.seen, bodies.time_of(bodies.decode(kind, body)))


def load(run: FleetRun, keys: Sequence[str], since: int = 0, until: int | None = None) -> dict[str, dict[int, Columns]]:
    """Read the points of keys, in the order each journal wrote them, each point once."""
    import numpy as np

    final = " FINAL" if any(journal.twice for journal in run.found.values()) else ""
    limits = f" AND pos >= {since:d}" if since else ""
    limits += f" AND pos < {until:d}" if until is not None else ""
    found = run.database.ask(
        f"SELECT series, journal, step, time, value, kind, whole FROM points{final} WHERE run = {{run:UInt64}} "
        f"AND series IN {{series:Array(UInt64)}}{limits} ORDER BY series, journal, pos",
        run=run.number, series=[series_number(key) for key in keys],
    )  # fmt: skip
    names = {series_number(key): key for key in keys}
    result: dict[str, dict[int, Columns]] = {key: {} for key in keys}
    if not len(found["step"]):
        return result
    change = (np.diff(found["series"]) != 0) | (np.diff(found["journal"]) != 0)
    bounds = [0, *(np.flatnonzero(change) + 1).tolist(), len(found["step"])]
    for start, stop in pairwise(bounds):
        part = {name: column[start:stop] for name, column in found.items()}
        result[names[int(part["series"][0])]][int(part["journal"][0])] = Columns(
            part["step"].astype(np.int64), part["time"] / 1e9, typed(part["value"], part["kind"], part["whole"])
        )
    return result


def typed(values: NDArray[np.float64], kinds: NDArray[np.uint8], wholes: NDArray[np.int64]) -> NDArray[Any]:
    """Return values in the type they were logged as."""
    import numpy as np

    there = set(np.unique(kinds).tolist())
    if there == {KINDS["q"]}:
        return wholes.astype(np.int64)
    if there == {KINDS["?"]}:
        return values.astype(bool)
    if there == {KINDS["q"], KINDS["?"]}:
        return np.where(kinds == KINDS["q"], wholes, values.astype(np.int64))
    return values
