"""Files that appear whole or not at all: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)  # some filesystems cannot sync a folder


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Return an unused, hidden name in the folder of `path`; a file under that name is removed at the end."""
    aside = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield aside
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` if the block succeeds. An existing link is replaced, never written through."""
    with beside(path) as aside:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), mode), "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)


def replace_text(path: Path, text: str, *, sync: bool = False, mode: int = 0o666) -> None:
    """Replace a small text file."""
    with replacing(path, sync=sync, mode=mode) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the filesystem can."""
    fd = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(fd)


def sync_folders(folders: Iterable[Path]) -> None:
    """Sync a folder and those above it; the ones above may belong to someone else, and are synced if possible."""
    for folder in folders:
        with contextlib.suppress(OSError):
            sync_folder(folder)
