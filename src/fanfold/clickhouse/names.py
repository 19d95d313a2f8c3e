"""Names of runs: which number a run has in the tables, also after it was moved to another project.

A run has the number of the name it was first stored under, and keeps it: a move is one row in `moved`, which gives the run
another project. So nothing is copied, and what arrives under the old name shortly before it is refused belongs to the same run.

A row of `moved` is a claim of a run on a name, and nobody ever takes one back: a name belongs to the run that claimed it first,
and later claims of other runs on it are void. Whoever reads the rows decides alike, whatever became of those who wrote them.
A run that begins claims its own name before anything of it is acknowledged; such a claim has no `who`.

Whoever claims a name looks at it once more before answering. A row may be invisible for a moment after it has its time, so a
move counts as GRACE_SECONDS later than that, and its author looks after twice as long. Then of a move and a beginning, the
beginning that is counted first is seen by the move, and the move that is counted first was seen by the beginning; so beginnings,
of which there are many, need not wait. Readers follow a move when its author has looked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..fleet.wire import Gone
from .database import Database
from .decode import run_number

FRESH_SECONDS = 2.0  # how long a gateway may not know of a move or deletion by another one
# How long a claim may take from its time to where everybody sees it, with what clocks of a cluster differ. An insert of one row
# takes 5 to 20 ms; one that waits behind large batches, or for a replica, some hundreds.
GRACE_SECONDS = 0.5
MOST_KNOWN = 1 << 17

_GRACE = int(GRACE_SECONDS * 1e6)
_OWN = "(run = name AND who = '')"  # the claim of a run that begins, on the name it has its number from
# The one rule: which run a name belongs to.
_OWNERS = (
    f"SELECT name, argMin(run, (toUnixTimestamp64Micro(at) + if({_OWN}, 0, {_GRACE}), run)) AS owner FROM moved "
    "WHERE {0} GROUP BY name"
)
# Claims on a name may be on several shards, so they are joined where all rows of both sides are.
_VALID = (
    f"(SELECT c.run AS run, c.name AS name, c.project AS project, c.id AS id, c.at AS at FROM (SELECT run, name, project, id, at "
    f"FROM moved WHERE NOT {_OWN} AND {{0}}) AS c INNER JOIN ("
    + _OWNERS.format(f"name GLOBAL IN (SELECT name FROM moved WHERE NOT {_OWN})")
    + ") AS o ON c.name = o.name AND c.run = o.owner)"
)
MADE = _VALID.format("true")  # all moves that are not void
IN_EFFECT = _VALID.format(f"toUnixTimestamp64Micro(at) <= toUnixTimestamp64Micro(now64(6)) - {2 * _GRACE}")  # … and settled
_MOVES = "SELECT run, name, project, id FROM {0} {1} ORDER BY at, name"
_OF_NAMES = "WHERE run IN (SELECT run FROM moved WHERE run IN {names:Array(UInt64)} OR name IN {names:Array(UInt64)})"
# The names of all runs: where a run was moved to, or else where its first bytes said it belongs.
CURRENT = (
    "(SELECT run, if(m.project = '', r.project, m.project) AS project, r.id AS id FROM (SELECT run, any(project) AS project, "
    "any(id) AS id FROM runs WHERE run NOT IN (SELECT run FROM deleted) GROUP BY run) AS r LEFT JOIN (SELECT run, "
    f"argMax(project, (at, name)) AS project FROM {IN_EFFECT} GROUP BY run) AS m ON r.run = m.run)"
)


class RunName(NamedTuple):
    """A name that a run has or had: the run's number, and its name now."""

    run: int
    project: str
    id: str


def owners(database: Database, names: Sequence[int]) -> dict[int, int]:
    """Return which run each of these names belongs to, by their numbers; names that nobody claimed are left out."""
    if not names:
        return {}
    found = database.ask(_OWNERS.format("name IN {names:Array(UInt64)}"), names=list(names))
    return dict(zip(found["name"].tolist(), found["owner"].tolist(), strict=True))


def look_up(database: Database, names: Sequence[tuple[str, str]], *, moves: str = IN_EFFECT) -> dict[tuple[str, str], RunName]:
    """Return the runs that have or had these names, as of now. Those that were never moved have the number of their name."""
    numbers = {run_number(*name): name for name in names}
    found = _Moves()
    if numbers:
        found.take(database.ask(_MOVES.format(moves, _OF_NAMES), names=list(numbers)))
    return {name: found.of(number, *name) for number, name in numbers.items()}


class _Moves:
    """All moves of some runs, except those that are void."""

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
        self._begun: set[int] = set()  # numbers that own their names for certain
        self._until = 0.0

    def renew(self, *, now: bool = False) -> None:
        """Load all moves and deletions again, which are few, if the last time is too long ago."""
        if not now and time.monotonic() < self._until:
            return
        moves = _Moves()
        moves.take(self.database.ask(_MOVES.format(IN_EFFECT, "")))
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

    def begin(self, names: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Claim names for runs that begin under them; return those that belong to other runs. What is ours once always is."""
        new = {run_number(*name): name for name in names}
        new = {number: name for number, name in new.items() if number not in self._begun}
        found = owners(self.database, list(new))
        unclaimed = {number: name for number, name in new.items() if number not in found}
        if unclaimed:
            self._claim(unclaimed)
            found.update(owners(self.database, list(unclaimed)))
        taken = {name for number, name in new.items() if found.get(number) != number}
        with self._lock:
            if len(self._begun) >= MOST_KNOWN:
                self._begun.clear()
            self._begun.update(number for number, name in new.items() if name not in taken)
        if taken:
            self.renew(now=True)
        return taken

    def _claim(self, names: Mapping[int, tuple[str, str]]) -> None:
        import numpy as np

        numbers = np.array(list(names), np.uint64)
        projects, ids = zip(*names.values(), strict=True)
        self.database.insert("moved", {"run": numbers, "name": numbers, "project": list(projects), "id": list(ids)})
