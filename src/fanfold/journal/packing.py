"""Packing of journals that will not grow any more: the same bytes in less space, with a complete copy at every moment."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
from collections.abc import Generator
from pathlib import Path
from typing import IO, Final, NamedTuple
from zlib import crc32

from ..atomic import beside, sync_folder
from ..errors import JournalError
from . import format as fmt
from .blocks import BlockPacker
from .files import open_regular
from .format import BLOCK, PACKED, SUFFIX
from .packed import ENTRY, HEAD, HEAD_SIZE, MAGIC, VERSION, copy, open_packed, unreadable

GAIN: Final = 0.9  # a journal that does not shrink to this fraction stays unpacked
SAMPLES: Final = 8


class Packed(NamedTuple):
    """The result of packing a journal."""

    path: Path
    raw: int
    stored: int


def pack(path: Path) -> Packed | None:
    """Replace a journal with its packed form; return None and leave it unchanged if that gains little, or it grew meanwhile."""
    steps = packing(path)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def packing(path: Path) -> Generator[int, None, Packed | None]:
    """Pack a journal as `pack` does, yielding the number of bytes done.

    A complete copy exists at every moment: write a temporary file, sync it, unpack and compare, rename, and only then delete
    the original. A killed process leaves the journal, or both.
    """
    target = path.with_suffix(PACKED)
    with open_regular(path) as raw, beside(target) as aside:
        before = os.fstat(raw.fileno())
        if before.st_size > SAMPLES * BLOCK and estimate(path) > GAIN * before.st_size:
            return None
        with aside.open("xb") as file:
            digest = yield from _write(raw, file, path)
            _dress(file, before)
        yield from _verify(aside, digest, before.st_size)
        stored = aside.stat().st_size
        if stored > GAIN * before.st_size or not _replace(raw, before, aside, path):
            return None
        return Packed(target, before.st_size, stored)


def _write(raw: IO[bytes], file: IO[bytes], path: Path) -> Generator[int, None, bytes]:
    """Write and sync the packed file, its head last; return the hash of the packed bytes."""
    journal_id = fmt.check_id(path.stem.rpartition("-")[2])
    digest, table, at = hashlib.sha256(), bytearray(), 0
    file.write(bytes(HEAD_SIZE))
    with mmap.mmap(raw.fileno(), os.fstat(raw.fileno()).st_size, access=mmap.ACCESS_READ) as data:
        packer = BlockPacker(data, journal_id)
        while at < len(data):
            end, stored = packer.block(at)
            digest.update(data[at:end])
            file.write(stored)
            table += ENTRY.pack(end - at, len(stored), crc32(stored))
            at = end
            yield at
    where = file.tell()
    file.write(table)
    head = HEAD.pack(MAGIC, VERSION, int(journal_id, 16), at, digest.digest(), where, len(table) // ENTRY.size, crc32(table))
    file.seek(0)
    file.write(head + crc32(head).to_bytes(4, "little"))
    file.flush()
    os.fsync(file.fileno())
    return digest.digest()


def _verify(aside: Path, expected: bytes, size: int) -> Generator[int, None, None]:
    """Unpack the written file, and raise unless it is identical to the journal."""
    digest = hashlib.sha256()
    with open_packed(aside) as packed:
        for block in packed.blocks():
            digest.update(block)
            yield size
    if packed.lost or digest.digest() != expected:
        raise JournalError(
            f"what was packed to {aside} does not unpack to the same bytes. The journal stays as it is; nothing is lost. "
            "The disk or the memory of this machine may be failing: check them."
        )


def _dress(file: IO[bytes], before: os.stat_result) -> None:
    """Give a new file the timestamps, owner and permissions of the one it replaces.

    By its descriptor: where root packs a user's journals, that user may put a link to any file in the place of a name.
    """
    file.flush()
    with contextlib.suppress(PermissionError):
        os.fchown(file.fileno(), before.st_uid, before.st_gid)
    os.fchmod(file.fileno(), before.st_mode & 0o777)
    os.utime(file.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(raw: IO[bytes], before: os.stat_result, aside: Path, path: Path) -> bool:
    """Put the packed file in the journal's place unless the journal has changed. A gateway that appends holds the lock."""
    if not _locked(raw):
        return False
    now = os.fstat(raw.fileno())
    if (now.st_size, now.st_mtime_ns, now.st_nlink) != (before.st_size, before.st_mtime_ns, before.st_nlink):
        return False
    aside.replace(path.with_suffix(PACKED))
    sync_folder(path.parent)  # the new name must be on disk before the old one is removed
    path.unlink(missing_ok=True)
    return True


def _locked(raw: IO[bytes]) -> bool:
    import fcntl

    try:
        fcntl.flock(raw.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a filesystem without locks: size and timestamp decide
    return True


def estimate(path: Path) -> int:
    """Estimate the size of a journal's packed file from evenly spaced sample blocks."""
    with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        packer = BlockPacker(data, fmt.check_id(path.stem.rpartition("-")[2]))
        starts = range(0, len(data), max(BLOCK, len(data) // SAMPLES))
        raw = stored = 0
        for at in itertools.islice(starts, SAMPLES):
            end, block = packer.block(at)
            raw, stored = raw + end - at, stored + len(block) + ENTRY.size
        return HEAD_SIZE + stored * len(data) // raw


def restore(path: Path) -> Path:
    """Replace a packed file with its unpacked journal, which is about to grow again; return the journal's path."""
    target = path.with_suffix(SUFFIX)
    with beside(target) as aside:
        with open_packed(path) as packed, aside.open("xb") as file:
            if not copy(packed, file):
                raise unreadable(path, "it is damaged")
            _dress(file, path.lstat())
        with contextlib.suppress(FileExistsError):  # another gateway was faster, and may already append to it
            os.link(aside, target)
        sync_folder(target.parent)
        path.unlink(missing_ok=True)
    return target
