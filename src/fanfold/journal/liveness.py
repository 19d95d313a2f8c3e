"""Whether the process that writes a journal is alive: judged by its lock, or by its heartbeats where locks do not work.

File timestamps are never used: a copy or `touch` would make a dead process look alive.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..process import boot_id
from ..settings import resolve
from . import writer
from .files import open_fd
from .format import PACKED
from .origin import origin_of

if TYPE_CHECKING:
    from .bodies import Header

LOST_SECONDS = 60.0  # without a sign of life; heartbeats come every 10


def is_locked(path: Path) -> bool | None:
    """Return whether a process of this kernel holds the lock; None if the filesystem has no locks.

    Never opens a lock that this process itself holds.
    """
    if str(path) in writer.held:
        return True
    try:
        fd = open_fd(path)
    except OSError:
        return False
    try:
        free = writer.try_lock(fd, shared=True)
        return None if free is None else not free
    finally:
        os.close(fd)


def status_of(path: Path, header: Header, *, seen: int, grown: float | None = None) -> str:
    """Return the status of a journal without an END frame: running, killed, or lost (reversible).

    `seen` is the newest time in its frames (ns), `grown` when this reader last saw it grow (monotonic clock). Either is a sign
    of life, so that a node with a wrong clock still counts as alive while it is watched.
    """
    if path.suffix == PACKED:
        return "killed"  # journals are packed only when nothing writes to them any more
    if header.boot == boot_id():
        home = origin_of(path, header)
        lock = Path(f"{home or path}.alive")
        if (header.spool and home) or lock.exists():  # otherwise a copy, for example a gateway's, which grows without a lock
            locked = is_locked(lock)
            if locked is not None:
                return "running" if locked else "killed"
    if not path.exists():
        return "lost"
    silent = abs(time.time() - seen / 1e9)
    if silent <= LOST_SECONDS or (grown is not None and time.monotonic() - grown <= LOST_SECONDS):
        return "running"
    return "killed" if header.node == (resolve("node") or platform.node()) else "lost"  # rebooted, or unreachable
