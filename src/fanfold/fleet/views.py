"""A store as one caller sees it, without other projects. Every query of the dashboard goes through it, so none can leak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import Forbidden
from ..store import forks
from ..store.buckets import Buckets
from ..store.catalogue import Progress
from ..store.changes import Changes
from ..store.query import Name, Store
from ..store.rows import Project, RunRow
from ..store.run import Runs, StoredRun


class ProjectsView(Store):
    """The projects for which `sees` is true. Any other is refused with the same error, whether it exists or not."""

    def __init__(self, store: Store, sees: Callable[[str], bool], changes: Changes, *, place: str = "") -> None:
        self._store = store
        self._sees = sees
        self._changes = changes
        self.place, self.root = place or store.place, store.root

    @property
    def changes(self) -> Changes:
        return self._changes

    def projects(self) -> list[Project]:
        return [project for project in self._store.projects() if self._sees(project.name)]

    def names(self, project: str | None = None) -> list[Name]:
        if project is not None:
            self._check(project)
        return [name for name in self._store.names(project) if self._sees(name[0])]

    def listed(self, project: str | None = None, *, progress: Progress | None = None) -> Runs:
        if project is not None:
            self._check(project)
        found = self._store.listed(project, progress=progress)
        unreadable = [] if project is None else found.unreadable  # the project of an unreadable folder is unknown
        return Runs((forks.limited(run, self._sees) for run in found if self._sees(run.project)), unreadable)

    def statistics(self, row: RunRow, key: str) -> dict[str, Any] | None:
        self._check(row.project)
        return self._store.statistics(row, key)

    def run(self, project: str, id: str) -> StoredRun:
        self._check(project)
        run = self._store.run(project, id)
        self._check(run.project)  # folder names may be shortened, so two projects may share one: the run itself has the full name
        return forks.limited(run, self._sees)

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        self._check(project)
        found = self._store.several(project, ids)
        for run in found.values():
            self._check(run.project)
        return {id: forks.limited(run, self._sees) for id, run in found.items()}

    def was_in(self, project: str, run: StoredRun) -> bool:
        return self._sees(project) and self._store.was_in(project, run)

    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        token, names = self._store.changed(since)
        return token, [name for name in names if self._sees(name[0])]

    def series(self, run: StoredRun, key: str, **how: Any) -> Buckets:
        self._check(run.project)
        return self._store.series(run, key, **how)

    def series_many(self, wanted: Sequence[tuple[StoredRun, str]], **how: Any) -> list[Buckets | None]:
        for run, _ in wanted:
            self._check(run.project)
        return self._store.series_many(wanted, **how)

    def _check(self, project: str) -> None:
        if not self._sees(project):
            raise Forbidden(f"project {project[:100]!r} is not open to you. Nothing was read. Ask whoever runs this gateway.")
