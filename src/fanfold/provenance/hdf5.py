"""HDF5, including models and weights saved by Keras. The stamp is appended after the end that the file itself states.

It is not an attribute: writing one takes h5py and a copy of the whole file, and reading one would open an untrusted file
with h5py. Changing the file with h5py cuts off everything after its end, so a stamp never describes other content.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from . import tail
from .zips import broken

_AT_OF_VERSION = {0: (24, 13), 1: (28, 13), 2: (12, 9), 3: (12, 9)}  # offsets of the addresses, and of their width


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return the format's name, the bytes of the stamp, and a few facts."""
    end = _end(file, path)
    return "HDF5", _present(file, end)[0], {"content_bytes": end}


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:
    """Append the stamp, or replace the present one."""
    end = _end(file, path)
    data = tail.block(stamp)
    # A partial write after the stated end is harmless, so any size may be appended.
    tail.add(path, file, lambda _at: data, content=end, old=_present(file, end)[1], safe=len(data))


def _present(file: BinaryIO, end: int) -> tuple[bytes | None, int]:
    """Return the stamp after the content and where it begins; anything inside the content is not a stamp."""
    stamp, start = tail.before(file, os.fstat(file.fileno()).st_size)
    return (stamp, start) if start >= end else (None, 0)


def _end(file: BinaryIO, path: Path) -> int:
    """Return where the content ends, according to the superblock."""
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
