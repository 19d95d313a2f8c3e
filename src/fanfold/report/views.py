"""Saved views in a report: which runs, keys and axes the address of a view names (web/src/lib/view.svelte.ts)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from ..errors import SettingError, suggestion
from ..store import StoredRun
from ..store.query import Store


@dataclass(frozen=True)
class ReportView:
    """How one view shows runs. `keys` are those pinned in it; None: those that contain `search`."""

    name: str
    keys: Sequence[str] | None = None
    search: str = ""
    x: str | None = None
    smooth: float = 0.0
    log: bool = False
    filter: str = ""
    hidden: frozenset[str] = frozenset()
    project: str = ""

    def shown(self, store: Store, runs: Sequence[StoredRun]) -> list[StoredRun]:
        """Return the runs that the view shows."""
        passing: set[str] | None = None
        if self.filter:
            passing = {row.id for row in store.runs(self.project, self.filter)}
        return [run for run in runs if run.id not in self.hidden and (passing is None or run.id in passing)]

    def chosen(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that the view shows, of those that there are."""
        if self.keys:
            return [key for key in self.keys if key in keys]
        return [key for key in keys if self.search.lower() in key.lower()]


def saved(store: Store, project: str, names: Sequence[str]) -> list[ReportView]:
    """Return saved views of a project by name; raise for a name that there is not."""
    known = store.changes.views.all(project)
    for name in names:
        if name not in known:
            raise SettingError(
                f"project {project} has no saved view {name!r}. Nothing was written.{suggestion(name, list(known))}"
            )
    return [read(name, known[name], project) for name in names]


def read(name: str, fragment: str, project: str) -> ReportView:
    """Read the address of a view. What it says of pages and tables has no place in a report."""
    given = parse_qs(fragment.lstrip("#"), keep_blank_values=True)
    x = _one(given, "x")
    return ReportView(
        name, [unquote(key) for key in _one(given, "pin").split(",") if key] or None, _one(given, "q"),
        None if x in ("", "auto") else x, _share(_one(given, "s")), _one(given, "log") == "1", _one(given, "f"),
        frozenset(unquote(id) for id in _one(given, "hide").split(",") if id), project,
    )  # fmt: skip


def _one(given: Mapping[str, Sequence[Any]], name: str) -> str:
    return str(given.get(name, [""])[0])


def _share(text: str) -> float:
    try:
        found = float(text or 0)
    except ValueError:
        return 0.0
    return min(1.0, max(0.0, found)) if math.isfinite(found) else 0.0
