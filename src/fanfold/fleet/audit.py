"""The audit log: runs deleted or moved, tokens and logins, granted or refused. Append-only; no fanfold command rewrites it."""

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
MOVE, MOVE_FAILED, MOVE_REFUSED = "run moved", "moving failed", "moving refused"
CREATED, REVOKED = "token created", "token revoked"
LOGIN, REFUSED = "login", "login refused"


class AuditEntry(msgspec.Struct, omit_defaults=True):
    """One event: when, what, by whom, from where, to which run; `detail` holds further facts, such as how much was deleted."""

    time: float
    action: str
    by: str
    peer: str = ""
    project: str = ""
    run: str = ""
    detail: dict[str, Any] = {}


class Audit(Protocol):
    """Storage for the audit log."""

    def write(self, entry: AuditEntry) -> None:
        """Append an entry, durably once this returns. Raise OSError if it cannot be written."""

    def read(self, limit: int = 1000) -> list[AuditEntry]:
        """Return the newest entries, oldest first."""


class AuditFile:
    """The audit log as lines of JSON. Several gateways may share the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, entry: AuditEntry) -> None:
        line = msgspec.json.encode(entry) + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        fd = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # on a network filesystem, nodes appending at once may overwrite each other
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # a gateway died in the middle of a line
            _write(fd, b"\n" + line if torn else line)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, limit: int = 1000) -> list[AuditEntry]:
        try:
            with self.path.open("rb") as file:
                lines = deque(file, limit)
        except FileNotFoundError:
            return []
        return [entry for line in lines if (entry := _read(line)) is not None]


def local(action: str, **what: Any) -> AuditEntry:
    """Return an entry for an action taken from the command line of this machine."""
    return AuditEntry(time.time(), action, local_user(), "command line", detail=what)


def local_user() -> str:
    """Return who runs this process, and where."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container whose user id has no name
        user = str(os.getuid())
    return f"{user} on {detect().node}"


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(line: bytes) -> AuditEntry | None:
    try:
        return msgspec.json.decode(line, type=AuditEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # cut off by a power failure
        return None


def unsafe(error: OSError) -> SettingError:
    """Return the error for a change that was not made because it could not be recorded."""
    return SettingError(
        f"the audit log cannot be written: {error.strerror or error}. Nothing was changed: no change goes unrecorded. "
        "Make room, or mend the store's permissions."
    )
