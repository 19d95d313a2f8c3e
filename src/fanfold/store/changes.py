"""Changes to stored runs: name, tags, notes, archiving, deletion, saved views. Nothing that training wrote is changed.

An edit is a frame in a journal of its own with the role `editor`; for each fact the newest edit counts.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from .._version import __version__
from ..atomic import replace_text
from ..errors import RunError, SettingError, clean_text
from ..journal import Kind, Writer, directory
from ..journal import format as fmt
from ..journal.files import open_inside
from ..journal.origin import spool_roots
from ..journal.requests import JobRequest
from ..journal.spool import recover
from ..process import detect
from .catalogue import forget
from .run import StoredRun

ASIDE = ".deleted-"  # hidden from every listing; prune removes leftovers of an interrupted deletion
COPYING = ".copying-"  # a copy that is being made: hidden, too, and named after its process
VIEWS = ".views"  # beside a project's runs, and hidden from every listing of them
WORKSPACES = "workspaces"  # in the folder of the views: a file per user
MAX_TEXT = 20_000  # bytes of one edit
VIEW, RULE, WORKSPACE = "view", "rule", "workspace"  # what a project keeps under names; also the prefix of those names


class Views(Protocol):
    """The saved views of a store, and the alert rules of its projects, which are kept in the same way."""

    def all(self, project: str, kind: str = VIEW) -> dict[str, str]:
        """Return a project's views: names and URL fragments. Of rules: their texts, and the times from which on they apply."""

    def save(self, project: str, name: str, fragment: str | None, kind: str = VIEW) -> None:
        """Save a view; without a fragment, delete it."""

    def workspace(self, project: str, user: str = "") -> str:
        """Return what a user last looked at in a project, as a URL fragment; empty if nothing is kept."""

    def keep_workspace(self, project: str, fragment: str, user: str = "") -> None:
        """Replace a user's workspace of a project."""


class Changes(Protocol):
    """The interface for changing a store's runs."""

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        """Set facts of a run."""

    def ask(self, run: StoredRun, request: JobRequest) -> None:
        """Leave a request for the job of a run."""

    def add_alert(self, run: StoredRun, alert: dict[str, Any]) -> None:
        """Add an alert to a run: its fields, with `t` in nanoseconds."""

    def check_deletable(self, run: StoredRun, *, force: bool = False) -> None:
        """Raise if this caller must not delete a run; `force` allows deleting one that may still be written to."""

    def delete(self, run: StoredRun) -> int:
        """Delete a run with everything in it; return the number of bytes freed on this machine."""

    def move(self, runs: Sequence[StoredRun], project: str) -> int:
        """Move runs to another project, and return how many moved; if one of them cannot go there, move none."""

    @property
    def views(self) -> Views:
        """The saved views."""


class OnDisk:
    """Changes to the runs of one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.views = DirectoryViews(root)

    def edit(self, run: StoredRun, facts: dict[str, Any]) -> None:
        _write(run.path / "journal", _header(run), edit_frame(facts))

    def add_alert(self, run: StoredRun, alert: dict[str, Any]) -> None:
        _write(run.path / "journal", _header(run), alert_frame(alert))

    def ask(self, run: StoredRun, request: JobRequest) -> None:
        run.leave_request(request)

    def check_deletable(self, run: StoredRun, *, force: bool = False) -> None:
        if not force:
            check_idle(run, ("running", "lost"))
        check_place(run.path, self.root)

    def delete(self, run: StoredRun) -> int:
        return delete(run)

    def move(self, runs: Sequence[StoredRun], project: str) -> int:
        from . import move

        before = {run.path for run in runs}
        return len(before - set(move.move(runs, self.root, project)))


class DirectoryViews:
    """Saved views, stored beside a project's runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def all(self, project: str, kind: str = VIEW) -> dict[str, str]:
        folder = self._folder(project)
        found = StoredRun(folder).refresh().info if directory.is_run(folder) and not directory.is_link(folder) else {}
        mark = f"{kind} "
        named = {name.removeprefix(mark): text for name, text in sorted(found.items()) if name.startswith(mark)}
        return {name: text for name, text in named.items() if isinstance(text, str)}

    def save(self, project: str, name: str, fragment: str | None, kind: str = VIEW) -> None:
        folder = self._to_write(project)
        directory.check_folders(folder)
        header = {"run": VIEWS, "project": project, "name": "saved views", "attempt": VIEWS}
        _write(folder / "journal", header, edit_frame({f"{kind} {name}": fragment}))

    def workspace(self, project: str, user: str = "") -> str:
        try:
            with open_inside(self.root, directory.encode_name(project), VIEWS, WORKSPACES, _file_of(user)) as file:
                return file.read(MAX_TEXT).decode("utf-8", "replace")
        except OSError:
            return ""

    def keep_workspace(self, project: str, fragment: str, user: str = "") -> None:
        """Replace one file: a workspace changes with every click, and a journal of each change would grow without end."""
        folder = self._to_write(project) / WORKSPACES
        if directory.is_link(folder):
            raise RunError(f"{folder} is a link. Nothing was saved. Remove it.")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(folder / _file_of(user), fragment, mode=0o600)

    def _to_write(self, project: str) -> Path:
        folder = self._folder(project)
        if not folder.parent.is_dir():
            raise RunError(f"there is no project {project!r}. Nothing was saved.")
        if directory.is_link(folder):
            raise RunError(f"{folder} is a link. Nothing was saved. Remove it.")
        return folder

    def _folder(self, project: str) -> Path:
        return self.root / directory.encode_name(project) / VIEWS


def _file_of(user: str) -> str:
    """Return the name of a user's file: any text may be a user's name."""
    return hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()


def checked_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of an edit as they are stored, or raise: name, tags, notes, group, archived."""
    known = {name: _CHECKS[name](name, value) for name, value in facts.items()}
    if len(msgspec.json.encode(known)) > MAX_TEXT:
        raise SettingError(f"the new facts are longer than {MAX_TEXT} bytes. Nothing was changed. Shorten them.")
    return known


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise SettingError(f"a run's {name} cannot be {value!r}. Nothing was changed. Give it a text that is not empty.")
    return clean_text(value)


def _text_or_none(name: str, value: Any) -> str | None:
    return None if value is None or value == "" else _text(name, value)


def _tags(name: str, value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SettingError(f"{name} cannot be {value!r}. Nothing was changed. Give a list of texts.")
    return list(dict.fromkeys(_text("tag", tag) for tag in value))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{name} cannot be {value!r}. Nothing was changed. Give True or False.")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "name": _text, "group": _text_or_none, "notes": _text_or_none, "tags": _tags, "archived": _flag,
}  # fmt: skip


Frame = tuple[Kind, dict[str, Any]]


def as_journal(run: StoredRun, frame: Frame) -> tuple[str, bytes]:
    """Return an edit or an alert as a journal not yet stored: its name and its bytes."""
    with tempfile.TemporaryDirectory(prefix="fanfold-edit-") as folder:
        _write(Path(folder), _header(run), frame)
        (file,) = Path(folder).glob(f"*{fmt.SUFFIX}")
        return file.stem, file.read_bytes()


def edit_frame(facts: dict[str, Any]) -> Frame:
    return Kind.INFO, {"t": time.time_ns(), **facts}


def alert_frame(alert: dict[str, Any]) -> Frame:
    return Kind.EVENT, {"event": "alert", **alert}


def _header(run: StoredRun) -> dict[str, Any]:
    first = run.attempts[0].journals[0].header if run.attempts else None
    last = run.attempts[-1].journals[-1].header if run.attempts else None
    name = (first.name if first else None) or run.name
    attempt, world = (last.attempt, last.world) if last else (None, None)
    return {"run": run.id, "project": run.project, "name": name, "attempt": attempt, "world": world}


def _write(folder: Path, header: dict[str, Any], frame: Frame) -> None:
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
    writer.append(frame)
    writer.close({"t": time.time_ns(), "status": "finished"})


def check_idle(run: StoredRun, busy: tuple[str, ...], done: str = "deleted") -> None:
    """Raise if a run may still be written to."""
    if run.status in busy:
        raise RunError(f"run {run.name} ({run.id}) may still be written. Nothing was {done}. Stop it first.")


def check_alone(run: StoredRun, others: Sequence[StoredRun], done: str) -> None:
    """Raise if another run that goes to the same project has the same id."""
    if sum(other.id == run.id for other in others) > 1:
        raise RunError(f"several of the runs have the id {run.id}. Nothing was {done}. A project can have only one of them.")


def check_place(path: Path, root: Path, done: str = "deleted") -> None:
    """Raise unless a directory is exactly `root/project/run` and not reached through a link."""
    inside = path.parent.parent == root or path.parent.parent.resolve() == root.resolve()
    linked = path.is_symlink() or path.parent.is_symlink()
    if not inside or linked or path.resolve().parent.parent != root.resolve():
        why = "is a link" if linked else f"is not in {root}"
        raise RunError(f"{path} {why}. Nothing was {done}. Name the directory of runs that it is in.")


def weight(path: Path) -> int:
    """Return the size of a directory in bytes; links are not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - os.walk gives strings, by the thousand
    return total


def delete(run: StoredRun) -> int:
    """Hide a run, then delete it, so that an interruption leaves no partial run; return the number of bytes freed."""
    recover(*spool_roots(), runs=run.path.parent.parent)  # what a killed process left in a spool would bring the run back
    freed = weight(run.path)
    aside = run.path.with_name(f"{ASIDE}{secrets.token_hex(6)}")
    run.path.rename(aside)
    forget(run.path)
    shutil.rmtree(aside)
    return freed
