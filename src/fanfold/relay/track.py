"""One journal on its way to a tracker: how far it is read, how much of that is acknowledged, and whether more will come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..journal import Journal, Record
from ..journal.bodies import End, Info, Metric
from ..journal.origin import spool_of
from ..journal.spool import recover
from ..journal.walker import RowReader
from .folding import Folding

SENT = frozenset({"", "energy"})  # origins every tracker gets: logged values and energy; others on request
AHEAD = 256  # rows checked at a time; when several journals are merged, this many are read again after a pause


@dataclass
class PendingFrame:
    """A frame with something to deliver; done when all of it has been handed out and acknowledged."""

    offset: int
    end: int
    left: int = 1


@dataclass(eq=False)
class Call:
    """One log() call to deliver, possibly waiting for other frames to complete it."""

    track: Track
    step: int | None
    time: float
    since: float
    values: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    frames: list[PendingFrame] = field(default_factory=list)
    number: int = 0
    parts: int = 0
    folds: bool = False


class Track:
    """One journal being read for delivery: the cursor's position, and what is outstanding beyond it."""

    def __init__(self, path: Path, mark: int, ahead: Iterable[int]) -> None:
        self.journal = Journal(path)
        rank = path.name.partition("-")[0]
        self.rank = int(rank) if rank.isdecimal() else 0
        self.mark = mark
        self.at = mark
        self.ahead = set(ahead)
        self.frames: deque[PendingFrame] = deque()
        self.calls: dict[int, Call] = {}  # those still missing late parts
        self.high = -(1 << 63)
        self.ended = False
        self.dead = False
        self.life: TrackedAttempt | None = None
        self.started = False
        self.size = 0
        self.stuck = -1  # the journal's length when all its valid frames had been read
        self._readers: dict[int, RowReader] = {}

    def items(self, *, rows: bool = True) -> Iterator[tuple[int, Track, int, int, Any]]:
        """Yield everything from `at` on: the time of the current or preceding row, track, offset, end, and the row or record.

        Without `rows`, only records.
        """
        self.journal.seek(self.at)
        when = 0
        for found in self.journal.stream(most=AHEAD):
            if isinstance(found, Record):
                yield when, self, found.offset, found.end, found
                continue
            if not rows:
                continue
            reader = self._readers.get(found.shape.id)
            if reader is None:
                reader = self._readers[found.shape.id] = RowReader(found.shape)
            stride, offset = found.stride, found.offset
            for row in reader.rows(found.view):
                when = row.time
                yield when, self, offset, offset + stride, row
                offset += stride

    def start(self) -> list[Record] | None:
        """Read shapes up to the mark; return facts, metric definitions and ends before it. None: the journal has not begun."""
        self.journal.seek(0)
        found = []
        for one in self.journal.stream():
            if one.offset < self.mark and isinstance(one, Record) and isinstance(one.data, (Info, End, Metric)):
                found.append(one)
            if one.end >= self.mark:
                self.started = True
                return found
        self.started = self.journal.begun  # its end, including the mark, is damaged
        return found if self.started else None

    @property
    def main(self) -> bool:
        return self.started and self.journal.header.role == "main"

    def settle(self) -> None:
        """Move the mark past everything delivered."""
        while self.frames and self.frames[0].left <= 0:
            self.mark = self.frames.popleft().end
        if not self.frames:
            self.mark = self.at
        self.ahead = {frame.offset for frame in self.frames if frame.left <= 0}

    def refresh(self) -> None:
        """Look for new frames. The writer's death is checked first, so that everything it wrote before dying is read."""
        if self.started and not self.ended:
            self.dead = self.journal.status() != "running"
        spool = spool_of(self.journal.header) if self.dead else None
        if spool is not None and (spool / self.journal.path.name).exists():
            recover(spool.parent, runs=self.journal.path.parents[3])  # frames not copied from the spool yet
        self.size = self.journal.look()

    def behind(self) -> bool:
        return self.at < self.size != self.stuck

    def through(self) -> bool:
        """Return whether nothing more will come."""
        return (self.ended or self.dead) and not self.behind()

    def passed(self, now: float, hold: float) -> float:
        """Return the first step this process may still add to: no earlier step is incomplete or waits for a late part."""
        if self.through():
            return float("inf")
        awaited = [call.step for call in self.calls.values() if call.step is not None and now - call.since <= hold]
        return min([self.high, *awaited])


@dataclass(eq=False)
class TrackedAttempt:
    """One attempt: its journals, and the state of its folding."""

    key: str
    folding: Folding
    tracks: list[Track] = field(default_factory=list)
