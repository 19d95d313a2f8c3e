"""The points to deliver, in order: complete calls of rank 0, folded keys of all ranks, and how far delivery has come.

A call whose late parts (device values, media) are still missing holds back the calls after it, until it is complete or a deadline
passes. A folded step is held until every rank has passed it. Delivered points are remembered per frame, so that a cursor always
names an offset from which nothing is missing and nothing is sent twice.

Reading pauses while enough is held back, so memory does not grow with a run, however far behind a tracker is.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..errors import JournalError, notices
from ..journal import Record, bodies
from ..journal.bodies import Artifact, Beat, End, Info, Lost, Metric, Values
from ..journal.directory import journal_files
from ..journal.walker import LoggedRow
from ..store.attempts import group
from ..trackers.base import Alert, Point
from .folding import Folding, Step
from .track import SENT, Call, PendingFrame, Track, TrackedAttempt

HOLD_SECONDS = 10.0
CHUNK = 4096  # frames read from a journal at a time, and calls or steps held before reading pauses

MOST = 100_000  # calls held behind an incomplete one; beyond that it is sent as it is


@dataclass
class Outgoing:
    """A point and the frames delivered with it; `partial` names a fold sent before every rank had reported."""

    point: Point
    frames: list[PendingFrame]
    partial: tuple[str, int] | None = None


class Feed:
    """A run's journals as points for one tracker."""

    def __init__(
        self,
        run: Path,
        *,
        name: str,
        fold: Mapping[str, str] | None = None,
        marks: Mapping[str, tuple[int, Iterable[int]]] | None = None,
        partial: Mapping[str, Iterable[int]] | None = None,
        probes: bool = False,
        hold: float = HOLD_SECONDS,
        patient: bool = True,
        points: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.name = name
        self.fold = dict(fold or {})
        self.probes = probes
        self.hold = hold
        self.patient = patient
        self.points = points  # whether rows, texts and events are wanted, or only how far the run is
        self.clock = clock
        self.tracks: dict[str, Track] = {}
        self.info: dict[str, Any] = {}
        self.metrics: dict[str, Metric] = {}  # definitions from define_metric(), by key
        self.events: deque[tuple[Artifact | Alert, PendingFrame]] = deque()
        self.queue: deque[Call] = deque()
        self._marks = dict(marks or {})
        self._partial = {key: set(steps) for key, steps in (partial or {}).items()}
        self._lives: list[TrackedAttempt] = []
        self._told: dict[str, int] = {}  # when each fact was written: the newest wins, whatever the reading order
        self._unreadable: set[Path] = set()
        self._read_now = 0
        self.last_word: str | None = None  # the final status that rank 0 reported

    # Reading

    def poll(self) -> list[Outgoing]:
        """Read new frames, up to the limit on held calls, and return the points that may be sent now, in order."""
        self._find_tracks()
        self._read_now = 0
        for track in list(self.tracks.values()):
            self._look(track)
        for life in self._lives:
            self._read_life(life)
        return self._release()

    @property
    def moved(self) -> bool:
        """Whether the last poll found anything new in the journals."""
        return self._read_now > 0

    def behind(self) -> bool:
        """Return whether more can be read immediately."""
        return any(track.behind() for track in self.tracks.values())

    def _find_tracks(self) -> None:
        for path in journal_files(self.run):
            wanted = path.name.startswith("0-") or self.fold
            if path.stem in self.tracks or path in self._unreadable or not wanted:
                continue
            mark, ahead = self._marks.get(path.stem, (0, ()))
            try:
                self.tracks[path.stem] = Track(path, mark, ahead)
            except JournalError as error:
                self._cannot_read(path, error)

    def _cannot_read(self, path: Path, error: JournalError) -> None:
        self._unreadable.add(path)
        self.tracks.pop(path.stem, None)
        notices.once(
            f"journal:{path}", f"{error}. The tracker does not get this journal's points; other journals are still delivered."
        )

    def _look(self, track: Track) -> None:
        """Check a journal for new data, and assign it to an attempt if it is new."""
        try:
            track.refresh()
        except JournalError as error:
            self._cannot_read(track.journal.path, error)
            return
        if track.life is None:
            self._recall(track)
            if track.started:
                self._arrange()

    def _recall(self, track: Track) -> None:
        """Read the run's facts before the mark: its description, its metrics, and how it ended."""
        try:
            for record in track.start() or ():
                self._take(track, record)
        except JournalError as error:
            self._cannot_read(track.journal.path, error)

    def _arrange(self) -> None:
        """Group journals into attempts. A journal stays in the attempt it was first assigned to."""
        by_id = {track.journal.id: track for track in self.tracks.values() if track.started}
        lives = []
        for attempt in group([track.journal for track in by_id.values()]):
            members = [by_id[journal.id] for journal in attempt.journals]
            life = next((track.life for track in members if track.life is not None), None)
            life = life or TrackedAttempt(attempt.key, self._folding(attempt.key))
            for track in members:
                if track.life is None:
                    track.life = life
                    life.tracks.append(track)
            if life not in lives:
                lives.append(life)
        self._lives = lives

    def _folding(self, key: str) -> Folding:
        return Folding(self.fold, self._partial.get(key, ()), self.clock, self.hold, patient=self.patient)

    def _read_life(self, life: TrackedAttempt) -> None:
        own, others = ([track for track in life.tracks if (track.rank == 0) is mine and track.behind()] for mine in (True, False))
        passed = life.folding.passed(life.tracks) if self.fold else float("inf")
        waits = bool(self.queue) and self.queue[0].parts > 0
        room = len(self.queue) < (MOST if waits else CHUNK)
        now, hold = self.clock(), self.hold
        if own and (room or any(track.passed(now, hold) <= passed for track in own)):
            self._read(own)
        for track in others:
            # The slowest rank is read however much is held: only its progress releases the rest.
            if len(life.folding.steps) < CHUNK or track.passed(now, hold) <= passed:
                self._read([track])

    def _read(self, tracks: list[Track]) -> None:
        """Read a chunk; merge the journals of one rank (forked children have their own) in the order of their timestamps."""
        streams = [track.items(rows=self.points) for track in tracks]
        merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=itemgetter(0))
        count = 0
        for _, track, offset, end, item in merged:
            if offset in track.ahead:
                track.frames.append(PendingFrame(offset, end, 0))
            elif type(item) is LoggedRow:
                self._take_row(track, offset, end, item)
            else:
                self._take(track, item)
            track.at = end
            count += 1
            if count == CHUNK:
                break
        else:
            for track in tracks:
                track.at, track.stuck = track.journal.verified, track.journal.size  # also past damage at the end
        self._read_now += count

    def _take(self, track: Track, record: Record) -> None:
        match record.data:
            case Values() | Lost() | Artifact() | bodies.Alert() if not self.points:
                pass
            case Values() | Lost():
                self._take_record(track, record)
            case Info() | End():
                self._take_facts(track, record.data)
            case Metric() if track.rank == 0:
                self._take_metric(record.data)
            case Artifact() if track.rank == 0:
                track.frames.append(PendingFrame(record.offset, record.end))
                self.events.append((record.data, track.frames[-1]))
            case bodies.Alert() if track.rank == 0:
                track.frames.append(PendingFrame(record.offset, record.end))
                self.events.append((_alert(record.data, f"{track.journal.id}-{record.offset}"), track.frames[-1]))
            case Beat():
                track.high = max(track.high, record.data.high)

    def _take_metric(self, metric: Metric) -> None:
        if metric.t >= self._told.get(f"metric:{metric.key}", 0):
            self._told[f"metric:{metric.key}"] = metric.t
            self.metrics[metric.key] = metric

    def _take_facts(self, track: Track, facts: Info | End) -> None:
        if isinstance(facts, End):
            track.ended = True
            if track.rank == 0 and track.main:
                self.last_word = facts.status
            return
        for name, value in facts.given.items():
            if track.rank == 0 and facts.t >= self._told.get(name, 0):
                self._told[name] = facts.t
                self.info[name] = value

    def _take_row(self, track: Track, offset: int, end: int, row: LoggedRow) -> None:
        if row.origin not in SENT and not self.probes:
            return
        if row.step is not None and row.step > track.high:
            track.high = row.step
        mine, folded = track.rank == 0, {}
        if self.fold and track.life is not None and row.step is not None and not row.origin:
            folded = track.life.folding.pick(row.values, track.journal.header)
        if not mine and not folded:
            self._await_parts(track, row, None)
            return
        frame = PendingFrame(offset, end, bool(folded) + mine)
        track.frames.append(frame)
        if folded and track.life is not None and row.step is not None:
            track.life.folding.add(track.rank, row.step, row.time, folded, frame)
        if mine:
            rest = {key: value for key, value in row.values.items() if key not in folded} if folded else row.values
            self._take_call(track, row, rest, frame, bool(folded))
        else:
            self._await_parts(track, row, None)

    def _await_parts(self, track: Track, row: LoggedRow, call: Call | None) -> Call | None:
        """Count down a call's late parts; return the call that this row is a part of."""
        if row.late:
            return self._part_came(track, row.call)
        if row.parts:
            call = call or Call(track, row.step, 0.0, self.clock())
            call.number, call.parts = row.call, row.parts
            track.calls[row.call] = call
        return None

    def _part_came(self, track: Track, number: int) -> Call | None:
        call = track.calls.get(number)
        if call is not None:
            call.parts -= 1
            if call.parts <= 0:
                del track.calls[number]
        return call

    def _take_call(self, track: Track, row: LoggedRow, values: dict[str, Any], frame: PendingFrame, folds: bool) -> None:
        call = Call(track, row.step, row.time / 1e9, self.clock(), values, {}, [frame], folds=folds)
        whole = self._await_parts(track, row, call)
        if whole is None:
            self.queue.append(call)
            return
        whole.values.update(values)
        whole.frames.append(frame)
        whole.folds = whole.folds or folds

    def _take_record(self, track: Track, record: Record) -> None:
        data: Values | Lost = record.data
        call = self._part_came(track, data.q) if data.q else None
        if track.rank != 0 or (call is None and isinstance(data, Lost)):
            return
        frame = PendingFrame(record.offset, record.end)
        track.frames.append(frame)
        if isinstance(data, Lost):
            call.frames.append(frame)  # type: ignore[union-attr]  # checked above
            return
        last = self.queue[-1] if self.queue else None
        if call is None and last is not None and not data.q and last.time == data.t / 1e9 and last.step == data.s:
            call = last  # texts of the same call belong to the same point
        if call is None:
            call = Call(track, data.s, data.t / 1e9, self.clock())
            self.queue.append(call)
        call.values.update(data.v)
        call.kwargs.update(data.arguments(self.name))
        call.frames.append(frame)

    # Releasing

    def _release(self) -> list[Outgoing]:
        stuck = self._read_now == 0 or not self.behind()  # only then are the ranks the cause of the wait, not our reading
        for life in self._lives:
            life.folding.fold(life.tracks, stuck)
        out: list[Outgoing] = []
        while self.queue and self._may_go(self.queue[0], stuck):
            call = self.queue.popleft()
            call.track.calls.pop(call.number, None)
            item = Outgoing(Point(call.values, call.step, call.time, call.kwargs), call.frames)
            if call.folds and call.track.life is not None and call.step in call.track.life.folding.ready:
                self._add_fold(item, call.track.life, call.track.life.folding.ready.pop(call.step))
            out.append(item)
        return out + self._folds_without_call()

    def _may_go(self, call: Call, stuck: bool) -> bool:
        patient = not stuck or self.clock() - call.since <= self.hold
        if call.parts > 0 and patient and not call.track.through() and len(self.queue) < MOST:
            return False
        return not (call.folds and call.track.life is not None and call.step in call.track.life.folding.steps)

    def _folds_without_call(self) -> list[Outgoing]:
        """Return folds of steps that rank 0 did not log or has already sent."""
        if not any(life.folding.ready for life in self._lives):
            return []
        waiting = {(call.track.life, call.step) for call in self.queue if call.folds}
        out = []
        for life in self._lives:
            for step in sorted(step for step in life.folding.ready if (life, step) not in waiting):
                folded = life.folding.ready.pop(step)
                item = Outgoing(Point({}, step, folded.time / 1e9, {}), [])
                self._add_fold(item, life, folded)
                out.append(item)
        return out

    def _add_fold(self, item: Outgoing, life: TrackedAttempt, folded: Step) -> None:
        item.point.values.update(folded.result)
        item.frames += folded.frames
        if folded.partial:
            item.partial = (life.key, folded.step)

    def finished(self) -> bool:
        """Return whether every process has ended and everything has been handed out."""
        known = [track for track in self.tracks.values() if track.started and track.journal.header.role in ("main", "worker")]
        if not any(track.main for track in known) or self.queue or self.events:
            return False
        held = any(life.folding.steps or life.folding.ready for life in self._lives)
        return not held and all(track.through() for track in known) and self._others_gone()

    def rank_zero_through(self) -> bool:
        """Return whether rank 0 has ended and all is handed out; other ranks may still run, unless folded."""
        mine = [track for track in self.tracks.values() if track.rank == 0 and track.main]
        return bool(mine) and not (self.fold or self.queue or self.events) and all(track.through() for track in mine)

    def through(self) -> list[str]:
        """Return rank 0's journals that have ended and are fully settled; call after marks()."""
        return [name for name, track in self.tracks.items() if track.rank == 0 and track.through() and not track.frames]

    def _others_gone(self) -> bool:
        """Return whether the ranks whose journals are not read here have ended, too."""
        if self.fold or len(self.tracks) == len(journal_files(self.run)):
            return True
        from ..store import open_run

        return not any(end["status"] == "running" for attempt in open_run(self.run).attempts for end in attempt.ends())

    def marks(self) -> dict[str, tuple[int, list[int]]]:
        """Return, per journal, the offset before which everything is delivered, and the offsets delivered beyond it."""
        for track in self.tracks.values():
            track.settle()
        return {name: (track.mark, sorted(track.ahead)) for name, track in self.tracks.items()}

    def still_partial(self) -> dict[str, set[int]]:
        """Return the steps, by attempt, that were sent early and that slow ranks may still log."""
        return {life.key: set(life.folding.partial) for life in self._lives if life.folding.partial}

    @property
    def late(self) -> int:
        return sum(life.folding.late for life in self._lives)


def _alert(event: bodies.Alert, number: str) -> Alert:
    level = event.level if event.level in ("info", "error") else "warning"
    step = event.s if event.s is not None and event.s >= 0 else None
    return Alert(event.title, event.text, level, step, event.t / 1e9, number)
