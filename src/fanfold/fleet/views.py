"""A store as one caller sees it: other projects are not there. Every question of the page goes through this, so none forgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..server.access import Forbidden
from ..server.edit import Changes
from ..store.buckets import Buckets
from ..store.query import Name, Row, Rows, Store
from ..store.run import StoredRun


class ProjectsView:
    """The projects that `sees` is true of. What names another is refused alike, whether it exists or not."""

    def __init__(self, store: Store, sees: Callable[[str], bool], changes: Changes) -> None:
        self._store = store
        self._sees = sees
        self.changes = changes

    def projects(self) -> list[Row]:
        return [row for row in self._store.projects() if self._sees(row["name"])]

    def runs(
        self, project: str | None = None, filter: str = "", sort: str = "", limit: int | None = None, *,
        stats: Sequence[str] = (),
    ) -> Rows:  # fmt: skip
        if project is not None:
            self._check(project)
            return self._store.runs(project, filter, sort, limit, stats=stats)
        rows = self._store.runs(None, filter, sort, None, stats=stats)
        seen = [row for row in rows if self._sees(row["project"])]
        return Rows(seen if limit is None else seen[:limit])  # a folder that cannot be read does not tell whose it is

    def run(self, project: str, id: str) -> StoredRun:
        self._check(project)
        run = self._store.run(project, id)
        self._check(run.project)  # folders' names may be cut, so that two projects meet in one: the run itself knows
        return run

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        self._check(project)
        found = self._store.several(project, ids)
        for run in found.values():
            self._check(run.project)
        return found

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
