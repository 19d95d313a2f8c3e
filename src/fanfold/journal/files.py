"""Safe access to files in a run's directory: regular files only, and never through a link.

A run directory may come from anybody. Opening a pipe blocks until somebody writes to it, a device may do anything, and a link
leads out of the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

_FLAGS: Final = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
HOLES: Final = 1 << 24  # tolerated bytes of holes: they cost little, and may be damage that a gateway left out
_FOLDER: Final = _FLAGS | getattr(os, "O_DIRECTORY", 0)


def open_fd(path: str | Path, *, dir_fd: int | None = None) -> int:
    """Open a regular file for reading and return its descriptor; raise OSError for anything else."""
    fd = os.open(path, _FLAGS, dir_fd=dir_fd)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_regular(path: str | Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading; raise OSError for a link, a pipe, a socket or a device."""
    return os.fdopen(open_fd(path), "rb", buffering)


def open_inside(folder: Path, *names: str) -> BinaryIO:
    """Open a regular file below a folder; no path component below that folder may be a link."""
    if os.open not in os.supports_dir_fd:
        return open_regular(folder.joinpath(*names))
    fd = os.open(folder, _FOLDER & ~getattr(os, "O_NOFOLLOW", 0))
    try:
        for name in names[:-1]:
            below = os.open(name, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = below
        return os.fdopen(open_fd(names[-1], dir_fd=fd), "rb")
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened_folder(folder: Path, name: str) -> Iterator[int]:
    """Open a folder inside another one, created privately if need be, and never through a link; return its descriptor.

    What is done through the descriptor happens in that folder, whatever somebody else puts in its place meanwhile.
    """
    outside = os.open(folder, _FOLDER)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=outside)
        fd = os.open(name, _FOLDER, dir_fd=outside)
    finally:
        os.close(outside)
    try:
        yield fd
    finally:
        os.close(fd)


def create(path: Path) -> BinaryIO:
    """Create a file that only its owner can read, for writing; raise FileExistsError if there is anything at its path."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600), "wb")


def open_to_write(path: Path, flags: int = 0) -> int:
    """Open or create a regular file for writing, never through a link, and return its descriptor."""
    fd = os.open(path, (_FLAGS & ~os.O_RDONLY) | os.O_RDWR | os.O_CREAT | flags, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def is_folder(path: str | Path) -> bool:
    """Return whether there is a folder at a path, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_mostly_holes(path: Path, ratio: int) -> bool:
    """Return whether a file, less `HOLES` bytes, is more than `ratio` times the data written to it, if the filesystem knows."""
    found = os.lstat(path)
    size = found.st_size - HOLES
    if size <= 0 or not stat.S_ISREG(found.st_mode) or not hasattr(os, "SEEK_DATA"):
        return False
    if getattr(found, "st_blocks", size) * 512 * ratio >= size:
        return False
    with open_regular(path) as file:  # some filesystems report no blocks at all: look for the holes
        return _data_bytes(file.fileno(), size // ratio) * ratio < size


def _data_bytes(fd: int, enough: int) -> int:
    """Return how many bytes of a file are not holes; counting stops once there are more than `enough`."""
    end = total = 0
    try:
        while total <= enough:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            total += end - start
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: no more data; anything else: the filesystem does not know
            return enough + 1
    return total


def read_list(path: Path, most: int) -> list[Any]:
    """Return the JSON list in a small file; an empty one if it is missing, torn or something else."""
    import json  # not needed by a first run

    try:
        with open_regular(path) as file:
            found = json.loads(file.read(most))
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def read_text(path: Path) -> str:
    """Read a small text file."""
    with open_regular(path) as file:
        return file.read(1 << 24).decode("utf-8")
