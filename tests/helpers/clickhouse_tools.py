"""Helpers of the ClickHouse store's tests: a database per test, and a node that ships runs into it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import clickhouse_server
from fanfold.clickhouse import schema
from fanfold.clickhouse import store as stores
from fanfold.clickhouse.address import parse
from fanfold.clickhouse.database import Database
from fanfold.clickhouse.intake import ClickHouseIntake
from fanfold.clickhouse.store import ClickHouseStore
from fanfold.fleet.wire import Conflict, Piece
from fanfold.journal import Journal, directory
from fleet_tools import bounds


class Fleet:
    """A migrated database, an intake over it, and a reader that is created on first use."""

    def __init__(self, place: clickhouse_server.Database, *, options: str = "", gather: float = 0.0) -> None:
        self.place = place
        self.url = f"{place.url}{options}"
        self.database = Database(parse(self.url))
        for server in place.servers:
            schema.migrate(Database(parse(self.url)._replace(port=server.http)))
        self.intake = ClickHouseIntake(self.database, gather=gather)
        self._store: ClickHouseStore | None = None
        self._ends: dict[Path, int] = {}

    def store(self) -> ClickHouseStore:
        if self._store is None:
            self._store = stores.connect(self.url)
        return self._store

    def ship(self, root: Path, *, most: int = 1 << 20) -> int:
        """Send the new frames of every journal, batched into pieces; return the number of pieces."""
        sent = 0
        for folder in directory.run_directories(root):
            for file in directory.journal_files(folder):
                sent += self._ship(file, most)
            for blob in (folder / "blobs").glob("*/*"):
                self._blob(folder, blob)
        return sent

    def _ship(self, file: Path, most: int) -> int:
        journal = Journal(file)
        journal.refresh()
        project, run = (directory.decode_name(part.name) for part in (file.parents[2], file.parents[1]))
        project, run = journal.header.project or project, journal.header.run or run
        at, sent = self._ends.get(file, 0), 0
        whole = file.read_bytes()
        room = random.randrange(1, most)
        for _, end in bounds(journal.walk(at)):
            if end - at >= room or end == journal.verified:
                at = self._send(project, Piece(run, file.stem, at, 0, whole[at:end]))
                sent, room = sent + 1, random.randrange(1, most)
        self._ends[file] = at
        return sent

    def _send(self, project: str, piece: Piece) -> int:
        try:
            return self.intake.append(project, piece)
        except Conflict as conflict:
            return conflict.offset

    def _blob(self, folder: Path, blob: Path) -> None:
        header = directory.read_header(directory.journal_files(folder)[0])
        assert header is not None
        data: Any = blob.read_bytes()
        if self.intake.missing(header.project, header.run, [blob.name]):
            self.intake.blob(header.project, header.run, blob.name, offset=0, total=len(data), data=data)

    def close(self) -> None:
        self.intake.close()
        self.database.close()
        stores._stores.pop(parse(self.url), None)
