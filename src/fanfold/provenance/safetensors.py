"""safetensors: eight bytes of length, a JSON header, the tensors. The stamp is an entry of the header's `__metadata__`."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from .record import NAME
from .zips import broken

MAX_HEADER = 100_000_000  # the format's own limit
ROOM = 4096
_INSERT_RANGE = 0x20


def is_safetensors(head: bytes, size: int) -> bool:
    """Tell by a file's first nine bytes and its size."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= max(0, size - 8)


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return the format's name, the bytes of the stamp, and a few facts."""
    header = _header(file, path)
    metadata = header.pop("__metadata__", {})
    dtypes: Counter[str] = Counter()
    parameters = 0
    for name, tensor in header.items():
        try:
            dtypes[str(tensor["dtype"])] += 1
            parameters += prod(int(n) for n in tensor["shape"])
        except (TypeError, KeyError, ValueError) as error:
            raise broken(path, f"its header says nothing sensible of tensor {name[:80]!r}") from error
    stamp = metadata.pop(NAME, None)
    told = {"tensors": len(header), "parameters": parameters, "dtypes": dict(dtypes), "metadata": metadata}
    return "safetensors", stamp.encode() if isinstance(stamp, str) else None, told


def _header(file: BinaryIO, path: Path) -> dict[str, Any]:
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        raise broken(path, f"its header claims {length} bytes, and the format allows {MAX_HEADER}")
    data = file.read(length)
    if len(data) < length:
        raise broken(path, "it was cut short within its header")
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise broken(path, f"its header is no JSON ({type(error).__name__})") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise broken(path, "its header is not the table the format asks for")
    return header


def write(path: Path, stamp: bytes) -> None:
    """Put the stamp into the header: in the room it has, else in a block put in front, else by writing the file anew."""
    with path.open("r+b", buffering=0) as file:
        header = _header(file, path)
        old = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        metadata = {str(k): str(v) for k, v in header.get("__metadata__", {}).items()}
        rest = {k: v for k, v in header.items() if k != "__metadata__"}
        head = json.dumps({"__metadata__": {**metadata, NAME: stamp.decode()}, **rest}, separators=(",", ":")).encode()
        if len(head) <= old:
            _put(file.fileno(), head, old)
            return
        more = -(-(len(head) - old) // ROOM) * ROOM
        if old + more <= MAX_HEADER and _insert(file.fileno(), more):
            _put(file.fileno(), head, old + more)
            return
    _rewrite(path, head, old)


def _put(fd: int, head: bytes, room: int) -> None:
    """Write length and header, padded with spaces as the format allows, by one call."""
    os.pwrite(fd, room.to_bytes(8, "little") + head.ljust(room), 0)


def _insert(fd: int, count: int) -> bool:
    """Put `count` bytes in front of a file without moving the others, where the filesystem can."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.fallocate(fd, _INSERT_RANGE, ctypes.c_long(0), ctypes.c_long(count)) == 0)
    except (OSError, AttributeError):  # not Linux
        return False


def _rewrite(path: Path, head: bytes, old: int) -> None:
    """Write the file anew beside itself, and put it in the place of the old one when it is whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.stamping")
    room = -(-len(head) // 8) * 8
    try:
        with path.open("rb") as source, aside.open("wb") as target:
            target.write(room.to_bytes(8, "little") + head.ljust(room))
            source.seek(8 + old)
            shutil.copyfileobj(source, target, 1 << 24)
            target.flush()
            os.fsync(target.fileno())
        shutil.copymode(path, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
