"""A store with some of its runs: those that are published. Nothing of another run can get into a folder through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..fleet.views import ProjectsView
from ..store.catalogue import Progress
from ..store.query import Name, Store
from ..store.rows import Project
from ..store.run import Runs, StoredRun


class ChosenRuns(ProjectsView):
    """The given runs, by project and id. A fork shows its parent's points if the parent is in one of these projects."""

    def __init__(self, store: Store, chosen: Mapping[str, frozenset[str]]) -> None:
        super().__init__(store, chosen.__contains__, store.changes)
        self._chosen = chosen

    def projects(self) -> list[Project]:
        last = {one.name: one.last for one in self._store.projects()}
        return [Project(name, len(ids), last.get(name, 0.0)) for name, ids in self._chosen.items()]

    def names(self, project: str | None = None) -> list[Name]:
        return [name for name in super().names(project) if name[1] in self._chosen[name[0]]]

    def listed(self, project: str | None = None, *, progress: Progress | None = None) -> Runs:
        return Runs(run for run in super().listed(project, progress=progress) if run.id in self._chosen[run.project])

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        self._check(project)
        return super().several(project, [id for id in ids if id in self._chosen[project]])
