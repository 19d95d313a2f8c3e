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
from collections import ChainMap, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..errors import FanfoldError, outcome
from ..fleet.intake import Result, check_gap, check_header
from ..fleet.wire import JOURNAL, MAX_GAP, Conflict, Gone, Piece, Rejected, checked_journal, checked_name
from ..journal import format as fmt
from ..journal.format import Kind, Shape
from ..journal.requests import JobRequest
from . import schema
from .batch import Batch, InsertJob, tables_of, token_of, u64
from .database import Database, DatabaseUnavailable
from .decode import MOST_FRAMES, MOST_POINTS, Scanned, learn, run_number, scan
from .gateway_tables import RequestTable
from .profile import MOST_ROWS, profile_of

GATHER_SECONDS = 0.25  # how long a batch is collected: ClickHouse works best with few large inserts
MOST_BYTES = 64 << 20  # in one batch
MOST_BATCH_POINTS = 2 * MOST_POINTS
MOST_JOBS = 16_000  # … and their ids are sent in the URL of a query
MOST_WAITING = 4096  # requests
WAIT_SECONDS = 60.0
REMEMBERED = 50_000  # journals
REMEMBERED_BYTES = 128 << 20  # of their shapes
DELETED_SECONDS = 2.0


@dataclass
class Known:
    """A journal as remembered by a gateway: how far it is committed, and its shapes up to there, if they were needed."""

    end: int
    shapes: dict[int, Shape] = field(default_factory=dict)
    complete: bool = True  # all shapes are loaded
    weight: int = 0  # size of the shapes' frames in bytes

    def fits(self, offset: int) -> bool:
        """Return whether a piece at this offset can be accepted or rejected without querying the database."""
        return self.end > offset or (self.end == offset and self.complete)


class Room:
    """The limits on the content of one request. A piece beyond them is sent again in the next request."""

    def __init__(self) -> None:
        self.runs, self.points, self.rows = MOST_FRAMES, MOST_POINTS, MOST_ROWS

    @property
    def left(self) -> bool:
        return min(self.runs, self.points, self.rows) > 0

    def take(self, scanned: Scanned) -> bool:
        """Subtract a piece's share; return whether it was within the limits."""
        self.runs -= scanned.runs
        self.points -= scanned.points
        return min(self.runs, self.points) >= 0


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
        self._deleted: set[int] = set()
        self._deleted_until = 0.0
        self._lock = threading.Lock()
        self._queue: queue.Queue[Batch | None] = queue.Queue(MOST_WAITING)
        self._boot = secrets.token_hex(4)
        self._batches = 0
        self._thread: threading.Thread | None = None
        self._requests = RequestTable(database)

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
        """Start storing pieces; the future returns for each its new offset, or why it was not stored."""
        results: list[Result] = [0] * len(pieces)
        jobs: dict[int, InsertJob] = {}
        taken: set[int] = set()
        room = Room()
        try:
            sent = self._look_up(project, pieces)
        except (FanfoldError, OSError) as error:
            return _done([error] * len(pieces))
        for place, piece in enumerate(pieces):
            try:
                jobs[place] = self._prepared(project, piece, taken, room, sent)
            except (FanfoldError, OSError) as error:
                results[place] = error
        if not jobs:
            return _done(results)
        done: Future[list[Result]] = Future()

        def tell(failures: Mapping[int, FanfoldError | OSError]) -> None:
            for place, job in jobs.items():
                results[place] = failures.get(job.journal) or job.end
            done.set_result(results)

        self._hand_over(Batch(list(jobs.values()), tell))
        return done

    def _look_up(self, project: str, pieces: Sequence[Piece]) -> dict[tuple[int, int], int]:
        """Look up in one query the journals of a request that are unknown here, or not known up to their offset.

        Return how many bytes were received of each journal that has damage before a piece.
        """
        unknown: dict[tuple[int, int], set[int]] = {}
        damaged: dict[tuple[int, int], None] = {}
        for piece in pieces:
            match = JOURNAL.fullmatch(piece.journal)
            if match and isinstance(piece.run, str):
                at = (run_number(project, piece.run), int(match[2], 16))
                known = self._remembered(*at)
                if known is None or not known.fits(piece.offset):
                    unknown.setdefault(at, set()).add(piece.offset)
                if piece.gap:
                    damaged[at] = None
        if unknown:
            self._renew(unknown)
        return self._of_each(list(damaged), "sum(end - start - gap)", "pieces") if damaged else {}

    def _prepared(
        self, project: str, piece: Piece, taken: set[int], room: Room, sent: Mapping[tuple[int, int], int]
    ) -> InsertJob:
        """Check one piece against the stored state, and decode it."""
        rank, id = checked_journal(piece.journal)
        run = self._check(project, piece.run)
        if piece.offset < 0 or not 0 <= piece.gap <= MAX_GAP or not piece.data:
            raise Rejected(400, "an offset or gap is out of range, or nothing follows it. Nothing was stored.")
        journal = int(id, 16)
        known = self._remembered(run, journal)
        if known is not None and known.end != piece.offset:
            raise Conflict(known.end)
        if known is None or not known.complete:
            raise DatabaseUnavailable("other requests pushed the journal out of memory")
        if journal in taken or not room.left:
            raise Conflict(piece.offset)  # it is sent again in the next request
        if piece.gap:
            check_gap(piece, sent.get((run, journal), 0))
        shapes: ChainMap[int, Shape] = ChainMap({}, known.shapes)
        base = piece.offset + piece.gap
        scanned = scan(piece.data, base, fmt.seed_of(id), shapes)
        if scanned.crowded:
            raise Rejected(413, f"the piece at {base} of {piece.journal} holds too many frames or points. Nothing was stored.")
        if scanned.end != len(piece.data):
            raise Rejected(
                422, f"the bytes at {base + scanned.end} are not whole, sound frames of {piece.journal}. Nothing was stored."
            )
        if base == 0:
            first = next(iter(scanned.others), None)
            check_header(piece, first.body if first is not None and first.kind == Kind.HEADER else b"")
        if not room.take(scanned) and taken:
            raise Conflict(piece.offset)
        profile = profile_of(run, rank, scanned.others)
        room.rows -= len(profile["ops"])
        taken.add(journal)
        return InsertJob(project, piece, run, journal, rank, scanned, shapes, profile)

    def _check(self, project: str, run: str) -> int:
        number = run_number(checked_name("project", project), checked_name("run", run))
        if self._is_deleted(number):
            raise Gone(project, run)
        return number

    # State of journals

    def _remembered(self, run: int, journal: int) -> Known | None:
        with self._lock:
            known = self._known.get((run, journal))
            if known is not None:
                self._known.move_to_end((run, journal))
            return known

    def _remember(self, run: int, journal: int, known: Known) -> None:
        with self._lock:
            before = self._known.pop((run, journal), None)
            self._known[run, journal] = known
            self._weight += known.weight - (before.weight if before else 0)
            while len(self._known) > 1 and (len(self._known) > REMEMBERED or self._weight > REMEMBERED_BYTES):
                self._weight -= self._known.popitem(last=False)[1].weight

    def _forget(self, run: int, journal: int) -> None:
        with self._lock:
            gone = self._known.pop((run, journal), None)
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
            if (known := self._remembered(*at)) is None or known.end != ends.get(at, 0) or not known.complete
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
            self._remember(*at, known)

    def _advance(self, job: InsertJob) -> None:
        """Record that a job is committed. Its shapes are added to the known ones, not copied: a journal may have very many."""
        known = self._remembered(job.run, job.journal)
        assert isinstance(job.shapes, ChainMap)
        named, base = job.shapes.maps
        if known is None or known.shapes is not base:
            self._forget(job.run, job.journal)  # it was looked up again meanwhile; the next piece does the same
            return
        known.shapes.update(named)
        weight = known.weight + sum(len(other.body) for other in job.scanned.others if other.kind == Kind.SHAPE)
        self._remember(job.run, job.journal, Known(job.end, known.shapes, weight=weight))

    # Batches

    def _hand_over(self, batch: Batch) -> None:
        """Queue a request's jobs for the writer; fail at once if the queue is full."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._write_on, name="fanfold-clickhouse", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            batch.fail("the database does not keep up")

    def _write_on(self) -> None:
        """Collect and write waiting requests until stopped. Requests postponed from one batch come first in the next."""
        later: list[Batch] = []
        last = False
        while not last or later:
            waiting: list[Batch | None] = [*later] or [self._queue.get()]
            time.sleep(0 if last else self.gather)
            while _has_room(waiting):
                try:
                    waiting.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            last = last or None in waiting
            later = self._write_all([one for one in waiting if one is not None])

    def _write_all(self, waiting: list[Batch]) -> list[Batch]:
        """Write requests as one batch; return those with bytes of a journal that is already in it."""
        now: list[Batch] = []
        later: list[Batch] = []
        journals: set[int] = set()
        for one in waiting:
            own = {job.journal for job in one.jobs}
            (later if own & journals else now).append(one)
            journals |= own
        jobs = [job for one in now for job in one.jobs]
        failures, error = outcome(lambda: self._stored(jobs))  # whatever happens, every caller gets a response
        for one in now:
            one.tell({job.journal: DatabaseUnavailable(str(error)) for job in one.jobs} if failures is None else failures)
        return [one for one in later if self._still_fits(one)]

    def _stored(self, jobs: Sequence[InsertJob]) -> dict[int, FanfoldError | OSError]:
        """Write the jobs that still start at their journals' ends; return the errors of the others."""
        elsewhere = self._elsewhere(jobs)
        self._write([job for job in jobs if job.journal not in elsewhere])
        return elsewhere

    def _elsewhere(self, jobs: Sequence[InsertJob]) -> dict[int, FanfoldError | OSError]:
        """Return errors for jobs whose journals another gateway advanced meanwhile: their bytes are already stored."""
        ends = self._ends([(job.run, job.journal) for job in jobs])
        moved = [job for job in jobs if ends.get((job.run, job.journal), 0) != job.start]
        for job in moved:
            self._forget(job.run, job.journal)
        return {job.journal: Conflict(ends.get((job.run, job.journal), 0)) for job in moved}

    def _still_fits(self, batch: Batch) -> bool:
        """Return whether the jobs of a request still start at their journals' ends; otherwise fail it, to be sent again."""
        for job in batch.jobs:
            known = self._remembered(job.run, job.journal)
            if known is None or known.end != job.start:
                batch.fail("another request brought the same journal")
                return False
        return True

    def _write(self, jobs: list[InsertJob]) -> None:
        """Write the batch: bytes, content, commit."""
        import numpy as np

        if not jobs:
            return
        self._batches += 1
        token = token_of(jobs, f"{self._boot}:{self._batches}")
        tables = tables_of(jobs)
        for name in ("pieces", "runs", "keys", "frames", "points", "ops", "usage"):
            if name in tables:
                self._insert(name, tables[name], token)
        ends = {
            "run": np.array([job.run for job in jobs], np.uint64),
            "journal": np.array([job.journal for job in jobs], np.uint64),
            "rank": np.array([job.rank for job in jobs], np.uint32),
            "end": np.array([job.end for job in jobs], np.uint64),
            "seen": np.full(len(jobs), np.datetime64(time.time_ns() // 1000, "us")),
        }
        self._insert("commits", ends, token)
        for job in jobs:
            self._advance(job)

    def _insert(self, table: str, columns: dict[str, Any], token: str) -> None:
        self.inserts += 1
        self.database.insert(table, columns, token=token)

    def close(self) -> None:
        """Write everything that is queued, and stop."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(WAIT_SECONDS)

    # Requests to jobs

    def ask(self, project: str, run: str, request: JobRequest) -> None:
        self._requests.put(self._check(project, run), request)

    def asked(self, project: str, runs: Sequence[str]) -> list[tuple[str, JobRequest]]:
        waiting = self._requests.waiting()
        return [(run, request) for run in runs for request in waiting.get(run_number(project, run), ())] if waiting else []

    def fetched(self, project: str, run: str, id: str) -> None:
        self._requests.remove(run_number(project, run), id)

    def check(self) -> None:
        schema.ready(self.database)

    # Deleting

    def _is_deleted(self, run: int) -> bool:
        """Check the list of deleted runs, which is short and reloaded every few seconds."""
        if run not in self._deleted and time.monotonic() >= self._deleted_until:
            self._deleted = set(self.database.ask("SELECT DISTINCT run FROM deleted")["run"].tolist())
            self._deleted_until = time.monotonic() + DELETED_SECONDS
        return run in self._deleted

    def deleted(self, project: str, run: str) -> bool:
        """Return whether this run was deleted here."""
        return self._is_deleted(run_number(project, run))

    def delete(self, project: str, run: str, by: str) -> None:
        """Delete a run and remember its id forever. Other gateways notice within seconds, so its rows are deleted twice."""
        number = run_number(project, run)
        mark: dict[str, Any] = {"run": u64([number]), "project": [project], "id": [run], "who": [by]}
        self.database.insert("deleted", mark)
        self._deleted.add(number)
        sweep(self.database, number)
        threading.Timer(2 * DELETED_SECONDS + self.gather, _again, (self.database, number)).start()

    # Blobs

    def missing(self, project: str, run: str, names: list[str]) -> dict[str, int]:
        from .blobs import missing

        return missing(self.database, self._check(project, run), names)

    def blob(self, project: str, run: str, name: str, *, offset: int, total: int, data: bytes) -> int:
        from .blobs import keep

        return keep(self.database, self._check(project, run), name, offset=offset, total=total, data=data, limit=self.max_blob)


def _has_room(waiting: Sequence[Batch | None]) -> bool:
    there = [one for one in waiting if one is not None]
    few = sum(one.size for one in there) < MOST_BYTES and sum(len(one.jobs) for one in there) < MOST_JOBS
    return few and sum(one.points for one in there) < MOST_BATCH_POINTS


def _asked(journals: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    return {"runs": list({run for run, _ in journals}), "all": [journal for _, journal in journals]}


def _done(results: list[Result]) -> Future[list[Result]]:
    done: Future[list[Result]] = Future()
    done.set_result(results)
    return done


def sweep(database: Database, run: int) -> None:
    """Delete a run's rows from every table but the list of deleted runs."""
    for table in schema.TABLES:
        if table.sharded and table.name != "deleted":
            schema.delete(database, table.name, run)


def _again(database: Database, run: int) -> None:
    try:
        sweep(database, run)
    except (FanfoldError, OSError):
        return  # remaining rows are hidden by the list of deleted runs, and removed by the next rebuild
