"""Calls to a tracker, made in order by a thread of their own: a tracker that is slow or down holds nobody up.

What is here lives in memory. Data that must outlive the process go through a run (`FanfoldCallback(trackers=[…])`).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import notices, outcome

LIMIT = 10_000
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
# A mistake in the call itself comes out the same each time; anything else may be an outage, which passes.
FINAL = (TypeError, AttributeError, LookupError, NotImplementedError, AssertionError)

Call = Callable[[], Any]


class Outbox:
    """Make calls one after the other; one that fails is tried again, with the others waiting behind it."""

    def __init__(self, name: str, *, limit: int = LIMIT, first_pause: float = FIRST_PAUSE) -> None:
        self.name = name
        self.error: Exception | None = None  # of the call that is being tried again
        self._limit = limit
        self._first_pause = first_pause
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._hurry = False

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> None:
        """Queue a call. When the tracker is so far behind that the queue is full, the call is dropped and counted."""
        with self._changed:
            if len(self._calls) >= self._limit:
                notices.once(
                    f"{self.name}:full",
                    f"{self.name} is {self._limit} calls behind, so new ones are dropped until it is back. Training goes on. "
                    "Give the tracker to FanfoldCallback(trackers=[...]) instead: a run keeps everything on disk.",
                )
                return
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"fanfold-report-{self.name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout: float) -> int:
        """Wait until all calls are made, and return how many are not: a tracker that fails again now is not waited for."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self.error, self._hurry = None, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._calls or self.error is not None, max(0.0, deadline - time.monotonic()))
            self._hurry = False
            return len(self._calls)

    def _work(self) -> None:
        pause = self._first_pause
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._calls))
                call = self._calls[0]
            error = _tried(call)
            again = error is not None and not isinstance(error, FINAL)
            if error is not None:
                outcome(partial(self._say, error, again))  # a library may have broken stderr: that must not end this thread
            with self._changed:
                if again:
                    self.error = error
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._hurry, pause * random.uniform(0.7, 1.3))
                    pause = min(LONGEST_PAUSE, 2 * pause)
                    continue
                pause, self.error = self._first_pause, None
                if self._calls and self._calls[0] is call:
                    self._calls.popleft()
                self._changed.notify_all()

    def _say(self, error: Exception, again: bool) -> None:
        what = f"{type(error).__name__}: {error}"
        if again:
            tail = "Training goes on; it is tried again and gets everything in order once it answers. Check its address and key."
        else:
            tail = "Training goes on; this call is not there. Look at what is logged, or at the callback's setup()."
        notices.once(
            f"report:{self.name}:{type(error).__name__}", f"the tracker {self.name} could not take a call: {what}. {tail}"
        )


def _tried(call: Call) -> Exception | None:
    """Make a call and return what it raised; a library that leaves by sys.exit() takes only its call with it."""
    try:
        return outcome(call)[1]
    except SystemExit as error:
        return RuntimeError(f"it called sys.exit({error.code!r})")
