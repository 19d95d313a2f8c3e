"""Zip archives. In those written by torch, the stamp is a member.

In others (.npz, .keras, .skops) a member would become part of the model, so the stamp is placed between the members and the
central directory, where no reader looks.

The central directory is parsed in bounded memory: an archive is untrusted input. The stamp is appended in one write, with a
new central directory: a kill at any moment leaves an archive that loads. If there are so many members that a partial write
could hide the old end from readers, the archive is copied and replaced.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ..errors import FanfoldError
from . import tail as tails
from .record import MAX_BYTES, NAME

if TYPE_CHECKING:
    import zipfile

MEMBER = f"extra/{NAME}"
MAX_DIRECTORY, MAX_MEMBERS = 256 << 20, 1_000_000
SAFE_TAIL = 60_000  # a partial write up to this size does not hide the old end of an archive: readers look 64 KiB back
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY = struct.Struct("<4s6H3I5H2I")
_RECORD64 = struct.Struct("<4sQ2H2I4Q")
_STORED, _DEFLATED = 0, 8
_DESCRIPTOR = 24  # bytes of an optional descriptor after a member, which repeats its size
_OF_TORCH = frozenset(("version", ".data/version", "archive_version", "archive_format", "data.pkl", "constants.pkl"))
_UNFIT = (NotImplementedError, ValueError, IndexError, struct.error)  # raised by zipfile for members that no saver writes
_TELLING = ("archive_format", "constants.pkl", "data.pkl", "data/aotinductor")  # 16-character prefixes that tell the format

_OF_KERAS = frozenset(("config.json", "metadata.json"))
_TELLING_ALONE = _OF_KERAS | {"schema.json"}


class ZipEntry(NamedTuple):
    """One member, as listed in the central directory."""

    name: str
    method: int
    crc: int
    packed: int
    size: int
    offset: int


class ZipDirectory(NamedTuple):
    """The central directory, as described at the end of the archive."""

    start: int
    size: int
    members: int
    comment: bytes
    wide: bool


def read(file: BinaryIO, path: Path) -> tuple[str, bytes | None, dict[str, Any]]:
    """Return an archive's format, the bytes of its stamp, and a few facts."""
    root, count, total = "", 0, 0
    arrays = 0
    seen: set[str] = set()
    wanted: dict[str, ZipEntry] = {}
    for entry in _entries(file, path):
        top, _, name = entry.name.partition("/")
        root = root or top
        count += 1
        total += entry.size
        if name in (MEMBER, ".data/serialization_id", "version", "archive_version"):
            wanted[name] = entry
        arrays += entry.name.endswith(".npy")
        if name[:16] in _TELLING:
            seen.add(name[:16])
        if entry.name in _TELLING_ALONE:
            seen.add(entry.name)
    of_stamp = wanted.pop(MEMBER, None)
    told = {"members": count, "bytes_of_members": total, "root": root}
    for name, entry in wanted.items():
        with contextlib.suppress(ValueError):
            told[name.rpartition("/")[2]] = _member(file, entry, 4096).decode("utf-8", "replace").strip()
    name = "NumPy archive" if 0 < count == arrays else _format(seen)
    if of_stamp is None:
        return name, tails.before(file, _directory(file, path).start)[0], told
    try:
        return name, _member(file, of_stamp, MAX_BYTES), told
    except ValueError as error:
        raise unreadable(path, str(error)) from error


def _format(seen: set[str]) -> str:
    if "archive_format" in seen:
        return "AOTInductor package" if "data/aotinductor" in seen else "torch.export"
    if "constants.pkl" in seen:
        return "TorchScript"
    if "data.pkl" in seen:
        return "torch.save"
    if seen >= _OF_KERAS:
        return "Keras"
    return "skops" if "schema.json" in seen else "zip"


def _entries(file: BinaryIO, path: Path) -> Iterator[ZipEntry]:
    """Iterate over the central directory; raise if it is damaged."""
    at, size, count, *_ = _directory(file, path)
    file.seek(at)
    end = at + size
    for _ in range(count):
        fixed = file.read(_ENTRY.size)
        at += _ENTRY.size  # tracked here: file.tell() would double the time
        if len(fixed) < _ENTRY.size or fixed[:4] != b"PK\x01\x02" or at > end:
            raise broken(path, "its table of contents is damaged")
        _, _, _, _, method, _, _, crc, packed, unpacked, name_len, extra_len, comment_len, *_, offset = _ENTRY.unpack(fixed)
        more = file.read(name_len + extra_len + comment_len)
        at += len(more)
        if 0xFFFFFFFF in (unpacked, packed, offset):
            unpacked, packed, offset = _wide(more[name_len : name_len + extra_len], unpacked, packed, offset)
        yield ZipEntry(more[:name_len].decode("utf-8", "replace"), method, crc, packed, unpacked, offset)


def _wide(extra: bytes, *fields: int) -> tuple[int, ...]:
    """Replace 32-bit fields marked as too large by their 64-bit values."""
    found = list(fields)
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{min(size, len(extra) - 4) // 8}Q", extra, 4))
            found = [next(numbers, field) if field == 0xFFFFFFFF else field for field in found]
        extra = extra[4 + size :]
    return tuple(found)


def _directory(file: BinaryIO, path: Path) -> ZipDirectory:
    """Find the central directory."""
    size = file.seek(0, os.SEEK_END)
    back = min(size, 22 + 0xFFFF)
    file.seek(size - back)
    tail = file.read(back)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < 22:
        raise broken(path, "the end of the archive is missing: it was cut short")
    count, length, start, comment = struct.unpack_from("<HIIH", tail, at + 10)
    locator = tail[at - 20 : at] if at >= 20 else b""
    if locator[:4] == _LOCATOR:
        file.seek(min(struct.unpack_from("<Q", locator, 8)[0], size))
        record = file.read(56)
        if len(record) < 56 or record[:4] != _END64:
            raise broken(path, "the end of the archive is damaged")
        count, length, start = struct.unpack_from("<QQQ", record, 32)
    if length > MAX_DIRECTORY or count > MAX_MEMBERS or start + length > size or count * _ENTRY.size > length:
        raise broken(path, "its table of contents is damaged, or larger than any model's")
    return ZipDirectory(start, length, count, tail[at + 22 : at + 22 + comment], locator[:4] == _LOCATOR)


def _member(file: BinaryIO, entry: ZipEntry, limit: int) -> bytes:
    """Read one member of at most `limit` bytes; raise ValueError if it does not match its entry."""
    if entry.size > limit or entry.packed > 2 * limit:
        raise ValueError(f"it has {max(entry.size, entry.packed):,} bytes, and {limit:,} are read")
    file.seek(entry.offset)
    head = file.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise ValueError("it is not where the archive says")
    file.seek(sum(struct.unpack_from("<HH", head, 26)), os.SEEK_CUR)
    data = _unpacked(file.read(entry.packed), entry.method, limit)
    if len(data) != entry.size:
        raise ValueError("it is not as long as the archive says")
    if entry.crc not in (zlib.crc32(data), 0):  # 0: torch was configured to compute none (set_crc32_options)
        raise ValueError("its checksum is wrong, so it was changed or damaged")
    return data


def _unpacked(data: bytes, method: int, limit: int) -> bytes:
    if method == _STORED:
        return data
    if method != _DEFLATED:
        raise ValueError("it is packed in a way that is not known here")
    try:
        return zlib.decompressobj(-15).decompress(data, limit)
    except zlib.error as error:
        raise ValueError("its packed bytes are damaged") from error


def write(path: Path, stamp: bytes, file: BinaryIO) -> None:
    """Add the stamp to an archive, or replace the one it has."""
    with path.open("rb") as buffered:
        root, last, old = _survey(buffered, path)
    if root is None:
        tails.add(path, file, lambda at: hidden(file, path, stamp, at), content=last, old=old, safe=SAFE_TAIL)
    else:
        name = f"{root}/{MEMBER}"
        tails.add(path, file, lambda at: _tail(path, file, name, stamp, at), content=last, old=old, safe=SAFE_TAIL)


def _survey(file: BinaryIO, path: Path) -> tuple[str | None, int, int]:
    """Return the folder that contains all members, where the last one ends, and where a stamp begins (0 if there is none).

    The folder is None for an archive that torch did not write.
    """
    root, last, old, of_torch = "", 0, 0, False
    for entry in _entries(file, path):
        top, _, name = entry.name.partition("/")
        root = root or top
        of_torch = of_torch or name in _OF_TORCH
        if (top, name) == (root, MEMBER):
            old = entry.offset
        else:
            head = os.pread(file.fileno(), 30, entry.offset).ljust(30, b"\xff")
            last = max(last, entry.offset + 30 + sum(struct.unpack_from("<HH", head, 26)) + entry.packed + _DESCRIPTOR)
    if of_torch:
        return root or "archive", last, old
    return None, last, tails.before(file, _directory(file, path).start)[1]


def hidden(file: BinaryIO, path: Path, stamp: bytes, at: int) -> bytes:
    """Return the bytes to write at offset `at` that add the stamp to an archive without a new member.

    They are the stamp followed by the unchanged central directory.
    """
    found = _directory(file, path)
    file.seek(found.start)
    table = file.read(found.size)
    added = tails.block(stamp)
    start = at + len(added)
    end = start + len(table)
    wide = found.wide or start >= 0xFFFFFFFF
    record = b""
    if wide:
        record = _RECORD64.pack(_END64, _RECORD64.size - 12, 45, 45, 0, 0, found.members, found.members, found.size, start)
        record += struct.pack("<4sIQI", _LOCATOR, 0, end, 1)
    count, size = min(found.members, 0xFFFF), min(found.size, 0xFFFFFFFF)
    last = struct.pack("<4s4H2IH", _END, 0, 0, count, count, size, min(start, 0xFFFFFFFF), len(found.comment))
    return added + table + record + last + found.comment


def hide(buffer: io.BytesIO, stamp: bytes) -> None:
    """Insert the stamp into an archive in memory, before its central directory."""
    name = Path("the archive")
    at = _directory(buffer, name).start
    data = hidden(buffer, name, stamp, at)
    buffer.seek(at)
    buffer.write(data)


def _tail(path: Path, file: BinaryIO, name: str, stamp: bytes, at: int) -> bytes:
    """Return the bytes to write at offset `at` that add the stamp to an archive: a member and a new central directory."""
    import zipfile  # imported here, since reading does not need it

    tail = _ArchiveTail(file, at)
    try:
        with zipfile.ZipFile(tail, "a") as archive:
            archive.start_dir = at  # the old end stays intact until ours is written
            _drop(archive, name)
            archive.writestr(name, stamp)
    except (zipfile.BadZipFile, *_UNFIT) as error:
        raise broken(path, f"its table of contents is damaged ({error})") from error
    return tail.added.getvalue()


def _drop(archive: zipfile.ZipFile, name: str) -> None:
    """Remove an earlier stamp from the directory; its bytes stay in the file, unlisted, until there are too many."""
    if (old := archive.NameToInfo.pop(name, None)) is not None:
        archive.filelist.remove(old)


class _ArchiveTail:
    """A file whose old part is read-only, and whose new part is collected in memory, to be written by one call."""

    def __init__(self, file: BinaryIO | io.FileIO, start: int) -> None:
        self.file, self.start = file, start
        self.end = file.seek(0, os.SEEK_END)
        self.added = io.BytesIO()
        self.at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = (0, self.at, self.end)[whence] + offset  # from the end only before the first write
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        self.file.seek(self.at)
        data = bytes(self.file.read(size) or b"")
        self.at += len(data)
        return data

    def write(self, data: bytes) -> int:
        if self.at < self.start:
            raise OSError("the old part of the archive is not to be written")
        self.added.seek(self.at - self.start)
        self.at += self.added.write(data)
        return len(data)

    def flush(self) -> None:
        pass

    def truncate(self, size: int | None = None) -> int:
        return self.at if size is None else size


def broken(path: Path, why: str) -> FanfoldError:
    """Return the error for a damaged file."""
    return FanfoldError(f"{path} cannot be read: {why}. Nothing was changed. Restore the file from a copy, or save it again.")


def unreadable(path: Path, why: str) -> FanfoldError:
    """Return the error for a file with an invalid stamp."""
    return FanfoldError(
        f"{path} has a stamp that cannot be read: {why}. Nothing says which run made it, and the rest may be damaged. "
        "Restore the file from a copy, or stamp it again with fanfold.stamp(path)."
    )
