"""A gateway's storage for incoming data: ordinary run directories, so that every reader works on them unchanged.

A journal's offset is where its last whole frame ends: there is no second file that could disagree. Several gateways may
share one directory; appending takes the file's lock, and a partial write left by a kill is overwritten by the next attempt.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from ..atomic import replace_text, sync_folders
from ..errors import FanfoldError, JournalError, RunError
from ..journal import blobs, directory, packed, requests
from ..journal import format as fmt
from ..journal.bodies import Header, NewerFormat, decode
from ..journal.files import HOLES, open_regular
from ..journal.packing import restore
from ..journal.requests import JobRequest
from ..store.changes import check_place
from ..store.changes import delete as delete_run
from ..store.departed import BACK, MOST_RECORD, TO, record_file, record_of
from ..store.move import check_move, move
from ..store.run import StoredRun
from .frames import sound_until, whole_end
from .wire import MAX_GAP, Conflict, Gone, Piece, Rejected, checked_journal, checked_name

REMEMBERED = 20_000
THREADS = 32  # that write: most of the time they wait for the disk
GAP_FREE = HOLES  # damaged bytes allowed in any journal: readers refuse files with more holes
GAP_RATIO = 4  # beyond that, a journal may be at most this many times as long as the bytes sent for it
STALE_PART_SECONDS = 7 * 86400.0
_ZEROS = bytes(1 << 20)
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
_PART = ".part-"


Result = int | FanfoldError | OSError


class Intake(Protocol):
    """The storage a gateway needs. Every call may be repeated: offsets make that harmless.

    For a run that was deleted or moved away, what stores or moves data raises Gone; `append_all` returns it in its results.
    """

    def offset(self, project: str, run: str, journal: str) -> int:
        """Return how many bytes of a journal are stored."""

    def append(self, project: str, piece: Piece) -> int:
        """Store a piece and return the new offset; raise Conflict if its offset does not match, Refused if it is not sound."""

    def append_all(self, project: str, pieces: Sequence[Piece]) -> Future[list[Result]]:
        """Start storing pieces, without waiting; the future holds, for each, its new offset or what kept it from being stored."""

    def missing(self, project: str, run: str, names: list[str]) -> dict[str, int]:
        """Return which blobs are not stored completely, and how much of each is."""

    def blob(self, project: str, run: str, name: str, *, offset: int, total: int, data: bytes) -> int:
        """Store a piece of a blob and return the new offset; at `total`, its content must match its name."""

    def deleted(self, project: str, run: str) -> bool:
        """Return whether a run was deleted here."""

    def delete(self, project: str, run: str, by: str) -> None:
        """Delete a run and remember that permanently: the record of the deletion is on disk before any data is deleted.

        For a run that was moved away, raise Gone.
        """

    def movable(self, project: str, run: str, target: str) -> None:
        """Raise what move() would raise: the run is gone, or cannot go to that project. Nothing is changed."""

    def move(self, project: str, run: str, target: str, by: str) -> None:
        """Move a run that has ended to another project, and refuse what is sent for it to the old one from then on.

        If it is interrupted, the run is whole in one of them, and the same call completes it. A run may return to a project
        that it has left.
        """

    def ask(self, project: str, run: str, request: JobRequest) -> None:
        """Keep a request to the job of a run until its forwarder fetches it."""

    def asked(self, project: str, runs: Sequence[str]) -> list[tuple[str, JobRequest]]:
        """Return the requests that wait for the jobs of some runs, each with its run."""

    def fetched(self, project: str, run: str, id: str) -> None:
        """Forget a request: it has been passed on."""

    def check(self) -> None:
        """Raise OSError when nothing can be stored."""


class DirectoryIntake:
    """An intake over a directory of runs. With `power`, data is on disk before it is acknowledged, so it survives a power cut."""

    def __init__(self, root: Path, *, power: bool = True, max_blob: int = 64 << 30) -> None:
        self.root = root
        self.power = power
        self.max_blob = max_blob
        self._whole: OrderedDict[Path, tuple[int, int]] = OrderedDict()  # inode, size of journals that end with a whole frame
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, "fanfold-intake")
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    # Journals

    def offset(self, project: str, run: str, journal: str) -> int:
        path, seed = self._journal(project, run, journal)
        self._check_there(project, run)
        with contextlib.suppress(FileNotFoundError), _locked(path) as fd:
            return self._end(fd, path, seed)
        return self._packed_end(path, seed)

    def append(self, project: str, piece: Piece) -> int:
        path, seed = self._journal(project, piece.run, piece.journal)
        if piece.offset < 0 or not 0 <= piece.gap <= MAX_GAP:
            raise Rejected(400, "an offset or gap is out of range. Nothing was stored.")
        self._check_there(project, piece.run)
        _check_frames(piece, seed)
        if piece.offset == 0:
            _make_folders(path)
        self._unpack_to_grow(path, seed, piece)
        try:
            with _locked(path, create=piece.offset == 0) as fd:
                self._check_still_there(project, piece.run, path)
                return self._append(fd, path, piece, self._end(fd, path, seed))
        except FileNotFoundError as error:
            raise Conflict(0) from error

    def append_all(self, project: str, pieces: Sequence[Piece]) -> Future[list[Result]]:
        return self._threads.submit(lambda: [self._outcome(project, piece) for piece in pieces])

    def _outcome(self, project: str, piece: Piece) -> Result:
        try:
            return self.append(project, piece)
        except (FanfoldError, OSError) as error:
            return error

    def _journal(self, project: str, run: str, journal: str) -> tuple[Path, int]:
        folder = self._run(project, run)
        _check_no_link(folder, folder / "journal")
        _, journal_id = checked_journal(journal)
        return folder / "journal" / f"{journal}{fmt.SUFFIX}", fmt.seed_of(journal_id)

    def _run(self, project: str, run: str) -> Path:
        return directory.run_path(self.root, checked_name("project", project), checked_name("run", run))

    def _end(self, fd: int, path: Path, seed: int) -> int:
        """Return where the last whole frame ends; for a file known to be whole, that is its size."""
        found = os.fstat(fd)
        with self._lock:
            known = self._whole.get(path) == (found.st_ino, found.st_size)
        if known or not found.st_size:
            return found.st_size
        with _readable():
            return whole_end(fd, path, found.st_size, seed)

    def _packed_end(self, path: Path, seed: int) -> int:
        """Return where the last whole frame of a packed journal ends; 0 if there is none."""
        there = packed.present(path)
        if there == path or there.is_symlink():
            return 0
        with _readable(), open_regular(packed.readable(there)) as file:
            return whole_end(file.fileno(), there, os.fstat(file.fileno()).st_size, seed)

    def _unpack_to_grow(self, path: Path, seed: int, piece: Piece) -> None:
        """Unpack a packed journal if more data arrives for it, such as values logged by an exit handler."""
        have = self._packed_end(path, seed)
        if have and have != piece.offset:
            raise Conflict(have)
        if have:
            with _readable():
                restore(packed.present(path))

    def _append(self, fd: int, path: Path, piece: Piece, have: int) -> int:
        if have != piece.offset:
            raise Conflict(have)
        place = have + piece.gap
        if piece.gap:
            found = os.fstat(fd)
            check_gap(piece, min(found.st_size, found.st_blocks * 512))  # holes take no blocks
        _blank(fd, have, min(place, os.fstat(fd).st_size))
        _write(fd, piece.data, place)
        if self.power:
            os.fdatasync(fd)
            if not have:
                sync_folders(path.parents[:4])
        self._remember(fd, path, place + len(piece.data))
        return place + len(piece.data)

    def _remember(self, fd: int, path: Path, end: int) -> None:
        found = os.fstat(fd)
        with self._lock:
            self._whole.pop(path, None)
            if found.st_size == end:
                self._whole[path] = (found.st_ino, end)
            while len(self._whole) > REMEMBERED:
                self._whole.popitem(last=False)

    # Blobs

    def missing(self, project: str, run: str, names: list[str]) -> dict[str, int]:
        folder = self._run(project, run)
        self._check_there(project, run)
        return {name: _size(_part(folder, name)) for name in names if not blobs.is_here(folder, _blob_path(folder, name).name)}

    def blob(self, project: str, run: str, name: str, *, offset: int, total: int, data: bytes) -> int:
        folder = self._run(project, run)
        final, part = _blob_path(folder, name), _part(folder, name)
        _check_no_link(folder, folder / "blobs", final.parent)
        check_blob(offset, total, data, self.max_blob)
        self._check_there(project, run)
        if blobs.is_here(folder, name):
            return total
        self._make_room(part)
        with _locked(part, create=True) as fd:
            self._check_still_there(project, run, part)
            if blobs.is_here(folder, name):
                part.unlink(missing_ok=True)  # another request completed it first
                return total
            have = os.fstat(fd).st_size
            if have != offset:
                raise Conflict(have)
            _write(fd, data, have)
            if have + len(data) == total:
                self._complete(fd, part, final)
        return offset + len(data)

    def _make_room(self, part: Path) -> None:
        """Create the folder; when a new partial file is started, remove abandoned ones."""
        _make_folders(part)
        if not part.exists():
            for old in part.parent.glob(f"{_PART}*"):
                if time.time() - old.lstat().st_mtime > STALE_PART_SECONDS:
                    old.unlink(missing_ok=True)

    def _complete(self, fd: int, part: Path, final: Path) -> None:
        digest = hashlib.sha256()
        at = 0
        while chunk := os.pread(fd, 1 << 20, at):
            digest.update(chunk)
            at += len(chunk)
        if digest.hexdigest() != final.name:
            part.unlink()
            raise Rejected(422, f"the content does not match its name {final.name}. It was not stored. Send it again.")
        if self.power:
            os.fsync(fd)
        final.parent.mkdir(exist_ok=True, mode=0o700)
        part.replace(final)

    # Deleted and moved runs: of each, a record next to the projects

    def deleted(self, project: str, run: str) -> bool:
        known = self._record(project, run)
        return known is not None and not (BACK in known and self._run(project, run).exists())

    def delete(self, project: str, run: str, by: str) -> None:
        path, stone = self._run(project, run), self._tombstone(project, run)
        if path.exists():
            check_place(path, self.root)
        _make_folders(stone)
        with _locked(stone, create=True) as fd:
            known = self._record(project, run)
            if known and TO in known and not path.exists():  # another gateway moved it meanwhile: it stays what it is
                raise Gone(project, run)
            if not known or TO in known:
                _write_record(fd, _record_of(project, run, by))
            sync_folders(stone.parents[:4])
            if path.exists():
                delete_run(StoredRun(path))

    def movable(self, project: str, run: str, target: str) -> None:
        self._checked_move(project, run, target)

    def move(self, project: str, run: str, target: str, by: str) -> None:
        """Record the move, then rename the folder: whatever is sent after the record is refused, so nothing is left behind."""
        self._checked_move(project, run, target)
        stone = self._tombstone(project, run)
        _make_folders(stone)
        with _locked(stone, create=True) as fd:
            stored = self._checked_move(project, run, target)  # again: another request may have moved it meanwhile
            returns = self._expect_back(target, run)
            before = os.pread(fd, MOST_RECORD, 0)
            try:
                _write_record(fd, {**_record_of(project, run, by), TO: target})
                sync_folders(stone.parents[:4])
                (there,) = move([stored], self.root, target)
            except (FanfoldError, OSError):
                with contextlib.suppress(OSError):  # then it counts as begun, and the same call completes it
                    _write_record(fd, before) if before else stone.unlink()
                raise
            if self.power:
                sync_folders([there.parent, stored.path.parent])
            with contextlib.suppress(OSError):
                returns.unlink(missing_ok=True)

    def _checked_move(self, project: str, run: str, target: str) -> StoredRun:
        path, there = self._run(project, run), self._run(target, run)
        known = self._record(project, run)
        if known is not None and not ((TO in known or not known) and path.exists()):  # a move that has begun may go on
            raise Gone(project, run)
        _check_no_link(path)
        if not path.exists():
            raise RunError(f"run {run} is not in project {project} any more. Nothing was moved. Another request moved it.")
        if os.path.lexists(there):
            raise RunError(f"project {target} has another run {run} already. Nothing was moved. Choose another project.")
        if self._record(target, run) is not None and not self._has_left(target, run, project):
            raise RunError(
                f"a run {run} was deleted in project {target}, or moved from there. Nothing was moved: what its nodes still send "
                "would be mixed with this run. Choose another project."
            )
        stored = StoredRun(path)
        check_move([stored], self.root, target)
        return stored

    def _has_left(self, old: str, run: str, now: str) -> bool:
        """Return whether the run that was in project `old` is the one that is in `now`, perhaps by way of others."""
        seen: list[Any] = []
        while old != now:
            to = (self._record(old, run) or {}).get(TO)
            if old in seen or not isinstance(to, str):
                return False
            seen.append(old)
            old = to
        return True

    def _expect_back(self, project: str, run: str) -> Path:
        """Note in the record of a run that has left a project that it comes back: it counts until the folder is there."""
        stone, known = self._tombstone(project, run), self._record(project, run)
        if known is not None:
            replace_text(stone, json.dumps({**known, BACK: True}), sync=True, mode=0o600)
        return stone

    def _tombstone(self, project: str, run: str) -> Path:
        return record_file(self.root, checked_name("project", project), checked_name("run", run))

    def _record(self, project: str, run: str) -> dict[str, Any] | None:
        return record_of(self.root, checked_name("project", project), checked_name("run", run))

    def _check_there(self, project: str, run: str) -> None:
        if self.deleted(project, run):
            raise Gone(project, run)

    def _check_still_there(self, project: str, run: str, path: Path) -> None:
        """Check again with the file locked: otherwise this write could bring back a run that was just deleted."""
        if self.deleted(project, run):
            path.unlink(missing_ok=True)
            for folder in path.parents[:2]:
                with contextlib.suppress(OSError):  # not empty: the other writer finds the deletion record, too
                    folder.rmdir()
            raise Gone(project, run)

    # Requests to jobs wait in their runs' directories, as they do where a job runs

    def ask(self, project: str, run: str, request: JobRequest) -> None:
        folder = self._run(project, run)
        _check_no_link(folder)
        self._check_there(project, run)
        for old in requests.waiting(folder):
            if old.expires <= time.time():
                requests.withdraw(folder, old.id)
        requests.leave(folder, request)

    def asked(self, project: str, runs: Sequence[str]) -> list[tuple[str, JobRequest]]:
        found = [(run, request) for run in runs for request in requests.waiting(self._run(project, run))]
        return [(run, request) for run, request in found if request.expires > time.time()]

    def fetched(self, project: str, run: str, id: str) -> None:
        requests.withdraw(self._run(project, run), requests.checked_id(id))

    def check(self) -> None:
        probe = self.root / f".ready-{os.getpid()}-{threading.get_ident()}"
        with probe.open("wb") as file:
            file.write(b"x")
        probe.unlink()


def _check_no_link(run: Path, *inside: Path) -> None:
    """Refuse to write through a symlink, which a run copied into the store may contain."""
    for folder in (run.parent, run, *inside):
        if directory.is_link(folder):
            raise Rejected(
                422, f"{folder.name} is a link in the gateway's store. Nothing was stored. Its administrator can remove it."
            )


def _check_frames(piece: Piece, seed: int) -> None:
    """Refuse anything but whole, sound frames; a header must name the journal it was sent for."""
    first = piece.offset == 0 and piece.gap == 0
    end = sound_until(piece.data, seed, first=first)
    if not piece.data or end != len(piece.data):
        raise Rejected(
            422,
            f"the bytes at {piece.offset + piece.gap + end} are not whole, sound frames of {piece.journal}. Nothing was stored.",
        )
    if first:
        length = int.from_bytes(piece.data[4:8], "little")
        check_header(piece, piece.data[fmt.HEAD_SIZE : fmt.HEAD_SIZE + length])


def check_blob(offset: int, total: int, data: bytes, limit: int) -> None:
    """Refuse a piece that is not inside its blob, or a blob that is too large."""
    if not 0 <= offset <= offset + len(data) <= total:
        raise Rejected(400, "a blob's piece is out of range. Nothing was stored.")
    if total > limit:
        raise Rejected(413, f"a blob of {total} bytes is over this gateway's limit of {limit}. It was not stored.")


def check_gap(piece: Piece, sent: int) -> None:
    """Refuse a gap out of proportion to the bytes sent: it costs the sender nothing, but readers its whole length."""
    end = piece.offset + piece.gap
    if end > GAP_RATIO * sent + GAP_FREE:
        raise Rejected(
            422,
            f"{piece.gap} damaged bytes before {end} of {piece.journal} are too many for the {sent} bytes that came of it. "
            "Nothing was stored. The journal is whole where it was written.",
        )


def check_header(piece: Piece, body: bytes) -> None:
    rank, journal_id = checked_journal(piece.journal)
    try:
        header = decode(fmt.Kind.HEADER, body) if len(body) <= directory.MAX_HEADER else None
    except NewerFormat as error:
        raise Rejected(
            422, f"{piece.journal} is of a format this gateway cannot read. Nothing was stored. Upgrade the gateway first."
        ) from error
    except JournalError:
        header = None
    # Not its project: a run may have been moved or copied since it began, and belongs to the project it is sent for.
    named = (header.run, header.rank, header.journal) if isinstance(header, Header) else None
    if named != (piece.run, rank, journal_id):
        raise Rejected(422, f"the header of {piece.journal} is about another journal. Nothing was stored.")


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except JournalError as error:
        raise Rejected(422, f"the journal that is here cannot be read: {error}. Nothing was added to it.") from error


@contextlib.contextmanager
def _locked(path: Path, *, create: bool = False) -> Iterator[int]:
    """Open a file and hold its lock. The lock belongs to the descriptor, so it also works between threads of one process."""
    while True:
        fd = os.open(path, _OPEN | (os.O_CREAT if create else 0), 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, path):
                yield fd
                return
        finally:
            os.close(fd)
        if not create:
            raise FileNotFoundError(path)


def _is_at(fd: int, path: Path) -> bool:
    """Return whether the file is still at `path`: it may have been renamed or deleted while we waited for the lock."""
    try:
        return os.fstat(fd).st_ino == path.lstat().st_ino
    except FileNotFoundError:
        return False


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def _record_of(project: str, run: str, by: str) -> dict[str, Any]:
    return {"project": project, "run": run, "by": by, "time": time.time()}


def _write_record(fd: int, record: dict[str, Any] | bytes) -> None:
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    os.ftruncate(fd, 0)
    _write(fd, data, 0)
    os.fsync(fd)


def _blank(fd: int, start: int, end: int) -> None:
    """Zero the bytes that a partial write left behind; beyond the end of the file, a hole already reads as zeros."""
    while start < end:
        start += os.pwrite(fd, memoryview(_ZEROS)[: end - start], start)


def _make_folders(path: Path) -> None:
    """Create the project, the run and the folder inside it, each private to the user."""
    for folder in reversed(path.parents[:3]):
        folder.mkdir(exist_ok=True, mode=0o700)


def _blob_path(run: Path, name: str) -> Path:
    try:
        return blobs.path_of(run, name)
    except (JournalError, TypeError) as error:
        raise Rejected(400, f"{error}. Nothing was stored.") from error


def _part(run: Path, name: str) -> Path:
    return run / "blobs" / f"{_PART}{name}"


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
