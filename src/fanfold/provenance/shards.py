"""Missing or truncated files of a checkpoint: shards named by its index, and parts of a sharded (DCP) checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from .read import MAX_FILES, is_file
from .zips import broken

MAX_PARTS, MAX_INDEXES, MAX_INDEX = 10_000, 100, 64 << 20
_INDEXES = ("*.safetensors.index*.json", "*.bin.index*.json")
_END_BYTES = 22


def faults(folder: Path, *, bare: bool) -> Iterator[tuple[Path, int, str]]:
    """Yield files that are missing or visibly cut short, their size, and the error; `bare`: the folder has no model file."""
    indexes = (index for above in ("", "*/") for pattern in _INDEXES for index in folder.glob(above + pattern))
    for index in islice(indexes, MAX_INDEXES):
        yield from islice(_missing(index, bare=bare), MAX_FILES)
    for part in islice(folder.glob("*.distcp"), MAX_PARTS):
        if part.is_file() and _is_cut(part):
            yield part, part.stat().st_size, str(broken(part, "it was cut short"))


def _missing(index: Path, *, bare: bool) -> Iterator[tuple[Path, int, str]]:
    """Yield missing shards. If all are, but there are other model files, the model was downloaded in another format."""
    named = _named(index)
    if named is None:
        yield index, index.stat().st_size, str(broken(index, "it does not say which shard holds which tensor"))
        return
    listed = named.intersection(os.listdir(index.parent))  # noqa: PTH208 - compares names: an index must not lead to other paths
    there = {name for name in listed if is_file(index.with_name(name))}  # a symlink in a cache may be broken
    for name in sorted(named - there) if there or bare else ():
        shard = index.parent / name[:255]
        yield shard, 0, str(broken(shard, f"it is missing, and {index.name} names it"))


def _named(index: Path) -> set[str] | None:
    """Return the names of the shards; None if the index cannot be read."""
    import msgspec  # imported here, since most folders have no index

    from .safetensors import MAX_QUOTES

    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    if index.stat().st_size > MAX_INDEX or (data := index.read_bytes()).count(b'"') > MAX_QUOTES:
        return None
    try:
        return set(msgspec.json.decode(data, type=Index).weight_map.values())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _is_cut(part: Path) -> bool:
    """Return whether a part lost its end: it is a sequence of torch.save archives; other formats are not checked."""
    with part.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        return file.read(4) != b"PK\x05\x06"
