"""Many rows of one shape at once, for imports: columns are packed and checksummed with numpy, not row by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .format import DTYPE, HEAD_SIZE, Layout

if TYPE_CHECKING:
    from .writer import Packer

ZLIB: Final = 0xEDB88320
CASTAGNOLI: Final = 0x82F63B78
LONGEST: Final = 512  # bytes of a row that are summed column by column; zlib is faster with longer ones
MOST_PLACES: Final = 640  # bytes of a row for which `place_tables` has tables


@lru_cache(maxsize=4)
def byte_table(polynomial: int) -> NDArray[np.uint32]:
    """Return what each byte adds to a checksum of this polynomial."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(polynomial), table >> 1).astype(np.uint32)
    return table


@lru_cache(maxsize=4)
def _by_distance(polynomial: int) -> NDArray[np.uint32]:
    """Return what each byte adds to a checksum, by the number of bytes from there to the end; the last row is the last byte."""
    base = byte_table(polynomial)
    found = np.empty((MOST_PLACES, 256), np.uint32)
    row = base
    for place in range(MOST_PLACES - 1, -1, -1):
        found[place] = row
        row = base[row & 255] ^ (row >> 8)
    return found


def place_tables(polynomial: int, length: int) -> NDArray[np.uint32]:
    """Return what each byte at each place of `length` bytes adds to their checksum; a zero adds nothing."""
    return _by_distance(polynomial)[MOST_PLACES - length :]


def added(rows: NDArray[np.uint8], places: Iterable[int], polynomial: int) -> NDArray[np.uint32]:
    """Return what the bytes at some places add to the checksum of each row.

    A checksum is linear: rows of one length that differ only in these places differ in it by what these bytes add.
    """
    tables = place_tables(polynomial, rows.shape[1])
    found = np.zeros(len(rows), np.uint32)
    for place in places:
        found ^= tables[place].take(rows[:, place])
    return found


def pack_rows(
    packer: Packer, times: NDArray[np.int64], steps: NDArray[np.int64] | None, columns: Sequence[NDArray[Any]]
) -> memoryview:
    """Return the frames of many rows of one shape; each column is converted to its type in the shape."""
    shape = packer.shape
    fields: list[tuple[str, str]] = [("head", "V8"), ("crc", "<u4"), ("id", "<u4"), ("time", "<i8")]
    if steps is not None:
        fields.append(("step", "<i8" if shape.layout & Layout.STEP_WIDE else "<i4"))
    fields += [(f"v{place}", DTYPE[code]) for place, code in enumerate(shape.types)]
    rows = np.empty(len(times), np.dtype(fields))
    rows["head"] = np.void(packer.head)
    rows["id"], rows["time"] = shape.id, times
    if steps is not None:
        rows["step"] = steps
    for place, column in enumerate(columns):
        rows[f"v{place}"] = column
    raw = rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
    bodies = raw[:, HEAD_SIZE:]
    if bodies.shape[1] <= LONGEST:
        places = range(4, bodies.shape[1])  # the id of the shape comes first, the same in all rows
        for start in range(0, len(rows), 4096):  # a block stays in the CPU cache
            block = bodies[start : start + 4096]
            sums = added(block, places, ZLIB)
            rows["crc"][start : start + 4096] = sums ^ np.uint32(int(sums[0]) ^ crc32(block[0].tobytes(), packer.crc))
    else:
        rows["crc"] = [crc32(body.tobytes(), packer.crc) for body in bodies]
    return raw.reshape(-1).data
