"""Several directories of runs as one store: what `fanfold ui A B` shows. A run that two of them have is shown once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import RunNotFound
from ..journal.requests import JobRequest
from .catalogue import Progress
from .changes import Changes, Views
from .query import LocalStore, Name, Store
from .rows import Project, RunRow
from .run import Runs, StoredRun, not_found


class SeveralStores(Store):
    """The runs of several directories. Where two have a run of the same project and id, the first one counts."""

    def __init__(self, stores: Sequence[LocalStore]) -> None:
        self.stores = list(stores)
        self.root = self.stores[0].root
        self.place = ", ".join(store.place for store in self.stores)
        self._watching = threading.Lock()
        self._tokens = [0] * len(self.stores)
        self._version: dict[Name, int] = {}
        self._token = 0

    @cached_property
    def changes(self) -> Changes:
        return _Changes(self)

    def projects(self) -> list[Project]:
        found: dict[str, Project] = {}
        for store in self.stores:
            for project in store.projects():
                known = found.setdefault(project.name, Project(project.name, 0, 0.0))
                known.runs += project.runs
                known.last = max(known.last, project.last)
        return sorted(found.values(), key=lambda one: one.last, reverse=True)

    def names(self, project: str | None = None) -> Iterator[Name]:
        return iter(dict.fromkeys(name for store in self.stores for name in store.names(project)))

    def listed(self, project: str | None = None, *, progress: Progress | None = None) -> Runs:
        seen: set[Name] = set()
        runs: list[StoredRun] = []
        unreadable: list[dict[str, str]] = []
        for store in self.stores:
            found = store.listed(project, progress=progress)
            unreadable += found.unreadable
            for run in found:
                if (run.project, run.id) not in seen:
                    seen.add((run.project, run.id))
                    runs.append(run)
        return Runs(sorted(runs, key=lambda run: run.started, reverse=True), unreadable)

    def statistics(self, row: RunRow, key: str) -> dict[str, Any] | None:
        return self.holding(Path(row.path)).statistics(row, key)

    def run(self, project: str, id: str) -> StoredRun:
        for store in self.stores:
            with contextlib.suppress(RunNotFound):
                return store.run(project, id)
        raise not_found(f"{project}/{id}", self.place)

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        found: dict[str, StoredRun] = {}
        for store in self.stores:
            found |= store.several(project, [id for id in ids if id not in found])
        return found

    def was_in(self, project: str, run: StoredRun) -> bool:
        return self.holding(run.path).was_in(project, run)

    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        with self._watching:
            moved: list[Name] = []
            for place, store in enumerate(self.stores):
                token, names = store.changed(self._tokens[place])
                if token != self._tokens[place]:
                    self._tokens[place] = token
                    moved += names
            if moved:
                self._token += 1
                self._version.update(dict.fromkeys(moved, self._token))
            return self._token, [name for name, version in self._version.items() if version > since]

    def holding(self, path: Path) -> LocalStore:
        """Return the store that has a run's folder."""
        return next((store for store in self.stores if path.is_relative_to(store.root)), self.stores[0])


class _Changes:
    """Changes to a run go to the directory that has it; saved views are kept in the first one."""

    def __init__(self, stores: SeveralStores) -> None:
        self._stores = stores

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        self._stores.holding(run.path).changes.edit(run, facts)

    def ask(self, run: StoredRun, request: JobRequest) -> None:
        self._stores.holding(run.path).changes.ask(run, request)

    def add_alert(self, run: StoredRun, alert: dict[str, Any]) -> None:
        self._stores.holding(run.path).changes.add_alert(run, alert)

    def check_deletable(self, run: StoredRun, *, force: bool = False) -> None:
        self._stores.holding(run.path).changes.check_deletable(run, force=force)

    def delete(self, run: StoredRun) -> int:
        return self._stores.holding(run.path).changes.delete(run)

    def move(self, runs: Sequence[StoredRun], project: str) -> int:
        from . import move

        stores = {run.path: self._stores.holding(run.path) for run in runs}
        groups = [(store, [run for run in runs if stores[run.path] is store]) for store in dict.fromkeys(stores.values())]
        for store, group in groups:
            move.check_move(group, store.root, project)
        return sum(store.changes.move(group, project) for store, group in groups)

    @property
    def views(self) -> Views:
        return self._stores.stores[0].changes.views
