"""What every store offers, and the store over a directory of runs. `clickhouse/store.py` is the same over a database."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RunError, RunNotFound, SettingError, notices
from ..journal import directory
from ..settings import find_directory
from . import catalogue
from .attempts import UNFINISHED
from .catalogue import Progress
from .departed import place_now
from .rows import LIVE, Project, RunRow, RunRows
from .run import Runs, StoredRun, not_found

if TYPE_CHECKING:
    from .buckets import Buckets
    from .changes import Changes

Name = tuple[str, str]  # project, run id


class Store(ABC):
    """A store, wherever it keeps its runs. `fanfold.stores.open_store` opens the store at an address."""

    place: str  # where the runs are, for display
    root: Path  # the local folder with the runs, or with local copies of runs kept elsewhere

    @property
    @abstractmethod
    def changes(self) -> Changes:
        """Changes to the runs: renaming, tagging, deleting, saving views."""

    @abstractmethod
    def projects(self) -> list[Project]:
        """Return the projects, the most recently active first."""

    @abstractmethod
    def names(self, project: str | None = None) -> Iterable[Name]:
        """Return the project and id of each run."""

    @abstractmethod
    def listed(self, project: str | None = None, *, progress: Progress | None = None) -> Runs:
        """Return all runs, newest first. Their facts are loaded; their journals are opened only when more is needed."""

    @abstractmethod
    def statistics(self, row: RunRow, key: str) -> dict[str, Any] | None:
        """Return min, max (and their steps: `min_step`, `max_step`), mean, first, last and count of a metric of a run."""

    @abstractmethod
    def run(self, project: str, id: str) -> StoredRun:
        """Open a run, or read what was appended since it was last opened."""

    @abstractmethod
    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        """Open many runs in one call and return them by id. Missing runs are left out."""

    @abstractmethod
    def was_in(self, project: str, run: StoredRun) -> bool:
        """Return whether a run was in a project before it was moved to the one where it is."""

    @abstractmethod
    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        """Return a token, and the runs that appeared, grew, ended or disappeared since the given token. 0 returns every run."""

    def runs(
        self, project: str | None = None, filter: str = "", sort: str = "", limit: int | None = None, *,
        stats: Sequence[str] = (),
    ) -> RunRows:  # fmt: skip
        """Return one row of facts per run, newest first unless `sort` names a column (`-loss`: highest first).

        `filter` uses the language of docs/query.md. `stats` names metrics whose min, max, mean, first, last and count are
        included in each row under `stats`.
        """
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise SettingError(f"limit={limit!r} is not a number of runs. Nothing was read. Pass 0 or more, or None for all.")
        found = _selected(self, project, filter)
        rows = [run.row() for run in found]
        if sort:
            from .filter import sort_rows

            rows = sort_rows(rows, sort, stats=self.statistics)
        rows = rows if limit is None else rows[:limit]
        if stats:
            rows = [_with_statistics(self, row, stats) for row in rows]
        return RunRows(rows, found.unreadable)

    def series(
        self, run: StoredRun, key: str, *, buckets: int = 330, whole: int = 0, x: str = "step", rank: int | None = None,
        fold: str | None = None, lo: float | None = None, hi: float | None = None, log: bool = False,
    ) -> Buckets:  # fmt: skip
        """Return one key's series, downsampled exactly.

        x: step, time (seconds since 1970), relative (seconds since the run began), or any logged key: a point is then placed at
        that key's last value at or before the point's step. `auto` is the x that `define_metric` chose, else the step. The series
        is sorted by x, then by step. rank: the rank to read (default: the lowest that has the key). fold: reduce all ranks to one
        series (mean, min, max, sum, std, last). log: buckets for a logarithmic axis. whole: up to so many points are returned as
        they are, one per bucket; a database may downsample them all the same in a part of a long series.
        """
        from .axes import thin

        return thin(run, key, buckets=buckets, whole=whole, x=x, rank=rank, fold=fold, lo=lo, hi=hi, log=log)

    def series_many(self, wanted: Sequence[tuple[StoredRun, str]], **how: Any) -> list[Buckets | None]:
        """Return many series in one call, in the given order; None where a run has no points under the key."""
        from .axes import thin_or_none

        return [thin_or_none(run, key, **how) for run, key in wanted]


class Watched:
    """The state of a store's runs at each call of `changed()`, which tells what changed since an earlier one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen: dict[Any, Any] = {}
        self._version: dict[Any, int] = {}
        self._token = 0

    def update(self, now: dict[Any, Any]) -> None:
        """Compare the current state of all runs with the last one."""
        moved = [run for run in {**self.seen, **now} if self.seen.get(run) != now.get(run)]
        if moved:
            self._token += 1
            self._version.update(dict.fromkeys(moved, self._token))
        self.seen = now

    def since(self, token: int) -> tuple[int, list[Any]]:
        """Return the current token, and the runs that changed after the given one."""
        return self._token, [run for run, version in self._version.items() if version > token]


class LocalStore(Store):
    """The runs below one directory. Journals stay open, so that repeated queries are cheap.

    Threads may share it: they block each other only while updating the same run, or while both call changed().
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None) -> None:
        self.root = find_directory(dir)
        if self.root.is_file():
            raise SettingError(f"{self.root} is a file, not a directory of runs. Nothing was opened. Name the directory.")
        self.place = str(self.root)
        self._shelf = catalogue.Shelf()
        self._watched = Watched()  # by folder: its signature, and any status change without a write

    # Runs

    @cached_property
    def changes(self) -> Changes:
        from .changes import OnDisk

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

    def statistics(self, row: RunRow, key: str) -> dict[str, Any] | None:
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

    def was_in(self, project: str, run: StoredRun) -> bool:
        return place_now(self.root.absolute(), project, run.id) == run.path

    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        """A finished run costs one stat of its folder, a growing one a stat of each file."""
        with self._watched.lock:
            dates = ((folder, catalogue.date_of(folder)) for folder in directory.run_folders(self.root))
            self._watched.update({folder: self._sight(folder, date) for folder, date in dates if date})
            token, folders = self._watched.since(since)
            return token, [_name(folder) for folder in folders]

    def _sight(self, folder: Path, date: int) -> tuple[str, str]:
        """Return a run's state as seen from outside. Only a live run can end without its files changing."""
        before: tuple[str, str] | None = self._watched.seen.get(folder)
        if before is not None and self._shelf.unchanged(folder, date) is not None:
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


def _name(folder: Path) -> Name:
    return directory.decode_name(folder.parent.name), directory.decode_name(folder.name)


def _with_statistics(store: Store, row: RunRow, keys: Sequence[str]) -> RunRow:
    return msgspec.structs.replace(row, stats={key: store.statistics(row, key) for key in keys if key in row.latest})


def matching(store: Store, project: str | None = None, filter: str = "", *, progress: Progress | None = None) -> Runs:
    """Return a store's runs that match a filter, newest first. Warn once about unreadable ones."""
    found = _selected(store, project, filter, progress)
    if found.unreadable:
        notices.once(f"unreadable:{store.place}", catalogue.unreadable_text(found.unreadable))
    return found


def _selected(store: Store, project: str | None, filter: str, progress: Progress | None = None) -> Runs:
    if not filter:
        return store.listed(project, progress=progress)
    from .filter import Filter

    wanted, found = Filter(filter), store.listed(project, progress=progress)
    return Runs((run for run in found if wanted.matches(run.row(), stats=store.statistics)), found.unreadable)


def find(store: Store, word: str, project: str | None = None, *, besides: Name | None = None) -> StoredRun:
    """Open the run whose id, id prefix, name, PROJECT/ID or PROJECT/NAME is `word`. `-` is the newest run.

    `besides`: a run that is not meant.
    """
    exact = [name for name in store.names(project) if name[1] == word and name != besides]
    if len(exact) == 1:
        with contextlib.suppress(RunNotFound):  # a folder renamed by hand: the listing knows the run's own id
            return store.run(*exact[0])
    matches = list(_meant(word, Runs(run for run in matching(store, project) if (run.project, run.id) != besides)))
    if len(matches) > 1:
        names = ", ".join(f"{run.project}/{run.id} ({run.name})" for run in matches[:6])
        more = f" and {len(matches) - 6} more" if len(matches) > 6 else ""
        raise RunError(f"{word!r} names {len(matches)} runs: {names}{more}. None was opened. Write PROJECT/ID as it is here.")
    if not matches:
        raise not_found(word, store.place)
    return matches[0].reopened()


def _meant(word: str, found: Runs) -> Iterator[StoredRun]:
    if word == "-":
        yield from found[:1]
        return
    named = [run for run in found if word in (run.id, run.name)] or [run for run in found if word in _full_names(run)]
    yield from named or [run for run in found if word and run.id.startswith(word)]


def _full_names(run: StoredRun) -> tuple[str, str]:
    """Return a run's names with its project: a copy in another project has the same id."""
    return f"{run.project}/{run.id}", f"{run.project}/{run.name}"


def open_run(path: Path) -> StoredRun:
    """Open the run in a directory."""
    if not directory.is_run(path):
        raise not_found(str(path), str(path.parent))
    return StoredRun(path).refresh()


def find_unfinished(root: Path, project: str, *, name: str | None, ignore_attempt: str) -> str | None:
    """Return the id of the newest run left unfinished by an attempt other than ours, so that all ranks get the same answer."""
    for run in matching(LocalStore(root), project):
        if directory.stranger_of(run.path, root):
            continue  # whoever shares the directory does not choose what is continued
        earlier = [life for life in run.row().lives if not life.key.startswith(ignore_attempt)]
        if earlier and earlier[-1].status in UNFINISHED and name in (None, run.name):
            return run.id
    return None
