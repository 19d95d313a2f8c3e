"""One journal on its way to a tracker: what was read of it, what of that is acknowledged, and whether more will come."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import JournalError
from ..journal import Journal, Kind
from ..journal.format import Layout, Shape
from ..journal.liveness import status_of
from ..journal.reader import Row
from ..journal.spool import recover
from .folding import Folding

SENT = frozenset({"", "energy"})  # origins that go to every tracker: what was logged, and what it cost; others when asked
_ROW = int(Kind.ROW)


@dataclass
class Frame:
    """A frame that holds something to deliver; done when all of it has been handed out and acknowledged."""

    offset: int
    end: int
    left: int = 1


@dataclass(eq=False)
class Call:
    """One log() call on its way out, or one that other frames will complete."""

    track: Track
    step: int | None
    time: float
    since: float
    values: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    number: int = 0
    parts: int = 0
    folds: bool = False


class Plan:
    """How the rows of one shape are read: made once, because a tracker that is behind has millions of them to come."""

    def __init__(self, shape: Shape) -> None:
        self.unpack = struct.Struct(shape.codes).unpack
        self.keys = shape.keys
        self.origin = shape.origin
        self.stepped = not shape.layout & Layout.STEP_NONE
        self.pending, self.late = bool(shape.layout & Layout.PENDING), bool(shape.layout & Layout.LATE)
        self.head = 2 + self.stepped + (2 if self.pending else 1 if self.late else 0)

    def row(self, body: memoryview) -> Row:
        fields = self.unpack(body)
        number = fields[2 + self.stepped] if self.pending or self.late else 0
        return Row(
            fields[2] if self.stepped else None,
            fields[1],
            dict(zip(self.keys, fields[self.head :], strict=True)),
            number,
            fields[3 + self.stepped] if self.pending else 0,
            self.late,
            self.origin,
        )


class Track:
    """One journal being read for delivery: where the cursor stands, and what is outstanding beyond it."""

    def __init__(self, path: Path, mark: int, ahead: Iterable[int]) -> None:
        self.journal = Journal(path)
        rank = path.name.partition("-")[0]
        self.rank = int(rank) if rank.isdecimal() else 0
        self.mark = mark
        self.at = mark
        self.ahead = set(ahead)
        self.frames: deque[Frame] = deque()
        self.calls: dict[int, Call] = {}  # those whose late parts are still to come
        self.high = -(1 << 63)
        self.ended = False
        self.dead = False
        self.life: Life | None = None
        self._plans: dict[bytes, Plan] = {}

    def row(self, body: memoryview) -> Row | None:
        """Read a row; None if its shape is not known."""
        shape_id = bytes(body[:4])
        plan = self._plans.get(shape_id)
        if plan is None:
            rows = self.journal.rows.get(int.from_bytes(shape_id, "little"))
            if rows is None:
                return None
            plan = self._plans[shape_id] = Plan(rows.shape)
        try:
            return plan.row(body)
        except struct.error:
            return None  # of another length than its shape: a forged journal

    @property
    def main(self) -> bool:
        return self.journal.header.get("role") == "main"

    def settle(self) -> None:
        """Move the mark past everything that is delivered."""
        while self.frames and self.frames[0].left <= 0:
            self.mark = self.frames.popleft().end
        if not self.frames:
            self.mark = self.at
        self.ahead = {frame.offset for frame in self.frames if frame.left <= 0}

    def refresh(self) -> None:
        """Read on. Whether the writer is dead is asked first: what it wrote before it died is then surely read."""
        header = self.journal.header
        if header and not self.ended:
            self.dead = status_of(self.journal.path, header) != "running"
        if self.dead and header.get("spool") and (Path(header["spool"]) / self.journal.path.name).exists():
            recover(Path(header["spool"]).parent)  # what it had not copied home yet
        self.journal.refresh()

    def forget_index(self) -> None:
        """Drop where rows stand: this reader goes through once, and the lists would grow with the journal."""
        self.journal.frames.clear()
        for rows in self.journal.rows.values():
            rows.runs.clear()

    def behind(self) -> bool:
        return self.at < self.journal.verified

    def through(self) -> bool:
        """Tell whether nothing more will come."""
        return (self.ended or self.dead) and not self.behind()

    def passed(self, now: float, hold: float) -> float:
        """Return the first step this process may still add to: later ones are logged, and no late part is awaited before."""
        if self.through():
            return float("inf")
        awaited = [call.step for call in self.calls.values() if call.step is not None and now - call.since <= hold]
        return min([self.high, *awaited])


@dataclass(eq=False)
class Life:
    """One attempt: its journals, and what of it is being folded."""

    key: str
    folding: Folding
    tracks: list[Track] = field(default_factory=list)


def timed(track: Track) -> Iterator[tuple[int, Track, int, int, int, memoryview]]:
    """Walk a journal's frames, each with the time of the row it is or follows."""
    when = 0
    for offset, end, kind, _, body in track.journal.walk(track.at):
        if kind == _ROW:
            when = int.from_bytes(body[4:12], "little", signed=True)
        yield when, track, offset, end, kind, body


def decoded(track: Track, body: memoryview) -> Any:
    """Decode a frame; one that cannot be, in a forged journal, holds nothing."""
    try:
        return track.journal.decode(body)
    except JournalError:
        return None


def mapping(track: Track, body: memoryview) -> dict[str, Any]:
    """Decode a frame that should hold a mapping; one that does not is an empty one."""
    found = decoded(track, body)
    return found if isinstance(found, dict) else {}
