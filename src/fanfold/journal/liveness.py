"""Is the process that writes a journal alive? Its lock says so; where locks do not reach, its heartbeats do.

The file's own dates are never asked: a copy, or `touch`, would bring the dead back to life.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from ..process import boot_id
from ..settings import resolve
from . import writer
from .bodies import Header
from .files import open_fd
from .format import PACKED
from .origin import origin_of

LOST_SECONDS = 60.0  # without a sign of life; heartbeats are written every 10


def is_locked(path: Path) -> bool | None:
    """Tell whether a process of this kernel holds the lock; None where the filesystem has no locks.

    Never opens a lock that this process holds itself.
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


def status_of(path: Path, header: Header, *, seen: int, grown: float | None = None, now: float | None = None) -> str:
    """Judge a journal without an END frame: running, killed, or lost (reversible).

    `seen` is the newest time its frames tell (ns), `grown` when this reader last saw it grow (monotonic clock): either is a
    sign of life, so a node whose clock is wrong is alive for whoever watches it.
    """
    if path.suffix == PACKED:
        return "killed"  # nobody packs what may still be written
    if header.boot == boot_id():
        home = origin_of(path, header)
        lock = Path(f"{home or path}.alive")
        if (header.spool and home) or lock.exists():  # else a copy, such as a gateway's: it grows where nobody holds a lock
            locked = is_locked(lock)
            if locked is not None:
                return "running" if locked else "killed"
    if not path.exists():
        return "lost"
    silent = abs((time.time() if now is None else now) - seen / 1e9)
    if silent <= LOST_SECONDS or (grown is not None and time.monotonic() - grown <= LOST_SECONDS):
        return "running"
    return "killed" if header.node == (resolve("node") or socket.gethostname()) else "lost"  # rebooted, or away
