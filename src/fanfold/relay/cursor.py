"""How far a tracker has been served: a small file beside the run, owned by one relay at a time.

*sent* is what was handed to the tracker, *settled* what its barrier confirmed. A relay that starts again goes from
settled. The file is replaced whole, so a kill leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..journal.writer import try_lock
from ..process import boot_id, digest
from ..settings import resolve

OWNER_SECONDS = 10.0
TAKEOVER_SECONDS = 60.0


def cursor_name(tracker: str, destination: dict[str, Any]) -> str:
    """Name a cursor by tracker and destination: two projects of one system are two cursors."""
    plain = json.dumps(destination, sort_keys=True, default=str)
    return f"{tracker}-{digest(plain)}" if destination else tracker


class Owned(RunError):
    """Another relay delivers this cursor now."""


@dataclass
class Cursor:
    """One tracker's progress through one run."""

    path: Path
    settled: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    remote: str | None = None
    closed: str | None = None
    delivered: int = 0
    refused: int = 0
    error: str | None = None
    tracker: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    artifacts: int = 0

    def __post_init__(self) -> None:
        self._lock_fd = -1
        self._owner: dict[str, Any] | None = None

    @classmethod
    def load(cls, path: Path) -> Cursor:
        cursor = cls(path)
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cursor
        for name in ("counts", "remote", "closed", "delivered", "refused", "error", "tracker", "kwargs", "artifacts"):
            setattr(cursor, name, known.get(name, getattr(cursor, name)))
        cursor.settled = {journal: (int(mark), list(ahead)) for journal, (mark, ahead) in known.get("settled", {}).items()}
        cursor._owner = known.get("owner")
        return cursor

    def save(self) -> None:
        """Replace the file by what is known now."""
        known = {
            "settled": self.settled,
            "counts": self.counts,
            "remote": self.remote,
            "closed": self.closed,
            "delivered": self.delivered,
            "refused": self.refused,
            "error": self.error,
            "tracker": self.tracker,
            "kwargs": self.kwargs,
            "artifacts": self.artifacts,
            "owner": _me() if self._lock_fd >= 0 else None,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = self.path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps(known), encoding="utf-8")
        aside.replace(self.path)

    def acquire(self) -> None:
        """Become the one relay of this cursor, or raise Owned."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        owner = self._owner
        away = owner is not None and owner.get("boot") != boot_id() and time.time() - owner.get("beat", 0) < TAKEOVER_SECONDS
        if away or not try_lock(fd):
            os.close(fd)
            who = f"process {owner['pid']} on {owner['node']}" if owner else "another process"
            raise Owned(
                f"{self.path.stem} is being delivered by {who}. Nothing was sent from here. Wait for it, or end it first."
            )
        self._lock_fd = fd

    def release(self) -> None:
        """Let another relay have it."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                self.save()
            os.close(fd)


def _me() -> dict[str, Any]:
    return {"node": resolve("node") or socket.gethostname(), "boot": boot_id(), "pid": os.getpid(), "beat": time.time()}


def cursors(run: Path) -> list[Cursor]:
    """Return what is known of every tracker this run was ever sent to."""
    return [Cursor.load(path) for path in sorted((run / "relay").glob("*.cursor"))]
