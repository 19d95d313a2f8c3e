"""safetensors: eight bytes of length, a JSON header, the tensors. The stamp is an entry of the header's `__metadata__`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..errors import FanfoldError
from . import undo
from .anew import anew, unshared
from .record import NAME
from .zips import broken

MAX_HEADER = 100_000_000  # the format's own limit
MAX_PARAMETERS = 1 << 63
MAX_QUOTES = 2_500_000  # a tensor has ten. Names take memory, some 200 bytes each, and none is without two quotes
MAX_ENTRY = 64 << 10  # bytes of one tensor's: numbers of a shape take ten times their letters
MAX_DTYPE, MAX_DTYPES = 64, 100  # letters of a name, and names; the format knows some twenty
ROOM = 4096
CARRY = 8_000_000  # of tensors carried to the end: the header is as much longer, and every loader reads past it
WORD = 8


class _Tensor(msgspec.Struct):
    """What is read of a tensor's entry."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_tensor = msgspec.json.Decoder(_Tensor)
_header_of = msgspec.json.Decoder(dict[str, msgspec.Raw])  # entries stay bytes until they are asked for: little memory
_metadata = msgspec.json.Decoder(dict[str, str])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return the format's name, the bytes of the stamp, and a few facts."""
    entries, metadata = _header(file, path)
    dtypes: Counter[str] = Counter()
    parameters = 0
    for tensor in _tensors(file, path, entries):
        dtypes[tensor.dtype] += 1
        if len(dtypes) > MAX_DTYPES:
            raise broken(path, "its header names more kinds of numbers than there are")
        parameters += prod(tensor.shape)
    stamp = metadata.pop(NAME, None)
    told = {"tensors": len(entries), "parameters": parameters, "dtypes": dict(dtypes), "metadata": metadata}
    return "safetensors", None if stamp is None else stamp.encode("utf-8", "replace"), told


def _tensors(file: BinaryIO, path: Path, entries: dict[str, msgspec.Raw]) -> Iterator[_Tensor]:
    """Read tensor by tensor what a header says, with the file right behind it; refuse a file that does not end where they do."""
    there, told = os.fstat(file.fileno()).st_size - file.tell(), 0
    for name, entry in entries.items():
        tensor = _read_tensor(entry, name, path)
        told = max(told, tensor.data_offsets[1])
        yield tensor
    if there < told:
        raise broken(path, f"it was cut short: its header tells of {told:,} bytes of tensors, and {there:,} are there")
    if there > told:
        raise broken(path, f"its header tells of {told:,} bytes of tensors, and {there:,} are there")


def _read_tensor(entry: msgspec.Raw, name: str, path: Path) -> _Tensor:
    if len(entry) > MAX_ENTRY:
        raise broken(path, f"its header says more of tensor {name[:80]!r} than there is to say")
    try:
        tensor = _tensor.decode(entry)
    except _UNREADABLE as error:
        raise broken(path, f"its header says nothing sensible of tensor {name[:80]!r}") from error
    if len(tensor.dtype) > MAX_DTYPE:
        raise broken(path, f"its header gives tensor {name[:80]!r} a kind of numbers that there is not")
    if len(tensor.shape) > 64 or not 0 <= prod(tensor.shape) < MAX_PARAMETERS:
        raise broken(path, f"its header gives tensor {name[:80]!r} a shape that no tensor has")
    if not 0 <= tensor.data_offsets[0] <= tensor.data_offsets[1]:
        raise broken(path, f"its header gives tensor {name[:80]!r} a place that there is not")
    return tensor


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, msgspec.Raw], dict[str, str]]:
    """Return the tensors' entries as they are written, and the metadata."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        raise broken(path, f"its header claims {length} bytes, and the format allows {MAX_HEADER}")
    data = file.read(length)
    if len(data) < length:
        raise broken(path, "it was cut short within its header")
    if data.count(b'"') > MAX_QUOTES:
        raise broken(path, "its header has more entries than any model has tensors")
    try:
        entries = _header_of.decode(data)
        metadata = _metadata.decode(entries.pop("__metadata__", b"{}"))
    except _UNREADABLE as error:
        raise broken(path, "its header is not the JSON table that the format asks for") from error
    return entries, metadata


def whole(path: Path) -> bool:
    """Say whether the header can be read and tells of just the bytes that are there."""
    try:
        with path.open("rb") as file:
            _checked(file, path)
    except (OSError, FanfoldError):
        return False
    return True


def _checked(file: BinaryIO, path: Path) -> tuple[dict[str, msgspec.Raw], dict[str, str]]:
    """Return what the header says of a file that is whole."""
    entries, metadata = _header(file, path)
    for _ in _tensors(file, path, entries):
        pass
    return entries, metadata


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:
    """Put the stamp into the header: in the room it has, over tensors carried to the end, in a block put in front, or anew."""
    fd = file.fileno()
    undo.sweep(path)
    entries, metadata = _checked(file, path)  # a damaged file is not written on
    old, size = file.tell() - 8, os.fstat(fd).st_size
    told = {**metadata, NAME: stamp.decode()}
    head = msgspec.json.encode({"__metadata__": told, **entries})
    with unshared(file) as ours:
        if len(head) <= old:  # weights stay where they are, so others may look on
            _fill(path, fd, head, old)
            return
        if ours and (_carried(path, fd, told, entries, 8 + old, len(head) - old) or _grown(path, fd, head, old, size)):
            return
    _rewrite(path, head, old)


def _fill(path: Path, fd: int, head: bytes, room: int) -> None:
    with undo.noted(path, fd, undo.Note(size=os.fstat(fd).st_size, start=8 + room)):
        _put(fd, head, room, lambda: None)


def _put(fd: int, head: bytes, room: int, settle: Callable[[], None]) -> None:
    """Write length and header, padded with spaces as the format allows; its first byte last, so that half of it is no header."""
    undo.put(fd, room.to_bytes(8, "little") + b"\0", 0)
    undo.put(fd, head.ljust(room)[1:], 9)
    settle()
    undo.put(fd, head[:1], 8)


def _carried(path: Path, fd: int, metadata: dict[str, str], entries: dict[str, msgspec.Raw], start: int, needed: int) -> bool:
    """Copy the first tensors behind the last one, and let the header have their place; False where they are large."""
    size = os.fstat(fd).st_size
    tensors = {name: msgspec.json.decode(entry) for name, entry in entries.items()}
    cut = _cut(sorted(tuple(tensor["data_offsets"]) for tensor in tensors.values()), needed, size - start)
    for tensor in tensors.values():
        by = size - start - cut if tensor["data_offsets"][0] < cut else -cut
        tensor["data_offsets"] = [at + by for at in tensor["data_offsets"]]
    head = msgspec.json.encode({"__metadata__": metadata, **tensors})
    if not cut or len(head) > start - 8 + cut or start + cut > MAX_HEADER:
        return False
    with undo.noted(path, fd, undo.Note(size=size, start=start, carried=cut)) as settle:
        undo.copy(fd, start, size, cut)
        settle()
        _put(fd, head, start - 8 + cut, settle)
    return True


def _cut(spans: list[tuple[int, int]], needed: int, size: int) -> int:
    """Return how many bytes of tensors make enough room when they go from the front to the end; 0 where no few do.

    They stay aligned for every type: both the room and the bytes before their new place are whole words. Tensors with holes
    between them, or one within another, are none that a loader takes: such a file is left as it lies.
    """
    joined = all(one[1] == two[0] for one, two in pairwise([(0, 0), *spans, (size, size)]))
    if size % WORD or not joined:
        return 0
    fits = (end for _, end in spans if needed <= end <= min(CARRY, size // 20) and end % WORD == 0)
    return next(fits, 0)


def _grown(path: Path, fd: int, head: bytes, old: int, size: int) -> bool:
    """Let the filesystem make room in front of the tensors, and fill it; False where it cannot."""
    more = -(-(len(head) - old) // ROOM) * ROOM
    if old + more > MAX_HEADER:
        return False
    with undo.noted(path, fd, undo.Note(size=size, start=8 + old, inserted=more)) as settle:
        if not undo.move(fd, more):
            return False
        _put(fd, head, old + more, settle)
    return True


def _rewrite(path: Path, head: bytes, old: int) -> None:
    import shutil

    room = -(-len(head) // 8) * 8
    if room > MAX_HEADER:
        raise FanfoldError(
            f"{path} could not be stamped: its header is as long as the format allows. The file is as it was. "
            "Give the stamp less to say, or save the model in parts."
        )
    with path.open("rb") as source, anew(path) as target:
        target.write(room.to_bytes(8, "little") + head.ljust(room))
        source.seek(8 + old)
        shutil.copyfileobj(source, target, 1 << 24)
