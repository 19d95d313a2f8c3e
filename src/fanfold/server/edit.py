"""Changes from the page: name, tags, note, archive, delete, saved views. Nothing that training wrote is touched.

An edit is a frame in a journal of its own, with the role `editor`; of each fact the newest edit counts.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

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
_MARK = "view "  # before the names of saved views among the facts of their run


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


class Views(Protocol):
    """Where a store keeps saved views."""

    def all(self, project: str) -> dict[str, str]:
        """Return a project's views: name and fragment of the address."""

    def save(self, project: str, name: str, fragment: str | None) -> None:
        """Keep a view; without a fragment, drop it."""


class Changes(Protocol):
    """Where changes to a store's runs go. A store that has `changes` says so itself; else they go into its directory."""

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        """Give a run new facts."""

    def check_deletable(self, run: StoredRun) -> None:
        """Raise when a run must not be deleted, or not by this caller."""

    def delete(self, run: StoredRun) -> None:
        """Delete a run with all it holds."""

    @property
    def views(self) -> Views:
        """Where views are kept."""


class OnDisk:
    """Changes to the runs of one directory."""

    def __init__(self, root: Path) -> None:
        self.views = DirectoryViews(root)

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        _write(run.path / "journal", _header(run), facts)

    def check_deletable(self, run: StoredRun) -> None:
        check_idle(run, ("running", "lost"))
        check_place(run.path, run.path.parent.parent)

    def delete(self, run: StoredRun) -> None:
        delete_run(run)


class DirectoryViews:
    """Saved views beside a project's runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def all(self, project: str) -> dict[str, str]:
        folder = self._folder(project)
        found = StoredRun(folder).refresh().info if (folder / "journal").is_dir() else {}
        named = {name.removeprefix(_MARK): text for name, text in sorted(found.items()) if name.startswith(_MARK)}
        return {name: text for name, text in named.items() if isinstance(text, str)}

    def save(self, project: str, name: str, fragment: str | None) -> None:
        folder = self._folder(project)
        if not folder.parent.is_dir():
            raise RunError(f"there is no project {project!r}. Nothing was saved.")
        header = {"run": VIEWS, "project": project, "name": "saved views", "attempt": VIEWS}
        _write(folder / "journal", header, {_MARK + name: fragment})

    def _folder(self, project: str) -> Path:
        return self.root / directory.encode_name(project) / VIEWS


def changes_of(store: Store) -> Changes:
    """Return where changes to a store's runs go."""
    changes: Changes | None = getattr(store, "changes", None)
    root: Path | None = getattr(store, "root", None)
    if changes is None and root is None:
        raise SettingError("this store keeps no changes from the page. Nothing was changed.")
    return changes or OnDisk(Path(str(root)))


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
        changes_of(store).edit(run, facts)
    return {"changed": len(runs)}


def as_journal(run: StoredRun, facts: dict[str, Any]) -> tuple[str, bytes]:
    """Return an edit as a journal that has yet to find its place: its name, and its bytes."""
    with tempfile.TemporaryDirectory(prefix="fanfold-edit-") as folder:
        _write(Path(folder), _header(run), facts)
        (file,) = Path(folder).glob(f"*{fmt.SUFFIX}")
        return file.stem, file.read_bytes()


def _header(run: StoredRun) -> dict[str, Any]:
    first = run.attempts[0].journals[0].header if run.attempts else None
    last = run.attempts[-1].journals[-1].header if run.attempts else None
    name = (first.name if first else None) or run.name
    attempt, world = (last.attempt, last.world) if last else (None, None)
    return {"run": run.id, "project": run.project, "name": name, "attempt": attempt, "world": world}


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


def check_idle(run: StoredRun, busy: tuple[str, ...]) -> None:
    """Raise when a run may still be written."""
    if run.status in busy:
        raise RunError(f"run {run.name} ({run.id}) may still be written. Nothing was deleted. Stop it first.")


def delete(store: Store, query: Delete) -> dict[str, Any]:
    """Delete runs, all or none: one that is still written stops it."""
    changes = changes_of(store)
    runs = [data.open_run(store, query.project, id) for id in query.ids]
    for run in runs:
        changes.check_deletable(run)
    for run in runs:
        changes.delete(run)
    return {"deleted": len(runs)}


def views(store: Store, project: str) -> dict[str, str]:
    """Return a project's saved views: name and fragment of the address."""
    return changes_of(store).views.all(project)


def save_view(store: Store, query: SaveView) -> dict[str, str]:
    """Keep or drop a view."""
    if not query.name.strip() or len(query.name) + len(query.fragment or "") > MAX_TEXT:
        raise SettingError("a view needs a name, and both must not be endless. Nothing was saved.")
    views = changes_of(store).views
    views.save(query.project, query.name, query.fragment)
    return views.all(query.project)
