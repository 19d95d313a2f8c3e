"""The interface of every store, and the store over a directory of runs. `clickhouse/store.py` is the same over a database."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..errors import FanfoldError, RunError, RunNotFound, notices
from ..journal import directory
from ..settings import find_directory
from . import axes, catalogue, deadline
from .attempts import UNFINISHED
from .buckets import Buckets
from .catalogue import Progress
from .changes import Changes, OnDisk
from .filter import Filter, sort_rows
from .rows import LIVE, Project, Row, Rows
from .run import Runs, StoredRun, not_found

Name = tuple[str, str]  # project, run id


class Store(Protocol):
    """The interface of a store, wherever it keeps its runs. `fanfold.stores.open_store` opens the store at an address."""

    @property
    def place(self) -> str:
        """Where the runs are, for display."""

    @property
    def root(self) -> Path:
        """The local folder with the runs, or with local copies of runs kept elsewhere."""

    @property
    def changes(self) -> Changes:
        """Changes to the runs: renaming, tagging, deleting, saving views."""

    def projects(self) -> list[Project]:
        """Return the projects, the most recently active first."""

    def names(self, project: str | None = None) -> Iterable[Name]:
        """Return the project and id of each run."""

    def listed(self, project: str | None = None, *, progress: Progress | None = None) -> Runs:
        """Return all runs, newest first. Their facts are loaded; their journals are opened only when more is needed."""

    def runs(
        self,
        project: str | None = None,
        filter: str = "",
        sort: str = "",
        limit: int | None = None,
        *,
        stats: Sequence[str] = (),
    ) -> Rows:
        """Return one row of facts per run, newest first unless `sort` names a column (`-loss`: highest first).

        `filter` uses the language of docs/query.md. `stats` names metrics whose min, max, mean, first, last and count are
        included in each row under `stats`.
        """

    def statistics(self, row: Row, key: str) -> dict[str, Any] | None:
        """Return min, max, mean, first, last and count of a metric of a run."""

    def run(self, project: str, id: str) -> StoredRun:
        """Open a run, or read what was appended since it was last opened."""

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        """Open many runs in one call and return them by id. Missing runs are left out."""

    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        """Return a token, and the runs that appeared, grew, ended or disappeared since the given token. 0 returns every run."""

    def series(
        self, run: StoredRun, key: str, *, buckets: int = 330, x: str = "step", rank: int | None = None,
        fold: str | None = None, lo: float | None = None, hi: float | None = None, log: bool = False,
    ) -> Buckets:  # fmt: skip
        """Return one key's series, downsampled exactly.

        x: step, time (seconds since 1970), relative (seconds since the run began), or any logged key: a point is then placed at
        that key's last value at or before the point's step. `auto` is the x that `define_metric` chose, else the step. The series
        is sorted by x, then by step. rank: the rank to read (default: the lowest that has the key). fold: reduce all ranks to one
        series (mean, min, max, sum, std, last). log: buckets for a logarithmic axis.
        """

    def series_many(self, wanted: Sequence[tuple[StoredRun, str]], **how: Any) -> list[Buckets | None]:
        """Return many series in one call, in the given order; None where a run has no points under the key."""


class LocalStore:
    """The runs below one directory. Journals stay open, so that repeated queries are cheap.

    Threads may share it: they block each other only while updating the same run, or while both call changed().
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None) -> None:
        self.root = find_directory(dir)
        self.place = str(self.root)
        self._watching = threading.Lock()  # guards the state of changed()
        self._shelf = catalogue.Shelf()
        self._seen: dict[Path, tuple[str, str]] = {}  # signature, and any status change without a write, as of changed()
        self._version: dict[Path, int] = {}
        self._token = 0

    # Runs

    @cached_property
    def changes(self) -> Changes:
        return OnDisk(self.root)

    def projects(self) -> list[Project]:
        found: dict[str, Project] = {}
        for folder, last in catalogue.last_signs(self.root, self._shelf):
            name = directory.decode_name(folder.parent.name)
            one = found.setdefault(name, Project(name, 0, 0.0))
            one.runs += 1
            one.last = max(one.last, last)
        return sorted(found.values(), key=lambda one: one.last, reverse=True)

    def names(self, project: str | None = None) -> Iterator[Name]:
        return (_name(folder) for folder in directory.run_directories(self.root, project))

    def listed(self, project: str | None = None, *, progress: Progress | None = None) -> Runs:
        return catalogue.listed(self.root, project, shelf=self._shelf, progress=progress)

    def runs(
        self, project: str | None = None, filter: str = "", sort: str = "", limit: int | None = None, *,
        stats: Sequence[str] = (),
    ) -> Rows:  # fmt: skip
        return rows_of(self, project, filter, sort, limit, stats)

    def statistics(self, row: Row, key: str) -> dict[str, Any] | None:
        return catalogue.statistics(row, key, run=self._shelf.opened.get(Path(row.path)))

    def run(self, project: str, id: str) -> StoredRun:
        folder = directory.run_path(self.root, project, id)
        linked = directory.is_link(folder.parent) or directory.is_link(folder)  # neither is listed
        if linked or not directory.is_run(folder):
            self._shelf.close(folder)
            raise not_found(f"{project}/{id}", self.place)
        return self._shelf.run(folder)

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        found = {}
        for id in ids:
            with contextlib.suppress(RunNotFound):
                found[id] = self.run(project, id)
        return found

    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        """Return a token, and the runs that appeared, grew, ended or disappeared since the given token. 0 returns every run.

        A finished run costs one stat of its folder, a growing one a stat of each file.
        """
        with self._watching:
            now = {folder: self._sight(folder) for folder in directory.run_directories(self.root)}
            moved = [folder for folder in {**self._seen, **now} if self._seen.get(folder) != now.get(folder)]
            if moved:
                self._token += 1
                self._version.update(dict.fromkeys(moved, self._token))
            self._seen = now
            return self._token, [_name(folder) for folder, version in self._version.items() if version > since]

    def _sight(self, folder: Path) -> tuple[str, str]:
        """Return a run's state as seen from outside. Only a live run can end without its files changing."""
        before = self._seen.get(folder)
        if before is not None and self._shelf.unchanged(folder, catalogue.date_of(folder)) is not None:
            return before
        try:
            sign = catalogue.signature(folder)
        except OSError as error:  # becoming readable again counts as a change, too
            return str(error), ""
        row, run = self._shelf.rows.get(folder), self._shelf.opened.get(folder)
        if row is not None and run is not None and row[0] == sign and row[1].status in LIVE:
            now = run.status
            if now != row[1].status:  # a status not listed yet is a change; listing it afterwards is not
                return sign, now
        return sign, before[1] if before is not None and before[0] == sign else ""

    # Points

    def series(
        self,
        run: StoredRun,
        key: str,
        *,
        buckets: int = 330,
        x: str = "step",
        rank: int | None = None,
        fold: str | None = None,
        lo: float | None = None,
        hi: float | None = None,
        log: bool = False,
    ) -> Buckets:
        return axes.thin(run, key, buckets=buckets, x=x, rank=rank, fold=fold, lo=lo, hi=hi, log=log)

    def series_many(self, wanted: Sequence[tuple[StoredRun, str]], **how: Any) -> list[Buckets | None]:
        return [self._or_none(run, key, how) for run, key in wanted]

    def _or_none(self, run: StoredRun, key: str, how: dict[str, Any]) -> Buckets | None:
        try:
            return self.series(run, key, **how) if any(key in journal.by_key for journal in run.journals) else None
        except deadline.TookTooLong:
            raise
        except FanfoldError:  # the requested rank or x does not exist
            return None


def _name(folder: Path) -> Name:
    return directory.decode_name(folder.parent.name), directory.decode_name(folder.name)


def rows_of(
    store: Store, project: str | None, filter: str, sort: str, limit: int | None, stats: Sequence[str]
) -> Rows:  # fmt: skip
    """Return the rows of a store's runs; see Store.runs."""
    wanted, found = Filter(filter), store.listed(project)
    rows = [run.row() for run in found]
    if filter:
        rows = [row for row in rows if wanted.matches(row, stats=store.statistics)]
    if sort:
        rows = sort_rows(rows, sort, stats=store.statistics)
    rows = rows if limit is None else rows[:limit]
    if stats:
        rows = [_with_statistics(store, row, stats) for row in rows]
    return Rows(rows, found.unreadable)


def _with_statistics(store: Store, row: Row, keys: Sequence[str]) -> Row:
    return msgspec.structs.replace(row, stats={key: store.statistics(row, key) for key in keys if key in row.latest})


def matching(store: Store, project: str | None = None, filter: str = "", *, progress: Progress | None = None) -> Runs:
    """Return a store's runs that match a filter, newest first. Warn once about unreadable ones."""
    wanted, found = Filter(filter), store.listed(project, progress=progress)
    if found.unreadable:
        notices.once(f"unreadable:{store.place}", catalogue.unreadable_text(found.unreadable))
    if not filter:
        return found
    return Runs((run for run in found if wanted.matches(run.row(), stats=store.statistics)), found.unreadable)


def find(store: Store, word: str, project: str | None = None) -> StoredRun:
    """Open the run whose id, id prefix or name is `word`. `-` is the newest run."""
    exact = [name for name in store.names(project) if name[1] == word]
    if len(exact) == 1:
        with contextlib.suppress(RunNotFound):  # a folder renamed by hand: the listing knows the run's own id
            return store.run(*exact[0])
    matches = list(_meant(word, matching(store, project)))
    if len(matches) > 1:
        names = ", ".join(f"{run.id} ({run.name}, {run.project})" for run in matches[:6])
        raise RunError(f"{word!r} names {len(matches)} runs: {names}. None was opened. Give more of the id, or --project.")
    if not matches:
        raise not_found(word, store.place)
    return matches[0].reopened()


def _meant(word: str, found: Runs) -> Iterator[StoredRun]:
    if word == "-":
        yield from found[:1]
        return
    named = [run for run in found if word in (run.id, run.name)]
    yield from named or [run for run in found if run.id.startswith(word)]


def open_run(path: Path) -> StoredRun:
    """Open the run in a directory."""
    if not directory.is_run(path):
        raise not_found(str(path), str(path.parent))
    return StoredRun(path).refresh()


def find_unfinished(root: Path, project: str, *, name: str | None, ignore_attempt: str) -> str | None:
    """Return the id of the newest run left unfinished by an attempt other than ours, so that all ranks get the same answer."""
    for run in matching(LocalStore(root), project):
        earlier = [life for life in run.row().lives if not life.key.startswith(ignore_attempt)]
        if earlier and earlier[-1].status in UNFINISHED and name in (None, run.name):
            return run.id
    return None
