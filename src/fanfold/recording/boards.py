"""Boards: short notes between the ranks of a job, without a collective. Each key is written once.

One kind uses the process group's store, another a folder on a filesystem that all ranks share.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..process import age


class Board(Protocol):
    """Notes by key, visible to all ranks. Any method may raise if the board cannot be reached."""

    rank: int
    world_size: int
    interval: float  # seconds between checks while idle
    busy_interval: float  # and while the ranks agree

    def create(self, key: str, text: str) -> str:
        """Write a note unless one exists; return the existing one."""
        ...

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the existing notes."""
        ...

    def forget(self, key: str) -> None:
        """Remove a note that nobody needs any more, where that saves anything."""
        ...


class StoreBoard:
    """The key-value store of a torch process group. Requests go to one process, so large jobs ask less often."""

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self._group_store = store
        self._prefix = prefix
        self.rank, self.world_size = rank, world_size
        self.interval = 0.1 * max(1.0, world_size / 128)
        self.busy_interval = 0.01 * max(1.0, world_size / 128)

    @cached_property
    def _store(self) -> Any:
        """A separate connection, since the group uses the other one. Created on first use: connecting may take long."""
        return self._group_store.clone() if hasattr(self._group_store, "clone") else self._group_store

    def create(self, key: str, text: str) -> str:
        return bytes(self._store.compare_set(self._prefix + key, "", text)).decode()

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        if not self._store.check([self._prefix + key for key in keys]):  # get() would wait for a missing key
            keys = [key for key in keys if self._store.check([self._prefix + key])] if len(keys) > 1 else []
        return {key: bytes(self._store.get(self._prefix + key)).decode() for key in keys}

    def forget(self, key: str) -> None:
        """Leave it: it is a few bytes in the memory of one process, and not every store can delete."""


class FolderBoard:
    """A folder that every rank can read and write; each note is a file created atomically.

    An idle rank looks for one file four times a second, while the ranks agree fifty times; beyond 128 and 64 ranks less often, so
    that all of them together ask for at most 512 files a second, and 3,200 for the two seconds of an agreement.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self.rank, self.world_size = rank, world_size
        self.interval = 0.25 * max(1.0, world_size / 128)
        self.busy_interval = 0.02 * max(1.0, world_size / 64)

    def create(self, key: str, text: str) -> str:
        path = self._path(key)
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{self.rank}.{os.getpid()}.tmp")
        aside.write_text(text, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)  # fails if another rank was first, also on a network filesystem
        aside.unlink()
        return path.read_text(encoding="utf-8")

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        found = {}
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                found[key] = self._path(key).read_text(encoding="utf-8")
        return found

    def forget(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")


def store_board(prefix: str) -> StoreBoard | None:
    """Return a board over the user's process group, or None if there is none, or only one rank."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public accessor
    return StoreBoard(store, f"{prefix}/", dist.get_rank(), dist.get_world_size())


def folder_board(name: str, run: Any) -> FolderBoard | None:
    """Return a board in the directory of a run with several ranks, or None if the run has only this process."""
    if run is None or getattr(run, "world_size", 1) == 1 or getattr(run, "path", None) is None:
        return None
    # All ranks have the same key of an attempt, but not always the same number: see launch_key in process.py.
    folder = Path(run.path) / "agreement" / f"{run._member.attempt}-{name}"  # noqa: SLF001 - a part of the run
    with contextlib.suppress(OSError):  # found out again when the first note is written
        _forget_earlier(folder)
    return FolderBoard(folder, run.rank, run.world_size)


def _forget_earlier(folder: Path) -> None:
    """Remove notes that are older than this process: ranks started by hand have the same key when they are started again."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = folder / f".{os.getpid()}-{os.urandom(4).hex()}"
    mark.touch()
    born = mark.stat().st_mtime - age()  # by the clock of the filesystem, which another node may keep
    mark.unlink()
    for note in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another rank does the same
            if note.stat().st_mtime < born:
                note.unlink()
