"""The sender: hands points to one tracker, remembers what was sent, and finds values that block all others.

A tracker that cannot be reached is retried forever. A value that the tracker's code cannot handle would be retried forever, too,
and block everything after it: it is told apart from an outage by other values succeeding, and skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import JournalError, notices, outcome
from ..journal import blobs
from ..trackers.base import Point, Refused
from ..trackers.destination import Destination
from .cursor import Cursor
from .custom import Custom
from .feed import Outgoing
from .track import PendingFrame

BATCH = 1000
ROUNDS = 3  # how often a mistake must occur before it counts as permanent
PLAIN = frozenset({float, int, bool, str})  # types of values that are sent as they are
_LEFT_OUT = object()

# Mistakes in code or data, which retrying rarely fixes. Anything else, and every OSError, may be an outage.
MISTAKES = (
    Refused, JournalError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError,
    NotImplementedError,
)  # fmt: skip


def is_mistake(error: Exception) -> bool:
    """Return whether an error is a mistake; an invalid server response, which is both in some libraries, is an outage."""
    return isinstance(error, MISTAKES) and not isinstance(error, OSError)


class Sender:
    """The points on their way to one tracker."""

    def __init__(self, run: Path, tracker: Destination, cursor: Cursor) -> None:
        self.run = run
        self.tracker = tracker
        self.cursor = cursor
        self.out: list[Outgoing] = []
        self.sent: list[PendingFrame] = []  # since the last settle
        self.counts = dict(cursor.counts)  # including unsettled points; the cursor's counts are settled
        self.delivered = cursor.delivered
        self.partial: dict[str, set[int]] = {key: set(steps) for key, steps in cursor.folds.items()}
        self.partials = cursor.partial
        self._skip: dict[str, int] = {}
        self._doubt = False  # a batch failed half-way: ask the destination what it has before resending
        self._rounds = 0
        self._met: Counter[str] = Counter()

    def look(self, known: Mapping[str, int]) -> None:
        """Find out which points the destination has beyond the known ones: they were sent before a crash, and are not resent."""
        have = self.tracker.counts() or {}
        self._skip = {key: n - known.get(key, 0) for key, n in have.items() if n > known.get(key, 0)}

    def attempt(self, what: str, action: Callable[[], Any], *, rounds: int = ROUNDS) -> Any:
        """Call the tracker; skip a mistake that persists, since it would block everything after it."""
        result, error = outcome(action)
        if error is None:
            self._met.pop(what, None)
            return result
        self._met[what] += 1
        if not is_mistake(error) or (self._met[what] < rounds and not isinstance(error, (Refused, JournalError))):
            raise error
        self.refuse(what, error)
        return _LEFT_OUT

    def refuse(self, what: str, error: Exception) -> None:
        """Skip something: warn once and count it."""
        self.cursor.refused += 1
        why = str(error) if isinstance(error, (Refused, JournalError)) else f"{type(error).__name__}: {error}"
        notices.once(
            f"{self.tracker.name}:refused:{what}",
            f"{self.tracker.name} does not take {what!r}: {why}. It is left out there and kept in the journal; "
            "everything else is delivered. Later cases are counted.",
        )

    def send_file(self, name: str, blob: str) -> None:
        """Send one file of an artifact."""

        def hand_over() -> None:
            path = blobs.path_of(self.run, blob)
            if not blobs.is_here(self.run, blob):
                raise JournalError(f"{path} is missing, or not a plain file of the run")
            self.tracker.artifact(path, name)

        self.attempt(name, hand_over)

    def send(self) -> None:
        """Send the next points; if a mistake occurs, find the values that cause it."""
        items = self.out[: 1 if isinstance(self.tracker, Custom) else BATCH]
        try:
            self._write([(item, tuple(item.point.values)) for item in items])  # removes refused values from their points
        except MISTAKES as error:
            if not is_mistake(error):
                raise
            self._send_apart()
            return
        del self.out[: len(items)]
        self._rounds = 0
        self._note(items)

    def _note(self, items: Sequence[Outgoing]) -> None:
        self._count([item.point.values for item in items])
        for item in items:
            self.sent += item.frames
            if item.partial:
                key, step = item.partial
                self.partial.setdefault(key, set()).add(step)
                self.partials += 1

    def _count(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Count what was sent: points of plain values with the same keys all at once."""
        plain: Counter[tuple[str, ...]] = Counter()
        for values in points:
            if PLAIN.issuperset(map(type, values.values())):
                plain[tuple(values)] += 1
                continue
            for key, value in values.items():
                self.counts[key] = self.counts.get(key, 0) + self._weight(value)
        for keys, times in plain.items():
            for key in keys:
                self.counts[key] = self.counts.get(key, 0) + times
        self.delivered += sum(map(len, points))

    def _weight(self, value: Any) -> int:
        """Return how many entries of `counts()` a value adds: a list of media may count as one, or as one per item."""
        return len(value) if isinstance(value, list) and self.tracker.counts_each else 1

    def _write(self, wanted: Sequence[tuple[Outgoing, Sequence[str]]]) -> None:
        if self._doubt and self.tracker.delivery == "readable":
            self.tracker.settle()
            self.look(self.counts)
        self._doubt = False
        skip = dict(self._skip)
        points = [(item, self._ready(item, keys, skip)) for item, keys in wanted]
        points = [(item, point) for item, point in points if point.values]
        self._doubt = True
        try:
            refused = self.tracker.write([point for _, point in points])
        except Refused:
            self._doubt = False  # the destination guarantees that nothing of the batch was sent
            raise
        self._doubt = False
        self._skip = {key: there for key, there in skip.items() if there}
        for index, key, why in refused or ():
            self.refuse(key, Refused(why))
            del points[index][0].point.values[key]

    def _ready(self, item: Outgoing, keys: Sequence[str], skip: dict[str, int]) -> Point:
        """Load media from their blobs, and leave out what the destination already has: it arrived before a kill."""
        found = item.point.values
        if not skip and len(keys) == len(found) and PLAIN.issuperset(map(type, found.values())):
            return item.point._replace(values=dict(found))
        values: dict[str, Any] = {}
        for key in keys:
            value, there = item.point.values[key], skip.get(key, 0)
            if there:
                skip[key] = max(0, there - self._weight(value))
                if there >= self._weight(value):
                    continue
                value = value[there:]  # the first items of the list have arrived
            values[key] = self._loaded(key, value)
            if values[key] is _LEFT_OUT:
                del values[key], item.point.values[key]
        return item.point._replace(values=values)

    def _loaded(self, key: str, value: Any) -> Any:
        """Return a value in the form trackers accept; damaged values stay damaged, so they are skipped at once."""
        if isinstance(value, list):
            return self.attempt(key, lambda: [self._load(entry) for entry in value], rounds=1)
        return self.attempt(key, lambda: self._load(value), rounds=1) if isinstance(value, dict) else value

    def _load(self, entry: dict[str, Any]) -> Any:
        from ..media import decode
        from ..trackers import native

        if "native" in entry:
            return native.take(entry, self.tracker, _LEFT_OUT)
        name = entry.get("blob")
        try:
            data = blobs.get(self.run, name) if name else b""
        except FileNotFoundError as error:
            raise JournalError(f"{error.filename} is missing") from error
        return decode(str(entry["type"]), dict(entry), data)

    # Point by point, value by value

    def _send_apart(self) -> None:
        """Send points one by one, and values one by one where a point fails; whatever succeeds is removed from `out`."""
        failed: list[tuple[Outgoing, str, Exception]] = []
        before = self.delivered
        for item in self.out[:BATCH]:
            values = item.point.values
            if len(values) > 1:
                self._take(item, tuple(values))
            for key in tuple(values):
                error = self._take(item, (key,))
                if isinstance(error, Refused):
                    self.refuse(key, error)
                    del values[key]
                elif error is not None:
                    failed.append((item, key, error))
        self._judge(failed, self.delivered > before)

    def _take(self, item: Outgoing, keys: Sequence[str]) -> Exception | None:
        """Send some values of a point and remove them from it, or return the error if they were refused."""
        try:
            self._write([(item, keys)])
        except MISTAKES as error:
            if not is_mistake(error):
                raise
            return error
        through = {key: item.point.values.pop(key) for key in keys if key in item.point.values}
        self._count([through])
        return None

    def _judge(self, failed: Sequence[tuple[Outgoing, str, Exception]], through: bool) -> None:
        """Skip values that failed while others succeeded.

        If nothing succeeded, it may be an outage in disguise: everything is retried, and after ROUNDS rounds one value at a time
        is given up, with the longest pauses in between. Little is lost in an outage, and no value blocks forever.
        """
        self._rounds += 1
        doomed = failed if through else failed[:1] if self._rounds >= ROUNDS else []
        for item, key, error in doomed:
            self.refuse(key, error)
            del item.point.values[key]
        done = [item for item in self.out[:BATCH] if not item.point.values]
        self.out[:BATCH] = [item for item in self.out[:BATCH] if item.point.values]
        self._note(done)
        if len(doomed) < len(failed):
            raise failed[-1][2]
        self._rounds = 0
