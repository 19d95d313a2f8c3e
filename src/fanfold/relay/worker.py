"""The worker: takes points from the feed to one tracker, settles, saves the cursor, retries. Same in process and thread."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import logger, notices, outcome
from ..journal.bodies import Artifact, Fork
from ..journal.directory import decode_name, project_of, run_path
from ..process import digest
from ..trackers.base import Alert, Identity
from ..trackers.destination import Destination
from ..trackers.face import destination_of
from .cursor import Cursor
from .custom import Custom
from .deadline import within
from .feed import Feed
from .sender import Sender, is_mistake
from .track import PendingFrame

SETTLE_SECONDS = 5.0
IDLE_SECONDS = (0.25, 1.0)
HURRY_SECONDS = (0.05, 30.0)  # polling interval, and for how long, once the run is about to end
RETRY_SECONDS = (1.0, 60.0)
SYNC_TRIES = 4  # of a delivery that does not follow the run
GRACE_SECONDS = 3.0  # how long the other ranks have when the program whose tracker this is has ended
PATIENCE_SECONDS = 24 * 3600.0  # how long a relay keeps trying a failing tracker after its run has ended
FORKED = "forked_from"  # the entry of the config that names the run a fork continues
_dice = random.Random()  # our own generator: the user's random state is untouched


class RelayOptions(NamedTuple):
    """What a tracker's arguments say to the relay."""

    probes: bool = False  # whether metrics of probes go there, too
    layout: str = "fanfold"  # of names and paths there: see Identity
    joined: bool = False  # whether the destination is a user's own run, which had points before and stays open


class Worker:
    """The delivery of one run's journals to one tracker, until the run has ended and all is delivered, or until stopped."""

    def __init__(
        self, run: Path, tracker: Any, cursor: Cursor, options: RelayOptions, *, fold: Mapping[str, str], hold: float,
        stop: threading.Event, hurry: threading.Event, follow: bool = True, live: bool = False,
    ) -> None:  # fmt: skip
        self.started_elsewhere = False
        self.run = run
        self.tracker: Destination = destination_of(tracker) or Custom(tracker)
        self.cursor = cursor
        self.options = options
        self.stop = stop
        self.hurry = hurry
        self.clock = time.monotonic
        self.follow = follow  # whether to wait for a live run to end, and to try for as long as it takes
        self.feed = Feed(
            run, name=tracker.name, fold=fold, marks=cursor.settled, partial=cursor.folds, probes=options.probes, hold=hold,
            patient=follow, points=self.tracker.takes_points,
        )  # fmt: skip
        self.gave_up = False
        self.closed = False
        self.errands: deque[Callable[[], Any]] = deque()  # other work for the tracker, in call order
        self.live = live  # whether user code in this process also calls the tracker
        self.turns = threading.RLock()  # held while the tracker is called
        self.nudge = threading.Event() if live else self.hurry
        self._answers = threading.Condition()
        self._asked: float = 0
        self._answered: float = 0
        self.sender = Sender(run, self.tracker, cursor)
        self._described = cursor.described
        self._told = dict(cursor.told)
        self._quiet_since: float | None = None
        self._settled_at = self._well_at = self._hurried_at = self.clock()
        self._started = False

    @property
    def _sent(self) -> list[PendingFrame]:
        return self.sender.sent

    @property
    def started(self) -> bool:
        return self._started or self.started_elsewhere

    def begin(self, *, limit: float | None = None) -> Exception | None:
        """Try once to start the tracker on this thread, within `limit` seconds if given; return the error if it fails.

        In that case serve() warns, retries, and delivers everything.
        """
        self.sender.out = self.feed.poll()
        _, error = outcome(self.open if limit is None else lambda: within(limit, self.open))
        self.started_elsewhere = error is None
        self._described, self._told = None, {}  # a live object here was not sent what an earlier one was
        return error

    def serve(self) -> None:
        """Deliver until nothing is left, and if the run is followed, until it has ended."""
        try:
            self._serve()
        finally:
            self._answer(float("inf"))  # wake every waiter: the relay has ended

    def _serve(self) -> None:
        pause, first = IDLE_SECONDS[0], True
        while not self.stop.is_set() and not self.gave_up and (self.run / "journal").is_dir():
            asked = 0 if self.sender.out else self._asked  # points left from an earlier poll may be older than the question
            moved = self._tolerantly(self.turn)
            if not self.sender.out and not self.feed.behind():
                self._answer(asked)
            over = not self.sender.out and not self.errands and (self.feed.finished() or self._alone())
            if over and not self._tolerantly(partial(self.tracker.look, over=True)):
                self._tolerantly(self._close)
                return
            if not (moved or self.feed.behind() or self.follow or first):  # that a process has died is seen at the second turn
                break
            first = False
            if not moved and self._rank_zero_is_new():
                self._tolerantly(self.settle)
            pause = IDLE_SECONDS[0] if moved else min(pause * 1.5, IDLE_SECONDS[1])
            if not self.feed.behind():
                self._wait(pause)
        if self._sent and not self.gave_up:
            outcome(self.settle)

    def catch_up(self, timeout: float) -> bool:
        """Wait until everything logged so far has been handed to the tracker; return whether it was, within `timeout`."""
        with self._answers:
            self._asked += 1
            mine = self._asked
            self.nudge.set()
            return self._answers.wait_for(lambda: self._answered >= mine, timeout)

    def _answer(self, asked: float) -> None:
        with self._answers:
            self._answered = max(self._answered, asked)
            self._answers.notify_all()

    def _rank_zero_is_new(self) -> bool:
        """Return whether rank 0 has ended and the cursor does not record it yet; this need not wait for other ranks."""
        through = self._started and self.feed.rank_zero_through()
        return through and not set(self.feed.through()) <= set(self.cursor.through)

    def _alone(self) -> bool:
        """Return whether rank 0 has ended and the other ranks had their grace: the loop that used this tracker is over."""
        if not self.live or not self.feed.rank_zero_through():
            return False
        if self._quiet_since is None:
            self._quiet_since = self.clock()
        return self.clock() - self._quiet_since > GRACE_SECONDS

    def _wait(self, seconds: float) -> None:
        if not self.hurry.is_set():
            if self.nudge.wait(seconds) and self.nudge is not self.hurry:
                self.nudge.clear()
            self._hurried_at = self.clock()
        else:
            self.stop.wait(HURRY_SECONDS[0] if self.clock() - self._hurried_at < HURRY_SECONDS[1] else seconds)

    def _tolerantly(self, action: Callable[[], Any]) -> Any:
        """Run one action; if the tracker fails, wait with backoff and jitter and try again."""
        pause, longest = RETRY_SECONDS
        tried, delivered = 0, self.sender.delivered
        while not self.stop.is_set() and not self.gave_up and (self.run / "journal").is_dir():
            with self.turns:
                result, error = outcome(action)
            if error is None:
                self.cursor.error = None
                self._well_at = self.clock()
                return result
            self._say(error)
            if self.sender.delivered > delivered:  # it failed further on, for another reason
                tried, delivered, pause = 0, self.sender.delivered, RETRY_SECONDS[0]
            tried += 1
            self.gave_up = (tried == SYNC_TRIES and not self.follow) or self._out_of_patience()
            if not self.gave_up:  # the end of the run triggers an immediate retry
                (self.stop if self.hurry.is_set() else self.hurry).wait(pause * _dice.uniform(0.5, 1.0))
            pause = min(pause * 2, longest)
        return None

    def _out_of_patience(self) -> bool:
        return self.clock() - self._well_at > PATIENCE_SECONDS and all(track.through() for track in self.feed.tracks.values())

    def _say(self, error: Exception) -> None:
        self.cursor.error = f"{type(error).__name__}: {error}"[:500]
        outcome(self.cursor.save)
        what_now = (
            "It is tried a few times more; then the values that fail are left out there, one by one, and kept here"
            if is_mistake(error)
            else f"It is tried again until it works, and `fanfold sync {self.run.name}` delivers what is left later"
        )
        notices.once(
            f"{self.tracker.name}:{type(error).__name__}",
            f"the tracker {self.tracker.name} failed: {self.cursor.error}. Training continues, and the journal keeps everything. "
            f"{what_now}.",
        )
        logger.debug("tracker %s failed", self.tracker.name, exc_info=error)

    # A single pass

    def turn(self) -> bool:
        """Read, start the tracker if there is anything to send, send, and settle now and then; return whether anything moved."""
        sender = self.sender
        if not sender.out:
            sender.out = self.feed.poll()
        if not self._started and self._has_news():
            self._start()
        if not self._started:
            return False
        self._describe()
        self._tell()
        moved = bool(sender.out or self.feed.events or self.errands) or (self.feed.moved and not self.tracker.takes_points)
        self._send_events()
        while sender.out and not self.stop.is_set():
            sender.send()
            if self.clock() - self._settled_at > SETTLE_SECONDS:
                self.settle()
        self._run_errands()
        self.tracker.look(over=False)
        # With user code in the process, its calls may belong to the same step: settling closes the step, so it happens less
        # often.
        if sender.sent and (not (moved or self.live) or self.clock() - self._settled_at > SETTLE_SECONDS):
            self.settle()
        return moved

    def _has_news(self) -> bool:
        """Return whether there is anything to send: a destination that was served and closed is left alone."""
        if self.sender.out or self.feed.events or self.errands:
            return True
        if not self.tracker.takes_points:
            return any(track.started for track in self.feed.tracks.values())
        said = self._words()[0] == self._described and not self._untold()
        return bool(self.feed.info) and (self.cursor.closed is None or not said)

    def _start(self) -> None:
        if not self.started_elsewhere:
            self.open()
        if self.options.joined and self.cursor.remote is None:  # existing points were not sent by this relay
            self.cursor.counts = self.sender.counts = self.tracker.counts() or {}
        self.cursor.remote = self.tracker.remote
        self.sender.look(self.cursor.counts)
        self.cursor.closed = None
        self.cursor.save()
        self._started = True

    def open(self) -> None:
        """Open the tracker for this run: under the run's name, continuing its earlier remote run if there is one."""
        self.tracker.open(self.identity(), self.cursor.remote or None)

    def identity(self) -> Identity:
        header = next((track.journal.header for track in self.feed.tracks.values() if track.journal.begun), None)
        info = self.feed.info
        run_id = (header.run if header else None) or decode_name(self.run.name)
        moved_from = "" if self.cursor.project == decode_name(self.run.parent.name) else self.cursor.project
        project = moved_from or project_of(self.run, header.project if header else None)
        name = info.get("name") or (header.name if header else None) or run_id
        folder = self.run / "trackers" / self.tracker.name
        fork = self._fork()
        relays = None if fork is None else run_path(self.run.parent.parent, fork.project, fork.run) / "relay"
        sent = relays is not None and any(relays.glob(f"{self.tracker.name}-*.cursor"))
        return Identity(run_id, name, project, info.get("group"), folder, self.live, self.options.layout, fork if sent else None)

    def _fork(self) -> Fork | None:
        headers = (track.journal.header for track in self.feed.tracks.values() if track.journal.begun)
        return next((header.fork for header in headers if header.fork is not None), None)

    def _words(self) -> tuple[str, Any, tuple[Any, ...]]:
        """Return a digest of the run's description, its config, and its name, tags, notes and group."""
        info = self.feed.info
        words = (info.get("name"), tuple(info.get("tags") or ()), info.get("notes"), info.get("group"))
        config, fork = info.get("config"), self._fork()
        if fork is not None:  # every system has a place for the config, and few have one for forks
            config = {FORKED: f"{fork.project}/{fork.run}@{fork.step}", **(config or {})}
        return digest(json.dumps([config, words], sort_keys=True, default=str)), config, words

    def _describe(self) -> None:
        """Send config, name and tags when they are new or have changed."""
        known, config, (name, tags, notes, group) = self._words()
        if known == self._described:
            return
        if config:  # some systems would record an empty one as an entry
            self.sender.attempt("the configuration", lambda: self.tracker.set_config(dict(config)))
        words = {"name": name, "tags": tags, "notes": notes, "group": group}
        self.sender.attempt("name, tags and notes", lambda: self.tracker.describe(**words))
        self._described = known

    def _untold(self) -> dict[str, tuple[str, Any]]:
        """Return the summary and metric definitions that are new or changed, each with its digest."""
        facts = {
            "summary": self.feed.info.get("summary"),
            "metrics": {key: [metric.x, metric.summary] for key, metric in self.feed.metrics.items()},
        }
        found = {name: (digest(json.dumps(value, sort_keys=True, default=str)), value) for name, value in facts.items() if value}
        return {name: both for name, both in found.items() if both[0] != self._told.get(name)}

    def _tell(self) -> None:
        """Send the summary and metric definitions when they are new or have changed."""
        for name, (known, value) in self._untold().items():
            if name == "summary":
                self.sender.attempt("the summary", partial(self.tracker.set_summary, value))
            else:
                for key, (x, rule) in value.items():
                    define = partial(self.tracker.define_metric, key, x=x, summary=rule)
                    self.sender.attempt(f"the definition of {key}", define)
            self._told[name] = known

    def _send_events(self) -> None:
        while self.feed.events and not self.stop.is_set():
            event, frame = self.feed.events[0]
            if isinstance(event, Alert):
                self.sender.attempt("an alert", partial(self.tracker.alert, event))
            else:
                self._send_files(event)
            self.feed.events.popleft()
            self.sender.sent.append(frame)

    def _run_errands(self) -> None:
        """Run the requested work after the points; if one fails because of an outage, retry it while the others wait."""
        while self.errands and not self.stop.is_set():
            self.sender.attempt("an upload", self.errands[0])
            self.errands.popleft()

    def _send_files(self, event: Artifact) -> None:
        for file in event.files:
            name = f"{event.name}/{file.path}" if len(event.files) > 1 else event.name
            self.sender.send_file(name, file.blob)

    def settle(self) -> None:
        if self._started:
            self.tracker.settle()
        sender = self.sender
        for frame in sender.sent:
            frame.left -= 1
        sender.sent = []
        cursor, awaited = self.cursor, self.feed.still_partial()
        cursor.settled = {**cursor.settled, **self.feed.marks()}
        cursor.counts, cursor.delivered, cursor.partial = dict(sender.counts), sender.delivered, sender.partials
        sender.partial = {key: steps & awaited[key] for key, steps in sender.partial.items() if key in awaited}
        cursor.folds = {key: sorted(steps) for key, steps in sender.partial.items() if steps}
        cursor.described, cursor.told = self._described, dict(self._told)
        cursor.error, cursor.through = None, self.feed.through()
        cursor.save()
        self._settled_at = self.clock()

    def _close(self) -> None:
        """Settle, then end the remote run with the status of this run."""
        from ..store import open_run

        status = open_run(self.run).status
        if status == "running":  # other ranks are still running: use rank 0's own status
            status = self.feed.last_word or "finished"
        if not self._started and self.cursor.closed != status:
            self._start()
            self._describe()
            self._tell()
        self.settle()
        if self._started:  # otherwise it was delivered and closed before, and nothing is new
            if self.tracker.points_replace_summary and (summary := self.feed.info.get("summary")):
                self.sender.attempt("the summary", partial(self.tracker.set_summary, summary))
            if not (self.options.joined and self.live):
                self.sender.attempt("the end of the run", lambda: self.tracker.close(status))
            self.cursor.closed = status
            self.cursor.save()
        self.closed = True
