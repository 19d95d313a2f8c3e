"""The content of each kind of frame, as types. `decode` is the only place where the bytes of a frame become data.

A checksum proves that bytes are those that were written, not that they make sense: a journal is untrusted input. A body that
does not fit its type is damage, for every reader alike. Unknown fields are ignored, so that later versions can add some;
unknown kinds and events are kept and have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from ..errors import JournalError
from . import format as fmt
from .format import Kind, Shape

MAX_DEPTH: Final = 64  # of data a run describes itself with; writers stop at half of it

Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Rank = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Blob = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Data = dict[str, Any]  # names and plain data, nested up to MAX_DEPTH


class Fork(Struct, array_like=True, frozen=True):
    """Which run a run continues, and the last of its steps that both have."""

    project: str
    run: str
    step: Int64


class Header(Struct, kw_only=True):
    """Who writes a journal. If the header is damaged, `salvaged` is set and the fields come from the file name."""

    format: Annotated[list[Count], Meta(min_length=1)]
    writer: str | None = None
    run: str | None = None
    project: str | None = None
    name: str | None = None
    role: str = ""
    rank: Rank
    world: Count | None = None
    local_rank: Int64 | None = None
    attempt: str | None = None
    ordinal: Count | None = None
    node: str | None = None
    boot: str | None = None
    pid: Int64 | None = None
    process: str | None = None
    launcher: str | None = None
    spool: str | None = None
    journal: str | None = None
    started: Int64 = 0
    mono: Int64 = 0
    born: Int64 | None = None  # when the process began (ns), if it began to train
    follows: str | None = None
    dropped: Count | None = None
    fork: Fork | None = None
    salvaged: bool = False


class Values(Struct):
    """The values of a call that are not numbers: texts and media. `q`: the call they belong to if they arrive late."""

    s: Int64
    t: Int64
    v: dict[str, str | Data | list[Data]] = {}
    q: Count | None = None
    k: Data | None = None

    def arguments(self, tracker: str) -> Data:
        """Return the call's arguments for one tracker."""
        found = (self.k or {}).get(tracker)
        return found if isinstance(found, dict) else {}


class Lost(Struct):
    """Late values that will never arrive, and why."""

    s: Int64
    t: Int64
    q: Count | None = None
    keys: list[str] = []
    why: str = ""


class Beat(Struct, array_like=True):
    """A heartbeat: clocks, the highest step, and the number of dropped calls."""

    time: Int64
    mono: Int64
    high: Int64
    dropped: Count = 0


class Info(Struct):
    """Facts about a run, by name. Only those given count, None included; unknown names are kept."""

    t: Int64
    given: Data


class _KnownFacts(Struct):
    t: Int64 = 0
    name: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    notes: str | None = None
    config: Data | None = None
    facts: Data | None = None
    summary: Data | None = None
    fold: dict[str, str] | None = None
    archived: bool | None = None


class Event(Struct):
    """Something that happened; for an unknown event, its name and time."""

    event: str
    t: Int64 = 0


class Alert(Event):
    title: str = ""
    text: str = ""
    level: str = ""
    s: Int64 | None = None
    rule: str | None = None  # the rule that raised it, and the key that met the rule
    key: str | None = None


class ArtifactFile(Struct):
    path: str
    blob: Blob
    size: Count = 0


class Artifact(Event, kw_only=True):
    name: str
    files: list[ArtifactFile]
    kind: str = "file"
    metadata: Data | None = None
    s: Int64 | None = None


# Readers try each pattern on each key, so they use only the newest ones, and none that is very long.
MOST_PATTERNS: Final = 256
MOST_PATTERN: Final = 256  # characters


def is_pattern(key: str) -> bool:
    """Return whether the key of a define_metric call names several keys, such as `val/*`."""
    return any(mark in key for mark in "*?[")


class Metric(Event, kw_only=True):
    key: str
    x: str | None = None
    summary: str | None = None


class Saved(Event, kw_only=True):
    path: str
    size: Count | None = None
    s: Int64 | None = None


class SpanEvent(Event, kw_only=True):
    """Time spent on something other than steps: `ns` of the time from `since` to `t`, in `n` spans."""

    kind: str
    since: Int64
    ns: Count
    n: Count = 1


class Ops(Event, kw_only=True):
    """An operator table; see docs/journal.md. It is unpacked, and checked separately, where it is read."""

    id: str
    table: bytes
    facts: Data | None = None
    folded: list[str] | None = None


class Usage(Event, kw_only=True):
    key: str
    data: Data | None = None
    node: str | None = None
    pid: Int64 | None = None


class Trace(Event, kw_only=True):
    path: str
    steps: Count | None = None
    size: Count | None = None


class Evidence(Event, kw_only=True):
    """What the black box saw; see docs/blackbox.md. `who` is the rank concerned, if it is not the writer's."""

    kind: str
    id: str = ""
    who: Rank | None = None
    data: Data | None = None
    files: list[ArtifactFile] = []


class Requested(Event, kw_only=True):
    """A request to the job (see requests.py), or the answer to one: `state` is asked, done, refused or expired."""

    id: str
    action: str
    state: str
    values: Data | None = None
    by: str = ""
    why: str = ""
    s: Int64 | None = None


class Console(Struct):
    """Bytes that a process printed."""

    t: Int64
    b: bytes
    stream: str = ""


class End(Struct):
    """The last frame of a process: how it ended."""

    status: str
    t: Int64 | None = None
    error: str | None = None
    reason: str | None = None  # why a finished run ended early
    exit_code: Int64 | None = None
    signal: str | None = None
    high: Int64 | None = None
    dropped: Count | None = None
    lost: Count | None = None
    said: dict[str, Count] | None = None


Body = Header | Shape | Values | Lost | Beat | Info | Event | Console | End
_T = TypeVar("_T", bound=Struct)


class _Format(Struct):
    format: Annotated[list[Count], Meta(min_length=1)]


class _Entry(Struct):
    """The fields every media entry has: its type, and where its content is."""

    type: str
    blob: Blob | None = None
    ext: str | None = None
    size: Count | None = None


def _refuse(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension {code} of {len(data)} bytes")


def _decoder(kind: type[_T]) -> msgspec.msgpack.Decoder[_T]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_refuse)


_kinds: Final[Mapping[int, msgspec.msgpack.Decoder[Any]]] = {
    Kind.VALUES: _decoder(Values),
    Kind.LOST: _decoder(Lost),
    Kind.BEAT: _decoder(Beat),
    Kind.EVENT: _decoder(Event),
    Kind.CONSOLE: _decoder(Console),
    Kind.END: _decoder(End),
}
_events: Final[Mapping[str, msgspec.msgpack.Decoder[Any]]] = {
    "alert": _decoder(Alert),
    "artifact": _decoder(Artifact),
    "metric": _decoder(Metric),
    "saved": _decoder(Saved),
    "span": _decoder(SpanEvent),
    "ops": _decoder(Ops),
    "usage": _decoder(Usage),
    "trace": _decoder(Trace),
    "blackbox": _decoder(Evidence),
    "request": _decoder(Requested),
}
_format = _decoder(_Format)
_header = _decoder(Header)
_known_facts = _decoder(_KnownFacts)
_named: Final = msgspec.msgpack.Decoder(Data, ext_hook=_refuse)
# Fields of free-form data: decoders only check that they have names.
_free: Final[Mapping[type, tuple[str, ...]]] = {
    Values: ("v", "k"), Info: ("given",), Artifact: ("metadata",), Ops: ("facts",), Usage: ("data",),
    Evidence: ("data",), Requested: ("values",),
}  # fmt: skip


class NewerFormat(JournalError):
    """A journal of a format that this version cannot read."""


def decode(kind: int, body: bytes | memoryview) -> Body | None:
    """Return the content of a frame; None for an unknown kind. Raise JournalError if the body does not fit its kind."""
    if kind == Kind.SHAPE:
        return Shape.parse(body)
    if kind == Kind.HEADER:
        return _decode_header(body)
    decoder = _kinds.get(kind)
    if decoder is None and kind != Kind.INFO:
        return None
    found: Any = _decoded(decoder, body) if decoder is not None else _decode_info(body)
    if kind == Kind.EVENT and found.event in _events:
        found = _decoded(_events[found.event], body)
    if type(found) in _free:
        _check_free(found)
    return found  # type: ignore[no-any-return]


def _decoded(decoder: msgspec.msgpack.Decoder[Any], body: bytes | memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise JournalError(f"a frame does not hold what its kind promises: {error}") from error


def _decode_header(body: bytes | memoryview) -> Header:
    major = _decoded(_format, body).format[0]
    if major > fmt.MAJOR:
        raise NewerFormat(
            f"it is of journal format {major}, and this fanfold reads up to {fmt.MAJOR}. "
            "The run cannot be shown. Upgrade fanfold: pip install -U fanfold"
        )
    return _decoded(_header, body)  # type: ignore[no-any-return]


def _decode_info(body: bytes | memoryview) -> Info:
    t = _decoded(_known_facts, body).t
    given = _decoded(_named, body)
    given.pop("t", None)
    return Info(t, given)


def _check_free(body: Any) -> None:
    for name in _free[type(body)]:
        value = getattr(body, name)
        if value is not None:
            _check_plain(value, MAX_DEPTH)
    if type(body) is Values:
        for entry in body.v.values():
            for one in entry if isinstance(entry, list) else (entry,):
                if isinstance(one, dict):
                    _check_entry(one)


_PLAIN: Final = frozenset({str, int, float, bool, type(None)})


def _check_plain(value: Any, depth: int) -> None:
    """Raise unless the value consists of JSON types: a decoder also accepts dates, bytes, and keys of any type."""
    if type(value) in _PLAIN:
        return
    if depth and isinstance(value, dict):
        for name, item in value.items():
            if type(name) is not str:
                raise JournalError("a frame holds data whose names are not text")
            if type(item) not in _PLAIN:
                _check_plain(item, depth - 1)
        return
    if depth and isinstance(value, list):
        for item in value:
            if type(item) not in _PLAIN:
                _check_plain(item, depth - 1)
        return
    raise JournalError(f"a frame holds data that is nested too deeply, or a {type(value).__name__}")


def _check_entry(entry: Data) -> None:
    try:
        msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise JournalError(f"a frame holds media that cannot be read: {error}") from error


def time_of(body: Body | None) -> int:
    """Return the time in a body, in nanoseconds since 1970; 0 if it has none."""
    if isinstance(body, Header):
        return max(0, body.started)
    if isinstance(body, Beat):
        return max(0, body.time)
    return max(0, getattr(body, "t", None) or 0)


def as_dict(body: Struct) -> Data:
    """Return a body's fields by name, as plain data."""
    found: Data = msgspec.to_builtins(body, builtin_types=(bytes,))
    return found
