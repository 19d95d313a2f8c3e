"""The worker: takes points from the feed to one tracker, settles, remembers, retries. The same in a process or a thread."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import logger, notices, outcome
from ..journal import blobs
from ..trackers.base import Adapter, Identity, Point, Refused, is_tracker
from .cursor import Cursor
from .feed import Feed, Frame, Outgoing

BATCH = 1000
SETTLE_SECONDS = 5.0
IDLE_SECONDS = 0.25
RETRY_SECONDS = (1.0, 60.0)


class Worker:
    """Serve one tracker from one run's journals, until the run has ended and all is delivered, or until stopped."""

    def __init__(
        self, run: Path, tracker: Any, cursor: Cursor, *, fold: Mapping[str, str] | None = None, probes: bool = False,
        hold: float | None = None, stop: threading.Event | None = None, clock: Callable[[], float] = time.monotonic,
        started: bool = False,
    ) -> None:  # fmt: skip
        self.started_elsewhere = started
        self.run = run
        self.tracker = tracker
        self.cursor = cursor
        self.stop = stop or threading.Event()
        self.clock = clock
        extra = {} if hold is None else {"hold": hold}
        self.feed = Feed(run, name=tracker.name, fold=fold, marks=cursor.settled, probes=probes, clock=clock, **extra)
        self.sent: list[Frame] = []
        self.skip: dict[str, int] = {}
        self._counts = dict(cursor.counts)  # with what is sent; the cursor's are settled
        self._delivered = cursor.delivered
        self._out: list[Outgoing] = []
        self._config: Any = None
        self._described: Any = None
        self._settled_at = clock()
        self._started = False

    def serve(self, *, follow: bool, finish_by: Callable[[], bool] = lambda: False) -> None:
        """Deliver until nothing is left. With `follow`, wait for a live run to end; `finish_by()` cuts that short."""
        pause = IDLE_SECONDS
        while not self.stop.is_set():
            moved = self._tolerantly(self.turn)
            if self._over(follow):
                self._tolerantly(self._close)
                if self.cursor.closed or not follow:
                    return
            elif not moved and not follow and self.cursor.error is None:
                self._tolerantly(self._settle)
                return
            if finish_by():
                self._tolerantly(self._settle)
                return
            pause = IDLE_SECONDS if moved else min(pause * 1.5, 1.0)
            if not moved:
                self.stop.wait(pause)

    def _over(self, follow: bool) -> bool:
        del follow
        return self._started and self.feed.finished() and not self.feed.artifacts and self.cursor.error is None

    def _tolerantly(self, action: Callable[[], Any]) -> Any:
        """Run one step; when the tracker fails, wait with backoff and jitter and try again, for ever."""
        pause, longest = RETRY_SECONDS
        while not self.stop.is_set():
            result, error = outcome(action)
            if error is None:
                self.cursor.error = None
                return result
            self._say(error)
            self.stop.wait(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, longest)
        return None

    def _say(self, error: Exception) -> None:
        self.cursor.error = f"{type(error).__name__}: {error}"[:500]
        self.cursor.save()
        notices.once(
            f"{self.tracker.name}:{type(error).__name__}",
            f"the tracker {self.tracker.name} failed: {self.cursor.error}. Training is not touched and nothing is lost; "
            f"it is tried again until it works, and `fanfold sync {self.run.name}` delivers what is left later.",
        )
        logger.debug("tracker %s failed", self.tracker.name, exc_info=error)

    # One turn

    def turn(self) -> bool:
        """Read, start the tracker when there is something to say, send, and settle now and then; tell whether anything moved."""
        self._out += self.feed.poll()
        if not self._started and (self._out or self.feed.info or self.feed.finished()):
            self._start()
        if self._started:
            self._describe()
            self._send_artifacts()
        moved = bool(self._out)
        while self._out and not self.stop.is_set():
            self._send(self._out[:BATCH])
            del self._out[:BATCH]
            if self.clock() - self._settled_at > SETTLE_SECONDS:
                self._settle()
        if self.sent and (not moved or self.clock() - self._settled_at > SETTLE_SECONDS):
            self._settle()
        return moved

    def _start(self) -> None:
        if not self.started_elsewhere:
            if isinstance(self.tracker, Adapter):
                self.tracker.adopt(self.identity())
                if self.cursor.remote:
                    self.tracker.resume(self.cursor.remote)
            self.tracker.start()
        if isinstance(self.tracker, Adapter):
            self.cursor.remote = self.tracker.remote
            have = self.tracker.counts()
            self.skip = {
                key: n - self.cursor.counts.get(key, 0) for key, n in (have or {}).items() if n > self.cursor.counts.get(key, 0)
            }
        self.cursor.closed = None
        self.cursor.save()
        self._started = True

    def identity(self) -> Identity:
        header = next(iter(track.journal.header for track in self.feed.tracks.values() if track.journal.header), {})
        info = self.feed.info
        name = str(info.get("name") or header.get("name") or self.run.name)
        return Identity(
            str(header.get("run")), name, str(header.get("project")), info.get("group"), self.run / "trackers" / self.tracker.name
        )

    def _describe(self) -> None:
        """Hand over config, name and tags when they are new or have changed."""
        info = self.feed.info
        if info.get("config") is not None and info["config"] != self._config:
            self.tracker.store_init_configuration(dict(info["config"]))
            self._config = info["config"]
        words = (info.get("name"), tuple(info.get("tags") or ()), info.get("notes"), info.get("group"))
        if isinstance(self.tracker, Adapter) and words != self._described:
            self.tracker.describe(name=words[0], tags=words[1], notes=words[2], group=words[3])
            self._described = words

    def _send_artifacts(self) -> None:
        while self.feed.artifacts:
            event = self.feed.artifacts[0]
            if isinstance(self.tracker, Adapter):
                for file in event["files"]:
                    self.tracker.artifact(
                        blobs.path_of(self.run, file["blob"]),
                        f"{event['name']}/{file['path']}" if len(event["files"]) > 1 else event["name"],
                    )
            self.feed.artifacts.popleft()

    def _send(self, batch: list[Outgoing]) -> None:
        points = [self._ready(item.point) for item in batch]
        if isinstance(self.tracker, Adapter):
            self._write([point for point in points if point.values])
        else:
            for point in points:
                if point.values:
                    self.tracker.log(point.values, step=point.step, **point.kwargs)
        for item in batch:
            self.sent += item.frames
        for point in points:
            self._delivered += len(point.values)
            for key in point.values:
                self._counts[key] = self._counts.get(key, 0) + 1

    def _write(self, points: list[Point]) -> None:
        """Send a batch; what the system refuses for good is sent one by one, said once, and counted."""
        try:
            self.tracker.write(points)
        except Refused as refusal:
            if len(points) == 1:
                self._refuse(points[0], refusal)
                return
            for point in points:
                self._write([point])

    def _refuse(self, point: Point, refusal: Refused) -> None:
        if len(point.values) > 1:
            for key, value in point.values.items():
                self._write([point._replace(values={key: value})])
            return
        self.cursor.refused += 1
        notices.once(
            f"{self.tracker.name}:refused:{next(iter(point.values))}",
            f"{self.tracker.name} does not take {next(iter(point.values))!r}: {refusal}. "
            "It is kept in the journal; later cases are counted.",
        )

    def _ready(self, point: Point) -> Point:
        """Load media from their blobs, and leave out what the destination has already."""
        values: dict[str, Any] = {}
        for key, value in point.values.items():
            if self.skip.get(key, 0) > 0:
                self.skip[key] -= 1  # it arrived before the relay was killed
                self._counts[key] = self._counts.get(key, 0) + 1
                self._delivered += 1
                continue
            if isinstance(value, dict):
                values[key] = self._load(value)
            elif isinstance(value, list):
                values[key] = [self._load(item) for item in value]
            else:
                values[key] = value
        return point._replace(values=values)

    def _load(self, entry: Mapping[str, Any]) -> Any:
        from ..media import decode

        name = entry.get("blob")
        return decode(str(entry["type"]), dict(entry), blobs.get(self.run, name) if name else b"")

    def _settle(self) -> None:
        if os.environ.get("FANFOLD_TEST_DIE") == "settle" and self.sent:
            os._exit(9)  # the contract suite kills the relay here, where a repeat could be made
        if isinstance(self.tracker, Adapter) and self._started:
            self.tracker.settle()
        for frame in self.sent:
            frame.left -= 1
        self.sent = []
        self.cursor.settled = self.feed.marks()
        self.cursor.counts, self.cursor.delivered = dict(self._counts), self._delivered
        self.cursor.save()
        self._settled_at = self.clock()

    def _close(self) -> None:
        """Settle, then end the remote run as what ours was."""
        from ..store import open_run

        self._settle()
        status = open_run(self.run).status
        if isinstance(self.tracker, Adapter):
            self.tracker.close(status)
        else:
            self.tracker.finish()
        self.cursor.closed = status
        self.cursor.save()


def check(tracker: Any) -> Any:
    """Return a tracker object, or raise for something that is none."""
    if not is_tracker(tracker):
        raise TypeError(f"{tracker!r} is no tracker: it is neither a name nor a GeneralTracker object. Nothing was started.")
    return tracker
