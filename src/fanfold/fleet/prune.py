"""Deletion of local runs that the gateway has: only on request, after checking with the gateway, and if not needed here."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from ..errors import JournalError
from ..journal import Journal, Kind, blobs, directory
from ..journal.files import is_folder
from ..journal.format import PACKED
from ..relay.cursor import settled
from .client import Client
from .forward_note import FOLDER
from .forward_run import Following

logger = logging.getLogger("fanfold.forwarder")
UNFINISHED_SECONDS = 86400.0  # a run that did not finish may be resumed, and a resumed run reads its earlier journals


def prune(run: Following, client: Client) -> bool:
    """Delete a run's local journals and blobs if all of them are at the gateway; return whether they were deleted."""
    files = directory.journal_files(run.path)
    if not files or any(why_not(file, run, client) for file in files):
        return False
    names = list(blobs.names(run.path))
    for start in range(0, len(names), 1000):
        if client.missing(run.project, run.id, names[start : start + 1000]):
            return False
    packed = [file.with_suffix(PACKED) for file in files]  # left beside its journal by a killed `fanfold prune`
    for file in [*files, *packed, *(blobs.path_of(run.path, name) for name in names)]:
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}.alive").unlink(missing_ok=True)
    _remove_empty(run.path)
    logger.info("pruned %d journals, which the gateway has", len(files), extra={"event": "pruned", "run": run.id})
    return True


def why_not(file: Path, run: Following, client: Client) -> str | None:
    """Return why a journal must be kept, or None."""
    try:
        journal = Journal(file)
        journal.refresh()
    except (OSError, JournalError) as error:
        return f"cannot be read: {error}"
    finished = any(record.data.status == "finished" for record in journal.records(Kind.END))
    if not finished and time.time() - journal.seen / 1e9 < UNFINISHED_SECONDS:
        return "its run may be resumed"
    if journal.damaged or journal.tail:
        return "has damaged bytes, which the gateway does not have"
    if any(marks.get(file.stem, 0) < journal.verified for marks in _behind(file, run)):
        return "a tracker has not confirmed it"
    if client.offset(run.project, run.id, file.stem) < journal.verified:
        run.note.forget()  # the note says it had; now it must be sent again
        return "the gateway does not have all of it"
    return None


def _behind(file: Path, run: Following) -> list[dict[str, int]]:
    """Return the delivered offsets of each tracker; ranks other than 0 count only where keys are folded."""
    known = settled(run.path).values()
    return [marks for marks in known if file.name.startswith("0-") or file.stem in marks]


def _remove_empty(run: Path) -> None:
    """Remove empty folders; if a tracker has files of its own there, they and the run's folder stay."""
    for note in (run / FOLDER).glob("*") if is_folder(run / FOLDER) else ():
        note.unlink(missing_ok=True)
    for folder in [*(run / "blobs").glob("*")] if is_folder(run / "blobs") else ():
        with contextlib.suppress(OSError):
            folder.rmdir()
    for folder in [run / "blobs", run / FOLDER, run / "journal", run]:
        with contextlib.suppress(OSError):
            folder.rmdir()
