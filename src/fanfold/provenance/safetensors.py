"""safetensors: eight bytes of length, a JSON header, the tensors. The stamp is an entry of the header's `__metadata__`."""

from __future__ import annotations

import os
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..errors import FanfoldError
from .anew import anew
from .record import NAME
from .zips import broken

MAX_HEADER = 100_000_000  # the format's own limit
MAX_PARAMETERS = 1 << 63
ROOM = 4096
_INSERT_RANGE, _COLLAPSE_RANGE = 0x20, 0x08


class _Tensor(msgspec.Struct):
    """What is read of a tensor's entry."""

    dtype: str
    shape: list[int]


_tensor = msgspec.json.Decoder(_Tensor)
_header_of = msgspec.json.Decoder(dict[str, msgspec.Raw])  # entries stay bytes until they are asked for: little memory
_metadata = msgspec.json.Decoder(dict[str, str])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return the format's name, the bytes of the stamp, and a few facts."""
    entries, metadata = _header(file, path)
    dtypes: Counter[str] = Counter()
    parameters = 0
    for name, entry in entries.items():
        tensor = _read_tensor(entry, name, path)
        dtypes[tensor.dtype] += 1
        parameters += prod(tensor.shape)
    stamp = metadata.pop(NAME, None)
    told = {"tensors": len(entries), "parameters": parameters, "dtypes": dict(dtypes), "metadata": metadata}
    return "safetensors", None if stamp is None else stamp.encode("utf-8", "replace"), told


def _read_tensor(entry: msgspec.Raw, name: str, path: Path) -> _Tensor:
    try:
        tensor = _tensor.decode(entry)
    except _UNREADABLE as error:
        raise broken(path, f"its header says nothing sensible of tensor {name[:80]!r}") from error
    if len(tensor.shape) > 64 or not 0 <= prod(tensor.shape) < MAX_PARAMETERS:
        raise broken(path, f"its header gives tensor {name[:80]!r} a shape that no tensor has")
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
    try:
        entries = _header_of.decode(data)
        metadata = _metadata.decode(entries.pop("__metadata__", b"{}"))
    except _UNREADABLE as error:
        raise broken(path, "its header is not the JSON table that the format asks for") from error
    return entries, metadata


def write(path: Path, stamp: bytes) -> None:
    """Put the stamp into the header: in the room it has, else in a block put in front, else by writing the file anew."""
    with path.open("r+b", buffering=0) as file:
        entries, metadata = _header(file, path)
        old = file.tell() - 8
        head = msgspec.json.encode({"__metadata__": {**metadata, NAME: stamp.decode()}, **entries})
        if len(head) <= old:
            _put(file.fileno(), head, old)
            return
        more = -(-(len(head) - old) // ROOM) * ROOM
        if old + more <= MAX_HEADER and _grown(file.fileno(), head, old, more):
            return
    _rewrite(path, head, old)


def _put(fd: int, head: bytes, room: int) -> None:
    """Write length and header, padded with spaces as the format allows, by one call."""
    data = room.to_bytes(8, "little") + head.ljust(room)
    if os.pwrite(fd, data, 0) != len(data):
        raise OSError("no space left")


def _grown(fd: int, head: bytes, old: int, more: int) -> bool:
    """Make room in front of the tensors without moving them, and fill it; False where the filesystem cannot.

    Between the two the file cannot be read, so a thread of their own does both: Ctrl-C interrupts only the main one.
    """
    import threading

    ended: list[OSError | bool] = []
    own = os.dup(fd)  # an interrupted main thread closes the other
    work = threading.Thread(target=lambda: ended.append(_grow(own, head, old, more)), name="fanfold-stamp")
    work.start()
    work.join()
    if isinstance(ended[0], OSError):
        raise ended[0]
    return ended[0]


def _grow(fd: int, head: bytes, old: int, more: int) -> OSError | bool:
    try:
        if not _move(fd, _INSERT_RANGE, more):
            return False
        try:
            _put(fd, head, old + more)
        except OSError as error:  # the disk is full: take the room back, and the file is as it was
            _move(fd, _COLLAPSE_RANGE, more)
            return error
        os.fdatasync(fd)  # the room is on the disk already; its content must not wait half a minute to follow
        return True
    finally:
        os.close(fd)


def _move(fd: int, how: int, count: int) -> bool:
    """Put `count` bytes in front of a file, or take them away, without touching the others, where the filesystem can."""
    import ctypes  # here, since reading does without

    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.fallocate(fd, how, ctypes.c_long(0), ctypes.c_long(count)) == 0)
    except (OSError, AttributeError):  # not Linux
        return False


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
