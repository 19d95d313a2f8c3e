"""Reading of packed journals: returns exactly the bytes of the original journal. docs/journal.md describes the file.

A packed journal (`.ffz`) replaces its journal (`.ffj`); if both exist, the `.ffj` is used. Readers map the unpacked
file, which is kept in the cache folder while there is space.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, NamedTuple
from zlib import crc32

from ..atomic import beside
from ..errors import JournalError, notices
from ..settings import cache_directory
from . import format as fmt
from .bodies import NewerFormat
from .files import is_mostly_holes, open_regular
from .format import BLOCK, MOST_RATIO, PACKED, SUFFIX

MAGIC: Final = b"FFPACK"
VERSION: Final = 1
HEAD: Final = struct.Struct("<6sHQQ32sQII")  # magic, version, journal id, raw size, sha256; the table's offset, rows and crc
HEAD_SIZE: Final = HEAD.size + 4  # and the crc of all that
ENTRY: Final = struct.Struct("<III")  # of the table: raw length, stored length, crc of the stored bytes
MOST_STORED: Final = BLOCK + (1 << 16)  # size of a block in which nothing can be compressed
CACHE_BYTES: Final = 4 << 30
SETTLED_NS: Final = 2_000_000_000


class BlockEntry(NamedTuple):
    """One block: the position of its bytes in the journal and in the packed file."""

    start: int
    length: int
    at: int
    stored: int
    crc: int


class Head(NamedTuple):
    """The head of the file."""

    journal: str
    size: int
    digest: bytes
    table: int
    blocks: int
    sum: int


class MostlyHoles(JournalError):
    """A journal whose size far exceeds its data on disk. Journals are only appended to, and have no holes."""


class PackedJournal(io.RawIOBase):
    """A packed journal, read as if it were the journal: block by block, each checked.

    A damaged block reads as zeros, which journal readers count as damage and skip; `lost` lists such blocks.
    """

    def __init__(self, path: Path, file: IO[bytes], head: Head, entries: list[BlockEntry]) -> None:
        self.path = path
        self.head = head
        self.entries = entries
        self.lost: list[BlockEntry] = []
        self.seed = fmt.seed_of(head.journal)
        self._file = file
        self._at = 0
        self._block: tuple[int, bytes] = (-1, b"")

    def close(self) -> None:
        self._file.close()
        super().close()

    def fileno(self) -> int:
        return self._file.fileno()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.head.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self.head.size:
            return 0
        number = self._number(self._at)
        start, length = self.entries[number][:2]
        part = self._bytes(number)[self._at - start : min(length, self._at - start + len(buffer))]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def blocks(self) -> Iterator[bytes]:
        """Yield the journal's bytes, one block at a time."""
        for number in range(len(self.entries)):
            yield self._bytes(number)

    def _number(self, at: int) -> int:
        low, high = 0, len(self.entries) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.entries[middle].start <= at else (low, middle - 1)
        return low

    def _bytes(self, number: int) -> bytes:
        if self._block[0] != number:
            self._block = number, self._unpacked(self.entries[number])
        return self._block[1]

    def _unpacked(self, entry: BlockEntry) -> bytes:
        self._file.seek(entry.at)
        stored = self._file.read(entry.stored)
        if len(stored) == entry.stored and crc32(stored) == entry.crc:
            from .blocks import unpack

            with contextlib.suppress(JournalError):
                return unpack(stored, entry.length, self.seed)
        self.lost.append(entry)
        return bytes(entry.length)


def open_packed(path: Path) -> PackedJournal:
    """Open a packed journal; raise JournalError if its blocks cannot be located."""
    file = open_regular(path)
    try:
        head = _read_head(path, file)
        return PackedJournal(path, file, head, _read_table(path, file, head))
    except (OSError, JournalError):
        file.close()
        raise


def _read_head(path: Path, file: IO[bytes]) -> Head:
    data = file.read(HEAD_SIZE)
    if len(data) == HEAD_SIZE and data.startswith(MAGIC):
        _, version, journal, *rest = HEAD.unpack_from(data)
        if version > VERSION:
            raise NewerFormat(
                f"{path} is of packed format {version}, and this fanfold reads up to {VERSION}. "
                "The run cannot be shown. Upgrade fanfold: pip install -U fanfold"
            )
        if crc32(data[:-4]) == int.from_bytes(data[-4:], "little"):
            return Head(f"{journal:016x}", *rest)
    raise unreadable(path, "its first bytes are damaged")


def _read_table(path: Path, file: IO[bytes], head: Head) -> list[BlockEntry]:
    """Read the table of blocks, and check it against the size of the file and of the journal."""
    size = os.fstat(file.fileno()).st_size
    if head.size > MOST_RATIO * size:
        raise unreadable(
            path, f"its {size} bytes would take {head.size} bytes, and at most {MOST_RATIO} times its size are allowed"
        )
    if head.table < HEAD_SIZE or head.table + head.blocks * ENTRY.size != size:
        raise unreadable(path, "it is cut off")
    file.seek(head.table)
    table = file.read(size - head.table)
    if crc32(table) != head.sum:
        raise unreadable(path, "the table of its blocks is damaged")
    entries, start, at = [], 0, HEAD_SIZE
    for length, stored, crc in ENTRY.iter_unpack(table):
        if not 0 < length <= BLOCK or not 0 < stored <= MOST_STORED:
            raise unreadable(path, "a block's size is out of range")
        entries.append(BlockEntry(start, length, at, stored, crc))
        start, at = start + length, at + stored
    if start != head.size or at != head.table:
        raise unreadable(path, "its sizes do not agree")
    return entries


def unreadable(path: Path, why: str) -> JournalError:
    return JournalError(
        f"{path} cannot be unpacked: {why}. What that process logged is not shown; other journals of the run are. "
        "Restore the file from a copy."
    )


def _other_content(path: Path) -> JournalError:
    return unreadable(path, "its content is not what was packed")


# Locating a journal's bytes for readers


def present(path: Path) -> Path:
    """Return the current path of a journal, which may have been packed since it was listed."""
    packed = path.with_suffix(PACKED)
    return packed if path.suffix == SUFFIX and not path.exists() and packed.exists() else path


def opened(path: Path) -> BinaryIO:
    """Open a journal for reading; only the blocks that are read are unpacked."""
    return io.BufferedReader(open_packed(path)) if path.suffix == PACKED else open_regular(_without_holes(path))


def raw_size(path: Path) -> int:
    """Return the size of a journal in bytes, as if unpacked."""
    if path.suffix == PACKED:
        with open_regular(path) as file, contextlib.suppress(JournalError):
            return _read_head(path, file).size
    return os.stat(path).st_size  # noqa: PTH116 - faster, for thousands of journals


def readable(path: Path) -> Path:
    """Return a file with a journal's raw bytes: the journal itself, or its unpacked copy in the cache folder."""
    return unpacked(path, cache_directory()) if path.suffix == PACKED else _without_holes(path)


def _without_holes(path: Path) -> Path:
    """Return the path, or raise MostlyHoles: reading such a file takes time and memory for bytes that were never written."""
    if is_mostly_holes(path, MOST_RATIO):
        raise MostlyHoles(
            f"{path} cannot be read: it is a sparse file, nearly all of whose {path.stat().st_size} bytes were never written. "
            "What that process logged is not shown; other journals of the run are. Restore the file from a copy, or delete it."
        )
    return path


def unpacked(path: Path, cache: Path) -> Path:
    """Return the unpacked copy of a packed journal in the cache, creating it if it is missing."""
    with open_packed(path) as packed:
        head = packed.head
        # The name includes the content hash: a journal may have been packed again after it grew.
        target = cache / "unpacked" / f"{head.journal}-{head.digest.hex()[:16]}{SUFFIX}"
        wrong, damaged = _verdicts(packed, target)
        if wrong.exists():
            raise _other_content(path)
        for known in (target, damaged):
            if _is_whole(known, head.size):
                _tell(packed, known == damaged)
                return known
        try:
            return _unpack_to(packed, target)
        except OSError as error:
            raise JournalError(
                f"{path} cannot be unpacked to {target.parent}: {error.strerror or error}. What that process logged is not shown "
                "now; nothing is lost. Make room there, or name another folder by FANFOLD_CACHE_DIR."
            ) from error


def _verdicts(packed: PackedJournal, target: Path) -> tuple[Path, Path]:
    """Return two cache paths: one marks this file's content as wrong, the other holds what could be read of it.

    A file is identified by inode and timestamps: another file that claims to be the same journal is judged separately.
    """
    found = os.fstat(packed.fileno())
    known = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    import hashlib

    mark = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
    return target.with_suffix(f".{mark}.wrong"), target.with_suffix(f".{mark}.damaged")


def _is_whole(target: Path, size: int) -> bool:
    """Return whether a file was unpacked before, and if so update its access time, which few filesystems do by themselves."""
    with contextlib.suppress(OSError):
        found = target.stat()
        if found.st_size == size:
            os.utime(target, ns=(time.time_ns(), found.st_mtime_ns))
            return True
    return False


def _unpack_to(packed: PackedJournal, target: Path) -> Path:
    """Write the journal's bytes to a temporary file, check them against their hash, and rename it."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _make_room(target.parent, packed.head.size)
    disk = os.statvfs(target.parent)
    if disk.f_bavail * disk.f_frsize < packed.head.size:
        raise OSError(errno.ENOSPC, f"there is no room for {packed.head.size} bytes")
    wrong, damaged = _verdicts(packed, target)
    # A file written moments ago may be rewritten without a new timestamp, so its defects are not recorded.
    settled = time.time_ns() - os.fstat(packed.fileno()).st_ctime_ns > SETTLED_NS
    with beside(target) as aside:
        with aside.open("xb") as file:
            try:
                sound = copy(packed, file)
            except JournalError:
                if settled:
                    with contextlib.suppress(OSError):
                        wrong.touch(mode=0o600)
                raise
        os.utime(aside, ns=(time.time_ns(), packed.path.stat().st_mtime_ns))
        if not sound:  # never under the name of the intact file, which may be restored later
            _tell(packed, True)
            target = damaged if settled else target.with_suffix(".damaged")
        aside.replace(target)
    return target


def _tell(packed: PackedJournal, damaged: bool) -> None:
    """Warn once about the lost part of a journal, however many places are damaged."""
    if not damaged:
        return
    places, lost = "", "where it cannot be read"
    if packed.lost:
        first, others = packed.lost[0], len(packed.lost) - 1
        places = f" at byte {first.at}" + (f", and {others} other parts are" if others else "")
        lost = f"in bytes {first.start} to {first.start + first.length} of that journal"
    notices.once(
        f"packed:{packed.path}",
        f"{packed.path} is damaged{places}. What was logged {lost} is lost; the rest is read. Restore the file from a copy.",
    )


def copy(packed: PackedJournal, file: IO[bytes]) -> bool:
    """Write a journal's bytes to a file and sync it; return whether they are complete."""
    import hashlib

    digest = hashlib.sha256()
    for block in packed.blocks():
        digest.update(block)
        file.write(block)
    file.flush()
    os.fsync(file.fileno())
    if not packed.lost and digest.digest() != packed.head.digest:
        raise _other_content(packed.path)
    return not packed.lost


def _make_room(folder: Path, size: int) -> None:
    """Remove the least recently used files until one of this size fits. Readers that have one open keep it."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another reader may be removing files as well
            found = path.lstat()
            files.append((found.st_atime_ns, path, found.st_size))
    over = sum(length for _, _, length in files) + size - CACHE_BYTES
    for _, path, length in sorted(files):
        if over <= 0:
            return
        path.unlink(missing_ok=True)
        over -= length


def discard(cache: Path, journal_id: str) -> None:
    """Remove the unpacked copies of a journal from the cache."""
    for path in (cache / "unpacked").glob(f"{fmt.check_id(journal_id)}-*"):
        path.unlink(missing_ok=True)
