"""Changes made in the dashboard: name, tags, notes, archive, delete, saved views."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import SettingError
from ..store.query import Store
from . import data

MAX_TEXT = 20_000


class Edit(msgspec.Struct, forbid_unknown_fields=True):
    """New values for some runs; omitted fields stay unchanged."""

    project: str
    ids: list[str]
    name: str | msgspec.UnsetType = msgspec.UNSET
    notes: str | msgspec.UnsetType = msgspec.UNSET
    tags: list[str] | msgspec.UnsetType = msgspec.UNSET
    archived: bool | msgspec.UnsetType = msgspec.UNSET


class Delete(msgspec.Struct, forbid_unknown_fields=True):
    """Runs to delete, with all their data."""

    project: str
    ids: list[str]


class SaveView(msgspec.Struct, forbid_unknown_fields=True):
    """A view to save under a name; without a fragment, the view is deleted."""

    project: str
    name: str
    fragment: str | None = None


def edit(store: Store, query: Edit) -> dict[str, Any]:
    """Write the new values to each run, in a journal of their own."""
    facts = {
        name: value for name in ("name", "notes", "tags", "archived") if (value := getattr(query, name)) is not msgspec.UNSET
    }
    if len(msgspec.json.encode(facts)) > MAX_TEXT:
        raise SettingError(f"the new facts are longer than {MAX_TEXT} bytes. Nothing was changed. Shorten them.")
    if "name" in facts and not str(facts["name"]).strip():
        raise SettingError("a run's name cannot be empty. Nothing was changed. Give it one.")
    runs = [data.open_run(store, query.project, id) for id in query.ids]
    for run in runs:
        store.changes.edit(run, facts)
    return {"changed": len(runs)}


def delete(store: Store, query: Delete) -> dict[str, Any]:
    """Delete runs; if one of them is still being written, delete none."""
    runs = [data.open_run(store, query.project, id) for id in query.ids]
    for run in runs:
        store.changes.check_deletable(run)
    for run in runs:
        store.changes.delete(run)
    return {"deleted": len(runs)}


def views(store: Store, project: str) -> dict[str, str]:
    """Return a project's saved views: URL fragments by name."""
    return store.changes.views.all(project)


def save_view(store: Store, query: SaveView) -> dict[str, str]:
    """Save or delete a view, and return all of the project's views."""
    if not query.name.strip() or len(query.name) + len(query.fragment or "") > MAX_TEXT:
        raise SettingError("a view needs a name, and neither the name nor the view may be too long. Nothing was saved.")
    views = store.changes.views
    views.save(query.project, query.name, query.fragment)
    return views.all(query.project)
