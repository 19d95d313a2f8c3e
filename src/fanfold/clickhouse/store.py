"""The store over ClickHouse, with the same calls and results as the store over a directory of runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec

from ..fleet.audit import local_user
from ..fleet.changes import ChangeTargets
from ..fleet.grants import Anybody
from ..journal import directory
from ..journal.liveness import LOST_SECONDS
from ..process import digest
from ..settings import cache_directory
from ..store import axes, deadline, goodput
from ..store.buckets import Buckets
from ..store.catalogue import Progress
from ..store.changes import Changes
from ..store.points import holders, points
from ..store.query import Name, Store, Watched
from ..store.rows import LIVE, Project, RunRow
from ..store.run import Runs, StoredRun, not_found
from . import schema
from .address import ClickHouseAddress, parse
from .buckets import thin_many
from .database import Database
from .decode import run_number
from .gateway_tables import AuditTable, ViewTable
from .intake import ClickHouseIntake
from .names import CURRENT, RunName, look_up
from .run import FleetRun, read

AT_ONCE = 500  # runs in one query
MOST_OPEN = 4000  # runs
FRESH_SECONDS = 0.2  # how long a list of runs stays valid


class ClickHouseStore(Store):
    """The runs in one database. Runs stay open, so that repeated queries are cheap.

    Threads may share it: they block each other only while reading the same run, listing the same project, or calling changed().
    """

    def __init__(self, database: Database) -> None:
        schema.check(database)
        self.database = database
        self.root = cache_directory() / "fleet" / digest(database.address.shown)
        self._lock = threading.Lock()  # guards the open runs; never held during a query
        self._watched = Watched()  # by name: the sum of its journals' ends, and whether it may be alive
        self._listings: dict[str | None, threading.Lock] = {}  # by project
        self._runs: dict[Name, FleetRun] = {}
        self._rows: dict[Name, tuple[int, RunRow]] = {}  # the sum of its journals' ends, and its row at that point
        self._numbers: dict[Name, int] = {}
        self._looked = 0.0
        self.place = database.address.shown

    # Runs

    @cached_property
    def changes(self) -> Changes:
        """Changes permitted to anyone with the database's password. Through a gateway, tokens and grants decide."""
        intake = ClickHouseIntake(self.database, gather=0.0)
        targets = ChangeTargets(intake, AuditTable(self.database), ViewTable(self.database), allow_delete=True)
        return targets.by(Anybody(local_user()), "this machine")

    def projects(self) -> list[Project]:
        found = self.database.ask(
            f"SELECT project, count() AS runs, max(seen) AS last FROM {CURRENT} AS r INNER JOIN (SELECT run, "
            "toUnixTimestamp64Micro(max(seen)) AS seen FROM commits GROUP BY run) AS c ON r.run = c.run "
            "GROUP BY project ORDER BY last DESC"
        )  # fmt: skip
        return [Project(_text(name), int(count), int(last) / 1e6) for name, count, last in zip(*found.values(), strict=True)]

    def names(self, project: str | None = None) -> dict[Name, tuple[int, int]]:
        """Return all runs, with the newest commit of each and the sum of its journals' ends."""
        of = "WHERE project = {project:String}" if project is not None else ""
        found = self.database.ask(
            f"SELECT project, id, run, seen, ends FROM (SELECT run, project, id FROM {CURRENT} {of}) AS r INNER JOIN "
            "(SELECT run, toUnixTimestamp64Micro(max(s)) AS seen, "
            "sum(e) AS ends FROM (SELECT run, journal, max(end) AS e, max(seen) AS s FROM commits GROUP BY run, journal) "
            "GROUP BY run) AS c ON r.run = c.run",
            **({"project": project} if project is not None else {}),
        )  # fmt: skip
        names: dict[Name, tuple[int, int]] = {}
        for project_name, id, run, seen, ends in zip(*found.values(), strict=True):
            if not id.startswith(b"."):
                name = RunName(int(run), _text(project_name), _text(id))
                names[name.project, name.id] = (int(seen), int(ends))
                self._numbers[name.project, name.id] = name.run
        return names

    def _listing(self, project: str | None, progress: Progress | None) -> list[Name]:
        """Update the rows of all runs, and return their names."""
        there = self.names(project)
        for gone in [name for name in self._rows if name not in there and project in (None, name[0])]:
            self._rows.pop(gone, None)
            self._runs.pop(gone, None)
        stale = [name for name, (_, ends) in there.items() if self._is_stale(name, ends)]
        some: list[Name] = []
        for name in progress(stale, len(stale)) if progress else stale:
            some.append(name)
            if len(some) == AT_ONCE:
                self._renew(some)
                some = []
        self._renew(some)
        return [name for name in there if name in self._rows]

    def _is_stale(self, name: Name, ends: int) -> bool:
        kept = self._rows.get(name)
        return kept is None or kept[0] != ends or kept[1].status in LIVE

    def _renew(self, names: Sequence[Name]) -> None:
        """Rebuild the rows of runs. Of a finished run only the row is kept; a live one stays open."""
        runs = {name: self._opened(name) for name in names}
        # A run that another thread reads for long is listed with its previous row; one not listed before is waited for.
        with holding(runs.values(), skip=[run for name, run in runs.items() if name in self._rows]) as held:
            read(held)
            for name, run in runs.items():
                if run in held:
                    self._renew_row(name, run)

    def _renew_row(self, name: Name, run: FleetRun) -> None:
        kept, ends = self._rows.get(name), sum(run.ends)
        if kept is None or kept[0] != ends:
            kept = (ends, run.row())
        self._rows[name] = (ends, msgspec.structs.replace(kept[1], verdict=run.verdict, seen=run.seen))
        if run.status in LIVE:
            self._keep(name, run)

    def _keep(self, name: Name, run: FleetRun) -> None:
        """Keep a run open; with too many, drop the least recently used."""
        with self._lock:
            self._runs.pop(name, None)
            self._runs[name] = run
            for old in list(self._runs)[: max(0, len(self._runs) - MOST_OPEN)]:
                del self._runs[old]

    def listed(self, project: str | None = None, *, progress: Progress | None = None) -> Runs:
        with self._listings.setdefault(project, threading.Lock()):
            found = [self._new(name, self._rows[name][1]) for name in self._listing(project, progress)]
        return Runs(sorted(found, key=lambda run: run.started, reverse=True))

    def statistics(self, row: RunRow, key: str) -> dict[str, Any] | None:
        deadline.check()
        run = self.run(row.project, row.id)
        with holding([run]):
            ranks = holders(run, key, own=True)
            if not ranks and key.startswith(goodput.PREFIX):
                return goodput.statistics(run, key)
            return points(run, key, ranks[0], own=True).statistics() if ranks else None

    def run(self, project: str, id: str) -> StoredRun:
        found = self.several(project, [id])
        if id not in found:
            raise not_found(f"{project}/{id}", self.place)
        return found[id]

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        deadline.check()
        runs: dict[str, FleetRun] = {}
        for (_, id), name in look_up(self.database, [(project, id) for id in ids]).items():
            if (name.project, name.id) == (project, id):  # else it has another name now
                self._numbers[project, id] = name.run
                runs[id] = self._opened((project, id))
        with holding(runs.values()) as held:
            read(held)
            gone = self._deleted([run.number for run in runs.values()])
            found: dict[str, StoredRun] = {}
            for id, run in runs.items():
                if run.journals and run.number not in gone:
                    found[id] = run
                    self._keep((project, id), run)
                else:
                    self._runs.pop((project, id), None)
        return found

    def was_in(self, project: str, run: StoredRun) -> bool:
        return look_up(self.database, [(project, run.id)])[project, run.id][1:] == (run.project, run.id)

    def _opened(self, name: Name) -> FleetRun:
        """Return the run of a name, which stays open if it was."""
        run = self._runs.get(name)
        return run if run is not None and run.number == self._number(name) else self._new(name)

    def _number(self, name: Name) -> int:
        return self._numbers.get(name) or run_number(*name)

    def _new(self, name: Name, row: RunRow | None = None) -> FleetRun:
        return FleetRun(self.database, directory.run_path(self.root, *name), RunName(self._number(name), *name), row=row)

    def _deleted(self, numbers: list[int]) -> set[int]:
        sql = "SELECT DISTINCT run FROM deleted WHERE run IN {runs:Array(UInt64)}"
        return set(self.database.ask(sql, runs=numbers)["run"].tolist()) if numbers else set()

    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        with self._watched.lock:
            if time.monotonic() - self._looked > FRESH_SECONDS:
                self._looked = time.monotonic()
                self._watched.update({name: (ends, _is_live(seen)) for name, (seen, ends) in self.names().items()})
            return self._watched.since(since)

    # Points

    def series(self, run: StoredRun, key: str, **how: Any) -> Buckets:
        with holding([run]):
            return thin_many(self.database, [(run, key)], **how)[0] or axes.thin(run, key, **how)

    def series_many(self, wanted: Sequence[tuple[StoredRun, str]], **how: Any) -> list[Buckets | None]:
        deadline.check()
        with holding(run for run, _ in wanted):
            quick = thin_many(self.database, wanted, **how)
            return [one or axes.thin_or_none(run, key, **how) for one, (run, key) in zip(quick, wanted, strict=True)]


@contextlib.contextmanager
def holding(runs: Iterable[StoredRun], *, skip: Sequence[StoredRun] = ()) -> Iterator[list[FleetRun]]:
    """Lock some runs for reading by this thread; those in `skip` are left out if another thread is reading them."""
    ours = {run.number: run for run in runs if isinstance(run, FleetRun)}
    held: list[FleetRun] = []
    try:
        for _, run in sorted(ours.items()):  # always in the same order, so that threads cannot deadlock
            if run.lock.acquire(blocking=run not in skip):
                held.append(run)
        yield held
    finally:
        for run in held:
            run.lock.release()


def _text(name: bytes) -> str:
    """Return a name as text. A header cannot contain an invalid one, so nothing is replaced in a name that came in."""
    return name.decode("utf-8", "replace")


def _is_live(seen: int) -> bool:
    """Return whether a run may still be active: one that stops sending changes its status without a write."""
    return time.time() - seen / 1e6 <= LOST_SECONDS


_stores: dict[ClickHouseAddress, ClickHouseStore] = {}


def connect(text: str) -> ClickHouseStore:
    """Open the store at an address, once per process."""
    address = parse(text)
    if address not in _stores:
        _stores[address] = ClickHouseStore(Database(address))
    return _stores[address]
