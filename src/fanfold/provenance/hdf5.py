"""HDF5, also as Keras saves models and weights in it. The stamp stands behind the end that the file itself states.

No attribute holds it: to write one takes h5py and a copy of the whole file, and to read one would mean to open an untrusted file
with it. Whoever changes the file with h5py cuts off what stands behind its end, so a stamp never tells of other content.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from . import tail
from .zips import broken

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_AT_OF_VERSION = {0: (24, 13), 1: (28, 13), 2: (12, 9), 3: (12, 9)}  # where addresses begin, and where their width is stated


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return the format's name, the bytes of the stamp, and a few facts."""
    end = _end(file, path)
    return "HDF5", _present(file, end)[0], {"content_bytes": end}


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:
    """Append the stamp, or replace the one that is there."""
    end = _end(file, path)
    data = tail.block(stamp)
    # Nothing that is cut short behind the stated end can hurt, so there is no limit to what is appended.
    tail.add(path, file, lambda _at: data, content=end, old=_present(file, end)[1], safe=len(data))


def _present(file: BinaryIO, end: int) -> tuple[bytes | None, int]:
    """Return the stamp behind the content and where it begins; what looks like one within the content is none."""
    stamp, start = tail.before(file, os.fstat(file.fileno()).st_size)
    return (stamp, start) if start >= end else (None, 0)


def _end(file: BinaryIO, path: Path) -> int:
    """Return where the content ends, as the superblock states it."""
    file.seek(0)
    head = file.read(96)
    at, width_at = _AT_OF_VERSION.get(head[8] if len(head) > 8 else -1, (0, 0))
    width = head[width_at] if at else 0
    if len(head) < 48 or width not in (4, 8):
        raise broken(path, "its superblock is damaged, or of a version that is not known here")
    base, end = (int.from_bytes(head[at + n * width : at + (n + 1) * width], "little") for n in (0, 2))
    size = os.fstat(file.fileno()).st_size
    if base + end > size:
        raise broken(path, f"it was cut short: it states {base + end:,} bytes, and {size:,} are there")
    return base + end
