"""Time a process spends on something other than its steps: saving, evaluating, waiting for data, for other ranks, compiling.

A long span is an event of its own in the journal; short ones, such as the wait for each batch, are added up and written at least
every ten seconds. Nothing is written when nothing happens. Only the thread that called init() counts: other threads do not hold
training up. Within a span, further spans are part of it. `store/goodput.py` reads the events.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

KINDS = ("checkpoint", "evaluation", "data", "ranks", "compile", "startup")
LONG_NS = 500_000_000  # at most two such events a second
FLUSH_SECONDS = 10.0

Write = Callable[[Mapping[str, Any]], object]
time_ns = time.time_ns
_inside = threading.local()  # flag: this thread is in a span
_ledgers: tuple[SpanWriter, ...] = ()  # of the runs of this process; replaced as a whole


class SpanWriter:
    """The spans of one run in this process."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._thread, self._pid = threading.get_ident(), os.getpid()
        # By kind: nanoseconds, number, end of the last one. Only the training thread sets these, only the keeper the others.
        self._sums: dict[str, tuple[int, int, int]] = {}
        self._first: dict[str, int] = {}
        self._written: dict[str, tuple[int, int, int]] = {}
        self._began = self._flushed = time.monotonic()

    def add(self, kind: str, since: int, until: int) -> None:
        """Count one span. A long one is written at once."""
        if until <= since or threading.get_ident() != self._thread or os.getpid() != self._pid:
            return  # a forked child, such as a DataLoader's worker, does not hold training up either
        if until - since >= LONG_NS:
            self._write({"event": "span", "kind": kind, "since": since, "t": until, "ns": until - since, "n": 1})
            return
        ns, count, _ = self._sums.get(kind) or (0, 0, self._first.setdefault(kind, since))
        self._sums[kind] = (ns + until - since, count + 1, until)

    def tick(self) -> None:
        """Write the sums if that is due; called by another thread every second."""
        now = time.monotonic()
        if now - self._flushed >= min(FLUSH_SECONDS, (now - self._began) / 10):  # a short run loses little when it is killed
            self._flushed = now
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last call, one event per kind."""
        for kind, now in list(self._sums.items()):
            before = self._written.get(kind, (0, 0, self._first[kind]))
            if now[1] > before[1]:
                self._written[kind] = now
                self._write({"event": "span", "kind": kind, "since": before[2], "t": now[2],
                             "ns": now[0] - before[0], "n": now[1] - before[1]})  # fmt: skip


def start(write: Write) -> SpanWriter:
    """Record the spans of this process with `write` until `stop`."""
    global _ledgers  # noqa: PLW0603 - replaced as a whole: a span may be ending in another thread
    made = SpanWriter(write)
    _inside.flag = False  # a training that raised may have left a span open
    _ledgers = (*_ledgers, made)
    return made


def stop(ledger: SpanWriter) -> None:
    """Write what is left, and record no more."""
    global _ledgers  # noqa: PLW0603 - as above
    _ledgers = tuple(one for one in _ledgers if one is not ledger)
    ledger.flush()


def add(kind: str, seconds: float) -> None:
    """Count a span that ended just now, unless it is part of another one."""
    if _ledgers and not getattr(_inside, "flag", False):
        now = time_ns()
        for ledger in _ledgers:
            ledger.add(kind, now - int(seconds * 1e9), now)


class Span:
    """A span as a context manager. `begin` and `end` do the same where a framework reports the two moments as events."""

    __slots__ = ("kind", "since")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.since = 0  # 0: it has not begun, or is part of another one

    def begin(self) -> None:
        if _ledgers and not self.since and not getattr(_inside, "flag", False):
            _inside.flag = True
            self.since = time_ns()

    def end(self) -> None:
        if since := self.since:
            self.cancel()
            now = time_ns()
            for ledger in _ledgers:
                ledger.add(self.kind, since, now)

    def cancel(self) -> None:
        """Forget the span: what it was for did not happen."""
        if self.since:
            _inside.flag = False
            self.since = 0

    def __enter__(self) -> Span:
        self.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()


def waited(source: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of an iterator, and count the time it takes to produce each as waiting for data."""
    end = object()
    wait = Span("data")
    while True:
        with wait:
            item = next(source, end)
        if item is end:
            return
        yield item
