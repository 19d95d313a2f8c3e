"""Atomic replacement of a model file: written next to the old one and renamed over it, by one process at a time.

A kill at any moment leaves either the old or the new file, complete; a process that has the old one mapped keeps it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import FanfoldError
from ..process import digest

WAIT_SECONDS = 300.0
OLD_SECONDS = 86_400.0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` at the end; an error inside leaves `path` unchanged, and nothing behind."""
    aside = path.with_name(f".{path.name}.{_node()}-{os.getpid()}.stamping")
    aside.unlink(missing_ok=True)  # left by a killed process with the same pid
    try:
        # Private until it gets the old file's permissions: others must not be able to read a model even for a moment.
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            yield target
            target.flush()
            before = path.stat()
            os.fchmod(target.fileno(), stat.S_IMODE(before.st_mode))  # by its descriptor: others may replace names in this folder
            with contextlib.suppress(OSError):  # only root can give a file to another user
                os.fchown(target.fileno(), before.st_uid, before.st_gid)
            os.fsync(target.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def copy_rest(source: BinaryIO, at: int, target: BinaryIO) -> None:
    """Append everything in `source` from offset `at` on, in the kernel if possible.

    Filesystems with shared blocks copy nothing, provided both offsets are at the same position within a block.
    """
    import shutil

    target.flush()
    with contextlib.suppress(OSError, AttributeError):  # an operating system or filesystem without support
        while count := os.copy_file_range(source.fileno(), target.fileno(), 1 << 30, at):
            at += count
        target.seek(0, os.SEEK_END)
        return
    source.seek(at)
    target.seek(0, os.SEEK_END)
    shutil.copyfileobj(source, target, 1 << 24)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[BinaryIO]:
    """Yield the open file to one process at a time: every rank of a job may call stamp() on the file that rank 0 saved."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        with path.open("r+b", buffering=0) as file, _locked(file) as ours:
            # Otherwise another process is stamping it, or has replaced it since we opened it.
            if ours is not False and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                _remove_leftovers(path, locked=ours is True)
                yield file
                return
        time.sleep(0.01)
    raise FanfoldError(
        f"{path} could not be stamped: another process has been stamping it for {WAIT_SECONDS:.0f} s. The file was left alone. "
        "Look whether that one hangs, then stamp again."
    )


def _node() -> str:
    return digest(socket.gethostname())[:8]


def _remove_leftovers(path: Path, *, locked: bool) -> None:
    """Remove copies that processes killed while stamping this file left next to it.

    The holder of the lock is the only one stamping the file, but some network filesystems lock only within a node, and
    others not at all. A copy from another node, or without a lock, is removed only if it has not changed for a day.
    """
    name = re.compile(rf"\.{re.escape(path.name)}\.(?P<node>[a-z0-9]+)-\d+\.stamping")
    for aside in path.parent.iterdir():
        made = name.fullmatch(aside.name)
        with contextlib.suppress(OSError):  # already gone, or another user's
            if made and ((locked and made["node"] == _node()) or time.time() - aside.lstat().st_mtime > OLD_SECONDS):
                aside.unlink()


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[bool | None]:
    """Yield whether we have the lock, or None if locks are not supported.

    It is released explicitly: a child forked meanwhile inherits the open file.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    except (ImportError, OSError):  # not POSIX, or a filesystem without locks
        yield None
        return
    try:
        yield True
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
