"""Changes a caller makes through a gateway: checked against their permissions, audited, and stored like any other data."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..errors import Forbidden, SettingError
from ..store.changes import Views, as_journal, check_idle
from ..store.run import StoredRun
from .audit import DELETE, DELETE_FAILED, Audit, Entry, unsafe
from .grants import Holder
from .intake import Intake
from .tokens import READ, WRITE
from .wire import Piece


@dataclass(frozen=True)
class Change:
    """The targets of a gateway's changes. Without an audit log, or without `allow_delete`, nothing can be deleted."""

    intake: Intake
    audit: Audit | None = None
    saved_views: Views | None = None
    allow_delete: bool = False

    def by(self, holder: Holder, peer: str) -> CallerChanges:
        return CallerChanges(self, holder, peer)


@dataclass(frozen=True)
class CallerChanges:
    """The changes of one caller."""

    place: Change
    holder: Holder
    peer: str

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        self._check_write(run.project)
        name, data = as_journal(run, facts)
        self.place.intake.append(run.project, Piece(run.id, name, 0, 0, data))

    def check_deletable(self, run: StoredRun, *, force: bool = False) -> None:
        self._check_write(run.project)
        if not self.place.allow_delete or self.place.audit is None:
            raise Forbidden(
                "this gateway keeps everything. Nothing was deleted. Whoever runs it can start it with --allow-delete."
            )
        if not force:
            check_idle(run, ("running",))  # a lost run may be deleted: what it still sends is refused as deleted

    def delete(self, run: StoredRun) -> int:
        """Record the deletion in the audit log, then delete: an unrecorded deletion is worse than a failed one."""
        self.check_deletable(run)
        detail = {"name": run.name, "journals": len(run.journals), "points": points(run), "status": run.status}
        self._record(DELETE, run, detail)
        try:
            self.place.intake.delete(run.project, run.id, self.holder.label)
        except OSError as error:
            self._record(DELETE_FAILED, run, {"error": str(error)})
            raise SettingError(f"run {run.id} could not be deleted: {error}. What is left of it is hidden. Try again.") from error
        return 0

    @property
    def views(self) -> Views:
        if self.place.saved_views is None:
            raise SettingError("this store keeps no views. Nothing was saved.")
        return CallerViews(self.place.saved_views, self.holder)

    def _check_write(self, project: str) -> None:
        check(self.holder, WRITE, project)

    def _record(self, action: str, run: StoredRun, detail: dict[str, Any]) -> None:
        entry = Entry(time.time(), action, self.holder.label, self.peer, run.project, run.id, detail)
        try:
            if self.place.audit is not None:
                self.place.audit.write(entry)
        except OSError as error:
            raise unsafe(error) from error


@dataclass(frozen=True)
class CallerViews:
    """Saved views of the projects the caller may read; saving one also needs permission to write."""

    place: Views
    holder: Holder

    def all(self, project: str) -> dict[str, str]:
        check(self.holder, READ, project)
        return self.place.all(project)

    def save(self, project: str, name: str, fragment: str | None) -> None:
        check(self.holder, READ, project)
        check(self.holder, WRITE, project)
        self.place.save(project, name, fragment)


def check(holder: Holder, scope: str, project: str) -> None:
    """Raise Forbidden unless the caller has `scope` for a project, with the same message whether the project exists or not."""
    if not holder.allows(scope, project):
        what = "change" if scope == WRITE else "read"
        raise Forbidden(f"you may not {what} project {project[:100]!r}. Nothing was done. Ask whoever runs this gateway.")


def points(run: StoredRun) -> int:
    """Return how many data points a run holds."""
    return sum(journal.count(key) for journal in run.journals for key in journal.by_key)
