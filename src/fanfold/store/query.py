"""The query face of the store: what dashboards, the command line and notebooks ask. A fleet store answers the same calls."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import FanfoldError, RunNotFound
from ..journal import directory
from ..settings import find_directory
from . import axes, catalogue, deadline
from .buckets import Buckets
from .filter import Filter, sort_rows
from .run import StoredRun, not_found

Row = dict[str, Any]
Name = tuple[str, str]  # project, run id


class Rows(list[Row]):
    """Rows of runs. `unreadable` has the path and the reason of each run that should be among them and could not be read."""

    def __init__(self, rows: Iterable[Row] = (), unreadable: Sequence[dict[str, str]] = ()) -> None:
        super().__init__(rows)
        self.unreadable = list(unreadable)


class Store(Protocol):
    """What a store answers, wherever it keeps its points."""

    def projects(self) -> list[Row]:
        """Return the projects: name, runs, last."""

    def runs(
        self,
        project: str | None = None,
        filter: str = "",
        sort: str = "",
        limit: int | None = None,
        *,
        stats: Sequence[str] = (),
    ) -> Rows:
        """Return one row of facts per run."""

    def run(self, project: str, id: str) -> StoredRun:
        """Open a run."""

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        """Open many runs in one call, by id; those that are not there are left out."""

    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        """Return a token, and the runs that changed since the token given."""

    def series(
        self, run: StoredRun, key: str, *, buckets: int = 330, x: str = "step", rank: int | None = None,
        fold: str | None = None, lo: float | None = None, hi: float | None = None, log: bool = False,
    ) -> Buckets:  # fmt: skip
        """Return one key's series, thinned exactly."""

    def series_many(self, wanted: Sequence[tuple[StoredRun, str]], **how: Any) -> list[Buckets | None]:
        """Return many series in one call."""


class LocalStore:
    """The runs below one directory. Journals stay open, so that asking again is cheap.

    Threads may share it: they wait for each other only where both read the same run on, or both ask what changed.
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None) -> None:
        self.root = find_directory(dir)
        self._watching = threading.Lock()  # of what changed() knows
        self._shelf = catalogue.Shelf()
        self._seen: dict[Path, tuple[str, str]] = {}  # signature, and how it ended without a byte, as of the last changed()
        self._version: dict[Path, int] = {}
        self._token = 0

    # Runs

    def projects(self) -> list[Row]:
        """Return the projects, the one with the newest sign of life first: name, runs, last."""
        found: dict[str, Row] = {}
        for folder, last in catalogue.last_signs(self.root, self._shelf):
            name = directory.decode_name(folder.parent.name)
            one = found.setdefault(name, {"name": name, "runs": 0, "last": 0.0})
            one["runs"] += 1
            one["last"] = max(one["last"], last)
        return sorted(found.values(), key=lambda one: one["last"], reverse=True)

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

        `filter` is the language of docs/query.md. `stats` names metrics whose min, max, mean, first, last and count each row
        is to hold under `stats`.
        """
        wanted = Filter(filter)
        listed = catalogue.listed(self.root, project, shelf=self._shelf)
        rows = [self._shelf.row(run) for run in listed]
        rows = [dict(row) for row in rows if not filter or wanted.matches(row, stats=self._statistics)]
        if sort:
            rows = sort_rows(rows, sort, stats=self._statistics)
        rows = rows if limit is None else rows[:limit]
        for row in rows if stats else ():
            row["stats"] = {key: self._statistics(row, key) for key in stats if key in row["latest"]}
        return Rows(rows, listed.unreadable)

    def _statistics(self, row: Mapping[str, Any], key: str) -> dict[str, Any] | None:
        return catalogue.statistics(row, key, run=self._shelf.opened.get(Path(row["path"])))

    def run(self, project: str, id: str) -> StoredRun:
        """Open a run, or read on where it was opened before."""
        folder = directory.run_path(self.root, project, id)
        linked = directory.is_link(folder.parent) or directory.is_link(folder)  # neither is listed
        if linked or not os.path.isdir(f"{folder}/journal"):  # noqa: PTH112 - by the hundred
            self._shelf.close(folder)
            raise not_found(f"{project}/{id}", self.root)
        return self._shelf.run(folder)

    def several(self, project: str, ids: Sequence[str]) -> dict[str, StoredRun]:
        """Open many runs in one call, by id; those that are not there are left out."""
        found = {}
        for id in ids:
            with contextlib.suppress(RunNotFound):
                found[id] = self.run(project, id)
        return found

    def changed(self, since: int = 0) -> tuple[int, list[Name]]:
        """Return a token, and the runs that are new, grew, ended or went away since the token given.

        Finished runs cost one look at a folder's date, growing ones one at each file's size. A token of 0 gets every run.
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
        """Return what a run looks like from outside. Only a live one can end without its files changing."""
        before = self._seen.get(folder)
        if before is not None and self._shelf.unchanged(folder, catalogue.date_of(folder)) is not None:
            return before
        try:
            sign = catalogue.signature(folder)
        except OSError as error:  # that it can be read again is news, too
            return str(error), ""
        row, run = self._shelf.rows.get(folder), self._shelf.opened.get(folder)
        if row is not None and run is not None and row[0] == sign and row[1].status in catalogue.LIVE:
            now = run.status
            if now != row[1].status:  # other than what was last listed: that is news, listing it afterwards is none
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
        """Return one key's series, thinned exactly.

        x: step, time (seconds since 1970), relative (seconds since the run began), or any key that was logged: a point is
        then placed at that key's last value at or before the point's step. `auto` is the x that `define_metric` chose, else
        the step. The whole is sorted by x, equal x by step. rank: which one (default: the lowest that has the key). fold:
        all ranks as one (mean, min, max, sum, std, last). log: buckets for a logarithmic axis.
        """
        return axes.thin(run, key, buckets=buckets, x=x, rank=rank, fold=fold, lo=lo, hi=hi, log=log)

    def series_many(self, wanted: Sequence[tuple[StoredRun, str]], **how: Any) -> list[Buckets | None]:
        """Return many series in one call, in the order asked; None where a run has nothing under the key."""
        return [self._or_none(run, key, how) for run, key in wanted]

    def _or_none(self, run: StoredRun, key: str, how: dict[str, Any]) -> Buckets | None:
        try:
            return self.series(run, key, **how) if any(key in journal.by_key for journal in run.journals) else None
        except deadline.TookTooLong:
            raise
        except FanfoldError:  # the rank or the x that was asked for is not there
            return None


def _name(folder: Path) -> Name:
    return directory.decode_name(folder.parent.name), directory.decode_name(folder.name)


def store_at(dir: str | os.PathLike[str] | None = None) -> Store:
    """Return the store at a directory, or at the address of a server."""
    root = find_directory(dir)
    found = catalogue.mounted.get(root)
    return LocalStore(root) if found is None else found  # type: ignore[return-value]
