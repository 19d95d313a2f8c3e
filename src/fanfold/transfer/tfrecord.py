"""Event files of TensorBoard as bytes: records with checksums. Scalars are decoded many at once, without protobuf or TensorFlow.

A record is a length (8 bytes), its masked CRC-32C, the data, and their masked CRC-32C. The data are an `Event` message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..journal.batch import CASTAGNOLI, added, byte_table, place_tables

CHUNK: Final = 4 << 20  # bytes read at a time
MOST_RECORD: Final = 1 << 30
LONGEST: Final = 600  # bytes of a record that may be a scalar
FEWEST: Final = 8  # records of one length from which on they are decoded together
LEAST_CHAINED: Final = 1 << 12  # bytes from which on heads are found all at once
SEARCHED: Final = 1 << 16  # bytes that are searched for heads at a time: they stay in the CPU cache
LONG, BLOCK = 1 << 14, 256  # bytes from which on checksums are computed in blocks
_HEAD: Final = struct.Struct("<QI")
_MASK: Final = 0xA282EAD8


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of some bytes."""
    whole = len(data) // BLOCK * BLOCK if len(data) >= LONG else 0
    table, crc = _table(), _crc_of_blocks(data, whole)
    for byte in memoryview(data)[whole:]:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_of_blocks(data: bytes, size: int) -> int:
    """Return the register after so many bytes: the share of every block at once, then carried on."""
    tables, crc = place_tables(CASTAGNOLI, BLOCK), 0xFFFFFFFF
    first, second, third, fourth = tables[:4].tolist()
    for start in range(0, size, CHUNK):
        blocks = np.frombuffer(data, np.uint8, min(CHUNK, size - start), start).reshape(-1, BLOCK)
        sums = np.zeros(len(blocks), np.uint32)
        for place in range(BLOCK):
            sums ^= tables[place][blocks[:, place]]
        for share in sums.tolist():
            crc = share ^ first[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ fourth[crc >> 24]
    return crc


@lru_cache(maxsize=1)
def _table() -> list[int]:
    found: list[int] = byte_table(CASTAGNOLI).tolist()
    return found


def masked(crc: int) -> int:
    """Return a checksum as it is stored."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def masked_all(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return checksums as they are stored."""
    found: NDArray[np.uint32] = (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(_MASK)
    return found


@lru_cache(maxsize=1 << 12)
def head_of(length: int) -> int:
    """Return the stored checksum of a length."""
    return masked(crc32c(struct.pack("<Q", length)))


def is_record(data: bytes) -> bool:
    """Return whether some bytes begin like an event file."""
    if len(data) < _HEAD.size:
        return False
    length, crc = _HEAD.unpack_from(data)
    return bool(length < MOST_RECORD and crc == head_of(length))


class RecordBatch(NamedTuple):
    """Some records of a file: where the data of each begin and how long they are, in `buffer`."""

    buffer: bytes
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    end: int  # the offset in the file of the first byte that was not read
    damaged: int  # bytes that were skipped
    more: bool  # whether there is more to read now

    def data(self, place: int) -> bytes:
        start = int(self.starts[place])
        return self.buffer[start : start + int(self.lengths[place])]

    def intact(self, place: int) -> bool:
        """Return whether one record's data match their checksum."""
        start, length = int(self.starts[place]), int(self.lengths[place])
        return masked(crc32c(self.buffer[start : start + length])) == int.from_bytes(
            self.buffer[start + length : start + length + 4], "little"
        )


def read_batch(file: BinaryIO, at: int) -> RecordBatch:
    """Read records from an offset on. A record that is not complete yet is left for the next time."""
    file.seek(at)
    buffer = file.read(CHUNK)
    starts, lengths, here, damaged = _records(buffer)
    if not len(starts) and not damaged and len(buffer) == CHUNK:  # one long record
        length = _HEAD.unpack_from(buffer)[0]
        buffer += file.read(length + 16 - CHUNK)
        starts, lengths, here, damaged = _records(buffer)
        if not len(starts):
            return RecordBatch(buffer, np.empty(0, np.int64), np.empty(0, np.int64), at, 0, more=False)
    more = len(buffer) >= CHUNK and here > 0
    return RecordBatch(buffer, np.asarray(starts, np.int64), np.asarray(lengths, np.int64), at + here, damaged, more)


def _records(buffer: bytes) -> tuple[Any, Any, int, int]:
    """Return where complete records begin, their lengths, where the rest begins, and how many bytes before it are damaged."""
    return (_chained(buffer) if len(buffer) >= LEAST_CHAINED else None) or _walked(buffer)


def _chained(buffer: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64], int, int] | None:
    """Find all heads at once, by their checksums; None unless each record follows the one before it."""
    places = _places_of_heads(buffer)
    heads = rows_of(buffer, places, _HEAD.size)
    words = heads.view("<u4")
    expected = masked_all(added(heads[:, :8], range(4), CASTAGNOLI) ^ np.uint32(crc32c(bytes(8))))
    valid = (words[:, 2] == expected) & (words[:, 0] < MOST_RECORD)
    heads_at, lengths = places[valid], words[valid, 0].astype(np.int64)
    if not len(heads_at) or heads_at[0] or (heads_at[:-1] + lengths[:-1] + 16 != heads_at[1:]).any():
        return None
    end = int(heads_at[-1] + lengths[-1]) + 16
    if end > len(buffer):  # the last one is not complete
        return heads_at[:-1] + 12, lengths[:-1], int(heads_at[-1]), 0
    return (heads_at + 12, lengths, end, 0) if len(buffer) - end < _HEAD.size else None


def _places_of_heads(buffer: bytes) -> NDArray[np.int64]:
    """Return where the upper four bytes of a length may be, and behind it a checksum that does not begin with a zero."""
    raw, found = np.frombuffer(buffer, np.uint8), []
    count = len(raw) - _HEAD.size + 1
    for start in range(0, count, SEARCHED):
        size = min(SEARCHED, count - start)
        zero = raw[start + 4 : start + size + 7] == 0
        pairs = zero[:-1] & zero[1:]
        found.append(np.flatnonzero(pairs[:size] & pairs[2:] & (raw[start + 8 : start + size + 8] != 0)) + start)
    return np.concatenate(found)


def rows_of(buffer: bytes, starts: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Return so many bytes from each place on, side by side."""
    windows = np.ndarray((len(buffer) - size + 1,), f"V{size}", buffer, strides=(1,))
    return windows[starts].view(np.uint8).reshape(len(starts), size)


def _walked(buffer: bytes) -> tuple[list[int], list[int], int, int]:
    """Go from record to record, and past damage to the next head."""
    starts: list[int] = []
    lengths: list[int] = []
    at, damaged, total, unpack = 0, 0, len(buffer), _HEAD.unpack_from
    known: dict[int, int] = {}
    while at + 12 <= total:
        length, crc = unpack(buffer, at)
        expected = known.get(length)
        if expected is None and length < MOST_RECORD:
            expected = known[length] = head_of(length)
        if crc != expected:
            found = _next_head(buffer, at + 1)
            damaged += found - at
            at = found
            continue
        if at + 16 + length > total:
            break
        starts.append(at + 12)
        lengths.append(length)
        at += 16 + length
    return starts, lengths, at, damaged


def _next_head(buffer: bytes, start: int) -> int:
    """Return the next offset where a valid length and its checksum stand; without one, the first that may begin one."""
    raw, first, window = np.frombuffer(buffer, np.uint8), start, 1 << 12
    while first < len(buffer) - 11:
        last = min(first + window, len(buffer) - 11)
        upper = raw[first + 4 : last + 4] | raw[first + 5 : last + 5] | raw[first + 6 : last + 6] | raw[first + 7 : last + 7]
        for place in (np.flatnonzero(upper == 0) + first).tolist():  # lengths fit in the lower four bytes
            length, crc = _HEAD.unpack_from(buffer, place)
            if length < MOST_RECORD and crc == head_of(length):
                return int(place)
        first, window = last, min(2 * window, 1 << 18)
    return max(start, len(buffer) - 11)


class Scalars(NamedTuple):
    """Many points of one tag: which records they are in, and their columns."""

    tag: str
    plugin: str  # "" if the record does not say
    places: NDArray[np.int64]
    times: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: NDArray[np.float32]


class ScalarLayout(NamedTuple):
    """How a record holds one scalar: its tag and where the four bytes of the value are."""

    tag: str
    plugin: str
    at: int


def scalars(batch: RecordBatch, layout_of: Callable[[bytes], ScalarLayout | None]) -> tuple[list[Scalars], NDArray[np.int64]]:
    """Decode the scalars among a batch's records together; return them, and the places of all other records.

    `layout_of(data)` returns the ScalarLayout of a record with one float32 scalar, else None. Records of the same length are put
    side by side as rows of bytes. Those that differ only in time, step and value have the same tag.
    """
    found: list[Scalars] = []
    others: list[NDArray[np.int64]] = []
    for length in np.unique(batch.lengths).tolist():
        places = np.flatnonzero(batch.lengths == length)
        if length < 16 or length > LONGEST or len(places) < FEWEST:
            others.append(places)
            continue
        rows = rows_of(batch.buffer, batch.starts[places], length + 4)
        for width, some in _widths(rows):
            left, decoded = _alike(rows[some], places[some], width, layout_of)
            found += decoded
            others.append(left)
    rest = np.sort(np.concatenate(others)) if others else np.empty(0, np.int64)
    return found, rest


def _widths(rows: NDArray[np.uint8]) -> list[tuple[int, NDArray[np.int64]]]:
    """Group records by the bytes of their step: -1 for those that do not begin with a time and a step."""
    kinds = np.full(len(rows), -1)
    timed = rows[:, 0] == 0x09
    kinds[timed & (rows[:, 9] == 0x2A)] = 0  # step 0 is left out
    open_ = timed & (rows[:, 9] == 0x10)
    for width in range(1, min(11, rows.shape[1] - 14)):
        if not open_.any():
            break
        ends = open_ & (rows[:, 9 + width] < 0x80)
        kinds[ends] = width
        open_ &= ~ends
    return [(int(kind), np.flatnonzero(kinds == kind)) for kind in np.unique(kinds)]


_WEIGHTS: Final = np.random.default_rng(17).integers(1, 1 << 62, LONGEST // 8 + 2, np.uint64) | np.uint64(1)


def _alike(
    rows: NDArray[np.uint8], places: NDArray[np.int64], width: int, layout_of: Callable[[bytes], ScalarLayout | None]
) -> tuple[NDArray[np.int64], list[Scalars]]:
    """Decode records of one length and one width of the step; return the places of those that are something else."""
    first = layout_of(rows[0, :-4].tobytes()) if width >= 0 and len(rows) >= FEWEST else None
    if first is None:
        return places, []
    own = _without_values(rows, width, first.at)
    words = own.view(np.uint64)
    sums = words @ _WEIGHTS[: words.shape[1]]
    order = np.argsort(sums, kind="stable")
    starts = np.concatenate(([0], np.flatnonzero(np.diff(sums[order])) + 1))
    counts = np.diff(np.append(starts, len(order)))
    leaders = own[order[starts]]
    layouts = [layout_of(leader) for leader in map(bytes, leaders[:, : rows.shape[1] - 4])]
    usable = np.array([layout is not None and layout.at == first.at for layout in layouts])
    sound = (words[order] == np.repeat(leaders.view(np.uint64), counts, axis=0)).all(axis=1) & np.repeat(usable, counts)
    sound &= _checksums(rows[order], np.repeat(_bases(leaders, rows.shape[1] - 4), counts), width, first.at)
    times, steps, values = _decoded(rows[order], width, first.at)
    where, found = places[order], []
    for layout, start, count in zip(layouts, starts.tolist(), counts.tolist(), strict=True):
        part: Any = slice(start, start + count)
        if not sound[part].all():
            part = start + np.flatnonzero(sound[part])
        if layout is not None and len(where[part]):
            found.append(Scalars(layout.tag, layout.plugin, where[part], times[part], steps[part], values[part]))
    return where[~sound], found


def _without_values(rows: NDArray[np.uint8], width: int, at: int) -> NDArray[np.uint8]:
    """Return records as if each had time 0, step 1 and value 0, without checksums, filled up to whole words."""
    size = rows.shape[1] - 4
    found = np.zeros((len(rows), -(-size // 8) * 8), np.uint8)
    found[:, :size] = rows[:, :-4]
    found[:, 1:9] = found[:, at : at + 4] = 0
    if width:
        found[:, 10 : 9 + width] = 0x80
        found[:, 9 + width] = 1
    return found


def _checksums(rows: NDArray[np.uint8], bases: NDArray[np.uint32], width: int, at: int) -> NDArray[np.bool_]:
    """Return which records' data match their checksums; `bases` are those of the records without values."""
    data, stored = rows[:, :-4], np.ascontiguousarray(rows[:, -4:]).view("<u4").ravel()
    step = range(10, 10 + width)
    example = np.array([[0x80] * (width - 1) + [1]] if width else [[]], np.uint8)
    bases = bases ^ added(np.pad(example, ((0, 0), (10, data.shape[1] - 10 - width))), step, CASTAGNOLI)
    sums = added(data, (*range(1, 9), *step, *range(at, at + 4)), CASTAGNOLI) ^ bases
    result: NDArray[np.bool_] = masked_all(sums) == stored
    return result


def _bases(leaders: NDArray[np.uint8], size: int) -> NDArray[np.uint32]:
    return np.array([_known_crc32c(leader[:size].tobytes()) for leader in leaders], np.uint32)


_known_crc32c = lru_cache(maxsize=1 << 12)(crc32c)


def _decoded(
    rows: NDArray[np.uint8], width: int, at: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:  # fmt: skip
    """Return the times, steps and values of records."""
    seconds = np.ascontiguousarray(rows[:, 1:9]).view("<f8").ravel()
    steps = np.zeros(len(rows), np.uint64)
    for place in range(width):
        steps |= (rows[:, 10 + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    values = np.ascontiguousarray(rows[:, at : at + 4]).view("<f4").ravel()
    return nanoseconds(seconds), steps.view(np.int64), values


def nanoseconds(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return times as integers; those that are not times become 0."""
    sane = np.where(np.isfinite(seconds) & (np.abs(seconds) < 9e9), seconds, 0.0)
    whole = np.floor(sane)
    result: NDArray[np.int64] = whole.astype(np.int64) * 1_000_000_000 + np.round((sane - whole) * 1e9).astype(np.int64)
    return result
