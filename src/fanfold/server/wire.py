"""The dashboard's column format: a small JSON header, then raw numbers that a typed array can view without a copy.

    u32 version · u32 length of the header · header, padded with spaces to 8 · columns, each on a multiple of 8

The header's `items` list their columns as [type, offset, length]; offsets count from the end of the header. Columns with
the same content are sent once: runs of one project mostly share their x values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
_TYPES = {"d": "f8", "f": "f4", "i": "i4", "H": "u2"}  # keyed by dtype.char: dtype.name takes longer than the copy


def encode(head: Mapping[str, Any], items: Iterable[tuple[Mapping[str, Any], Mapping[str, NDArray[Any]]]]) -> bytes:
    """Encode the facts and columns of many items as one response."""
    body: list[bytes] = []
    places: dict[bytes, int] = {}
    size = 0
    listed = []
    for facts, columns in items:
        named = {}
        for name, column in columns.items():
            data = column.tobytes()
            at = places.get(data)
            if at is None:
                at = places[data] = size
                body.append(data.ljust(-len(data) % 8 + len(data), b"\0"))
                size += len(body[-1])
            named[name] = [_TYPES[column.dtype.char], at, len(column)]
        listed.append({**facts, "columns": named})
    header = msgspec.json.encode({**head, "items": listed})
    header += b" " * (-len(header) % 8)
    return b"".join([struct.pack("<II", VERSION, len(header)), header, *body])


def offsets(column: NDArray[Any]) -> NDArray[Any]:
    """Return distances along an axis in the smallest type: exact for steps, to a ten-millionth of the distance for times."""
    import numpy as np

    if not len(column) or (column.min() >= 0 and column.max() < 1 << 16 and not (column % 1).any()):
        return column.astype(np.uint16)
    if column.max() < 1 << 31 and not (column % 1).any():
        return column.astype(np.int32)
    return column.astype(np.float32 if column.max() < 1 << 24 else np.float64)


def small(lowest: NDArray[Any], highest: NDArray[Any], *columns: NDArray[Any]) -> list[NDArray[Any]]:
    """Convert columns bounded by `lowest` and `highest` to 32 bits if neither their range nor visible detail is lost."""
    import numpy as np

    kind = np.float32 if _fits(lowest, highest) else np.float64
    return [column.astype(kind) for column in (lowest, highest, *columns)]


def _fits(lowest: NDArray[Any], highest: NDArray[Any]) -> bool:
    import numpy as np

    if not len(lowest):
        return True
    low, high = float(lowest.min()), float(highest.max())
    if not math.isfinite(high - low):  # a NaN or infinite value, or an infinite range
        lowest, highest = lowest[np.isfinite(lowest)], highest[np.isfinite(highest)]
        if not len(lowest) or not len(highest):
            return True
        low, high = float(lowest.min()), float(highest.max())
    top, span = max(abs(low), abs(high)), high - low
    whole = top < 1 << 24  # up to here 32 bits hold every whole number, which the tooltip shows to its last digit
    return whole and (top == 0 or (top > 1e-30 and (span == 0 or span > top * 1e-3)))
