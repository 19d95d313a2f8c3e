"""Who deleted what, who let whom in, and who was turned away: an append-only record that no command of ours rewrites."""

from __future__ import annotations

import fcntl
import getpass
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..errors import SettingError
from ..process import detect

FILE_NAME = ".audit.jsonl"
DELETE, DELETE_FAILED = "run deleted", "deleting failed"
CREATED, REVOKED = "token created", "token revoked"
LOGIN, REFUSED = "login", "login refused"


class Entry(msgspec.Struct, omit_defaults=True):
    """One thing that happened: when, what, by whom, from where, to which run; `detail` says how much."""

    time: float
    action: str
    by: str
    peer: str = ""
    project: str = ""
    run: str = ""
    detail: dict[str, Any] = {}


class Audit(Protocol):
    """Where the record is kept."""

    def write(self, entry: Entry) -> None:
        """Add an entry; when this returns, it is safe. Raise OSError when it cannot be."""

    def read(self, limit: int = 1000) -> list[Entry]:
        """Return the newest entries, oldest first."""


class AuditFile:
    """The record as lines of JSON. Several gateways may share the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, entry: Entry) -> None:
        line = msgspec.json.encode(entry) + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        fd = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # on a network filesystem appending alone does not keep two nodes apart
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # a gateway died in the middle of a line
            _write(fd, b"\n" + line if torn else line)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, limit: int = 1000) -> list[Entry]:
        try:
            with self.path.open("rb") as file:
                lines = deque(file, limit)
        except FileNotFoundError:
            return []
        return [entry for line in lines if (entry := _read(line)) is not None]


def local(action: str, **what: Any) -> Entry:
    """Return an entry about something the user of this machine does from the command line."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        user = str(os.getuid())
    return Entry(time.time(), action, f"{user} on {detect().node}", "command line", detail=what)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(line: bytes) -> Entry | None:
    try:
        return msgspec.json.decode(line, type=Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # torn by a power cut
        return None


def unsafe(error: OSError) -> SettingError:
    """Return the error for a change that is not made because it could not be recorded."""
    return SettingError(
        f"the audit log cannot be written: {error.strerror or error}. Nothing was changed: no change goes unrecorded. "
        "Make room, or mend the store's permissions."
    )
