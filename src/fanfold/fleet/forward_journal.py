"""One journal on its way to a gateway: read from where the gateway is, in whole frames, a batch at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from ..errors import JournalError, notices
from ..journal import Kind, packed
from ..journal import format as fmt
from ..journal.bodies import Header
from ..journal.files import open_regular
from ..journal.format import HEAD_SIZE
from ..journal.liveness import LOST_SECONDS, is_locked
from ..journal.origin import origin_of
from ..process import boot_id
from .frames import blobs_in, length_at, next_whole, walk
from .wire import BATCH

TORN_SECONDS = 5.0  # an incomplete frame at the end of a file as young as this is still being written
FORGOTTEN_SECONDS = 86400.0


class Read(NamedTuple):
    """The next part of a journal: how many damaged bytes to skip, then whole frames, and the blobs they may name."""

    gap: int
    data: bytes
    blobs: set[str]


class Tail:
    """How much of one journal is shipped, and whether more can follow."""

    def __init__(self, path: Path, header: Header | None) -> None:
        self.path = path
        self.name = path.stem
        self.header = header
        self.seed = fmt.seed_of(fmt.check_id(self.name.rpartition("-")[2]))
        self.offset: int | None = None  # what the gateway has; None: not asked yet
        self.size = 0
        self.hold_until = 0.0  # the gateway refused it: retried much later
        self._last = 0
        self._stuck = (-1, -1)  # offset and size at which nothing whole was found

    def look(self) -> bool:
        """Refresh the size and return whether there may be something to ship."""
        self.path = packed.present(self.path)
        try:
            self.size = packed.raw_size(self.path)
        except OSError:
            return False
        if self.hold_until > time.monotonic():
            return False
        return self.offset is None or (self.offset < self.size and self._stuck != (self.offset, self.size))

    def read(self, limit: int = BATCH) -> Read | None:
        """Read about `limit` bytes of whole frames at the offset, or one longer frame; return None if none is whole yet."""
        at = offset = self.offset or 0
        try:
            with open_regular(packed.readable(self.path), buffering=0) as file:
                read = self._read_at(file.fileno(), at, limit)
                if read is None and self._is_young(file.fileno(), at):
                    return None
                if read is None:
                    at = next_whole(self.path, offset) or offset
                    read = self._read_at(file.fileno(), at, limit) if at > offset else None
        except OSError:
            return None
        except JournalError as error:  # a damaged packed journal
            notices.once(f"packed:{self.path}", str(error))
            read = None
        if read is None:
            self._stuck = (offset, self.size)
            return None
        return Read(at - offset, *read)

    def _read_at(self, fd: int, at: int, limit: int) -> tuple[bytes, set[str]] | None:
        data = os.pread(fd, limit, at)
        walked = walk(data, self.seed, first=at == 0)
        length = length_at(data[:HEAD_SIZE])
        if not walked.end and length is not None and length > len(data):
            data = os.pread(fd, length, at)
            walked = walk(data, self.seed, first=at == 0)
        self._last = walked.last
        return (data[: walked.end], blobs_in(data, walked)) if walked.end else None

    def _is_young(self, fd: int, at: int) -> bool:
        """Return whether a frame is still being written, not damaged: the end of the file cuts it off, and the file is young."""
        size = os.fstat(fd).st_size
        length = length_at(os.pread(fd, HEAD_SIZE, at))
        short = at + HEAD_SIZE > size or (length is not None and at + length > size)
        return short and time.time() - os.fstat(fd).st_mtime < TORN_SECONDS

    def is_over(self) -> bool:
        """Return whether the writer has exited and everything it wrote is shipped."""
        if not packed.present(self.path).exists():
            return True
        gone = self._is_gone()  # checked first, so that the size read below includes everything it wrote
        return gone and self.offset is not None and self.hold_until == 0.0 and not self.look() and not self._is_torn()

    def _is_torn(self) -> bool:
        """Return whether there are bytes after the offset that were not examined yet."""
        return self.offset is not None and self.offset < self.size and self._stuck != (self.offset, self.size)

    def _is_gone(self) -> bool:
        if self.path.suffix == fmt.PACKED:
            return True
        locked = self._is_locked() if self.header is not None and self.header.boot == boot_id() else None
        if locked is not None:
            return not locked and self._is_home()
        age = time.time() - self.path.stat().st_mtime  # another node's process, or a filesystem without locks
        return age > (LOST_SECONDS if self._last == Kind.END else FORGOTTEN_SECONDS)

    @property
    def _origin(self) -> Path | None:
        """Where the process writes this journal; None if that is another user's spool."""
        return origin_of(self.path, self.header) if self.header else self.path

    def _is_locked(self) -> bool | None:
        """Return whether a process on this node is still writing the journal; None if there is no lock to tell."""
        origin = self._origin
        return is_locked(Path(f"{origin}.alive")) if origin is not None else None

    def _is_home(self) -> bool:
        """Return whether its spool, if any, was copied here completely."""
        origin = self._origin
        return origin is None or origin == self.path or not origin.exists() or origin.stat().st_size <= self.size
