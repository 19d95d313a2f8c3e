"""Intake of journals: the pieces a gateway receives become rows of the tables, many journals per insert.

A batch is written in this order: the bytes themselves (`pieces`), their content (`frames`, `points`, …), and the commit that
advances the journals' ends. Data is acknowledged only after its commit. A gateway that dies in between leaves pieces without a
commit; when their bytes are sent again, `pieces` shows that some were written twice, and readers count each point of those
journals once.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FanfoldError, RunError, outcome
from ..fleet.intake import Result, check_gap, check_header
from ..fleet.wire import MAX_GAP, Conflict, Gone, Piece, Rejected, checked_journal, checked_name
from ..journal.format import Kind, Shape, seed_of
from ..journal.requests import JobRequest
from ..store.changes import check_idle
from . import schema
from .batch import InsertJob, tables_of, token_of, u64
from .cells import Roller
from .database import Database, DatabaseUnavailable
from .decode import MOST_FRAMES, MOST_POINTS, Scanned, learn, run_number, scan
from .gateway_tables import RequestTable
from .names import FRESH_SECONDS, GRACE_SECONDS, MADE, Names, RunName, look_up, owners
from .profile import MOST_ROWS, profile_of
from .run import FleetRun, read

# Runs that began before they claimed their names.
_BEGUN = (
    "SELECT (SELECT count() FROM commits WHERE run = {run:UInt64}) + (SELECT count() FROM blobs WHERE run = {run:UInt64}) AS n"
)
GATHER_SECONDS = 0.25  # how long a batch is collected: ClickHouse works best with few large inserts
STEP_SECONDS = 0.05  # while one batch is stored, what arrives is added to the next one that often
MOST_BYTES = 64 << 20  # in one batch
MOST_BATCH_POINTS = 2 * MOST_POINTS
MOST_JOBS = 16_000  # … and their ids are sent in the URL of a query
MOST_WAITING = 4096  # requests
WAIT_SECONDS = 60.0
REMEMBERED = 50_000  # journals
REMEMBERED_BYTES = 128 << 20  # of their shapes
FEW_HEADS = 8  # of a journal's frames are remembered


@dataclass
class Known:
    """A journal as remembered by a gateway: how far it is committed, and its shapes up to there, if they were needed."""

    end: int
    shapes: dict[int, Shape] = field(default_factory=dict)
    complete: bool = True  # all shapes are loaded
    weight: int = 0  # size of the shapes' frames in bytes
    heads: dict[int, Any] = field(default_factory=dict)  # of its frames, parsed

    def fits(self, offset: int) -> bool:
        """Return whether a piece at this offset can be accepted or rejected without querying the database."""
        return self.end > offset or (self.end == offset and self.complete)


class Named(NamedTuple):
    """A piece with valid names."""

    place: int  # in its request
    piece: Piece
    at: tuple[int, int]  # run and journal
    rank: int
    seed: int  # of its frames' checksums


class Request:
    """Pieces that arrived together, and the outcome of each."""

    def __init__(self, project: str, pieces: Sequence[Piece]) -> None:
        self.project = project
        self.pieces = pieces
        self.size = sum(len(piece.data) for piece in pieces)
        self.results: list[Result] = [0] * len(pieces)
        self.done: Future[list[Result]] = Future()

    def tell(self) -> None:
        self.done.set_result(self.results)

    def fail(self, error: Exception) -> None:
        """Answer that nothing was stored, except where it is known that nothing can be."""
        why = error if isinstance(error, DatabaseUnavailable) else DatabaseUnavailable(str(error))
        self.results = [one if isinstance(one, Rejected) else why for one in self.results]
        self.tell()


@dataclass
class Batch:
    """Requests that are decoded together: what is to be stored of them, and for which place in which request."""

    busy: AbstractSet[tuple[int, int]] = frozenset()  # journals of the batch before it, which is still being stored
    requests: list[Request] = field(default_factory=list)
    jobs: dict[tuple[int, int], tuple[Request, int, InsertJob]] = field(default_factory=dict)  # by run and journal
    size: int = 0  # bytes
    pieces: int = 0
    points: int = 0

    def add(self, request: Request, points: int) -> None:
        self.requests.append(request)
        self.size += request.size
        self.pieces += len(request.pieces)
        self.points += points

    def clear(self) -> None:
        self.requests, self.jobs, self.size, self.pieces, self.points = [], {}, 0, 0, 0


class Room:
    """The limits on the content of one request. A piece beyond them is sent again in the next request."""

    def __init__(self) -> None:
        self.runs, self.points, self.rows = MOST_FRAMES, MOST_POINTS, MOST_ROWS
        self.first = True  # the first piece always fits

    @property
    def left(self) -> bool:
        return self.runs > 0 and self.points > 0 and self.rows > 0

    def take(self, scanned: Scanned) -> bool:
        """Subtract a piece's share; return whether it was within the limits."""
        self.runs -= scanned.runs
        self.points -= scanned.points
        return self.runs >= 0 and self.points >= 0


class ClickHouseIntake:
    """An intake over ClickHouse. Several may work on one database: what each remembers can only be outdated, never wrong."""

    def __init__(self, database: Database, *, gather: float = GATHER_SECONDS, max_blob: int = 64 << 30) -> None:
        schema.check(database)
        self.database = database
        self.gather = gather
        self.max_blob = max_blob
        self.inserts = 0
        self._known: OrderedDict[tuple[int, int], Known] = OrderedDict()
        self._weight = 0
        self.names = Names(database)
        self._lock = threading.Lock()
        self._memory = threading.RLock()  # of journals: one batch is stored while another is decoded
        self._moving = threading.Lock()
        self._queue: queue.Queue[Request | None] = queue.Queue(MOST_WAITING)
        self._boot = secrets.token_hex(4)
        self._batches = 0
        self._thread: threading.Thread | None = None
        self._requests = RequestTable(database)
        self._roller = Roller(database, self.names.is_deleted)

    # Journals

    def offset(self, project: str, run: str, journal: str) -> int:
        at = (self._check(project, run), int(checked_journal(journal)[1], 16))
        return self._ends([at]).get(at, 0)

    def append(self, project: str, piece: Piece) -> int:
        """Store a piece and return the new offset."""
        result = self.append_all(project, [piece]).result(WAIT_SECONDS)[0]
        if isinstance(result, BaseException):
            raise result
        return result

    def append_all(self, project: str, pieces: Sequence[Piece]) -> Future[list[Result]]:
        """Queue pieces; the future returns for each its new offset, or why it was not stored. Nothing is decoded here."""
        request = Request(project, pieces)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._write_on, name="fanfold-clickhouse", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            request.fail(DatabaseUnavailable("the database does not keep up"))
        return request.done

    def _named(self, request: Request, numbers: dict[str, int | FanfoldError]) -> list[Named]:
        """Return the pieces of a request whose names are valid, and for which its run was not deleted."""
        found = []
        for place, piece in enumerate(request.pieces):
            try:
                rank, journal, seed = _read_name(piece.journal)
                run = self._number(request.project, piece.run, numbers)
                if piece.offset < 0 or not 0 <= piece.gap <= MAX_GAP or not piece.data:
                    raise Rejected(400, "an offset or gap is out of range, or nothing follows it. Nothing was stored.")
            except FanfoldError as error:
                request.results[place] = error.with_traceback(None)  # which would hold the request in memory
            else:
                found.append(Named(place, piece, (run, journal), rank, seed))
        return found

    def _number(self, project: str, run: str, numbers: dict[str, int | FanfoldError]) -> int:
        """Return a run's number, or raise; what was found of a project's runs before is in `numbers`."""
        found = numbers.get(run)
        if found is None:
            try:
                found = self._check(project, run)
            except Gone as gone:
                found = gone
            numbers[run] = found
        if isinstance(found, FanfoldError):
            raise found
        return found

    def _look_up(self, pieces: Iterable[Named]) -> dict[tuple[int, int], int]:
        """Look up in one query the journals that are unknown here, or not known up to a piece's offset.

        Return how many bytes were received of each journal that has damage before a piece.
        """
        unknown: dict[tuple[int, int], set[int]] = {}
        damaged: dict[tuple[int, int], None] = {}
        for one in pieces:
            known = self._known.get(one.at)
            if known is None or not known.fits(one.piece.offset):
                unknown.setdefault(one.at, set()).add(one.piece.offset)
            if one.piece.gap:
                damaged[one.at] = None
        if unknown:
            self._renew(unknown)
        return self._of_each(list(damaged), "sum(end - start - gap)", "pieces") if damaged else {}

    def _prepared(self, project: str, one: Named, batch: Batch, room: Room, sent: Mapping[tuple[int, int], int]) -> InsertJob:
        """Check one piece against the stored state, and decode it."""
        _, piece, at, rank, seed = one
        known = self._remembered(at)
        if known is not None and known.end != piece.offset:
            raise Conflict(known.end)
        if known is None or not known.complete:
            raise DatabaseUnavailable("other requests pushed the journal out of memory")
        if at in batch.jobs or at in batch.busy or not room.left:
            raise Conflict(piece.offset)  # it is sent again in the next request
        if piece.gap:
            check_gap(piece, sent.get(at, 0))
        base = piece.offset + piece.gap
        scanned = scan(piece.data, base, seed, known.shapes, known.heads, apart=True)
        if len(known.heads) > FEW_HEADS:
            known.heads = {}
        if scanned.crowded:
            raise Rejected(413, f"the piece at {base} of {piece.journal} holds too many frames or points. Nothing was stored.")
        if scanned.end != len(piece.data):
            raise Rejected(
                422, f"the bytes at {base + scanned.end} are not whole, sound frames of {piece.journal}. Nothing was stored."
            )
        if base == 0:
            first = next(iter(scanned.others), None)
            check_header(piece, first.body if first is not None and first.kind == Kind.HEADER else b"")
        if not room.take(scanned) and not room.first:
            raise Conflict(piece.offset)
        profile = profile_of(at[0], rank, scanned.others)
        room.rows -= len(profile["ops"])
        room.first = False
        return InsertJob(project, piece, *at, rank, scanned, known.shapes, profile)

    def _check(self, project: str, run: str) -> int:
        return self.names.number(checked_name("project", project), checked_name("run", run))

    # State of journals

    def _remembered(self, at: tuple[int, int]) -> Known | None:
        with self._memory:
            known = self._known.get(at)
            if known is not None:
                self._known.move_to_end(at)
            return known

    def _remember(self, at: tuple[int, int], known: Known) -> None:
        with self._memory:
            before = self._known.pop(at, None)
            self._known[at] = known
            self._weight += known.weight - (before.weight if before else 0)
            while len(self._known) > 1 and (len(self._known) > REMEMBERED or self._weight > REMEMBERED_BYTES):
                self._weight -= self._known.popitem(last=False)[1].weight

    def _forget(self, at: tuple[int, int]) -> None:
        with self._memory:
            gone = self._known.pop(at, None)
            self._weight -= gone.weight if gone else 0

    def _ends(self, journals: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Query how far journals are committed."""
        return self._of_each(journals, "max(end)", "commits")

    def _of_each(self, journals: Sequence[tuple[int, int]], number: str, table: str) -> dict[tuple[int, int], int]:
        """Query a number of each of these journals that has any rows."""
        found = self.database.ask(
            f"SELECT run, journal, {number} AS number FROM {table} WHERE run IN {{runs:Array(UInt64)}} AND journal IN "
            "{all:Array(UInt64)} GROUP BY run, journal", **_asked(journals),
        )  # fmt: skip
        return {(run, journal): value for run, journal, value in zip(*(one.tolist() for one in found.values()), strict=True)}

    def _renew(self, wanted: Mapping[tuple[int, int], set[int]]) -> None:
        """Load how far journals are committed and, for those at a wanted offset, the shapes defined up to there."""
        ends = self._ends(list(wanted))
        stale = {
            at: Known(ends.get(at, 0), complete=ends.get(at, 0) in offsets)
            for at, offsets in wanted.items()
            if (known := self._remembered(at)) is None or known.end != ends.get(at, 0) or not known.complete
        }
        fitting = [at for at, known in stale.items() if known.end and known.complete]
        if fitting:
            found = self.database.ask(
                "SELECT run, journal, pos, body FROM frames WHERE run IN {runs:Array(UInt64)} AND journal IN {all:Array(UInt64)} "
                "AND kind = {kind:UInt8} ORDER BY run, journal, pos", kind=int(Kind.SHAPE), **_asked(fitting),
            )  # fmt: skip
            for run, journal, pos, body in zip(*found.values(), strict=True):
                known = stale.get((int(run), int(journal)))
                if known is not None and pos < known.end:
                    learn(known.shapes, body)
                    known.weight += len(body)
        for at, known in stale.items():
            self._remember(at, known)

    def _advance(self, jobs: Iterable[InsertJob]) -> None:
        """Record that jobs are committed."""
        with self._memory:
            for job in jobs:
                known = self._known.get(job.at)
                if known is None or known.shapes is not job.shapes:
                    self._forget(job.at)  # it was pushed out of memory; the next piece looks it up again
                    continue
                known.end = job.end
                if job.scanned.named:
                    self._add_shapes(known, job, job.scanned.named)

    def _add_shapes(self, known: Known, job: InsertJob, named: Mapping[int, Shape]) -> None:
        """Add the shapes of a job to the known ones. They are not copied: a journal may have very many."""
        for number, shape in named.items():
            known.shapes.setdefault(number, shape)
        weight = known.weight + sum(len(other.body) for other in job.scanned.others if other.kind == Kind.SHAPE)
        self._forget(job.at)
        known.weight = weight
        self._remember(job.at, known)

    # Batches

    def _write_on(self) -> None:
        """Collect and decode waiting requests until stopped: each batch is stored while the next one grows.

        Requests postponed from one batch come first in the next.
        """
        later: list[Request] = []
        storing: Future[None] | None = None
        stored = Batch()
        last = False
        with ThreadPoolExecutor(1, "fanfold-clickhouse-store") as stores:
            while not last or later:
                batch = Batch()
                waiting = later or [one for one in (self._queue.get(),) if one is not None]
                last = last or not waiting
                time.sleep(0 if last else self.gather)
                while True:
                    last = self._take(waiting, batch) or last
                    batch.busy = stored.jobs.keys() if storing is not None and not storing.done() else frozenset()
                    waiting, later = [], self._decoded(waiting, batch)
                    if later or storing is None or storing.done():
                        break
                    wait([storing], STEP_SECONDS)
                wait([storing] if storing else [])
                storing, stored = stores.submit(self._store_all, batch), batch

    def _take(self, waiting: list[Request], batch: Batch) -> bool:
        """Add queued requests to those for a batch, as many as fit; return whether the intake is to stop after them."""
        size = batch.size + sum(one.size for one in waiting)
        pieces = batch.pieces + sum(len(one.pieces) for one in waiting)
        stopped = False
        while size < MOST_BYTES and pieces < MOST_JOBS:
            try:
                one = self._queue.get_nowait()
            except queue.Empty:
                break
            if one is None:
                stopped = True
                continue
            waiting.append(one)
            size, pieces = size + one.size, pieces + len(one.pieces)
        return stopped

    def _decoded(self, waiting: list[Request], batch: Batch) -> list[Request]:
        """Decode requests into a batch; return those that are too much for it."""
        later, error = outcome(lambda: self._decode(waiting, batch))  # whatever happens, every caller gets a response
        if error is None:
            return later or []
        for request in {id(one): one for one in (*batch.requests, *waiting)}.values():
            request.fail(error)
        batch.clear()
        return []

    def _decode(self, waiting: list[Request], batch: Batch) -> list[Request]:
        """Add the pieces that start at their journals' ends to a batch; return the requests that are too much for it."""
        if not waiting:
            return []
        self.names.meet({(request.project, piece.run) for request in waiting for piece in request.pieces})
        numbers: dict[str, dict[str, int | FanfoldError]] = {}
        named = [self._named(request, numbers.setdefault(request.project, {})) for request in waiting]
        sent = self._look_up(one for pieces in named for one in pieces)
        later = []
        for request, pieces in zip(waiting, named, strict=True):
            if batch.points >= MOST_BATCH_POINTS:
                later.append(request)
                continue
            room = Room()
            for one in pieces:
                try:
                    job = self._prepared(request.project, one, batch, room, sent)
                except (FanfoldError, OSError) as error:
                    request.results[one.place] = error.with_traceback(None)  # which would hold the whole batch in memory
                else:
                    batch.jobs[one.at] = (request, one.place, job)
                    request.results[one.place] = job.end
            batch.add(request, MOST_POINTS - room.points)
        return later

    def _store_all(self, batch: Batch) -> None:
        _, error = outcome(lambda: self._store(batch))
        for request in batch.requests:
            request.fail(error) if error is not None else request.tell()

    def _store(self, batch: Batch) -> None:
        """Write a batch: bytes, content, commit. What another gateway has stored, or whose name another run has, is left out."""
        for left_out in (self._elsewhere, self._taken):
            for at, error in left_out([job for _, _, job in batch.jobs.values()]).items():
                request, place, _ = batch.jobs.pop(at)
                request.results[place] = error
        self._write([job for _, _, job in batch.jobs.values()])

    def _elsewhere(self, jobs: Sequence[InsertJob]) -> dict[tuple[int, int], Conflict]:
        """Return errors for jobs whose journals another gateway advanced meanwhile: their bytes are already stored."""
        ends = self._ends([job.at for job in jobs]) if jobs else {}
        moved = [job.at for job in jobs if ends.get(job.at, 0) != job.start]
        for at in moved:
            self._forget(at)
        return {at: Conflict(ends.get(at, 0)) for at in moved}

    def _taken(self, jobs: Sequence[InsertJob]) -> dict[tuple[int, int], DatabaseUnavailable]:
        """Claim the names of runs that begin here; return errors for the jobs of those that belong to other runs already."""
        taken = self.names.begin({(job.project, job.piece.run) for job in jobs if job.begins})
        return {job.at: _just_moved() for job in jobs if taken and job.begins and (job.project, job.piece.run) in taken}

    def _write(self, jobs: list[InsertJob]) -> None:
        import numpy as np

        if not jobs:
            return
        tables = tables_of(jobs)
        self._batches += 1
        token = token_of(jobs, f"{self._boot}:{self._batches}")
        for name in ("pieces", "runs", "keys", "frames", "points", "ops", "usage"):
            if name in tables:
                self._insert(name, tables[name], token)
        ends = {
            **{name: tables["pieces"][name] for name in ("run", "journal", "end")},
            "rank": np.array([job.rank for job in jobs], np.uint32),
            "seen": np.full(len(jobs), np.datetime64(time.time_ns() // 1000, "us")),
        }
        self._insert("commits", ends, token)
        self._advance(jobs)
        self._roller.stored([(job.at, job.start, job.end, _is_last(job)) for job in jobs])

    def _insert(self, table: str, columns: dict[str, Any], token: str) -> None:
        self.inserts += 1
        self.database.insert(table, columns, token=token)

    def close(self) -> None:
        """Write everything that is queued, and stop."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(WAIT_SECONDS)
        self._roller.close()

    # Requests to jobs

    def ask(self, project: str, run: str, request: JobRequest) -> None:
        self._requests.put(self._check(project, run), request)

    def asked(self, project: str, runs: Sequence[str]) -> list[tuple[str, JobRequest]]:
        waiting = self._requests.waiting()
        return [(run, request) for run in runs for request in waiting.get(self.names.owner(project, run), ())] if waiting else []

    def fetched(self, project: str, run: str, id: str) -> None:
        self._requests.remove(self.names.owner(project, run), id)

    def check(self) -> None:
        schema.ready(self.database)

    # Deleting and moving

    def deleted(self, project: str, run: str) -> bool:
        """Return whether this run was deleted here, or moved to another project."""
        return isinstance(outcome(lambda: self.names.number(project, run))[1], Gone)

    def delete(self, project: str, run: str, by: str) -> None:
        """Delete a run and remember its id forever. Other gateways notice within seconds, so its rows are deleted twice.

        If it is moved at the same time, whoever looks last refuses: we look for moves after our mark, and a move looks for it.
        """
        self.names.renew(now=True)  # another gateway may have just moved a run here
        number = self.names.current(project, run)
        self._check_stays(project, run)
        mark: dict[str, Any] = {"run": u64([number]), "project": [project], "id": [run], "who": [by]}
        self.database.insert("deleted", mark)
        try:
            self._check_stays(project, run)
        except Gone:  # who may delete it here may not do so there
            schema.delete(self.database, "deleted", number, project=project, who=by)
            raise
        self.names.add_deleted(number)
        sweep(self.database, number)
        threading.Timer(2 * FRESH_SECONDS + self.gather, _again, (self.database, number)).start()

    def _check_stays(self, project: str, run: str) -> None:
        """Raise Gone if a run was moved, or is about to be."""
        if look_up(self.database, [(project, run)], moves=MADE)[project, run][1:] != (project, run):
            raise Gone(project, run)

    def movable(self, project: str, run: str, target: str) -> None:
        """Raise if a run cannot be moved: it is not here any more, or the other project has or had another run of its id."""
        self.names.renew(now=True)
        self._movable(project, run, target)

    def _movable(self, project: str, run: str, target: str) -> int:
        number, there = self._check(project, run), self.names.owner(checked_name("project", target), run)
        self._check_stays(project, run)
        if there != number:
            if self.deleted(target, run):
                raise _taken_by("had", target, run)
            if there != run_number(target, run) or owners(self.database, [there]).get(there, number) != number:
                raise _taken_by("has", target, run)
            if self.database.one(_BEGUN, run=there)["n"]:
                raise _taken_by("has", target, run)
        return number

    def move(self, project: str, run: str, target: str, by: str) -> None:
        """Give a run another project. If two gateways do at once, the later one counts."""
        (error,) = self.move_all([(project, run)], target, by)
        if error is not None:
            raise error

    def move_all(self, runs: Sequence[tuple[str, str]], target: str, by: str) -> list[FanfoldError | None]:
        """Move runs with one wait for all; return for each why it was not moved. If one of them cannot go, none does.

        Each gets a row that claims its name there and stays: if another run was first, it is void.
        """
        with self._moving:
            numbers, errors = self._checked_moves(runs, target)
            if errors:
                return [errors.get(name, next(iter(errors.values()))) for name in runs]
            there = {name: run_number(target, name[1]) for name in numbers}
            claims = {**_with_names(numbers, target), "name": u64(list(there.values())), "who": [by or "?"] * len(there)}
            self.database.insert("moved", claims)
        time.sleep(2 * GRACE_SECONDS)
        errors = self._void(numbers, there, target)
        moved = {name: number for name, number in numbers.items() if name not in errors}
        if moved:
            self.database.insert("runs", _with_names(moved, target))  # for those who query this table
        return [errors.get(name) for name in runs]

    def _checked_moves(
        self, runs: Sequence[tuple[str, str]], target: str
    ) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], FanfoldError]]:
        """Return the numbers of runs, and errors for those that cannot be moved."""
        errors: dict[tuple[str, str], FanfoldError] = {}
        numbers: dict[tuple[str, str], int] = {}
        self.names.renew(now=True)
        for name in runs:
            try:
                numbers[name] = self._movable(*name, target)
            except FanfoldError as error:
                errors[name] = error
        return numbers, errors | self._going_on(numbers)

    def _going_on(self, numbers: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], FanfoldError]:
        """Return errors for runs that are written again since the caller looked: a resumed job may send to another gateway."""
        found = {name: FleetRun(self.database, Path("/nowhere"), RunName(run, *name)) for name, run in numbers.items()}
        read(list(found.values()))
        errors = {}
        for name, run in found.items():
            try:
                if run.journals:
                    check_idle(run, ("running", "lost"), "moved")
            except FanfoldError as error:
                errors[name] = error
        return errors

    def _void(
        self, numbers: Mapping[tuple[str, str], int], there: Mapping[tuple[str, str], int], target: str
    ) -> dict[tuple[str, str], FanfoldError]:
        """Return errors for runs that do not get the names they claimed, or were deleted meanwhile."""
        first = owners(self.database, list(there.values()))
        self.names.renew(now=True)
        errors: dict[tuple[str, str], FanfoldError] = {}
        for name, number in numbers.items():
            if first.get(there[name]) != number:
                errors[name] = _taken_by("has", target, name[1])
            elif self.names.is_deleted(number):
                errors[name] = Gone(*name)
        return errors

    # Blobs

    def missing(self, project: str, run: str, names: list[str]) -> dict[str, int]:
        from .blobs import missing

        return missing(self.database, self._check(project, run), names)

    def blob(self, project: str, run: str, name: str, *, offset: int, total: int, data: bytes) -> int:
        from .blobs import keep

        number = self._check(project, run)
        if number == run_number(project, run) and self.names.begin([(project, run)]):
            raise _just_moved()
        return keep(self.database, number, name, offset=offset, total=total, data=data, limit=self.max_blob)


def _with_names(numbers: Mapping[tuple[str, str], int], project: str) -> dict[str, Any]:
    return {"run": u64(list(numbers.values())), "project": [project] * len(numbers), "id": [id for _, id in numbers]}


def _just_moved() -> DatabaseUnavailable:
    return DatabaseUnavailable("another run was just moved to this name")


def _taken_by(has: str, project: str, run: str) -> RunError:
    return RunError(f"project {project} {has} another run {run} already. Nothing was moved. Choose another project.")


def _is_last(job: InsertJob) -> bool:
    """Return whether a journal ends with this job."""
    others = job.scanned.others
    return bool(others) and any(other.kind == Kind.END for other in others)


@lru_cache(maxsize=REMEMBERED)
def _read_name(journal: str) -> tuple[int, int, int]:
    """Return the rank and the id in a journal's name, and where its frames' checksums start; the same names come each second."""
    rank, id = checked_journal(journal)
    return rank, int(id, 16), seed_of(id)


def _asked(journals: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    return {"runs": list({run for run, _ in journals}), "all": [journal for _, journal in journals]}


def sweep(database: Database, run: int) -> None:
    """Delete a run's rows from every table but those that remember its names."""
    for table in schema.TABLES:
        if table.sharded and table.name not in ("deleted", "moved"):
            schema.delete(database, table.name, run)


def _again(database: Database, run: int) -> None:
    try:
        sweep(database, run)
    except (FanfoldError, OSError):
        return  # remaining rows are hidden by the list of deleted runs, and removed by the next rebuild
