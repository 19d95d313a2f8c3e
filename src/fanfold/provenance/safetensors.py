"""safetensors: eight bytes of header length, a JSON header, the tensors. The stamp is an entry in its `__metadata__`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..errors import FanfoldError
from .record import NAME
from .replace import copy_rest, replacing
from .zips import broken

MAX_HEADER = 100_000_000  # the format's own limit
MAX_PARAMETERS = 1 << 63
MAX_QUOTES = 2_500_000  # a tensor has ten. Limits memory: each name takes about 200 bytes, and has two quotes
MAX_ENTRY = 64 << 10  # bytes of one tensor's entry: parsed, a shape's numbers take ten times their text
MAX_DTYPE, MAX_DTYPES = 64, 100  # characters of a name, and number of names; the format has about twenty
BLOCK = 4096  # of a filesystem


class _Tensor(msgspec.Struct):
    """The fields read from a tensor's entry."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_tensor = msgspec.json.Decoder(_Tensor)
_header_of = msgspec.json.Decoder(dict[str, msgspec.Raw])  # entries stay raw bytes until needed, to save memory
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
    """Yield the header's tensors, with the file positioned after it; raise if the file does not end where the tensors do."""
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
    """Return the raw entries of the tensors, and the metadata."""
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


def _checked(file: BinaryIO, path: Path) -> tuple[dict[str, msgspec.Raw], dict[str, str]]:
    """Return the header of a file, after checking that the file is complete."""
    entries, metadata = _header(file, path)
    for _ in _tensors(file, path, entries):
        pass
    return entries, metadata


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:
    """Write the stamp into the header of a copy that replaces the file.

    The header comes first and tensors must not have gaps, so changing it in place would leave the file unreadable for a
    moment. The header grows by whole blocks: on filesystems with shared blocks, the tensors are not copied.
    """
    entries, metadata = _checked(file, path)  # raises for a damaged file
    start = file.tell()
    head = msgspec.json.encode({"__metadata__": {**metadata, NAME: stamp.decode()}, **entries})
    more = max(0, -(-(len(head) - (start - 8)) // BLOCK)) * BLOCK
    room = start - 8 + more
    if room > MAX_HEADER:
        raise FanfoldError(
            f"{path} could not be stamped: its header is as long as the format allows. The file is as it was. "
            "Put less into the stamp, or save the model in parts."
        )
    with replacing(path) as target:
        target.write(room.to_bytes(8, "little") + head.ljust(room))
        copy_rest(file, start, target)
