"""What is to be delivered, in order: the calls of rank 0 made whole, folded keys of all ranks, and how far that is.

A call whose late parts (device values, media) are still to come holds back the calls after it, until it is whole or a
deadline passes. A folded step is held until every rank has passed it. What was handed out is remembered per frame, so
that a cursor always names a point from which nothing is missing and nothing comes twice.
"""

from __future__ import annotations

import fnmatch
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import notices
from ..journal import Journal, Kind
from ..journal.directory import journal_files
from ..journal.liveness import status_of
from ..trackers.base import Point

HOLD_SECONDS = 10.0
JOIN_SECONDS = 60.0


@dataclass
class Frame:
    """A frame that holds something to deliver; done when all of it has been handed out and acknowledged."""

    offset: int
    end: int
    left: int = 1


@dataclass
class Call:
    """One log() call of rank 0 on its way out."""

    step: int
    time: float
    since: float
    values: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    parts: int = 0
    folds: bool = False


@dataclass
class Outgoing:
    """A point, and the frames that are delivered with it."""

    point: Point
    frames: list[Frame]


class Track:
    """One journal being read for delivery: where the cursor stands, and what is outstanding beyond it."""

    def __init__(self, path: Path, mark: int, ahead: Iterable[int]) -> None:
        self.journal = Journal(path)
        self.mark = mark
        self.at = mark
        self.ahead = set(ahead)
        self.frames: deque[Frame] = deque()
        self.calls: dict[int, Call] = {}
        self.high = -(1 << 63)
        self.ended = False
        self.dead = False

    @property
    def rank(self) -> int:
        return int(self.journal.header.get("rank", 0))

    def settle(self) -> None:
        """Move the mark past everything that is delivered."""
        while self.frames and self.frames[0].left <= 0:
            self.mark = self.frames.popleft().end
        if not self.frames:
            self.mark = self.at
        self.ahead = {frame.offset for frame in self.frames if frame.left <= 0}

    def refresh(self) -> None:
        """Read on. Whether the writer is dead is asked first: what it wrote before it died is then surely read."""
        self.dead = bool(self.journal.header) and status_of(self.journal.path, self.journal.header) != "running"
        self.journal.refresh()

    def gone(self) -> bool:
        """Tell whether nothing more will come."""
        return self.ended or self.dead


def policy_for(key: str, fold: Mapping[str, str]) -> str | None:
    """Return how a key is folded: by its own name, else by the first pattern that matches."""
    if key in fold:
        return fold[key]
    return next((how for pattern, how in fold.items() if fnmatch.fnmatchcase(key, pattern)), None)


class Feed:
    """Turn a run's journals into points for one tracker."""

    def __init__(
        self,
        run: Path,
        *,
        name: str,
        fold: Mapping[str, str] | None = None,
        marks: Mapping[str, tuple[int, Iterable[int]]] | None = None,
        probes: bool = False,
        hold: float = HOLD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.name = name
        self.fold = dict(fold or {})
        self.probes = probes
        self.hold = hold
        self.clock = clock
        self.tracks: dict[str, Track] = {}
        self.info: dict[str, Any] = {}
        self.artifacts: deque[dict[str, Any]] = deque()
        self.queue: deque[Call] = deque()
        self.partial = 0
        self._marks = dict(marks or {})
        self._began = clock()
        self._steps: dict[int, dict[int, dict[str, Any]]] = {}  # step → rank → folded key → value
        self._step_frames: dict[int, list[Frame]] = {}
        self._first_seen: dict[int, float] = {}
        self._early: dict[int, tuple[dict[str, Any], list[Frame]]] = {}  # folded, and waiting for rank 0's call of the step

    # Reading

    def poll(self) -> list[Outgoing]:
        """Read what is new and return what may go out now, in order."""
        for path in journal_files(self.run):
            if path.stem not in self.tracks:
                mark, ahead = self._marks.get(path.stem, (0, ()))
                self.tracks[path.stem] = Track(path, mark, ahead)
        for track in self.tracks.values():
            self._read(track)
        return self._release()

    def _read(self, track: Track) -> None:
        journal = track.journal
        track.refresh()
        if not journal.header:
            return
        for offset, end, kind, flags, body in journal.walk(track.at):
            if offset not in track.ahead:
                self._take(track, offset, end, kind, flags, body)
            track.at = end
        if journal.header.get("role") == "main" and not self.info:
            self.info.setdefault("name", journal.header.get("name"))

    def _take(self, track: Track, offset: int, end: int, kind: int, flags: int, body: memoryview) -> None:
        if kind == Kind.ROW:
            self._take_row(track, offset, end, flags, body)
        elif kind in (Kind.VALUES, Kind.LOST) and track.rank == 0:
            self._take_record(track, offset, end, kind, body)
        elif kind == Kind.INFO and track.rank == 0:
            self.info.update({name: value for name, value in track.journal.decode(body).items() if name != "t"})
        elif kind == Kind.EVENT and track.rank == 0:
            event = track.journal.decode(body)
            if event.get("event") == "artifact":
                self.artifacts.append(event)
        elif kind == Kind.BEAT:
            track.high = max(track.high, int(track.journal.decode(body)[2]))
        elif kind == Kind.END and track.journal.header.get("role") == "main":
            track.ended = True

    def _take_row(self, track: Track, offset: int, end: int, flags: int, body: memoryview) -> None:
        row = track.journal.row(flags, body)
        if row is None or (row.origin and not self.probes):
            return
        if row.step is not None:
            track.high = max(track.high, row.step)
        mine = track.rank == 0
        folded = (
            {key: value for key, value in row.values.items() if policy_for(key, self.fold)}
            if row.step is not None and not row.origin
            else {}
        )
        if not mine and not folded:
            return
        frame = Frame(offset, end, bool(folded) + mine)
        track.frames.append(frame)
        if folded:
            self._take_folded(track, row.step, folded, frame)
        if mine:
            rest = {key: value for key, value in row.values.items() if key not in folded}
            self._take_call(track, row, rest, frame, bool(folded))

    def _take_folded(self, track: Track, step: Any, folded: Mapping[str, Any], frame: Frame) -> None:
        self._steps.setdefault(step, {}).setdefault(track.rank, {}).update(folded)
        self._step_frames.setdefault(step, []).append(frame)
        self._first_seen.setdefault(step, self.clock())

    def _take_call(self, track: Track, row: Any, values: dict[str, Any], frame: Frame, folds: bool) -> None:
        late = track.calls.get(row.call) if row.late else None
        if late is not None:
            late.values.update(values)
            late.frames.append(frame)
            late.parts -= 1
            late.folds = late.folds or folds
            return
        call = Call(
            row.step, row.time / 1e9, self.clock(), values, frames=[frame], parts=0 if row.late else row.parts, folds=folds
        )
        if row.call and not row.late:
            track.calls[row.call] = call
        self.queue.append(call)

    def _take_record(self, track: Track, offset: int, end: int, kind: int, body: memoryview) -> None:
        data = track.journal.decode(body)
        frame = Frame(offset, end)
        track.frames.append(frame)
        waiting = track.calls.get(data.get("q"))
        if waiting is not None:
            waiting.parts -= 1
            waiting.frames.append(frame)
            waiting.values.update(data.get("v") or {})
            return
        if kind == Kind.LOST:
            frame.left = 0
            return
        kwargs = (data.get("k") or {}).get(self.name) or {}
        last = self.queue[-1] if self.queue else None
        if last is not None and not data.get("q") and last.time == data["t"] / 1e9 and last.step == data["s"]:
            last.values.update(data["v"])  # texts of the same call: one point, not two
            last.kwargs.update(kwargs)
            last.frames.append(frame)
            return
        self.queue.append(Call(data["s"], data["t"] / 1e9, self.clock(), dict(data["v"]), dict(kwargs), [frame]))

    # Releasing

    def _release(self) -> list[Outgoing]:
        out: list[Outgoing] = []
        done = self._folded_steps()
        while self.queue:
            call = self.queue[0]
            late = self.clock() - call.since > self.hold
            if call.parts > 0 and not late and not self._nothing_more(0):
                break
            if call.folds and call.step in self._steps and call.step not in done:
                break
            self.queue.popleft()
            self._forget(call)
            values = dict(call.values)
            frames = list(call.frames)
            if call.folds and call.step in done:
                extra, more = done.pop(call.step)
                values.update(extra)
                frames += more
            out.append(Outgoing(Point(values, call.step, call.time, call.kwargs), frames))
        waiting = {call.step for call in self.queue if call.folds}
        for step in sorted(done):
            if step not in waiting:
                values, frames = done[step]
                out.append(Outgoing(Point(values, step, self._time_of(step), {}), frames))
            else:
                self._early[step] = done[step]
        return out

    def _forget(self, call: Call) -> None:
        for track in self.tracks.values():
            for number in [number for number, known in track.calls.items() if known is call]:
                del track.calls[number]

    def _time_of(self, _step: int) -> float:
        return time.time()

    def _folded_steps(self) -> dict[int, tuple[dict[str, Any], list[Frame]]]:
        """Fold every step that all ranks have passed, or whose time is up."""
        done, self._early = self._early, {}
        if not self._steps:
            return done
        passed = self._passed()
        for step in sorted(self._steps):
            overdue = self.clock() - self._first_seen[step] > self.hold
            if step >= passed and not overdue:
                break
            ranks = self._steps.pop(step)
            if step >= passed:
                self.partial += 1
                notices.once(
                    f"fold:{self.run}",
                    f"step {step} was folded with {len(ranks)} rank(s) because others did not pass it within {self.hold:g} s. "
                    "The tracker has that value; the store keeps every rank and is always exact. Later cases are counted.",
                )
            self._first_seen.pop(step)
            done[step] = (self._reduce(ranks), self._step_frames.pop(step))
        return done

    def _passed(self) -> float:
        """Return the first step that some rank may still log: every step below it is complete."""
        mains = [track for track in self.tracks.values() if track.journal.header.get("role") == "main"]
        by_rank: dict[int, float] = {}
        for track in mains:
            high = float("inf") if track.gone() else track.high
            by_rank[track.rank] = max(by_rank.get(track.rank, -float("inf")), high)
        world = max((int(track.journal.header.get("world", 1)) for track in mains), default=1)
        if len(by_rank) < world and self.clock() - self._began < JOIN_SECONDS and any(not track.gone() for track in mains):
            return -float("inf")
        return min(by_rank.values(), default=float("inf"))

    def _nothing_more(self, rank: int) -> bool:
        return all(
            track.gone() for track in self.tracks.values() if track.rank == rank and track.journal.header.get("role") == "main"
        )

    def _reduce(self, ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        keys = list(dict.fromkeys(key for values in ranks.values() for key in values))
        return {
            key: fold_values(str(policy_for(key, self.fold)), [ranks[rank][key] for rank in sorted(ranks) if key in ranks[rank]])
            for key in keys
        }

    def finished(self) -> bool:
        """Tell whether every process is gone and everything was handed out."""
        return (
            not self.queue
            and not self._steps
            and all(track.gone() for track in self.tracks.values() if track.journal.header.get("role") in ("main", "worker"))
        )

    def marks(self) -> dict[str, tuple[int, list[int]]]:
        """Return, per journal, the offset before which all is delivered, and what is delivered beyond it."""
        for track in self.tracks.values():
            track.settle()
        return {name: (track.mark, sorted(track.ahead)) for name, track in self.tracks.items()}


def fold_values(how: str, values: list[Any]) -> float:
    """Fold one step's values over ranks, by the same rule as the store."""
    import numpy as np

    from ..fold import fold

    count = len(values)
    zeros = np.zeros(count, np.int64)
    return float(fold(how, np.arange(count), zeros, zeros, np.array(values, np.float64)).values[0])
