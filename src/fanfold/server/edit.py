"""Changes from the page: name, tags, note, archive, delete, saved views. Nothing that training wrote is touched.

An edit is a frame in a journal of its own, with the role `editor`; of each fact the newest edit counts.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from .._version import __version__
from ..errors import RunError, SettingError
from ..journal import Kind, Writer, directory
from ..journal import format as fmt
from ..process import detect
from ..store.delete import check_place
from ..store.delete import delete as delete_run
from ..store.query import Store
from ..store.run import StoredRun
from . import data

MAX_TEXT = 20_000
VIEWS = ".views"  # beside a project's runs, and hidden from every listing of them
_MARK = "view "


class Edit(msgspec.Struct, forbid_unknown_fields=True):
    """New facts for some runs; what is left out stays."""

    project: str
    ids: list[str]
    name: str | msgspec.UnsetType = msgspec.UNSET
    notes: str | msgspec.UnsetType = msgspec.UNSET
    tags: list[str] | msgspec.UnsetType = msgspec.UNSET
    archived: bool | msgspec.UnsetType = msgspec.UNSET


class Delete(msgspec.Struct, forbid_unknown_fields=True):
    """Runs to delete, with all they hold."""

    project: str
    ids: list[str]


class SaveView(msgspec.Struct, forbid_unknown_fields=True):
    """A view to keep under a name; without a fragment, one to drop."""

    project: str
    name: str
    fragment: str | None = None


def edit(store: Store, query: Edit) -> dict[str, Any]:
    """Write the new facts into a journal of this edit's own, run by run."""
    facts = {
        name: value for name in ("name", "notes", "tags", "archived") if (value := getattr(query, name)) is not msgspec.UNSET
    }
    if len(msgspec.json.encode(facts)) > MAX_TEXT:
        raise SettingError(f"the new facts are longer than {MAX_TEXT} bytes. Nothing was changed. Shorten them.")
    if "name" in facts and not str(facts["name"]).strip():
        raise SettingError("a run's name cannot be empty. Nothing was changed. Give it one.")
    runs = [data.open_run(store, query.project, id) for id in query.ids]
    for run in runs:
        last = run.attempts[-1].journals[-1].header if run.attempts else {}
        _write(run.path / "journal", {**_whose(run), "attempt": last.get("attempt"), "world": last.get("world")}, facts)
    return {"changed": len(runs)}


def _whose(run: StoredRun) -> dict[str, Any]:
    first = run.attempts[0].journals[0].header if run.attempts else {}
    return {"run": run.id, "project": run.project, "name": first.get("name") or run.name}


def _write(folder: Path, header: dict[str, Any], facts: dict[str, Any]) -> None:
    me = detect()
    writer = Writer(
        folder,
        {
            "format": [fmt.MAJOR, fmt.MINOR],
            "writer": f"fanfold {__version__}",
            "role": "editor",
            "rank": 0,
            "node": me.node,
            "boot": me.boot,
            "pid": os.getpid(),
            "process": secrets.token_hex(8),
            **header,
        },
    )
    now = time.time_ns()
    writer.append((Kind.INFO, {"t": now, **facts}))
    writer.close({"t": now, "status": "finished"})


def delete(store: Store, query: Delete) -> dict[str, Any]:
    """Delete runs, all or none: one that is still written stops it."""
    runs = [data.open_run(store, query.project, id) for id in query.ids]
    for run in runs:
        if run.status in ("running", "lost"):
            raise RunError(f"run {run.name} ({run.id}) may still be written. Nothing was deleted. Stop it first.")
        check_place(run.path, run.path.parent.parent)
    for run in runs:
        delete_run(run)
    return {"deleted": len(runs)}


def views(store: Store, project: str) -> dict[str, str]:
    """Return a project's saved views: name and fragment of the address."""
    folder = _views_folder(store, project)
    found = StoredRun(folder).refresh().info if (folder / "journal").is_dir() else {}
    named = {name.removeprefix(_MARK): text for name, text in sorted(found.items()) if name.startswith(_MARK)}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def save_view(store: Store, query: SaveView) -> dict[str, str]:
    """Keep or drop a view."""
    if not query.name.strip() or len(query.name) + len(query.fragment or "") > MAX_TEXT:
        raise SettingError("a view needs a name, and both must not be endless. Nothing was saved.")
    folder = _views_folder(store, query.project)
    if not folder.parent.is_dir():
        raise RunError(f"there is no project {query.project!r}. Nothing was saved.")
    header = {"run": VIEWS, "project": query.project, "name": "saved views", "attempt": VIEWS}
    _write(folder / "journal", header, {_MARK + query.name: query.fragment})
    return views(store, query.project)


def _views_folder(store: Store, project: str) -> Path:
    root = getattr(store, "root", None)
    if root is None:
        raise SettingError("this store keeps no views. Nothing was saved.")
    return Path(root) / directory.encode_name(project) / VIEWS
