"""The derived cache of a large journal: where its rows stand and how far it was checked, so that no byte is walked twice."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..errors import JournalError
from . import format as fmt
from .reader import Journal

VERSION = 1
WORTH_BYTES = 4 << 20  # below this, walking is quicker than a file more


def _path(cache: Path, journal: Journal) -> Path:
    return cache / "index" / f"{journal.id}.idx"


def load(journal: Journal, cache: Path) -> bool:
    """Take over what an earlier reader found, if it is about this very file; tell whether it did."""
    if journal.verified or journal.path.stat().st_size < WORTH_BYTES:
        return False
    try:
        known = fmt.unpack(_path(cache, journal).read_bytes())
        if known["version"] != VERSION or journal.path.stat().st_size < known["verified"]:
            return False
        frames = [(int(kind), int(offset), int(length)) for kind, offset, length in known["frames"]]
        return journal.adopt(frames, known["runs"], known["verified"], known["damaged"])
    except (OSError, JournalError, KeyError, TypeError, ValueError):
        return False  # derived data that cannot be used is simply made again


def save(journal: Journal, cache: Path, known: int) -> None:
    """Keep what was found, when it is worth a file. `known` is how far the last saved index reached."""
    if journal.verified - known < WORTH_BYTES:
        return
    path = _path(cache, journal)
    data = fmt.pack(
        {
            "version": VERSION,
            "verified": journal.verified,
            "damaged": journal.damaged,
            "frames": journal.frames,
            "runs": [[shape_id, rows.runs] for shape_id, rows in journal.rows.items()],
        }
    )
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_bytes(data)
        aside.replace(path)


def open_indexed(path: Path, cache: Path) -> Journal:
    """Open a journal and read it as far as it goes, through the cache where that helps."""
    journal = Journal(path)
    load(journal, cache)
    known = journal.verified
    journal.refresh()
    save(journal, cache, known)
    return journal
