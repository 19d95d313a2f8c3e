"""A stamp behind the content of a file, where no loader looks: the stamp, its length, and a mark by which we know it.

It is appended in one write. A write that is cut short leaves a file that loads as before, with the stamp it had.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ..errors import FanfoldError
from .record import MAX_BYTES
from .replace import copy_rest, replacing

SLACK = 64 << 10  # bytes of earlier stamps that may stay in the file; in a large file, a hundredth of it
_MARK = b"\nfanfold stamp 1\n"
_END = 8 + len(_MARK)


def block(stamp: bytes) -> bytes:
    """Return a stamp in the form that `before` finds."""
    return stamp + len(stamp).to_bytes(8, "little") + _MARK


def before(file: BinaryIO, end: int) -> tuple[bytes | None, int]:
    """Return the stamp whose block ends at `end`, and where that block begins (0: there is none)."""
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
    """Add the bytes that `make` returns for a place in the file: behind its end, or in the room of stamps no longer in use.

    `content` is where the model's own bytes end, `old` where the present stamp begins (0: there is none). When more than `safe`
    bytes are to be appended, the file is copied and replaced, because a reader might not find the old end behind a torn write.
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
    if file.write(data) != len(data):  # a full disk: remove the part that was written, and the model is as it was
        file.truncate(end)
        raise FanfoldError(f"{path} could not be stamped: no space left. The file is as it was. Make room and stamp again.")


def _over_earlier(file: BinaryIO, data: bytes, content: int, old: int) -> bool:
    """Write over the stamps before the present one, and end the file there. False where there is not enough room.

    The present stamp stays whole until ours is on the disk.
    """
    if content + len(data) > old:
        return False
    left, at = memoryview(data), content
    while left:  # a full disk takes a part of it
        count = os.pwrite(file.fileno(), left, at)
        left, at = left[count:], at + count
    os.fsync(file.fileno())
    os.ftruncate(file.fileno(), content + len(data))
    return True
