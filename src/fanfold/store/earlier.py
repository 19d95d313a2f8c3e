"""A run as its earlier attempts left it, for the process that resumes it."""

from __future__ import annotations

from pathlib import Path

from ..journal import Journal
from ..journal.directory import journal_files
from .run import StoredRun


class Earlier(StoredRun):
    """The earlier journals of one rank and of rank 0 only: with a thousand ranks, no rank should read them all."""

    def __init__(self, path: Path, rank: int, attempt: str) -> None:
        super().__init__(path)
        self._rank, self._attempt = rank, attempt
        self._files = {file for file in journal_files(path) if file.name.partition("-")[0] in (str(rank), "0")}

    def _read_on(self, file: Path) -> Journal | None:
        journal = super()._read_on(file) if file in self._files else None
        # Earlier journals of this rank belong to an earlier attempt even if the launcher gives both attempts the same key.
        if journal is None or (journal.header.attempt == self._attempt and journal.header.rank != self._rank):
            return None
        return journal
