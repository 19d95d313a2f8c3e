"""Write a model file anew where it cannot be stamped in place: beside itself, then in its place when it is whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def anew(path: Path) -> Iterator[BinaryIO]:
    """Yield the file that takes the place of `path` at the end; an error inside leaves `path` as it was, and nothing else."""
    import shutil

    aside = path.with_name(f".{path.name}.{os.getpid()}.stamping")
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


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time stamp a file: every rank of a job may call stamp() on the one that rank 0 saved."""
    while True:
        with path.open("r+b") as file:
            with contextlib.suppress(ImportError, OSError):  # not POSIX, or a filesystem without locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else it was written anew while we waited
                yield
                return
