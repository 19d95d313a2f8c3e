"""Names of runs: which number a run has in the tables, also after it was moved to another project.

A run has the number of the name it was first stored under, and keeps it: a move is one row in `moved`, which gives the run
another project. So nothing is copied, and what arrives under the old name shortly before it is refused belongs to the same run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..fleet.wire import Gone
from .database import Database
from .decode import run_number

FRESH_SECONDS = 2.0  # how long a gateway may not know of a move or deletion by another one
MOST_KNOWN = 1 << 17

_MOVES = "SELECT run, name, project, id FROM moved {0} ORDER BY at, name"
_OF_NAMES = "WHERE run IN (SELECT run FROM moved WHERE run IN {names:Array(UInt64)} OR name IN {names:Array(UInt64)})"
# The names of all runs: where a run was moved to, or else where its first bytes said it belongs.
CURRENT = (
    "(SELECT run, if(m.project = '', r.project, m.project) AS project, r.id AS id FROM (SELECT run, any(project) AS project, "
    "any(id) AS id FROM runs WHERE run NOT IN (SELECT run FROM deleted) GROUP BY run) AS r LEFT JOIN (SELECT run, "
    "argMax(project, at) AS project FROM moved GROUP BY run) AS m ON r.run = m.run)"
)


class RunName(NamedTuple):
    """A name that a run has or had: the run's number, and its name now."""

    run: int
    project: str
    id: str


def look_up(database: Database, names: Sequence[tuple[str, str]]) -> dict[tuple[str, str], RunName]:
    """Return the runs that have or had these names, as of now. Those that were never moved have the number of their name."""
    numbers = {run_number(*name): name for name in names}
    moves = _Moves()
    if numbers:
        moves.take(database.ask(_MOVES.format(_OF_NAMES), names=list(numbers)))
    return {name: moves.of(number, *name) for number, name in numbers.items()}


class _Moves:
    """All moves of some runs."""

    def __init__(self) -> None:
        self.owner: dict[int, int] = {}  # by each name a moved run ever had, as a number: the run's number
        self.now: dict[int, tuple[str, str]] = {}  # by the run's number: its name

    def take(self, found: dict[str, Any]) -> None:
        for run, name, project, id in zip(*(one.tolist() for one in found.values()), strict=True):
            self.owner[run] = self.owner[name] = run
            self.now[run] = (project.decode("utf-8", "replace"), id.decode("utf-8", "replace"))

    def of(self, number: int, project: str, id: str) -> RunName:
        run = self.owner.get(number, number)
        return RunName(run, *self.now.get(run, (project, id)))


class Names:
    """The moves and deletions in a database, as an intake remembers them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._lock = threading.Lock()
        self._moves = _Moves()
        self._deleted: set[int] = set()
        self._native: set[int] = set()  # numbers that were looked up since they were first seen, and are not of moved runs
        self._until = 0.0

    def renew(self, *, now: bool = False) -> None:
        """Load all moves and deletions again, which are few, if the last time is too long ago."""
        if not now and time.monotonic() < self._until:
            return
        moves = _Moves()
        moves.take(self.database.ask(_MOVES.format("")))
        deleted = set(self.database.ask("SELECT DISTINCT run FROM deleted")["run"].tolist())
        with self._lock:
            self._moves, self._deleted = moves, deleted
            self._until = time.monotonic() + FRESH_SECONDS

    def number(self, project: str, id: str) -> int:
        """Return the number of the run that has this name. Raise Gone if it was deleted, or has another name now."""
        self.meet([(project, id)])
        found = self.current(project, id)
        if found in self._deleted:
            raise Gone(project, id)
        return found

    def current(self, project: str, id: str) -> int:
        """Return the number of the run that has this name, deleted or not. Raise Gone if it has another name now."""
        found = self._moves.of(run_number(project, id), project, id)
        if found[1:] != (project, id):
            raise Gone(project, id)
        return found.run

    def owner(self, project: str, id: str) -> int:
        """Return the number of the run that has or had this name."""
        return self._moves.of(run_number(project, id), project, id).run

    def is_deleted(self, run: int) -> bool:
        if run not in self._deleted:
            self.renew()
        return run in self._deleted

    def add_deleted(self, run: int) -> None:
        self._deleted.add(run)

    def meet(self, names: Iterable[tuple[str, str]]) -> None:
        """Renew, and at once if a name is used for the first time: another gateway may have just moved a run there."""
        new = {run_number(*name) for name in names} - self._native - self._moves.owner.keys()
        self.renew(now=bool(new))
        with self._lock:
            if len(self._native) >= MOST_KNOWN:
                self._native.clear()
            self._native |= new
