"""Checksums of many frames at once, and of any byte range of a forged journal at a cost independent of its length.

crc32 is linear: for two pieces, crc(a + b) = crc(a) · x^(8·len(b)) + crc(b) in the field of its polynomial. So the sum over
thousands of equal rows follows from the sums written in them, and one call over all their bytes checks every row. From sums at
the borders of small blocks, the sum between any two offsets takes one such product, for thousands of offsets at once.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from .format import HEAD_SIZE, MAGIC_BYTES, MAX_BODY, Kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_POLYNOMIAL: Final = 0xEDB88320
_BLOCK: Final = 64
_DIGITS: Final = 7  # of a length, in base 16: 64 MiB and a head need 27 bits
_REGION: Final = 64 << 20  # offsets examined with one set of sums; frames that begin there end within twice that
_BATCH: Final = 1 << 16


def _times(matrix: list[int], vector: int) -> int:
    found, row = 0, 0
    while vector:
        if vector & 1:
            found ^= matrix[row]
        vector >>= 1
        row += 1
    return found


def _product(a: list[int], b: list[int]) -> list[int]:
    return [_times(a, column) for column in b]


@cache
def _tables() -> Any:
    """Return a table of what a shift by that many bytes makes of each byte of a sum, by digit and digit value."""
    import numpy as np

    bit = [_POLYNOMIAL, *(1 << place for place in range(31))]
    step = bit
    for _ in range(3):
        step = _product(step, step)  # eight bits: a byte
    tables = np.zeros((_DIGITS, 16, 4, 256), np.uint32)
    for digit in range(_DIGITS):
        shift = [1 << place for place in range(32)]
        for value in range(16):
            tables[digit, value] = _entries(np.array(shift, np.uint32).reshape(4, 8))
            shift = _product(step, shift)
        step = shift  # sixteen steps are one step of the next digit
    return tables


def _entries(columns: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the sum of the columns of its bits, for each value of each of four bytes."""
    import numpy as np

    values = np.arange(256)
    found = np.zeros((4, 256), np.uint32)
    for place in range(8):
        found ^= np.where(values >> place & 1, columns[:, place : place + 1], 0).astype(np.uint32)
    return found


def shifted(sums: NDArray[np.uint32], lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the sums after appending that many zero bytes."""
    tables = _tables()
    for digit in range(_DIGITS):
        value = lengths >> 4 * digit & 15
        table = tables[digit]
        sums = (
            table[value, 0, sums & 255] ^ table[value, 1, sums >> 8 & 255]
            ^ table[value, 2, sums >> 16 & 255] ^ table[value, 3, sums >> 24]
        )  # fmt: skip
    return sums


class EqualRows:
    """Rows of one length, checked in blocks: one crc32 over all bytes of a block against the sum that its rows' own sums imply.

    A block passes if and only if its rows do, but for a chance of 2⁻³² like that of the sums themselves.
    """

    def __init__(self, head: bytes, start: int, stride: int) -> None:
        body = stride - HEAD_SIZE
        self.head, self.stride = head, stride
        self._own = _shift(body + 4)  # what a row's own sum, as four of its bytes, adds to the sum over the row
        (self._constant,) = _shift(body)([crc32(head + bytes(4)) ^ start]).tolist()
        self._step = _shift(stride)

    def sound(self, block: memoryview, shape: bytes) -> bool:
        """Return whether a block consists of valid rows of one shape."""
        import numpy as np

        count = len(block) // self.stride
        fields = ((0, "<u8", self.head), (HEAD_SIZE, "<u4", shape))
        for at, code, expected in fields:
            found = np.ndarray((count,), code, block, at, (self.stride,))
            if (found != np.frombuffer(expected, code)[0]).any():
                return False
        own = np.ndarray((count,), "<u4", block, 8, (self.stride,)).astype(np.uint32)
        return self._joined(own ^ self._own(own) ^ np.uint32(self._constant)) == crc32(block)

    def _joined(self, sums: NDArray[np.uint32]) -> int:
        """Return the sum over consecutive rows from the sum over each, joining neighbours until one is left."""
        import numpy as np

        step = self._step
        while len(sums) > 1:
            if len(sums) % 2:
                sums = np.concatenate([np.zeros(1, np.uint32), sums])  # nothing before the first row
            sums, step = step(sums[::2]) ^ sums[1::2], step.twice
        return int(sums[0])


class _Shift:
    """What appending a fixed number of zero bytes makes of a sum."""

    def __init__(self, columns: NDArray[np.uint32]) -> None:
        self._columns = columns  # for each bit of a sum
        self._table = _entries(columns.reshape(4, 8))

    @cached_property
    def twice(self) -> _Shift:
        return _Shift(self(self._columns))

    def __call__(self, sums: Any) -> NDArray[np.uint32]:
        import numpy as np

        sums, table = np.asarray(sums, np.uint32), self._table
        return table[0][sums & 255] ^ table[1][sums >> 8 & 255] ^ table[2][sums >> 16 & 255] ^ table[3][sums >> 24]  # type: ignore[no-any-return]


@lru_cache(maxsize=256)  # ranks of one run have rows of the same lengths
def _shift(length: int) -> _Shift:
    """Return the shift by some bytes."""
    import numpy as np

    columns, power = np.uint32(1) << np.arange(32, dtype=np.uint32), _shift_by_one()
    while length:
        if length & 1:
            columns = power(columns)
        power, length = power.twice, length >> 1
    return _Shift(columns)


@cache
def _shift_by_one() -> _Shift:
    import numpy as np

    return _Shift(np.array([crc32(b"\0", 1 << bit) ^ crc32(b"\0") for bit in range(32)], np.uint32))


class Blocks:
    """The valid frames in a journal's bytes, wherever they begin; each offset is checked once."""

    def __init__(self, view: memoryview, size: int, seed: int) -> None:
        self.view, self.size, self.seed = view, size, seed
        self._sound: list[int] = []
        self._from = self._to = 0  # the range of offsets already checked
        self._base = -1
        self._sums: list[int] = []  # of the bytes from the base to the start of each block

    def next(self, start: int) -> int:
        """Return the offset of the next valid frame at or after `start`, or -1."""
        while start < self.size - HEAD_SIZE + 1:
            if not self._from <= start < self._to:
                self._judge(start)
            place = bisect_left(self._sound, start)
            if place < len(self._sound):
                return self._sound[place]
            start = self._to
        return -1

    def _judge(self, start: int) -> None:
        """Check a batch of offsets from `start` on that look like a frame."""
        import numpy as np

        if self._base < 0 or start >= self._base + _REGION:
            self._base, self._sums = start, [0]
        end = min(self.size, self._base + _REGION, start + 16 * _BATCH)
        bytes_ = np.frombuffer(self.view[start : min(self.size, end + 1)], np.uint8)
        places = np.flatnonzero((bytes_[:-1] == MAGIC_BYTES[0]) & (bytes_[1:] == MAGIC_BYTES[1])) + start
        self._from, self._to, self._sound = start, end, []
        for first in range(0, len(places), _BATCH):
            self._sound += self._sound_among(places[first : first + _BATCH])

    def _sound_among(self, places: NDArray[np.int64]) -> list[int]:
        import numpy as np

        places = places[places + HEAD_SIZE <= self.size]
        heads = np.frombuffer(self.view, np.uint8)[places[:, None] + np.arange(HEAD_SIZE)]
        lengths = np.ascontiguousarray(heads[:, 4:8]).view("<u4").ravel().astype(np.int64)
        ends = places + HEAD_SIZE + lengths
        kept = (lengths <= MAX_BODY) & (ends <= self.size) & (heads[:, 2] != Kind.HEADER)
        places, heads, lengths, ends = places[kept], heads[kept], lengths[kept], ends[kept]
        if not len(places):
            return []
        self._extend(int(ends.max()))
        covered = np.array([crc32(head, self.seed) for head in np.ascontiguousarray(heads[:, 2:8])], np.uint32)
        before, after = self._up_to(places + HEAD_SIZE), self._up_to(ends)
        expected = np.ascontiguousarray(heads[:, 8:12]).view("<u4").ravel()
        sound = shifted(covered ^ before, lengths) ^ after == expected
        return [int(place) for place in places[sound]]

    def _extend(self, end: int) -> None:
        view, sums = self.view, self._sums
        at, last = self._base + _BLOCK * (len(sums) - 1), sums[-1]
        while at + _BLOCK <= end:
            last = crc32(view[at : at + _BLOCK], last)
            sums.append(last)
            at += _BLOCK

    def _up_to(self, places: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the sum of the bytes from the base to each offset."""
        import numpy as np

        view, base, sums = self.view, self._base, self._sums
        return np.array(
            [crc32(view[at - (at - base) % _BLOCK : at], sums[(at - base) // _BLOCK]) for at in places.tolist()], np.uint32
        )
