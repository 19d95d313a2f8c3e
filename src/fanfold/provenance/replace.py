"""Replace a model file: written beside the old one and renamed over it, by one process at a time.

A kill at any moment leaves the old file or the new one, both whole; a model that was loaded from the old one keeps it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
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
    """Yield a new file that replaces `path` at the end; an error inside leaves `path` as it was, and nothing else."""
    import shutil

    aside = path.with_name(f".{path.name}.{_node()}-{os.getpid()}.stamping")
    aside.unlink(missing_ok=True)  # of a process of the same number that was killed
    try:
        # Private until it has the rights of the one it replaces: a model is not to be read by others for a moment either.
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        shutil.copymode(path, aside)
        owner = path.stat()
        with contextlib.suppress(OSError):  # another's file can be given back by root alone
            os.chown(aside, owner.st_uid, owner.st_gid)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def copy_rest(source: BinaryIO, at: int, target: BinaryIO) -> None:
    """Append everything from a byte of `source` on, in the kernel where it can.

    Filesystems that share blocks between files copy nothing, provided both places are equally far into a block.
    """
    import shutil

    target.flush()
    with contextlib.suppress(OSError, AttributeError):  # another system, or a filesystem that cannot
        while count := os.copy_file_range(source.fileno(), target.fileno(), 1 << 30, at):
            at += count
        target.seek(0, os.SEEK_END)
        return
    source.seek(at)
    target.seek(0, os.SEEK_END)
    shutil.copyfileobj(source, target, 1 << 24)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[BinaryIO]:
    """Yield the open file to one process at a time: every rank of a job may call stamp() on the one that rank 0 saved."""
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
    """Remove the copies that killed stamps of this file left beside it.

    Who has the lock is the only one who stamps the file, but some network filesystems keep locks on one node only, and others
    have none. A copy that may be another node's, or that no lock protects, is removed when it has not changed for a day.
    """
    name = re.compile(rf"\.{re.escape(path.name)}\.(?P<node>[a-z0-9]+)-\d+\.stamping")
    for aside in path.parent.iterdir():
        made = name.fullmatch(aside.name)
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if made and ((locked and made["node"] == _node()) or time.time() - aside.lstat().st_mtime > OLD_SECONDS):
                aside.unlink()


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[bool | None]:
    """Yield whether we have the lock, or None where there are no locks.

    It is released explicitly: a child forked meanwhile has the file open, too.
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
