"""The forwarder: one per node and directory, ships every journal in it to a gateway, indefinitely, in bounded memory.

The journals are its buffer. It holds one batch at a time and no state that a restart would lose: the gateway knows how
much of each journal it has.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import FanfoldError, notices
from ..journal import directory
from ..journal.files import open_to_write
from ..journal.origin import spool_roots
from ..journal.spool import recover
from ..journal.writer import try_lock
from ..process import digest
from ..settings import stranger
from .client import Backoff, Client, Unreachable
from .forward_journal import Tail
from .forward_note import home
from .forward_requests import RequestMail
from .forward_run import Following
from .prune import prune
from .wire import Piece

logger = logging.getLogger("fanfold.forwarder")
INTERVAL = 1.0
SCAN_SHARE = 100  # scanning for new runs takes at most 1/SCAN_SHARE of the time
LONGEST_SCAN = 30.0
RECOVER_SECONDS = 10.0
NOTE_SECONDS = 1.0
REFUSED_SECONDS = 600.0
ONCE_TRIES = 6


class Taken(FanfoldError):
    """Another forwarder is already serving this directory."""


class Forwarder:
    """A service that ships all runs in `root`; `tries` is how many failures in a row end once() (None: ONCE_TRIES)."""

    def __init__(
        self, root: Path, client: Client, *, project: str | None = None, prune: bool = False, tries: int | None = None,
        interval: float = INTERVAL,
    ) -> None:  # fmt: skip
        self.root = root
        self.client = client
        self.project = project
        self.prune = prune
        self.tries = tries
        self.interval = interval
        self.runs: dict[Path, Following] = {}
        self._settled: dict[Path, int] = {}  # finished runs, with the mtime of their journal folder
        self._pauses: dict[str, tuple[Backoff, float]] = {}
        self._here: set[Path] = set()  # the runs that once() has to deliver
        self.left: set[Path] = set()  # runs with data that the gateway does not take: it has deleted or moved them
        self._next_scan = self._next_recover = self._next_note = 0.0
        self._turn = self._accepted = 0
        self._requests = RequestMail(client)

    # Each round: scan, ship, settle

    def serve(self, wake: threading.Event, stop: threading.Event, *, idle: float | None = None) -> None:
        """Run until stopped or, with `idle`, until there was nothing to do for that many seconds. `wake` cuts a wait short."""
        quiet_since = time.monotonic()
        while not stop.is_set():
            busy = self.round()
            if busy or any(run.is_awaited for run in self.runs.values()):
                quiet_since = time.monotonic()
            elif idle is not None and time.monotonic() - quiet_since >= idle:
                break
            if not busy and wake.wait(self.interval):
                wake.clear()
                self._next_scan = self._next_note = 0.0
        self.note()

    def once(self) -> bool:
        """Ship everything present now, but not what is added meanwhile; return whether all of it arrived."""
        self._scan()
        goals = {tail.path: tail.size for run in self.runs.values() for tail in run.tails.values() if tail.look()}
        self._here = set(self.runs)
        while (moved := self.round()) or self._is_behind(goals):
            if any(backoff.failures >= (self.tries or ONCE_TRIES) for backoff, _ in self._pauses.values()):
                break
            if moved and not self._is_behind(goals):
                break  # everything present at the start has arrived; the rest comes from runs still being written
            if not moved:
                time.sleep(0.05)
        self.note()
        self.left = {path for path in self.left if path.exists()}
        refused = any(tail.hold_until for run in self.runs.values() for tail in run.tails.values())
        return not refused and not self.left and not self._is_behind(goals)

    def _is_behind(self, goals: dict[Path, int]) -> bool:
        """Return whether something present at the start is not at the gateway yet, or a finished run is not settled."""
        if any(not path.exists() for path in self._here):  # moved to another project meanwhile, and found there
            self._next_scan = 0.0
            self._scan()
            self._here = set(self.runs)
        return any(run.large or not run.tails or run.is_behind(goals) for run in self.runs.values())

    def _ready_projects(self) -> set[str]:
        now = time.monotonic()
        return {run.project for run in self.runs.values() if self._pauses.get(run.project, (None, 0.0))[1] <= now}

    def round(self) -> bool:
        """Scan for new data and send one batch per project; return whether anything was sent."""
        self._scan()
        moved = False
        for project in sorted(self._ready_projects()):
            try:
                moved = self._serve_project(project) or moved
            except Unreachable as error:
                self._pause(project, error)
            else:
                self._resume(project)
        self._requests.fetch(self.runs.values())
        if time.monotonic() >= self._next_note:
            self.note()
        return moved

    def note(self) -> None:
        """Save the progress of every run."""
        self._next_note = time.monotonic() + NOTE_SECONDS
        for run in self.runs.values():
            run.settle()
            run.note.save()

    def _serve_project(self, project: str) -> bool:
        runs = [run for run in self.runs.values() if run.project == project]
        batch = list(self._batch(runs))
        if batch:
            self._ship(project, batch)
        moved = bool(batch)
        for run in runs:
            with self._unless_deleted(run):
                if run.path in self.runs:
                    moved = any([run.send_large(self.client), self._end(run), moved])
        return moved

    # Journals

    def _batch(self, runs: list[Following]) -> Iterator[tuple[Tail, Piece]]:
        """Collect about a batch of new data, starting with a different journal each time, so that none starves."""
        tails = [(run, tail) for run in runs for tail in run.tails.values() if tail.look()]
        self._turn += 1
        first, room = self._turn % len(tails) if tails else 0, self.client.room
        for run, tail in tails[first:] + tails[:first]:
            if room <= 0:
                break
            piece = None
            with self._unless_deleted(run):
                piece = self._next(run, tail, room) if run.path in self.runs else None
            if piece is not None:
                room -= len(piece.data)
                yield tail, piece

    def _next(self, run: Following, tail: Tail, room: int) -> Piece | None:
        """Return the next piece of a journal, after sending the small blobs it names."""
        if tail.offset is None:
            tail.offset = self.client.offset(run.project, run.id, tail.name)
        read = tail.read(max(room, 1 << 12)) if tail.look() else None
        if read is None or len(read.data) > room < self.client.room:  # a frame too long for this batch starts a later one
            return None
        if read.blobs:
            run.send_small(self.client, read.blobs)
        return Piece(run.id, tail.name, tail.offset, read.gap, read.data)

    def _ship(self, project: str, batch: list[tuple[Tail, Piece]]) -> None:
        results = self.client.append(project, [piece for _, piece in batch])
        failed = None
        for (tail, piece), result in zip(batch, results, strict=True):
            status, offset = result.status, result.offset
            if status in (200, 409) and offset is not None and (status == 200 or offset != piece.offset):
                tail.offset, tail.hold_until = offset, 0.0
            elif status == 410:
                self._let_go(self.runs.get(tail.path.parent.parent), result.error)
            elif status in (400, 413, 422):
                self._hold(tail, result.error)
            else:
                failed = Unreachable(f"{self.client.url} answers {status}: {result.error}")
        if failed is not None:
            raise failed

    def _hold(self, tail: Tail, why: str) -> None:
        tail.hold_until = time.monotonic() + REFUSED_SECONDS
        notices.once(
            f"refused:{tail.path}",
            f"the gateway refuses {tail.path}: {why} It is kept here and tried again every {REFUSED_SECONDS / 60:.0f} minutes; "
            "everything else continues.",
        )

    # Runs

    def _scan(self) -> None:
        """Scan for new runs and journals, as often as that is cheap."""
        began = time.monotonic()
        if began < self._next_scan:
            return
        self._recover(began)
        for path in directory.run_directories(self.root, self.project):
            with contextlib.suppress(OSError):  # just deleted
                self._look_at(path)
        took = time.monotonic() - began
        self._next_scan = began + min(LONGEST_SCAN, max(self.interval / 2, SCAN_SHARE * took))

    def news(self) -> bool:
        """Scan now and return whether there are runs to forward."""
        self._next_scan = 0.0
        self._scan()
        return bool(self.runs)

    def _recover(self, now: float) -> None:
        """Copy journals that killed processes left in a spool to their run directories."""
        if now >= self._next_recover:
            self._next_recover = now + RECOVER_SECONDS
            with contextlib.suppress(OSError):
                recover(*spool_roots(), runs=self.root)

    def _look_at(self, path: Path) -> None:
        changed = (path / "journal").stat().st_mtime_ns
        if self._settled.get(path) == changed:
            return
        run = self.runs.get(path)
        self.left.discard(path)  # there is something new
        if run is None and self._is_foreign(path):
            self._settled[path] = changed
            return
        if run is None:
            run = self.runs[path] = Following(path, self.client.url)
        if run.changed != changed:
            run.list()

    def _is_foreign(self, path: Path) -> bool:
        """Return whether a run is left out: in a shared directory, another user could write to the gateway with our token."""
        owner = stranger(path, self.root) if os.geteuid() else ""  # root forwards for all users
        if owner:
            notices.once(
                f"foreign:{self.root}",
                f"{path} belongs to another user ({owner}), so it is not forwarded with your token, and neither are others like "
                f"it. Your own runs are. To forward the runs of all users, set FANFOLD_SAFE_DIRECTORY={self.root}.",
            )
        return bool(owner)

    def _end(self, run: Following) -> bool:
        """Stop following a run when every journal is over and every blob has arrived; return whether anything changed."""
        run.settle()
        if run.tails:
            return False
        if not run.note.whole and not run.sweep(self.client):
            return True
        run.note.whole = True
        run.note.save()
        if run.changed < 0 and run.path.exists():  # changed so recently that a new journal could go unnoticed
            return False
        self._settled[run.path] = run.changed
        del self.runs[run.path]
        if self.prune and not prune(run, self.client) and not run.note.whole:
            del self._settled[run.path]
            self._look_at(run.path)
        return True

    # Runs that were deleted at the gateway

    @contextlib.contextmanager
    def _unless_deleted(self, run: Following) -> Iterator[None]:
        """Stop following the run if the gateway replies that it was deleted there."""
        try:
            yield
        except Unreachable as error:
            if error.status != 410:
                raise
            self._let_go(run, str(error))

    def _let_go(self, run: Following | None, why: str) -> None:
        """Stop shipping a run. A journal that is added later makes it try again, and get the same response."""
        if run is None or run.path not in self.runs:  # another journal of the same batch was first
            return
        notices.once(
            f"deleted:{run.path}",
            f"run {run.id} is not forwarded any more: {why} What has not arrived exists only here, in {run.path}. If the run was "
            f"moved there, `fanfold mv {run.project}/{run.id} --project NAME` moves it here, too, and the rest is sent to its "
            f"new project. If it was deleted there, `fanfold rm {run.project}/{run.id}` deletes it with what exists only here.",
        )
        self.left.add(run.path)
        run.note.deleted = True
        run.note.save()
        self._settled[run.path] = run.changed
        del self.runs[run.path]

    # Outages

    def _pause(self, project: str, error: Unreachable) -> None:
        backoff, _ = self._pauses.get(project, (Backoff(), 0.0))
        if self.client.accepted > self._accepted and backoff.failures:
            backoff.failures = 1  # connections break, but data gets through: no reason to wait longer and longer
        self._accepted = self.client.accepted
        seconds = backoff.fail(error.after)
        self._pauses[project] = (backoff, time.monotonic() + seconds)
        if backoff.failures == 1:
            logger.warning(
                "project %s is not forwarded now: %s. Nothing is lost: it waits in %s, and is tried again until it works.",
                project, str(error).rstrip("."), self.root,
                extra={"event": "outage", "project": project, "seconds": round(seconds, 1)},
            )  # fmt: skip

    def _resume(self, project: str) -> None:
        backoff, _ = self._pauses.pop(project, (None, 0.0))
        if backoff is not None:
            logger.info("project %s is forwarded again", project, extra={"event": "resumed", "project": project})


@contextlib.contextmanager
def only_one(root: Path, url: str) -> Iterator[None]:
    """Hold the lock that makes this the only forwarder from `root` to `url`, or raise Taken."""
    folder = home(root)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = open_to_write(folder / f"{digest(url)}.lock")
    try:
        if try_lock(fd) is False:  # without locks there may be two, which is harmless: the gateway stores each byte once
            raise Taken(f"another forwarder serves {root}. Nothing was sent from here. Let it work, or end it first.")
        yield
    finally:
        os.close(fd)


def follow(forwarder: Forwarder, wake: threading.Event, stop: threading.Event, *, idle: float | None = None) -> None:
    """Serve a directory as its only forwarder.

    After an idle exit it scans once more without the lock: a forwarder started meanwhile saw the lock and left.
    """
    while True:
        with only_one(forwarder.root, forwarder.client.url):
            forwarder.serve(wake, stop, idle=idle)
        if stop.is_set() or not forwarder.news():
            return
