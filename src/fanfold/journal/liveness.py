"""Is the process that writes a journal alive? Asked of the lock it holds, or of the file's growth."""

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

LOST_SECONDS = 60.0


def is_locked(path: Path) -> bool:
    """Tell whether a process of this kernel holds the lock. Never opens a lock that this process holds itself."""
    if str(path) in writer.held:
        return True
    try:
        fd = open_fd(path)
    except OSError:
        return False
    try:
        return not writer.try_lock(fd, shared=True)
    finally:
        os.close(fd)


def status_of(path: Path, header: Header, *, now: float | None = None) -> str:
    """Judge a journal without an END frame: running, killed, or lost (reversible)."""
    if path.suffix == PACKED:
        return "killed"  # nobody packs what may still be written
    if header.boot == boot_id():
        home = Path(header.spool) / path.name if header.spool else path
        lock = Path(f"{home}.alive")
        if header.spool or lock.exists():  # else a copy, such as a gateway's: it grows where nobody holds a lock
            return "running" if is_locked(lock) else "killed"
    try:
        age = (time.time() if now is None else now) - path.stat().st_mtime
    except OSError:
        return "lost"
    if age <= LOST_SECONDS:
        return "running"
    return "killed" if header.node == (resolve("node") or socket.gethostname()) else "lost"  # rebooted, or away
