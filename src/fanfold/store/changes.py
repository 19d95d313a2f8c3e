"""Changes to stored runs: name, tags, notes, archiving, deletion, saved views. Nothing that training wrote is changed.

An edit is a frame in a journal of its own with the role `editor`; for each fact the newest edit counts.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from .._version import __version__
from ..errors import RunError
from ..journal import Kind, Writer, directory
from ..journal import format as fmt
from ..process import detect
from .delete import check_place, delete
from .run import StoredRun

VIEWS = ".views"  # beside a project's runs, and hidden from every listing of them
_MARK = "view "  # prefix of saved views among the facts of their run


class Views(Protocol):
    """The saved views of a store."""

    def all(self, project: str) -> dict[str, str]:
        """Return a project's views: names and URL fragments."""

    def save(self, project: str, name: str, fragment: str | None) -> None:
        """Save a view; without a fragment, delete it."""


class Changes(Protocol):
    """The interface for changing a store's runs."""

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        """Set facts of a run."""

    def check_deletable(self, run: StoredRun, *, force: bool = False) -> None:
        """Raise if this caller must not delete a run; `force` allows deleting one that may still be written to."""

    def delete(self, run: StoredRun) -> int:
        """Delete a run with everything in it; return the number of bytes freed on this machine."""

    @property
    def views(self) -> Views:
        """The saved views."""


class OnDisk:
    """Changes to the runs of one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.views = DirectoryViews(root)

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        _write(run.path / "journal", _header(run), facts)

    def check_deletable(self, run: StoredRun, *, force: bool = False) -> None:
        if not force:
            check_idle(run, ("running", "lost"))
        check_place(run.path, self.root)

    def delete(self, run: StoredRun) -> int:
        return delete(run)


class DirectoryViews:
    """Saved views, stored beside a project's runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def all(self, project: str) -> dict[str, str]:
        folder = self._folder(project)
        found = StoredRun(folder).refresh().info if directory.is_run(folder) and not directory.is_link(folder) else {}
        named = {name.removeprefix(_MARK): text for name, text in sorted(found.items()) if name.startswith(_MARK)}
        return {name: text for name, text in named.items() if isinstance(text, str)}

    def save(self, project: str, name: str, fragment: str | None) -> None:
        folder = self._folder(project)
        if not folder.parent.is_dir():
            raise RunError(f"there is no project {project!r}. Nothing was saved.")
        if directory.is_link(folder):
            raise RunError(f"{folder} is a link. Nothing was saved. Remove it.")
        directory.check_folders(folder)
        header = {"run": VIEWS, "project": project, "name": "saved views", "attempt": VIEWS}
        _write(folder / "journal", header, {_MARK + name: fragment})

    def _folder(self, project: str) -> Path:
        return self.root / directory.encode_name(project) / VIEWS


def as_journal(run: StoredRun, facts: dict[str, Any]) -> tuple[str, bytes]:
    """Return an edit as a journal not yet stored: its name and its bytes."""
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
    """Raise if a run may still be written to."""
    if run.status in busy:
        raise RunError(f"run {run.name} ({run.id}) may still be written. Nothing was deleted. Stop it first.")
