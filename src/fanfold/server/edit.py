"""Changes made in the dashboard: name, tags, notes, archive, delete, saved views, alert rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from ..errors import Forbidden, SettingError
from ..notify.project_rules import change_rule, project_rules, run_rules
from ..store.changes import MAX_TEXT, OnDisk, checked_facts
from ..store.query import Store
from ..store.run import StoredRun
from ..store.tell import tell as ask_job
from ..transfer.examples import PROJECT, write_examples
from . import data


class Edit(msgspec.Struct, forbid_unknown_fields=True):
    """New values for some runs; omitted fields stay unchanged."""

    project: str
    ids: list[str]
    name: str | msgspec.UnsetType = msgspec.UNSET
    notes: str | msgspec.UnsetType = msgspec.UNSET
    tags: list[str] | msgspec.UnsetType = msgspec.UNSET
    archived: bool | msgspec.UnsetType = msgspec.UNSET
    add_tags: list[str] = []
    remove_tags: list[str] = []


class Delete(msgspec.Struct, forbid_unknown_fields=True):
    """Runs to delete, with all their data."""

    project: str
    ids: list[str]


class Tell(msgspec.Struct, forbid_unknown_fields=True):
    """A request to the job of a run; `values` are for the action `set`."""

    project: str
    id: str
    action: str
    values: dict[str, bool | int | float | str] = {}


class Move(msgspec.Struct, forbid_unknown_fields=True):
    """Runs to move, and the project they go to."""

    project: str
    ids: list[str]
    to: str


class SaveView(msgspec.Struct, forbid_unknown_fields=True):
    """A view to save under a name; without a fragment, the view is deleted."""

    project: str
    name: str
    fragment: str | None = None


class KeepWorkspace(msgspec.Struct, forbid_unknown_fields=True):
    """What the caller looks at now, as a URL fragment."""

    project: str
    fragment: str


class AddExamples(msgspec.Struct, forbid_unknown_fields=True):
    """The project that gets the example runs."""

    project: str = PROJECT


class SaveRule(msgspec.Struct, forbid_unknown_fields=True):
    """A rule to add to a project, or to remove from it."""

    project: str
    rule: str
    remove: bool = False


def edit(store: Store, query: Edit) -> dict[str, Any]:
    """Write the new values to each run, in a journal of their own."""
    facts = {
        name: value for name in ("name", "notes", "tags", "archived") if (value := getattr(query, name)) is not msgspec.UNSET
    }
    facts = checked_facts(facts)
    runs = [data.open_run(store, query.project, id) for id in query.ids]
    changes = [(run, {**facts, **_retagged(run, facts, query)}) for run in runs]
    for run, new in changes:
        if new:
            store.changes.edit(run, new)
    return {"changed": sum(bool(new) for _, new in changes)}


def _retagged(run: StoredRun, facts: dict[str, Any], query: Edit) -> dict[str, Any]:
    """Return a run's tags with some added and some removed, if that changes them."""
    before = list(facts.get("tags", run.tags))
    after = [*dict.fromkeys([*before, *query.add_tags])]
    after = [tag for tag in after if tag not in query.remove_tags]
    return {} if after == before else checked_facts({"tags": after})


def move(store: Store, query: Move) -> dict[str, Any]:
    """Move runs to another project; if one of them cannot go there, move none."""
    runs = [data.open_run(store, query.project, id) for id in query.ids]
    return {"moved": store.changes.move(runs, query.to.strip())}


def tell(store: Store, query: Tell) -> dict[str, Any]:
    """Leave a request for a running job; its answer appears among the run's requests."""
    run = data.open_run(store, query.project, query.id)
    answer = ask_job(run, query.action, query.values, wait=False, leave=partial(store.changes.ask, run))
    return {"id": answer.id, "state": answer.state, "why": answer.why}


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


def workspace(store: Store, project: str) -> dict[str, str]:
    """Return what the caller last looked at in a project."""
    return {"fragment": store.changes.views.workspace(project)}


def keep_workspace(store: Store, query: KeepWorkspace) -> dict[str, str]:
    """Keep what the caller looks at now, for the next time the project is opened."""
    if len(query.fragment.encode()) > MAX_TEXT:
        raise SettingError(f"the workspace is longer than {MAX_TEXT} bytes. It was not saved. The one saved before is kept.")
    store.changes.views.keep_workspace(query.project, query.fragment)
    return {"fragment": query.fragment}


def add_examples(store: Store, query: AddExamples) -> dict[str, Any]:
    """Write example runs, for a first look."""
    if not isinstance(store.changes, OnDisk):
        raise Forbidden(
            "example runs are written into a directory of runs only. Nothing was written. Run `fanfold demo --examples`."
        )
    return {"project": query.project, "added": write_examples(store.changes.root, query.project)}


def rules(store: Store, project: str) -> dict[str, Any]:
    """Return a project's rules with the times they were added, and the rules of its programs with how many runs have each."""
    counts: dict[str, int] = {}
    for one in data.opened(store, project):
        for text in run_rules(one):
            counts[text] = counts.get(text, 0) + 1
    return {"rules": project_rules(store.changes.views, project), "programs": counts}


def save_rule(store: Store, query: SaveRule) -> dict[str, Any]:
    """Add or remove a rule, and return all of the project's rules."""
    change_rule(store.changes.views, query.project, query.rule, remove=query.remove)
    return rules(store, query.project)
