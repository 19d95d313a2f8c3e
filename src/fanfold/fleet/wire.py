"""The wire format between forwarder and gateway: pieces of journals, many per request, packed and compressed.

Both ends use this module. Incoming data is untrusted: names are checked, and nothing is unpacked beyond its announced size.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ..errors import FanfoldError
from ..journal.requests import JobRequest
from ..journal.walker import MAX_FRAME

BATCH = 1 << 20  # bytes per request, about; or one larger frame
MAX_RAW = MAX_FRAME + BATCH + (1 << 16)
MAX_PIECES = 4096
MAX_GAP = 1 << 30
MAX_RATIO = 64  # a body unpacks to at most this many times its size; data that compresses better is sent uncompressed
RATIO_FREE = 4 << 20  # no limit on the ratio below this unpacked size
MAX_NAME = 1000
LENGTH = "x-fanfold-length"  # header: size of the unpacked body
APPEND, OFFSET, MISSING, BLOB, RUNS, RUN = "/v1/append", "/v1/offset", "/v1/missing", "/v1/blob", "/v1/runs", "/v1/run"
TELL, ANSWER, REQUESTS = "/v1/tell", "/v1/answer", "/v1/requests"
JOURNAL = re.compile(r"(0|[1-9][0-9]{0,8})-([0-9a-f]{16})")


class Rejected(FanfoldError):
    """A request the gateway refuses, and the HTTP status for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Gone(Rejected):
    """A run that was deleted or moved at the gateway: forwarders that still have it must not bring it back."""

    def __init__(self, project: str, run: str) -> None:
        super().__init__(
            410,
            f"run {run[:100]!r} of project {project[:100]!r} was deleted at this gateway, or moved to another project there. "
            "Nothing was stored. Move or delete it where it was recorded, too.",
        )


class Conflict(FanfoldError):
    """Bytes sent for the wrong offset: `offset` is how many the gateway has."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the gateway has {offset} bytes")
        self.offset = offset


class Piece(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Whole frames of one journal: the offset they follow, and how many damaged bytes come before them."""

    run: str
    journal: str
    offset: int
    gap: int
    data: bytes


# The length limit is checked before any piece is created: a few bytes can announce millions of them.
_decoder = msgspec.msgpack.Decoder(Annotated[list[Piece], msgspec.Meta(min_length=1, max_length=MAX_PIECES)])
_encoder = msgspec.msgpack.Encoder()


def encode(pieces: Sequence[Piece]) -> tuple[bytes, int]:
    """Pack pieces; return the body and its unpacked size."""
    raw = _encoder.encode(pieces)
    body = zlib.compress(raw, 1)
    return body if ratio_fits(len(body), len(raw)) else zlib.compress(raw, 0), len(raw)


def ratio_fits(size: int, length: int) -> bool:
    """Return whether a body of `size` bytes may unpack to `length`: a gateway's cost must be in proportion to the bytes sent."""
    return length <= max(RATIO_FREE, MAX_RATIO * size)


def decode(body: bytes, length: int) -> list[Piece]:
    """Decode a body that unpacks to exactly `length` bytes; any other is refused before it takes memory."""
    if not ratio_fits(len(body), length):
        raise Rejected(413, f"{len(body)} bytes that unpack to {length} are compressed too well. Nothing was stored.")
    try:
        return _decoder.decode(unpack(body, length))  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(400, f"the body does not hold pieces of journals: {error}. Nothing was stored.") from error


def unpack(body: bytes, length: int) -> bytes:
    """Decompress a body, never to more than the announced length."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(body, length + 1)
    except zlib.error as error:
        raise Rejected(400, f"the body is not compressed as it should be: {error}. Nothing was stored.") from error
    if len(raw) != length or not unpacker.eof or unpacker.unused_data:
        raise Rejected(400, f"the body does not unpack to the {length} bytes it announces. Nothing was stored.")
    return raw


def checked_name(what: str, name: Any) -> str:
    """Return a valid project or run name, else raise Refused; it is percent-encoded later, for paths."""
    if not isinstance(name, str) or not name.strip() or "\0" in name or len(name) > MAX_NAME:
        raise Rejected(400, f"the {what} is not a name: a text of 1 to {MAX_NAME} characters. Nothing was stored.")
    return name


def checked_journal(name: Any) -> tuple[int, str]:
    """Return the rank and id in a journal's name, `3-0123456789abcdef`."""
    match = JOURNAL.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise Rejected(
            400, f"{str(name)[:60]!r} is not the name of a journal: rank, dash, 16 hexadecimal digits. Nothing was stored."
        )
    return int(match[1]), match[2]


class Telling(msgspec.Struct, forbid_unknown_fields=True):
    """A request to a job, as somebody asks a gateway."""

    action: str
    values: dict[str, bool | int | float | str] = {}
    seconds: float = 600.0


class Fetching(msgspec.Struct, forbid_unknown_fields=True):
    """A forwarder's question: the runs whose rank 0 it serves, and the requests (run, id) that it has passed on."""

    runs: Annotated[list[str], msgspec.Meta(max_length=1000)]
    got: Annotated[list[tuple[str, str]], msgspec.Meta(max_length=10_000)] = []


class Fetched(msgspec.Struct):
    """The answer: requests by run, and the gateway's clock, since a request's times are in it."""

    now: float
    requests: list[tuple[str, JobRequest]]
