"""Changes made by a dashboard or command with direct database access: edits are stored as journals, deletions logged."""

from __future__ import annotations

import getpass
import time
from typing import Any

from ..fleet.audit import DELETE, Audit, Entry
from ..fleet.wire import Piece
from ..store.changes import as_journal, check_idle
from ..store.run import StoredRun
from .database import Database
from .gateway_tables import AuditTable, ViewTable
from .intake import ClickHouseIntake


class DirectChanges:
    """Changes permitted to anyone with the database's password. Through a gateway, tokens and grants decide."""

    def __init__(self, database: Database) -> None:
        self.views = ViewTable(database)
        self._audit: Audit = AuditTable(database)
        self._intake = ClickHouseIntake(database, gather=0.0)

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        name, data = as_journal(run, facts)
        self._intake.append(run.project, Piece(run.id, name, 0, 0, data))

    def check_deletable(self, run: StoredRun, *, force: bool = False) -> None:
        if not force:
            check_idle(run, ("running",))

    def delete(self, run: StoredRun) -> int:
        """Log the deletion first, then delete."""
        self._audit.write(Entry(time.time(), DELETE, _user(), "this machine", run.project, run.id, {"name": run.name}))
        self._intake.delete(run.project, run.id, _user())
        return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        return "somebody"
