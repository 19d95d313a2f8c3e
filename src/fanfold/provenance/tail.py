"""A stamp after the content of a file, where no loader looks: the stamp, its length, and a marker.

It is appended in one write. A partial write leaves a file that loads as before, with its previous stamp.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ..errors import FanfoldError
from .record import MAX_BYTES
from .replace import copy_rest, replacing

SLACK = 64 << 10  # bytes of earlier stamps that may stay in the file; or a hundredth of a large file
_MARK = b"\nfanfold stamp 1\n"
_END = 8 + len(_MARK)


def block(stamp: bytes) -> bytes:
    """Return a stamp in the form that `before` reads."""
    return stamp + len(stamp).to_bytes(8, "little") + _MARK


def before(file: BinaryIO, end: int) -> tuple[bytes | None, int]:
    """Return the stamp whose block ends at `end`, and where that block begins (0 if there is none)."""
    if end < _END:
        return None, 0
    file.seek(end - _END)
    found = file.read(_END)
    length = int.from_bytes(found[:8], "little")
    if found[8:] != _MARK or length > end - _END:
        return None, 0
    start = end - _END - length
    file.seek(start)
    return file.read(min(length, MAX_BYTES + 1)), start


def add(path: Path, file: BinaryIO, make: Callable[[int], bytes], *, content: int, old: int, safe: int) -> None:
    """Add the bytes that `make` returns for an offset in the file: at its end, or in the space of earlier stamps.

    `content` is where the model's own bytes end, `old` where the current stamp begins (0 if there is none). To append more
    than `safe` bytes, the file is copied and replaced, because a partial write could hide the old end from readers.
    """
    end = file.seek(0, os.SEEK_END)
    if old - content > max(SLACK, end // 100) and _over_earlier(file, make(content), content, old):
        return
    data = make(end)
    if len(data) > safe:
        with replacing(path) as target:
            copy_rest(file, 0, target)
            target.write(data)
        return
    file.seek(end)
    if file.write(data) != len(data):  # the disk is full: remove the part that was written, to restore the file
        file.truncate(end)
        raise FanfoldError(f"{path} could not be stamped: no space left. The file is as it was. Make room and stamp again.")


def _over_earlier(file: BinaryIO, data: bytes, content: int, old: int) -> bool:
    """Overwrite the stamps before the current one, and end the file there. Return False if there is not enough room.

    The current stamp stays intact until the new one is on disk.
    """
    if content + len(data) > old:
        return False
    left, at = memoryview(data), content
    while left:  # a write may be partial if the disk is full
        count = os.pwrite(file.fileno(), left, at)
        left, at = left[count:], at + count
    os.fsync(file.fileno())
    os.ftruncate(file.fileno(), content + len(data))
    return True
