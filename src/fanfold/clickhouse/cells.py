"""Cells: 32 steps of one series as one row, from which charts of long series are drawn.

A gateway makes them of many points at a time, a while after these arrived; until then readers use the points. A journal is cut
at multiples of UNIT bytes. A cell is made of the points of one such part, so it comes out the same whoever makes it, and however
often: rows with the same key replace each other. `rolled` says up to where all cells of a journal are there.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import FanfoldError
from . import schema
from .database import Database, DatabaseUnavailable

logger = logging.getLogger("fanfold.gateway")
UNIT = 1 << 20  # bytes
GATHER_SECONDS = 5.0  # how long journals are collected for one query
MOST_BYTES = 32 << 20  # of journals in one query
MOST_JOURNALS = 5_000
SWEEP_SECONDS = 3600.0
QUIET_SECONDS = 3600.0  # after that, cells are made of the rest of a journal, too

At = tuple[int, int]  # a run and a journal

_ROLL = (
    f"INSERT INTO cells (run, series, journal, cell, base, upto, {', '.join(schema.CELL_COLUMNS)}) "
    f"SELECT run, series, journal, cell, base, upto, {schema.COMBINED} FROM (SELECT run, series, journal, "
    "transform(journal, {journals:Array(UInt64)}, {starts:Array(UInt64)}, toUInt64(0)) AS f, "
    "transform(journal, {journals:Array(UInt64)}, {stops:Array(UInt64)}, toUInt64(0)) AS t, "
    f"greatest(f, intDiv(pos, {UNIT}) * {UNIT}) AS base, least(t, (intDiv(pos, {UNIT}) + 1) * {UNIT}) AS upto, "
    f"{schema.POINT_CELL} FROM points WHERE run IN {{runs:Array(UInt64)}} AND journal IN {{journals:Array(UInt64)}} "
    f"AND pos >= {{least:UInt64}} AND pos >= f AND pos < t AND {schema.HAS_STEP}) "
    "GROUP BY run, series, journal, cell, base, upto SETTINGS distributed_foreground_insert = 1, "
    "insert_deduplication_token = '{0}'"
)
_REACHED = (
    "SELECT run, journal, max(upto) AS upto FROM rolled WHERE run IN {runs:Array(UInt64)} AND journal IN "
    "{journals:Array(UInt64)} GROUP BY run, journal"
)
_LEFT = (
    "SELECT run, journal, end, toUInt8(seen < now64(6) - {quiet:UInt32}) AS quiet FROM (SELECT run, journal, max(end) AS end, "
    "max(seen) AS seen FROM commits GROUP BY run, journal) AS c LEFT JOIN (SELECT run, journal, max(upto) AS upto FROM rolled "
    "GROUP BY run, journal) AS r ON c.run = r.run AND c.journal = r.journal "
    f"WHERE end >= upto + {2 * UNIT} OR (quiet AND end > upto)"
)


def reached(database: Database, runs: Sequence[int], journals: Sequence[int]) -> dict[At, int]:
    """Return up to where there are cells of each journal; those without any are left out."""
    found = database.ask(_REACHED, runs=list(runs), journals=list(journals))
    return {(run, journal): upto for run, journal, upto in zip(*(one.tolist() for one in found.values()), strict=True)}


def roll(database: Database, ends: Mapping[At, int]) -> None:
    """Make the cells of journals up to these positions. Doing it twice, or in two gateways at once, does no harm."""
    import numpy as np

    for some in _groups(ends):
        before = reached(database, [run for run, _ in some], [journal for _, journal in some])
        spans = {at: (before.get(at, 0), end) for at, end in some.items() if end > before.get(at, 0)}
        if not spans:
            continue
        starts, stops = zip(*spans.values(), strict=True)
        runs, journals = zip(*spans, strict=True)
        places = {"journals": list(journals), "starts": list(starts), "stops": list(stops), "least": min(starts)}
        database.run(_ROLL.replace("{0}", secrets.token_hex(16)), runs=sorted(set(runs)), **places)
        columns = {"run": runs, "journal": journals, "upto": stops}
        database.insert("rolled", {name: np.array(values, np.uint64) for name, values in columns.items()})


def _groups(ends: Mapping[At, int]) -> Iterator[dict[At, int]]:
    """Split journals into queries of limited size. A run that is being moved has its journals twice: in different queries."""
    group: dict[At, int] = {}
    journals: set[int] = set()
    size = 0
    for at, end in ends.items():
        if at[1] in journals or size > MOST_BYTES or len(group) >= MOST_JOURNALS:
            yield group
            group, journals, size = {}, set(), 0
        group[at] = end
        journals.add(at[1])
        size += UNIT
    if group:
        yield group


class Roller:
    """Makes cells in a thread, of the journals that a gateway stores, and now and then of those that others left."""

    def __init__(self, database: Database, gone: Callable[[int], bool], *, gather: float = GATHER_SECONDS) -> None:
        self.database = database
        self._gone = gone  # whether a run was deleted
        self._gather = gather
        self._due: dict[At, int] = {}
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._sweep_at = 0.0

    def stored(self, grown: Iterable[tuple[At, int, int, bool]]) -> None:
        """Note that journals grew: from where to where, and whether they ended.

        Cells are made of a journal's whole parts, and of the rest once it has ended.
        """
        uptos = ((at, start, end if ended else end // UNIT * UNIT, ended) for at, start, end, ended in grown)
        due = {at: upto for at, start, upto, ended in uptos if upto > start or ended}
        with self._wake:
            if due:
                self._due.update({at: max(upto, self._due.get(at, 0)) for at, upto in due.items()})
                self._wake.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fanfold-clickhouse-cells", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Make the cells that are due, and stop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(GATHER_SECONDS)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._due or self._closing, SWEEP_SECONDS)
                self._wake.wait_for(lambda: self._closing, self._gather)
                due, self._due = self._due, {}
            if self._closing and not due:
                return
            self._roll(due)

    def _roll(self, due: dict[At, int]) -> None:
        try:
            if time.monotonic() >= self._sweep_at and not self._closing:
                due = {**left(self.database), **due}
                self._sweep_at = time.monotonic() + SWEEP_SECONDS
            roll(self.database, {at: end for at, end in due.items() if not self._gone(at[0])})
        except DatabaseUnavailable:
            with self._wake:
                self._due = {**due, **self._due} if not self._closing else {}
        except (FanfoldError, OSError) as error:  # charts are drawn from the points instead; the next sweep tries again
            logger.warning("cells of %d journals could not be made: %s", len(due), error)


def left(database: Database) -> dict[At, int]:
    """Return the journals that wait for cells, because a gateway died or nothing arrived for long, and up to where."""
    found = database.ask(_LEFT, quiet=int(QUIET_SECONDS))
    rows = zip(*(one.tolist() for one in found.values()), strict=True)
    return {(run, journal): end if quiet else end // UNIT * UNIT for run, journal, end, quiet in rows}


def parameters(database: Database, runs: Sequence[int], journals: Sequence[int]) -> dict[str, Any]:
    """Return the parameters of MADE and TAIL: up to where there are cells of each journal."""
    there: dict[int, int] = {}
    for (_, journal), upto in reached(database, runs, journals).items():
        there[journal] = min(upto, there.get(journal, upto))
    least = min(there.values()) if len(there) == len(set(journals)) else 0
    return {"rolled": list(there) or [0], "uptos": list(there.values()) or [0], "least_rolled": least}


_UPTO = "transform(journal, {rolled:Array(UInt64)}, {uptos:Array(UInt64)}, toUInt64(0))"
MADE = f"upto <= {_UPTO}"  # selects the rows of `cells` that are complete
TAIL = f"pos >= {{least_rolled:UInt64}} AND pos >= {_UPTO} AND {schema.HAS_STEP}"  # selects the points without a cell
