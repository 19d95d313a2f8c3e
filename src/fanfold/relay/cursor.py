"""How far delivery to a tracker has progressed: a small file beside the run, owned by one relay at a time.

It holds what the tracker has confirmed as stored; a restarted relay continues from there. The file is replaced atomically, so a
kill leaves either the old or the new version. The owner holds a lock and renews a record of itself in the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..errors import RunError
from ..facts.mask import is_secret, mask
from ..journal import writer
from ..journal.files import is_folder, open_to_write, read_text
from ..process import boot_id, digest
from ..settings import resolve

OWNER_SECONDS = 10.0
TAKEOVER_SECONDS = 60.0
_held: set[Path] = set()  # POSIX locks do not exclude threads of one process; this set does


def public(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tracker's arguments without secrets, at any depth: the ones that may appear in a cursor and its name."""
    return {
        key: public(value) if isinstance(value, dict) else value
        for key, value in kwargs.items()
        if isinstance(value, dict) or not ((isinstance(value, str) and is_secret(key)) or mask({key: value}) != {key: value})
    }


def cursor_name(tracker: str, destination: Mapping[str, Any]) -> str:
    """Return a cursor's name from tracker and destination: two projects of one system have two cursors."""
    plain = json.dumps(destination, sort_keys=True, default=str)
    return f"{tracker}-{digest(plain)}" if destination else tracker


class Owned(RunError):
    """Raised when another relay is delivering this cursor."""


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
    partial: int = 0
    restarts: int = 0  # of a relay that died during a run
    folds: dict[str, list[int]] = field(default_factory=dict)
    described: str | None = None
    told: dict[str, str] = field(default_factory=dict)  # digests of the summary and metric definitions already sent
    error: str | None = None
    through: list[str] = field(default_factory=list)  # rank 0's journals that have ended and are fully delivered
    tracker: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    project: str = ""  # the run's project when delivery began; its remote run stays there if the run is moved

    def __post_init__(self) -> None:
        self.owner: dict[str, Any] | None = None
        self._lock_fd = -1
        self._saved: dict[str, Any] = {}
        self._saving = threading.Lock()
        self._released = threading.Event()

    @classmethod
    def load(cls, path: Path) -> Cursor:
        cursor = cls(path)
        cursor.reload()
        return cursor

    def reload(self) -> None:
        """Load the file's current contents."""
        try:
            known = json.loads(read_text(self.path))
        except (OSError, ValueError):
            return
        for name in FIELDS:
            setattr(self, name, known.get(name, getattr(self, name)))
        self.settled = {journal: (int(mark), list(ahead)) for journal, (mark, ahead) in known.get("settled", {}).items()}
        self.owner = known.get("owner")
        self._saved = {name: value for name, value in known.items() if name != "owner"}

    def save(self) -> None:
        """Replace the file with the current state."""
        with self._saving:
            self._saved = {name: getattr(self, name) for name in (*FIELDS, "settled")}
            self._write()

    def _write(self) -> None:
        self.owner = _me() if self._lock_fd >= 0 else None
        # Synced to disk: otherwise a power cut may leave an empty file, and everything would be sent again.
        replace_text(self.path, json.dumps({**self._saved, "owner": self.owner}), sync=True)

    def acquire(self) -> None:
        """Become this cursor's only relay and load its current state, or raise Owned."""
        self.path.parent.mkdir(exist_ok=True, mode=0o700)
        if self.path in _held:
            raise self._owned()
        _held.add(self.path)
        lock = self.path.with_suffix(".lock")
        fd = open_to_write(lock)
        mine, tracker, kwargs = writer.try_lock(fd), self.tracker, self.kwargs
        self.reload()  # under the lock: the previous owner may have progressed since we last read it
        self.tracker, self.kwargs = tracker or self.tracker, kwargs or self.kwargs
        if mine is False or self._kept_from_afar(locks=mine is not None):
            os.close(fd)
            _held.discard(self.path)
            raise self._owned()
        self._lock_fd = fd
        writer.held.add(str(lock))
        self.save()
        self._released.clear()
        threading.Thread(target=self._renew, name="fanfold-owner", daemon=True).start()

    @property
    def owned(self) -> bool:
        return self._lock_fd >= 0

    def _owned(self) -> Owned:
        who = f"process {self.owner['pid']} on {self.owner['node']}" if self.owner else "another relay"
        return Owned(f"{self.path.stem} is being delivered by {who}. Nothing was sent from here. Wait for it, or end it first.")

    def _kept_from_afar(self, *, locks: bool) -> bool:
        """Return whether an owner that our lock may not reach (on another node, or any without locks) is still active.

        Both ages come from the filesystem, so the nodes' clocks need not agree.
        """
        owner = self.owner
        if owner is None or (locks and (owner.get("boot") == boot_id() or owner.get("node") == _node())):
            return False
        lock = self.path.with_suffix(".lock")
        os.utime(lock)
        return lock.stat().st_mtime - self.path.stat().st_mtime < TAKEOVER_SECONDS

    def _renew(self) -> None:
        while not self._released.wait(OWNER_SECONDS):
            with self._saving, contextlib.suppress(OSError):
                if self._lock_fd >= 0 and self._saved:
                    self._write()

    def release(self) -> None:
        """Release the cursor for another relay."""
        self._released.set()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                self.save()
            os.close(fd)
            writer.held.discard(str(self.path.with_suffix(".lock")))
            _held.discard(self.path)


FIELDS = tuple(field.name for field in fields(Cursor) if field.name not in ("path", "settled"))  # as they are in the file


def _node() -> str:
    return str(resolve("node") or socket.gethostname())


def _me() -> dict[str, Any]:
    return {"node": _node(), "boot": boot_id(), "pid": os.getpid(), "beat": time.time()}


def settled(run: Path) -> dict[str, dict[str, int]]:
    """Return how far each destination this run was ever sent to has confirmed each journal.

    The result maps destination (the cursor's name) and journal (its file's stem) to the offset before which everything is
    delivered. Journals that a destination was not served from are missing.
    """
    return {cursor.path.stem: {name: mark for name, (mark, _) in cursor.settled.items()} for cursor in cursors(run)}


def cursors(run: Path) -> list[Cursor]:
    """Return the cursors of every tracker this run was ever sent to."""
    folder = run / "relay"
    return [Cursor.load(path) for path in sorted(folder.glob("*.cursor"))] if is_folder(folder) else []
