"""A packed block of a journal: rows as byte planes without heads and checksums, everything else unchanged. No file access.

A frame is stored as a row only if its head, its body and the journal's id reproduce its exact checksum: unpacking returns
what was packed, bit for bit, damage included. docs/journal.md describes the format.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final

from ..errors import JournalError
from . import format as fmt
from .format import BLOCK, HEAD, HEAD_SIZE, MAGIC, MAGIC_BYTES, MAX_BODY, MOST_RATIO, Kind, Layout, Shape
from .walker import Finder, spans

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST_ROW: Final = 1 << 16  # longer rows gain nothing from their neighbours, and would make blocks uneven
LEVEL: Final = 4  # most of a block is noise, where higher levels take time and gain nothing
_START: Final = struct.Struct("<QII")  # of a row: eight bytes of head, checksum, shape id
_FIXED: Final = _START.size  # bytes that all rows of one layout share, or that can be computed
_COUNTS: Final = struct.Struct("<II")
_LAYOUT: Final = struct.Struct("<QIII")
_SPAN: Final = struct.Struct("<III")
_OVERHEAD: Final = _COUNTS.size + 8  # of a block stored unchanged: its counts and one piece

Span = tuple[int, int, int]  # offset in the frame, width, and how many adjacent numbers


@dataclass
class _Rows:
    """The rows of one layout in one block."""

    head: int
    shape: int
    stride: int
    spans: list[Span]
    number: int
    parts: list[memoryview] = field(default_factory=list)
    count: int = 0


class BlockPacker:
    """A packer of one journal, block by block in order. Shapes found on the way show which values are integers."""

    def __init__(self, data: mmap | bytes, journal_id: str) -> None:
        self.data = data
        self.size = len(data)
        self.seed = fmt.seed_of(journal_id)
        self._shapes: dict[int, Shape] = {}
        self._heads: dict[int, Any] = {}
        self._plain_until = 0  # a long frame that is stored unchanged may reach into the next block

    def block(self, at: int) -> tuple[int, bytes]:
        """Pack about one block of bytes starting at `at`; return where it ends, and the bytes to store."""
        chunk = self.data[at : at + BLOCK]
        pieces: list[tuple[int, int]] = []
        plain: list[memoryview] = []
        layouts: dict[tuple[int, int], _Rows] = {}
        view, here, start = memoryview(chunk), max(0, min(len(chunk), self._plain_until - at)), 0
        last = at + len(chunk) == self.size
        finder = Finder(chunk, view, len(chunk), self.seed)
        while here < len(chunk):
            rows, end = self._run(chunk, view, here, layouts, finder)
            if rows is None and not last and self._is_cut(chunk, here):
                chunk = chunk[:here]
                break
            if rows is None:
                here = self._past(chunk, at, here, finder)
                continue
            if start < here:
                pieces.append((0, here - start))
                plain.append(view[start:here])
            pieces.append((rows.number, (end - here) // rows.stride))
            rows.parts.append(view[here:end])
            rows.count += pieces[-1][1]
            here = start = end
        if start < len(chunk):
            pieces.append((0, len(chunk) - start))
            plain.append(view[start : len(chunk)])
        content = _written(pieces, list(layouts.values()), b"".join(plain))
        if len(content) > len(chunk) + _OVERHEAD:  # rows of ever-changing shapes: the layout table takes more than it saves
            content = _written([(0, len(chunk))], [], chunk)
        return at + len(chunk), _deflated(content, len(chunk))

    def _run(
        self, chunk: bytes, view: memoryview, at: int, layouts: dict[tuple[int, int], _Rows], finder: Finder
    ) -> tuple[_Rows | None, int]:
        """Find the consecutive valid rows of one layout starting at `at`, and where they end."""
        if len(chunk) - at < _FIXED:
            return None, at
        head, _, shape = _START.unpack_from(chunk, at)
        if _stride(head) is None:
            return None, at
        span = next(spans(view, at, len(chunk), self.seed, most=len(chunk), heads=self._heads, finder=finder), None)
        if span is None:
            return None, at
        rows = layouts.get((head, shape))
        if rows is None:
            spaces = _spans(span.flags, span.stride, self._shapes.get(shape))
            rows = layouts[head, shape] = _Rows(head, shape, span.stride, spaces, len(layouts) + 1)
        return rows, span.end

    def _is_cut(self, chunk: bytes, at: int) -> bool:
        """Return whether the end of the block cuts this row, which is then left to the next block."""
        if at == 0 or len(chunk) - at >= LONGEST_ROW:
            return False
        if len(chunk) - at < _FIXED:
            return chunk.startswith(MAGIC_BYTES[: len(chunk) - at], at)
        stride = _stride(int.from_bytes(chunk[at : at + 8], "little"))
        return stride is not None and at + stride > len(chunk)

    def _past(self, chunk: bytes, base: int, at: int, finder: Finder) -> int:
        """Return where to continue after bytes that are stored unchanged: after a frame, or at the next valid one."""
        if len(chunk) - at >= HEAD_SIZE:
            magic, kind, _, length, _ = HEAD.unpack_from(chunk, at)
            odd = kind != Kind.ROW or length > LONGEST_ROW - HEAD_SIZE
            if magic == MAGIC and length <= MAX_BODY and odd:
                end = base + at + HEAD_SIZE + length
                if kind == Kind.SHAPE:
                    self._learn_shape(base + at + HEAD_SIZE, end)
                self._plain_until = end
                return int(min(end - base, len(chunk)))
        found = finder.next(at + 1)
        return len(chunk) if found < 0 else found

    def _learn_shape(self, start: int, end: int) -> None:
        try:
            shape = Shape.parse(self.data[start:end])
        except JournalError:
            return  # damaged: its rows are packed anyway, a little less well
        self._shapes[shape.id] = shape


def _stride(head: int) -> int | None:
    """Return the length of a frame that begins with these bytes; None if it is not a row, or has an unusual length."""
    magic, kind, _, length, _ = HEAD.unpack(head.to_bytes(8, "little") + bytes(4))
    if magic != MAGIC or kind != Kind.ROW or not 12 <= length <= LONGEST_ROW - HEAD_SIZE:
        return None
    return int(HEAD_SIZE + length)


def _spans(flags: int, stride: int, shape: Shape | None) -> list[Span]:
    """Return the positions of a row's numbers that are stored as differences: time, step, call, and integer values."""
    found: list[Span] = [(_FIXED, 8, 1)]
    at = _FIXED + 8
    if not flags & Layout.STEP_NONE:
        found.append((at, 8 if flags & Layout.STEP_WIDE else 4, 1))
        at += found[-1][1]
    if flags & (Layout.PENDING | Layout.LATE):
        found.append((at, 4, 1))
    found = [span for span in found if span[0] + span[1] <= stride]  # a forged row may be too short for its flags
    if shape is not None and shape.layout == flags and HEAD_SIZE + shape.size == stride:
        found += _whole_numbers(shape, stride)
    return found


def _whole_numbers(shape: Shape, stride: int) -> list[Span]:
    found: list[Span] = []
    at = stride - sum(fmt.TYPE_SIZE[code] for code in shape.types)
    for code in shape.types:
        if code == "q" and found and found[-1][0] + 8 * found[-1][2] == at:
            found[-1] = (found[-1][0], 8, found[-1][2] + 1)
        elif code == "q":
            found.append((at, 8, 1))
        at += fmt.TYPE_SIZE[code]
    return found


def _written(pieces: list[tuple[int, int]], layouts: list[_Rows], plain: bytes) -> bytes:
    """Build a block: the order of its pieces, the layouts, the unchanged bytes, and the planes of each layout."""
    import numpy as np

    parts = [_COUNTS.pack(len(pieces), len(layouts)), np.array(pieces, "<u4").tobytes()]
    for rows in layouts:
        parts += [_LAYOUT.pack(rows.head, rows.shape, rows.count, len(rows.spans)), *(_SPAN.pack(*span) for span in rows.spans)]
    return b"".join([*parts, plain, *map(_planes, layouts)])


def _deflated(content: bytes, length: int) -> bytes:
    """Deflate a block, but within the ratio that readers accept: without repeats each byte takes at least one bit."""
    stored = zlib.compress(content, LEVEL)
    if length <= MOST_RATIO * len(stored):
        return stored
    stream = zlib.compressobj(LEVEL, strategy=zlib.Z_HUFFMAN_ONLY)
    return stream.compress(content) + stream.flush()


def _planes(rows: _Rows) -> bytes:
    """Return the rows' bodies transposed: the first byte of all rows, then the second of all, and so on."""
    import numpy as np

    block = np.frombuffer(b"".join(rows.parts), np.uint8).reshape(rows.count, rows.stride)[:, _FIXED:].copy()
    for span in rows.spans:
        numbers = _numbers(block, span)
        numbers[1:] -= numbers[:-1].copy()
        _put(block, span, numbers)
    planes: bytes = block.T.tobytes()
    return planes


def _numbers(block: NDArray[np.uint8], span: Span) -> NDArray[Any]:
    import numpy as np

    offset, width, count = span
    place = slice(offset - _FIXED, offset - _FIXED + width * count)
    return np.ascontiguousarray(block[:, place]).view(f"<u{width}")


def _put(block: NDArray[np.uint8], span: Span, numbers: NDArray[Any]) -> None:
    offset, width, count = span
    block[:, offset - _FIXED : offset - _FIXED + width * count] = numbers.view("u1")


# Unpacking. Files are not trusted: every count is checked against the bytes that are there.


def unpack(stored: bytes, length: int, seed: int) -> bytes:
    """Return the raw bytes of a block; raise JournalError unless there are exactly `length` of them."""
    try:
        raw: bytes = b"".join(_Reader(_inflated(stored, length), seed).pieces(length))
    except (struct.error, zlib.error, ValueError, IndexError, OverflowError) as error:
        raise JournalError(f"a packed block cannot be read: {error}") from error
    if len(raw) != length:
        raise JournalError(f"a packed block holds {len(raw)} bytes and not {length}")
    return raw


def _inflated(stored: bytes, length: int) -> bytes:
    """Inflate, but no more than a block of this length can need: a few bytes may expand to gigabytes."""
    stream = zlib.decompressobj()
    plain = stream.decompress(stored, length + _OVERHEAD + 1)  # with less room zlib would not reach the end of the stream
    if not stream.eof or stream.unused_data:
        raise ValueError("it is longer than it says")
    return plain


class _Reader:
    """A reader of one inflated block, from start to end."""

    def __init__(self, data: bytes, seed: int) -> None:
        self.data = data
        self.seed = seed
        self.at = 0

    def pieces(self, length: int) -> list[memoryview]:
        """Return the pieces of the raw bytes, in order."""
        import numpy as np

        count, layouts = self._take(_COUNTS)
        order = np.frombuffer(self._bytes(8 * count), "<u4").reshape(count, 2)
        heads = [self._layout(length) for _ in range(layouts)]
        plain = int(order[order[:, 0] == 0, 1].sum(dtype=np.uint64))
        if plain + sum(rows * stride for _, _, stride, rows, _ in heads) != length:
            raise ValueError("its counts do not agree")
        stretches = [(self._bytes(plain), 1), *((self._rows(*head), head[2]) for head in heads)]
        return _in_order(order.tolist(), stretches)

    def _take(self, fields: struct.Struct) -> Any:
        return fields.unpack(self._bytes(fields.size))

    def _bytes(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise ValueError("it ends too early")
        self.at += count
        return memoryview(self.data)[self.at - count : self.at]

    def _layout(self, length: int) -> tuple[int, int, int, int, list[Span]]:
        head, shape, rows, count = self._take(_LAYOUT)
        stride = HEAD_SIZE + (head >> 32)
        if not _FIXED < stride <= LONGEST_ROW or rows * stride > length:
            raise ValueError("a layout is out of range")
        spans = [_SPAN.unpack(part) for part in _cut(self._bytes(count * _SPAN.size), _SPAN.size)]
        free = _FIXED
        for offset, width, many in spans:
            if width not in (4, 8) or offset < free or not many or offset + width * many > stride:
                raise ValueError("a column is out of range")
            free = offset + width * many
        return head, shape, stride, rows, spans

    def _rows(self, head: int, shape: int, stride: int, count: int, spans: list[Span]) -> memoryview:
        """Turn planes back into complete frames, including heads and checksums."""
        import numpy as np

        planes = np.frombuffer(self._bytes(count * (stride - _FIXED)), np.uint8)
        frames = np.empty((count, stride), np.uint8)
        block = frames[:, _FIXED:]
        block[:] = planes.reshape(stride - _FIXED, count).T
        for span in spans:
            numbers = _numbers(block, span)
            _put(block, span, np.cumsum(numbers, axis=0, dtype=numbers.dtype))
        frames[:, :_FIXED] = np.frombuffer(_START.pack(head, 0, shape), np.uint8)
        covered = fmt.covered(head >> 16 & 0xFF, stride - HEAD_SIZE, self.seed, head >> 24 & 0xFF)
        view, crc32 = frames.reshape(-1).data, zlib.crc32
        sums = [crc32(view[at + HEAD_SIZE : at + stride], covered) for at in range(0, count * stride, stride)]
        frames[:, 8:HEAD_SIZE] = np.array(sums, "<u4").view("u1").reshape(count, 4)
        return view


def _cut(data: memoryview, size: int) -> list[memoryview]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _in_order(order: list[list[int]], stretches: list[tuple[memoryview, int]]) -> list[memoryview]:
    """Return the pieces in the order they had in the journal, taking each kind from where it was left."""
    places = [0] * len(stretches)
    found = []
    for kind, count in order:
        data, size = stretches[kind]
        found.append(data[places[kind] : places[kind] + count * size])
        places[kind] += count * size
    return found
