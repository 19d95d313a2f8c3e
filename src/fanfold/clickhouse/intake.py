"""Taking journals in: a gateway's pieces become rows of the tables, many journals to one insert.

A batch is written in this order: the bytes themselves (`pieces`), what they say (`frames`, `points`, …), and the commit that
moves the journals' ends. Only a commit is answered for. A gateway that dies in between leaves pieces without a commit; when
their bytes come again, `pieces` shows that some were written twice, and reading counts those journals' points once each.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..errors import FanfoldError, outcome
from ..fleet.intake import Result, check_header
from ..fleet.wire import JOURNAL, MAX_GAP, Conflict, Gone, Piece, Refused, checked_journal, checked_name
from ..journal import format as fmt
from ..journal.format import Kind, Shape
from . import schema
from .batch import Batch, Job, tables_of, token_of, u64
from .database import Database, Unavailable
from .decode import learn, run_number, scan

GATHER_SECONDS = 0.25  # how long a batch is gathered: ClickHouse likes few large inserts
MOST_BYTES = 64 << 20  # in one batch
MOST_JOBS = 16_000  # … and their ids travel in the address of a query
MOST_WAITING = 4096  # requests
WAIT_SECONDS = 60.0
REMEMBERED = 50_000  # journals
DELETED_SECONDS = 2.0


@dataclass
class Known:
    """What a gateway remembers of a journal: how far it is committed, and its shapes as of there."""

    end: int
    shapes: dict[int, Shape] = field(default_factory=dict)


class ClickHouseIntake:
    """An intake over ClickHouse. Any number of them may work on one database: what they remember can only be too old."""

    def __init__(self, database: Database, *, gather: float = GATHER_SECONDS, max_blob: int = 64 << 30) -> None:
        schema.check(database)
        self.database = database
        self.gather = gather
        self.max_blob = max_blob
        self.inserts = 0
        self._known: OrderedDict[tuple[int, int], Known] = OrderedDict()
        self._deleted: set[int] = set()
        self._deleted_until = 0.0
        self._lock = threading.Lock()
        self._queue: queue.Queue[Batch | None] = queue.Queue(MOST_WAITING)
        self._boot = secrets.token_hex(4)
        self._batches = 0
        self._thread: threading.Thread | None = None

    # Journals

    def offset(self, project: str, run: str, journal: str) -> int:
        number = self._check(project, run)
        return self._renewed(number, int(checked_journal(journal)[1], 16)).end

    def append(self, project: str, piece: Piece) -> int:
        """Keep a piece and return the new offset."""
        result = self.append_all(project, [piece]).result(WAIT_SECONDS)[0]
        if isinstance(result, BaseException):
            raise result
        return result

    def append_all(self, project: str, pieces: Sequence[Piece]) -> Future[list[Result]]:
        """Begin to keep pieces; what comes says of each its new offset, or why it was not kept."""
        results: list[Result] = [0] * len(pieces)
        jobs: dict[int, Job] = {}
        taken: set[int] = set()
        try:
            self._look_up(project, pieces)
        except (FanfoldError, OSError) as error:
            return _done([error] * len(pieces))
        for place, piece in enumerate(pieces):
            try:
                job = self._prepared(project, piece)
                if job.journal in taken:
                    raise Conflict(job.start)  # a second piece of a journal in one request: it comes again, in its turn
                taken.add(job.journal)
                jobs[place] = job
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

    def _look_up(self, project: str, pieces: Sequence[Piece]) -> None:
        """Ask once for all journals of a request that are not known here, or not as far as they come."""
        unknown: dict[tuple[int, int], None] = {}
        for piece in pieces:
            match = JOURNAL.fullmatch(piece.journal)
            if match and isinstance(piece.run, str):
                at = (run_number(project, piece.run), int(match[2], 16))
                known = self._remembered(*at)
                if known is None or known.end < piece.offset:
                    unknown[at] = None
        if unknown:
            self._renew(list(unknown))

    def _prepared(self, project: str, piece: Piece) -> Job:
        """Check one piece against what is here, and take it apart."""
        rank, id = checked_journal(piece.journal)
        run = self._check(project, piece.run)
        if piece.offset < 0 or not 0 <= piece.gap <= MAX_GAP or not piece.data:
            raise Refused(400, "an offset or gap is out of range, or nothing follows it. Nothing was stored.")
        journal = int(id, 16)
        known = self._remembered(run, journal)
        if known is None or known.end < piece.offset:
            known = self._renewed(run, journal)
        if known.end != piece.offset:
            raise Conflict(known.end)
        shapes = dict(known.shapes)
        base = piece.offset + piece.gap
        scanned = scan(piece.data, base, fmt.seed_of(id), shapes)
        if scanned.crowded:
            raise Refused(413, f"the piece at {base} of {piece.journal} holds too many frames or points. Nothing was stored.")
        if scanned.end != len(piece.data):
            raise Refused(
                422, f"the bytes at {base + scanned.end} are not whole, sound frames of {piece.journal}. Nothing was stored."
            )
        if base == 0:
            first = next(iter(scanned.others), None)
            check_header(project, piece, first.body if first is not None and first.kind == Kind.HEADER else b"")
        return Job(project, piece, run, journal, rank, scanned, shapes)

    def _check(self, project: str, run: str) -> int:
        number = run_number(checked_name("project", project), checked_name("run", run))
        if self._is_deleted(number):
            raise Gone(project, run)
        return number

    # What is known of a journal

    def _remembered(self, run: int, journal: int) -> Known | None:
        with self._lock:
            known = self._known.get((run, journal))
            if known is not None:
                self._known.move_to_end((run, journal))
            return known

    def _remember(self, run: int, journal: int, known: Known) -> None:
        with self._lock:
            self._known[run, journal] = known
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    def _forget(self, run: int, journal: int) -> None:
        with self._lock:
            self._known.pop((run, journal), None)

    def _renewed(self, run: int, journal: int) -> Known:
        self._renew([(run, journal)])
        return self._remembered(run, journal) or Known(0)

    def _renew(self, journals: Sequence[tuple[int, int]]) -> None:
        """Ask the database how far journals are, and which shapes they named by then."""
        asked = {"runs": list({run for run, _ in journals}), "all": [journal for _, journal in journals]}
        where = "WHERE run IN {runs:Array(UInt64)} AND journal IN {all:Array(UInt64)}"
        ends = self.database.ask(f"SELECT run, journal, max(end) AS end FROM commits {where} GROUP BY run, journal", **asked)
        there = {(run, journal): end for run, journal, end in zip(*(column.tolist() for column in ends.values()), strict=True)}
        stale = {
            at: Known(there.get(at, 0))
            for at in journals
            if (known := self._remembered(*at)) is None or known.end != there.get(at, 0)
        }
        if any(known.end for known in stale.values()):
            sql = f"SELECT run, journal, pos, body FROM frames {where} AND kind = {Kind.SHAPE:d} ORDER BY run, journal, pos"
            for run, journal, pos, body in zip(*self.database.ask(sql, **asked).values(), strict=True):
                known = stale.get((int(run), int(journal)))
                if known is not None and pos < known.end:
                    learn(known.shapes, body)
        for at, known in stale.items():
            self._remember(*at, known)

    # The batch

    def _hand_over(self, batch: Batch) -> None:
        """Give a request's jobs to the writer; one that has no room for them says so at once."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._write_on, name="fanfold-clickhouse", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            batch.fail("the database does not keep up")

    def _write_on(self) -> None:
        """Gather what waits and write it, until told to stop. What came too late for a batch is first in the next."""
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
        """Write requests as one batch; return those that hold bytes of a journal that is in it already."""
        now: list[Batch] = []
        later: list[Batch] = []
        journals: set[int] = set()
        for one in waiting:
            own = {job.journal for job in one.jobs}
            (later if own & journals else now).append(one)
            journals |= own
        jobs = [job for one in now for job in one.jobs]
        failures, error = outcome(lambda: self._stored(jobs))  # whatever happens, whoever waits is told
        for one in now:
            one.tell({job.journal: Unavailable(str(error)) for job in one.jobs} if failures is None else failures)
        return [one for one in later if self._still_fits(one)]

    def _stored(self, jobs: Sequence[Job]) -> dict[int, FanfoldError | OSError]:
        """Write the jobs that still stand at their journals' ends; return why the others do not."""
        elsewhere = self._elsewhere(jobs)
        self._write([job for job in jobs if job.journal not in elsewhere])
        return elsewhere

    def _elsewhere(self, jobs: Sequence[Job]) -> dict[int, FanfoldError | OSError]:
        """Find the jobs whose journals another gateway took further meanwhile: their bytes are there already."""
        found = self.database.ask(
            "SELECT journal, max(end) AS end FROM commits WHERE run IN {runs:Array(UInt64)} AND journal IN {all:Array(UInt64)} "
            "GROUP BY journal", runs=list({job.run for job in jobs}), all=[job.journal for job in jobs],
        )  # fmt: skip
        ends = dict(zip(found["journal"].tolist(), found["end"].tolist(), strict=True))
        moved = [job for job in jobs if ends.get(job.journal, 0) != job.start]
        for job in moved:
            self._forget(job.run, job.journal)
        return {job.journal: Conflict(ends.get(job.journal, 0)) for job in moved}

    def _still_fits(self, batch: Batch) -> bool:
        """Tell whether the jobs of a request still stand at the ends of their journals; else it is to come again."""
        for job in batch.jobs:
            known = self._remembered(job.run, job.journal)
            if known is None or known.end != job.start:
                batch.fail("another request brought the same journal")
                return False
        return True

    def _write(self, jobs: list[Job]) -> None:
        """Write the batch: bytes, what they say, commit."""
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
            self._remember(job.run, job.journal, Known(job.end, job.shapes))

    def _insert(self, table: str, columns: dict[str, Any], token: str) -> None:
        self.inserts += 1
        self.database.insert(table, columns, token=token)

    def close(self) -> None:
        """Write what waits, and stop."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(WAIT_SECONDS)

    def check(self) -> None:
        schema.ready(self.database)

    # Deleting

    def _is_deleted(self, run: int) -> bool:
        """Look in the list of the deleted, which is short and read anew every few seconds."""
        if run not in self._deleted and time.monotonic() >= self._deleted_until:
            self._deleted = set(self.database.ask("SELECT DISTINCT run FROM deleted")["run"].tolist())
            self._deleted_until = time.monotonic() + DELETED_SECONDS
        return run in self._deleted

    def deleted(self, project: str, run: str) -> bool:
        """Tell whether this run was deleted here."""
        return self._is_deleted(run_number(project, run))

    def delete(self, project: str, run: str, by: str) -> None:
        """Delete everything of a run and remember its id for ever; other gateways hear of it within seconds, so sweep twice."""
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
    return sum(one.size for one in there) < MOST_BYTES and sum(len(one.jobs) for one in there) < MOST_JOBS


def _done(results: list[Result]) -> Future[list[Result]]:
    done: Future[list[Result]] = Future()
    done.set_result(results)
    return done


def sweep(database: Database, run: int) -> None:
    """Delete a run's rows everywhere but in the list of the deleted."""
    for table in schema.TABLES:
        if table.sharded and table.name != "deleted":
            schema.delete(database, table.name, run)


def _again(database: Database, run: int) -> None:
    try:
        sweep(database, run)
    except (FanfoldError, OSError):
        return  # what is left is hidden by the list of the deleted, and goes with the next rebuild
