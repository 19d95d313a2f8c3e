"""Zip archives, as torch.save, TorchScript, torch.export and AOTInductor write them; the stamp is a member of its own.

Read by walking the central directory in bounded memory: an archive is untrusted input. Written behind the old end of the
archive in one write, with a directory of its own: a kill before it leaves the model as it was.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ..errors import FanfoldError
from .record import MAX_BYTES, NAME

if TYPE_CHECKING:
    import zipfile

MEMBER = f"extra/{NAME}"
MAX_DIRECTORY = 256 << 20
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY = struct.Struct("<4s6H3I5H2I")
_STORED, _DEFLATED = 0, 8
_TELLING = ("archive_format", "constants.pkl", "data.pkl", "data/aotinductor")  # the first 16 letters of names that tell a format


class Entry(NamedTuple):
    """One member, as the central directory has it."""

    name: str
    method: int
    packed: int
    size: int
    offset: int


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return an archive's format, the bytes of its stamp, and a few facts."""
    root, count, total = "", 0, 0
    seen: set[str] = set()
    wanted: dict[str, Entry] = {}
    for entry in _entries(file, path):
        top, _, name = entry.name.partition("/")
        root = root or top
        count += 1
        total += entry.size
        if name in (MEMBER, ".data/serialization_id", "version", "archive_version"):
            wanted[name] = entry
        if name[:16] in _TELLING:
            seen.add(name[:16])
    texts = {name: _member(file, entry, 4096) for name, entry in wanted.items() if name != MEMBER}
    told = {"members": count, "bytes_of_members": total, "root": root}
    told |= {name.rpartition("/")[2]: data.decode("utf-8", "replace").strip() for name, data in texts.items() if data is not None}
    stamp = _member(file, wanted[MEMBER], MAX_BYTES) if MEMBER in wanted else None
    return _format(seen), stamp, told


def _format(seen: set[str]) -> str:
    if "archive_format" in seen:
        return "AOTInductor package" if "data/aotinductor" in seen else "torch.export"
    if "constants.pkl" in seen:
        return "TorchScript"
    return "torch.save" if "data.pkl" in seen else "zip"


def _entries(file: BinaryIO, path: Path) -> Iterator[Entry]:
    """Walk the central directory; damage ends in a clear error."""
    at, size, count = _directory(file, path)
    file.seek(at)
    end = at + size
    for _ in range(count):
        fixed = file.read(_ENTRY.size)
        at += _ENTRY.size  # counted here: to ask the file takes as long as all the rest
        if len(fixed) < _ENTRY.size or fixed[:4] != b"PK\x01\x02" or at > end:
            raise broken(path, "its table of contents is damaged")
        _, _, _, _, method, _, _, _, packed, unpacked, name_len, extra_len, comment_len, *_, offset = _ENTRY.unpack(fixed)
        more = file.read(name_len + extra_len + comment_len)
        at += len(more)
        if 0xFFFFFFFF in (unpacked, packed, offset):
            unpacked, packed, offset = _wide(more[name_len : name_len + extra_len], unpacked, packed, offset)
        yield Entry(more[:name_len].decode("utf-8", "replace"), method, packed, unpacked, offset)


def _wide(extra: bytes, *fields: int) -> tuple[int, ...]:
    """Replace the 32-bit fields that say "too large" by their 64-bit ones."""
    found = list(fields)
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{min(size, len(extra) - 4) // 8}Q", extra, 4))
            found = [next(numbers, field) if field == 0xFFFFFFFF else field for field in found]
        extra = extra[4 + size :]
    return tuple(found)


def _directory(file: BinaryIO, path: Path) -> tuple[int, int, int]:
    """Return where the central directory starts, its bytes, and how many members it names."""
    size = file.seek(0, os.SEEK_END)
    back = min(size, 22 + 0xFFFF)
    file.seek(size - back)
    tail = file.read(back)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < 22:
        raise broken(path, "the end of the archive is missing: it was cut short")
    count, length, start = struct.unpack_from("<HII", tail, at + 10)
    locator = tail[at - 20 : at] if at >= 20 else b""
    if locator[:4] == _LOCATOR:
        file.seek(min(struct.unpack_from("<Q", locator, 8)[0], size))
        record = file.read(56)
        if len(record) < 56 or record[:4] != _END64:
            raise broken(path, "the end of the archive is damaged")
        count, length, start = struct.unpack_from("<QQQ", record, 32)
    if length > MAX_DIRECTORY or start + length > size or count * _ENTRY.size > length:
        raise broken(path, "its table of contents is damaged, or larger than any model's")
    return start, length, count


def _member(file: BinaryIO, entry: Entry, limit: int) -> bytes | None:
    """Read one member, at most `limit` bytes of it; None where it is not what its entry says."""
    file.seek(entry.offset)
    head = file.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04" or entry.size > limit or entry.packed > 2 * limit:
        return None
    name_len, extra_len = struct.unpack_from("<HH", head, 26)
    file.seek(name_len + extra_len, os.SEEK_CUR)
    data = file.read(entry.packed)
    if entry.method == _STORED:
        return data
    try:
        return zlib.decompressobj(-15).decompress(data, limit) if entry.method == _DEFLATED else None
    except zlib.error:
        return None


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:
    """Add the stamp to an archive, or replace the one it has."""
    import zipfile  # here, since reading does without

    with path.open("rb") as buffered:
        root = next((entry.name.partition("/")[0] for entry in _entries(buffered, path)), "archive")
    tail = _Tail(file)
    try:
        with zipfile.ZipFile(tail, "a") as archive:
            archive.start_dir = tail.end  # behind the old end, which stays whole until ours is written
            _drop(archive, f"{root}/{MEMBER}")
            archive.writestr(f"{root}/{MEMBER}", stamp)
    except zipfile.BadZipFile as error:
        raise broken(path, str(error)) from error
    file.seek(tail.end)
    data = tail.added.getvalue()
    if file.write(data) != len(data):  # a full disk: take the part back, and the model is as it was
        file.truncate(tail.end)
        raise FanfoldError(f"{path} could not be stamped: no space left. The file is as it was. Make room and stamp again.")


def _drop(archive: zipfile.ZipFile, name: str) -> None:
    """Forget an earlier stamp; its few bytes stay in the file, unnamed."""
    if (old := archive.NameToInfo.pop(name, None)) is not None:
        archive.filelist.remove(old)


class _Tail:
    """A file whose old part is only read, and whose new part is collected, to be written by one call."""

    def __init__(self, file: BinaryIO | io.FileIO) -> None:
        self.file = file
        self.end = file.seek(0, os.SEEK_END)
        self.added = io.BytesIO()
        self.at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self.at, self.end + len(self.added.getbuffer()))[whence]
        self.at = base + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        self.file.seek(self.at)
        data = bytes(self.file.read(size) or b"")
        self.at += len(data)
        return data

    def write(self, data: bytes) -> int:
        if self.at < self.end:
            raise OSError("the old part of the archive is not to be written")
        self.added.seek(self.at - self.end)
        self.at += self.added.write(data)
        return len(data)

    def flush(self) -> None:
        pass

    def truncate(self, size: int | None = None) -> int:
        return self.at if size is None else size


def broken(path: Path, why: str) -> FanfoldError:
    """Return the error for a file that is not what it says it is."""
    return FanfoldError(f"{path} cannot be read: {why}. Nothing was changed. Restore the file from a copy, or save it again.")
