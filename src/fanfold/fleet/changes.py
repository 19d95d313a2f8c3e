"""Changes a caller makes through a gateway: checked against their permissions, audited, and stored like any other data."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec

from ..errors import FanfoldError, Forbidden, SettingError
from ..journal.requests import JobRequest
from ..store.changes import VIEW, Frame, Views, alert_frame, as_journal, check_alone, check_idle, edit_frame
from ..store.run import StoredRun
from .audit import DELETE, DELETE_FAILED, MOVE, MOVE_FAILED, MOVE_REFUSED, Audit, AuditEntry, unsafe
from .grants import Holder
from .intake import Intake
from .tokens import READ, WRITE
from .wire import Gone, Piece, Rejected

logger = logging.getLogger("fanfold.gateway")


@runtime_checkable
class MovesTogether(Protocol):
    """An intake that moves many runs in the time that one takes: each move has to wait."""

    def move_all(self, runs: Sequence[tuple[str, str]], target: str, by: str) -> Sequence[FanfoldError | None]:
        """Move runs, named by project and id; return for each why it was not moved."""


@dataclass(frozen=True)
class ChangeTargets:
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

    place: ChangeTargets
    holder: Holder
    peer: str

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        self._add(run, edit_frame(facts))

    def add_alert(self, run: StoredRun, alert: dict[str, Any]) -> None:
        self._add(run, alert_frame(alert))

    def _add(self, run: StoredRun, frame: Frame) -> None:
        check(self.holder, WRITE, run.project)
        name, data = as_journal(run, frame)
        self.place.intake.append(run.project, Piece(run.id, name, 0, 0, data))

    def ask(self, run: StoredRun, request: JobRequest) -> None:
        check(self.holder, WRITE, run.project)
        self.place.intake.ask(run.project, run.id, msgspec.structs.replace(request, by=self.holder.label[:200]))

    def check_deletable(self, run: StoredRun, *, force: bool = False) -> None:
        self._check_removable(run, "deleted")
        if not force:
            check_idle(run, ("running",))  # a lost run may be deleted: what it still sends is refused as deleted

    def _check_removable(self, run: StoredRun, done: str) -> None:
        """Raise unless the caller may take a run out of its project, for which a move is as final as a deletion."""
        check(self.holder, WRITE, run.project)
        if not self.place.allow_delete or self.place.audit is None:
            raise Forbidden(
                f"this gateway keeps everything. Nothing was {done}. Whoever runs it can start it with --allow-delete."
            )

    def delete(self, run: StoredRun) -> int:
        """Record the deletion in the audit log, then delete: an unrecorded deletion is worse than a failed one."""
        self.check_deletable(run, force=True)
        detail = {"name": run.name, "journals": len(run.journals), "points": points(run), "status": run.status}
        self._record(DELETE, run, detail)
        try:
            self.place.intake.delete(run.project, run.id, self.holder.label)
        except (FanfoldError, OSError) as error:
            self._note(DELETE_FAILED, run, {"error": str(error)})
            raise _not_deleted(run, error) from error
        return 0

    def move(self, runs: Sequence[StoredRun], project: str) -> int:
        """Move runs that have ended. What their nodes still send to the old project is refused, as if they were deleted."""
        away = list({(run.project, run.id): run for run in runs if run.project != project}.values())
        try:
            self._check_move(away, project)
        except Forbidden as error:
            for run in away[:1]:  # of each request: a caller without the right must not fill the disk
                self._note(MOVE_REFUSED, run, {"error": str(error), "to": project, "runs": len(away)})
            raise
        together = isinstance(self.place.intake, MovesTogether)
        moved = 0
        for group in [away] if together and away else [[run] for run in away]:
            failed = self._move(group, project)
            moved += len(group) - len(failed)
            for run, why in failed:
                self._note(MOVE_FAILED, run, {"error": str(why), "to": project})
            if failed:
                raise _not_moved(*failed[0], project, moved) from failed[0][1]
        return len(away)

    def _move(self, runs: Sequence[StoredRun], project: str) -> list[tuple[StoredRun, FanfoldError | OSError]]:
        """Record that runs move, and move them; return those that did not, and why."""
        intake = self.place.intake
        errors: Sequence[FanfoldError | OSError | None]
        try:
            for run in runs:
                self._record(MOVE, run, {"name": run.name, "to": project})
            if isinstance(intake, MovesTogether):
                errors = intake.move_all([(run.project, run.id) for run in runs], project, self.holder.label)
            else:
                intake.move(runs[0].project, runs[0].id, project, self.holder.label)
                errors = [None]
        except (FanfoldError, OSError) as error:
            errors = [error] * len(runs)
        return [(run, error) for run, error in zip(runs, errors, strict=True) if error is not None]

    def _check_move(self, runs: Sequence[StoredRun], project: str) -> None:
        """Raise unless all of these runs can go there: whatever can be refused is, before the first is moved."""
        for scope in (READ, WRITE):
            check(self.holder, scope, project)
        for run in runs:
            self._check_removable(run, "moved")
        for run in runs:
            check_idle(run, ("running", "lost"), "moved")
            check_alone(run, runs, "moved")
            self.place.intake.movable(run.project, run.id, project)

    @property
    def views(self) -> Views:
        if self.place.saved_views is None:
            raise SettingError("this store keeps no views. Nothing was saved.")
        return CallerViews(self.place.saved_views, self.holder)

    def _record(self, action: str, run: StoredRun, detail: dict[str, Any]) -> None:
        try:
            self._write(action, run, detail)
        except OSError as error:
            raise unsafe(error) from error

    def _note(self, action: str, run: StoredRun, detail: dict[str, Any]) -> None:
        """Record what did not happen. The caller hears why it did not, and not that the log cannot be written either."""
        try:
            self._write(action, run, detail)
        except (FanfoldError, OSError) as error:
            logger.error("the audit log cannot be written: %s", error, extra={"event": "storage"})  # noqa: TRY400 - no trace

    def _write(self, action: str, run: StoredRun, detail: dict[str, Any]) -> None:
        if self.place.audit is not None:
            entry = AuditEntry(time.time(), action, self.holder.label, self.peer, run.project, run.id, detail)
            self.place.audit.write(entry)


@dataclass(frozen=True)
class CallerViews:
    """Saved views of the projects the caller may read; saving one also needs permission to write."""

    place: Views
    holder: Holder

    def all(self, project: str, kind: str = VIEW) -> dict[str, str]:
        check(self.holder, READ, project)
        return self.place.all(project, kind)

    def save(self, project: str, name: str, fragment: str | None, kind: str = VIEW) -> None:
        check(self.holder, READ, project)
        check(self.holder, WRITE, project)
        self.place.save(project, name, fragment, kind)

    def workspace(self, project: str, user: str = "") -> str:
        """Return the caller's own workspace, or that of `user`: a gateway over a database names its caller to the database."""
        check(self.holder, READ, project)
        return self.place.workspace(project, user or self.holder.label)

    def keep_workspace(self, project: str, fragment: str, user: str = "") -> None:
        check(self.holder, READ, project)  # it is the caller's own: reading is enough
        self.place.keep_workspace(project, fragment, user or self.holder.label)


def check(holder: Holder, scope: str, project: str) -> None:
    """Raise Forbidden unless the caller has `scope` for a project, with the same message whether the project exists or not."""
    if not holder.allows(scope, project):
        what = "change" if scope == WRITE else "read"
        raise Forbidden(f"you may not {what} project {project[:100]!r}. Nothing was done. Ask whoever runs this gateway.")


def _not_moved(run: StoredRun, error: FanfoldError | OSError, project: str, moved: int) -> FanfoldError:
    """Return the error for a move that failed after its checks; `moved` others are in their new project."""
    if isinstance(error, FanfoldError):
        why = re.sub("Nothing was (moved|changed)", "It was not moved", str(error)) if moved else str(error)
    else:
        why = f"run {run.id} could not be moved: {error}. It is whole, in {run.project} or in {project}. Try again."
    others = f" {moved} other run{'' if moved == 1 else 's'} went to {project}." if moved else ""
    return SettingError(why + others)


def _not_deleted(run: StoredRun, error: FanfoldError | OSError) -> FanfoldError:
    if isinstance(error, Gone):
        return Rejected(
            410,
            f"run {run.id} is not in project {run.project} any more: it was deleted or moved meanwhile. It was not deleted here. "
            "List the runs again.",
        )
    if isinstance(error, FanfoldError):
        return error
    return SettingError(f"run {run.id} could not be deleted: {error}. What is left of it is hidden. Try again.")


def points(run: StoredRun) -> int:
    """Return how many data points a run holds."""
    return sum(journal.count(key) for journal in run.journals for key in journal.by_key)
