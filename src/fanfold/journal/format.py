"""The byte format of a journal, and nothing else: no files, no clocks. docs/journal.md describes it for other languages.

    frame = magic u16 · kind u8 · flags u8 · length u32 · crc32 u32 · body      (little endian)

The crc covers kind, flags, length and body, and starts from the journal's id, so that a frame of another journal
(a stale disk block, bytes inside a logged string) is never mistaken for one of this journal.
"""

from __future__ import annotations

import enum
import os
import struct
from functools import cached_property
from typing import Annotated, Any, Final
from zlib import crc32

import msgspec

from ..errors import JournalError

MAJOR: Final = 1
MINOR: Final = 1  # 1: rows may have numbers of 32 bits
SUFFIX: Final = ".ffj"
PACKED: Final = ".ffz"  # the same journal, packed
MAGIC: Final = 0xFDFA
MAGIC_BYTES: Final = MAGIC.to_bytes(2, "little")
MAX_BODY: Final = 64 << 20
MAX_KEYS: Final = 1 << 17  # of one shape; a call with more keys is written as several rows
MAX_SHAPE: Final = 16 << 20  # maximum bytes of a shape: one with many short keys takes several times as much in memory
BLOCK: Final = 1 << 20  # maximum raw bytes of a packed block: bounds the memory of packing and unpacking
MOST_RATIO: Final = 64  # of raw to packed bytes: received data must not expand to far more than was sent
HEAD: Final = struct.Struct("<HBBII")
HEAD_SIZE: Final = HEAD.size
EXEC: Final = "fanfold exec"  # the launcher in the header of the process around a command
_COVERED: Final = struct.Struct("<BBI")


class Kind(enum.IntEnum):
    """The kinds of frames. Readers skip unknown kinds."""

    HEADER = 1  # who writes: format, run, rank, node, process; always the first frame, crc seeded with 0
    SHAPE = 2  # declares a list of keys and their types once: [id, layout, types, keys, origin]
    ROW = 3  # numbers of one call: shape id, time, step, packed values
    VALUES = 4  # values that are not numbers: strings, media
    LOST = 5  # a late part that will never arrive, and why
    BEAT = 6  # the process is alive: clocks, last step, counters
    INFO = 7  # facts about the run; the newest value of each name wins
    EVENT = 8  # something that happened: alert, artifact, attempt, note
    CONSOLE = 9  # bytes the process printed
    END = 10  # the last frame of the process: status, error


class Layout(enum.IntFlag):
    """The fields before the values of a row; also its frame's flags, so that a row's step can be read without its shape."""

    STEP_WIDE = 1  # step is i64, else i32
    STEP_NONE = 2  # no step at all (probes)
    PENDING = 4  # seq u32, parts u16: this many late parts of the call will follow
    LATE = 8  # seq u32: this row is a late part of that call


def seed_of(journal_id: str) -> int:
    """Return the seed of a journal's checksums: the crc32 of its id's eight bytes."""
    return crc32(int(journal_id, 16).to_bytes(8, "little"))


def covered(kind: int, length: int, seed: int, flags: int = 0) -> int:
    """Return the running crc over the covered part of the head."""
    return crc32(_COVERED.pack(kind, flags, length), seed)


def frame(kind: int, body: bytes, seed: int, flags: int = 0) -> bytes:
    """Wrap a body as one frame."""
    if len(body) > MAX_BODY:
        raise JournalError(f"a frame of {len(body)} bytes is over the limit of {MAX_BODY}; large values belong in a blob")
    return HEAD.pack(MAGIC, kind, flags, len(body), crc32(body, covered(kind, len(body), seed, flags))) + body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def pack(value: Any) -> bytes:
    """Encode plain data as msgpack."""
    return _encoder.encode(value)


def unpack(body: bytes | memoryview) -> Any:
    """Decode msgpack; raise JournalError for damage that the crc did not catch."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise JournalError(f"a frame's body is not msgpack: {error}") from error


def _layout_codes(layout: Layout) -> str:
    """Return the struct codes of the fields before the values."""
    step = "" if layout & Layout.STEP_NONE else "q" if layout & Layout.STEP_WIDE else "i"
    return "<Iq" + step + ("IH" if layout & Layout.PENDING else "I" if layout & Layout.LATE else "")


_LAYOUT_CODES: Final = [_layout_codes(Layout(flags)) for flags in range(16)]  # looked up for every journal that is listed


class Shape(msgspec.Struct, frozen=True, dict=True):
    """The keys and types of a row, and the position of each value."""

    id: int
    layout: int
    types: str
    keys: tuple[str, ...]
    origin: str = ""

    @cached_property
    def codes(self) -> str:
        """Return the struct codes of a row body: shape id, time, the fields of the layout, then the values."""
        return _LAYOUT_CODES[self.layout & 15] + self.types

    @cached_property
    def size(self) -> int:
        """Return the length of a row's body."""
        return struct.calcsize(self.codes)

    def body(self) -> bytes:
        found = pack([self.id, int(self.layout), self.types, list(self.keys), self.origin])
        if len(self.keys) > MAX_KEYS or len(found) > MAX_SHAPE:
            raise JournalError(f"{len(self.keys)} keys in {len(found)} bytes are over the limit of {MAX_KEYS} in {MAX_SHAPE}")
        return found

    @classmethod
    def parse(cls, body: bytes | memoryview) -> Shape:
        """Parse a shape frame's body; raise if its parts are inconsistent."""
        try:
            found = _shape.decode(body) if len(body) <= MAX_SHAPE else None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise JournalError(f"a shape frame does not hold [id, layout, types, keys, origin]: {error}") from error
        if found is None or len(found.types) != len(found.keys) or set(found.types) - TYPE_SIZE.keys():
            raise JournalError("a shape frame's types and keys do not fit together, or are too many")
        keys = tuple(found.keys)
        if len(set(keys)) != len(keys):
            raise JournalError("a shape frame names a key twice")
        return cls(found.id, found.layout, found.types, keys, found.origin)


class _ShapeBody(msgspec.Struct, array_like=True):
    id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    layout: Annotated[int, msgspec.Meta(ge=0, lt=16)]
    types: Annotated[str, msgspec.Meta(max_length=MAX_KEYS)]
    keys: Annotated[list[str], msgspec.Meta(max_length=MAX_KEYS)]
    origin: str


_shape = msgspec.msgpack.Decoder(_ShapeBody)
TYPE_SIZE: Final = {"d": 8, "f": 4, "q": 8, "?": 1}
DTYPE: Final = {"d": "<f8", "f": "<f4", "q": "<i8", "?": "?"}
READ_AS: Final = {"d": "f8", "f": "f8", "q": "i8", "?": "?"}  # by readers, who see float32 as the same numbers in 64 bits


def new_id() -> str:
    """Return a random id of 16 hexadecimal digits."""
    return os.urandom(8).hex()


def check_id(journal_id: str) -> str:
    """Return a journal id if it is 16 hexadecimal digits, else raise."""
    if len(journal_id) != 16 or set(journal_id) - set("0123456789abcdef"):
        raise JournalError(f"{journal_id!r} is not a journal id (16 hexadecimal digits)")
    return journal_id
