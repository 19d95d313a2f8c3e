"""One run on its way to a gateway: its journals, the blobs they name, and whether all of it has arrived."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import JournalError, notices
from ..journal import blobs, directory
from ..journal.bodies import Header
from .client import Client, Unreachable
from .forward_journal import TORN_SECONDS, Tail
from .forward_note import Note
from .wire import Conflict

SMALL_BLOB = 4 << 20  # sent before the frames that name it; a larger one is sent after them, slice by slice
SLICE = 8 << 20
ASKED = 1000
SETTLED_NS = 2_000_000_000  # a folder changed more recently than this may change again with the same mtime


class Following:
    """A local run that is being forwarded."""

    def __init__(self, path: Path, url: str) -> None:
        self.path = path
        self.note = Note(path, url)
        self.project = directory.decode_name(path.parent.name)
        self.id = directory.decode_name(path.name)
        self.tails: dict[str, Tail] = {}
        self.changed = -1  # mtime of the journal folder at the last listing; -1: list it again
        self.large: set[str] = set()
        self._unswept: Iterator[list[str]] | None = None

    def list(self) -> None:
        """Start following new journals, except those that the note lists as over."""
        changed = (self.path / "journal").stat().st_mtime_ns
        complete = time.time_ns() - changed > SETTLED_NS
        for file in directory.journal_files(self.path):
            if file.stem not in self.tails and not self.note.is_over(file):
                complete = self._take_up(file) and complete
        self.changed = changed if complete else -1

    def _take_up(self, file: Path) -> bool:
        header = directory.read_header(file)
        if header is None and time.time() - file.stat().st_mtime < TORN_SECONDS:
            return False  # its header is still being written
        try:
            tail = Tail(file, header)
        except JournalError:
            return True  # not named like a journal
        self._learn(header)
        tail.offset = self.note.offsets.get(file.stem)
        self.tails[file.stem] = tail
        self.note.whole, self._unswept = False, None
        return True

    def _learn(self, header: Header | None) -> None:
        """Take project and run id from a header: folder names may be shortened."""
        if header is not None and header.project is not None and header.run is not None:
            self.project, self.id = directory.project_of(self.path, header.project), header.run
            self.note.project = self.project

    # Blobs

    def send_small(self, client: Client, names: set[str]) -> None:
        """Send the small blobs among `names` to the gateway now, and queue the large ones."""
        here = {name: size for name in names if (size := self._size(name)) is not None}
        self.large |= {name for name, size in here.items() if size > SMALL_BLOB}
        small = sorted(name for name, size in here.items() if size <= SMALL_BLOB)
        for some in _chunks(small):
            for name, have in client.missing(self.project, self.id, some).items():
                self._send(client, name, have, SLICE)

    def send_large(self, client: Client) -> bool:
        """Send a slice of one large blob; return whether there was one."""
        if not self.large:
            return False
        name = min(self.large)
        have = client.missing(self.project, self.id, [name]).get(name)
        if have is None or self._send(client, name, have, SLICE):
            self.large.discard(name)
        return True

    def sweep(self, client: Client) -> bool:
        """Check the next chunk of this run's blobs against the gateway; return whether all have been checked and sent."""
        if self._unswept is None:
            self._unswept = _chunks(self._all_blobs())
        some = next(self._unswept, None)
        if some is not None:
            self.send_small(client, set(client.missing(self.project, self.id, some)))
        return some is None and not self.large

    def _all_blobs(self) -> Iterator[str]:
        return blobs.names(self.path)

    def _size(self, name: str) -> int | None:
        try:
            with blobs.opened(self.path, name) as file:
                return os.fstat(file.fileno()).st_size
        except (OSError, JournalError):
            return None

    def _send(self, client: Client, name: str, have: int, most: int) -> bool:
        """Send up to `most` bytes of a blob starting at `have`; return True once it is complete or cannot be sent at all."""
        try:
            return self._send_from(client, name, have, most)
        except OSError as error:
            return self._give_up(name, error)
        except Unreachable as error:
            if error.status == 422 and have:  # the gateway's partial content was wrong and has been discarded: start over
                return self._send(client, name, 0, most)
            if error.status not in (400, 413, 422):
                raise
            return self._give_up(name, error)

    def _send_from(self, client: Client, name: str, have: int, most: int) -> bool:
        with blobs.opened(self.path, name) as file:
            total = os.fstat(file.fileno()).st_size
            end = min(total, have + most)
            while True:
                file.seek(have)
                try:
                    have = client.blob(self.project, self.id, name, offset=have, total=total, data=file.read(client.room))
                except Conflict as conflict:  # another node sends the same content, or a response was lost
                    have = conflict.offset
                if have >= end:
                    return have >= total

    def _give_up(self, name: str, error: Exception) -> bool:
        if not self.path.exists():  # moved or deleted: it is sent from where it is now
            return True
        notices.once(
            f"blob:{self.path}:{name}",
            f"a file of run {self.id} could not be forwarded: {error}. Its points are; this media or artifact ({name[:12]}…) is "
            f"missing at the gateway. It is kept in {self.path}.",
        )
        return True

    # Completion

    @property
    def is_awaited(self) -> bool:
        """Return whether there is more to do: the run may still grow, or something not refused has not arrived."""
        unswept = not self.tails and not self.note.whole
        return unswept or bool(self.large) or any(not tail.hold_until for tail in self.tails.values())

    def is_behind(self, goals: dict[Path, int]) -> bool:
        """Return whether a journal can and must still advance to its goal; a newly seen journal gets its current size as goal."""
        return any(tail.look() and (tail.offset or 0) < goals.setdefault(tail.path, tail.size) for tail in self.tails.values())

    def settle(self) -> None:
        """Stop following journals that are over, and note the offsets of the others."""
        for name, tail in list(self.tails.items()):
            if tail.offset is not None:
                self.note.offsets[name] = tail.offset
                self.note.deleted = False
            if tail.is_over():
                self.note.offsets.pop(name, None)
                self.note.over[name] = tail.size
                del self.tails[name]
                self.note.save()


def _chunks(names: Iterator[str] | list[str]) -> Iterator[list[str]]:
    stream = iter(names)
    while some := list(itertools.islice(stream, ASKED)):
        yield some
