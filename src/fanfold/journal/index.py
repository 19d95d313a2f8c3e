"""A cached index of a large journal: where its rows are and how far it was checked, so that no byte is read twice."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from zlib import crc32

from ..atomic import replacing
from ..errors import JournalError
from ..settings import cache_directory
from . import format as fmt
from .packed import raw_size
from .reader import Journal

VERSION = 3
WORTH_BYTES = 4 << 20  # below this, walking the journal is faster than reading another file


def _path(cache: Path, journal: Journal) -> Path:
    return cache / "index" / f"{journal.id}.idx"


def load(path: Path, cache: Path) -> Journal | None:
    """Open a journal with the index of an earlier reader, if there is one and it matches this content."""
    journal = Journal(path)
    try:
        data = _path(cache, journal).read_bytes()
        if crc32(data[4:]) != int.from_bytes(data[:4], "little"):
            return None
        known = fmt.unpack(memoryview(data)[4:])
        if known["version"] != VERSION:
            return None
        frames = [(int(kind), int(offset), int(length)) for kind, offset, length in known["frames"]]
        adopted = journal.adopt(frames, known["runs"], known["verified"], known["damaged"], known["mark"])
    except (OSError, JournalError, KeyError, TypeError, ValueError):
        return None  # an unusable index is simply rebuilt
    return journal if adopted else None


def save(journal: Journal, cache: Path, known: int) -> None:
    """Save the index if it is worth a file. `known` is how far the last saved index reached."""
    if journal.verified - known < WORTH_BYTES:
        return
    path = _path(cache, journal)
    data = fmt.pack(
        {
            "version": VERSION,
            "verified": journal.verified,
            "mark": journal.print_of(journal.verified),
            "damaged": journal.damaged,
            "frames": journal.frames,
            "runs": [[shape_id, rows.runs] for shape_id, rows in list(journal.rows.items())],
        }
    )
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path) as file:
            file.write(crc32(data).to_bytes(4, "little") + data)


KEPT = 8
_kept: dict[tuple[int, Path], tuple[os.stat_result, Journal]] = {}  # also keyed by process: a forked child starts with none


def _open(path: Path) -> Journal | None:
    """Return a large journal recently read in this process: mapping its file again costs as much as gathering a column.

    Drop those whose file is gone, was replaced or changed other than by growing, to free their disk space.
    """
    for key, (then, _) in list(_kept.items()):
        with contextlib.suppress(OSError):
            now = key[1].stat()
            grown = now.st_size > then.st_size or (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns)
            if key[0] == os.getpid() and now.st_ino == then.st_ino and grown:
                continue
        _kept.pop(key, None)
    found = _kept.get((os.getpid(), path))
    return found[1] if found else None


def _keep(path: Path, journal: Journal) -> None:
    with contextlib.suppress(OSError):
        _kept.pop((os.getpid(), path), None)  # most recently used last
        _kept[os.getpid(), path] = (path.stat(), journal)
    for key in list(_kept)[: max(0, len(_kept) - KEPT)]:
        _kept.pop(key, None)


def open_indexed(path: Path, cache: Path | None = None) -> Journal:
    """Open a journal and read it to its end, using what this process or an earlier one already indexed."""
    if raw_size(path) < WORTH_BYTES:
        journal = Journal(path)
        journal.refresh()
        return journal
    cache = cache or cache_directory()
    journal = _open(path) or load(path, cache) or Journal(path)
    known = journal.verified
    journal.refresh()
    save(journal, cache, known)
    _keep(path, journal)
    return journal
