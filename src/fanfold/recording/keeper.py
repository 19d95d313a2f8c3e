"""The thread that maintains a run's journal: fdatasync every second, a heartbeat every ten, and rescue of deleted files.

Requests from outside are looked for more often than that: somebody waits for the answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import guard
from ..threads import Background

SYNC_SECONDS = 1.0
GLANCE_SECONDS = 0.25
BEAT_SECONDS = 10.0


class Keeper:
    """A daemon thread that runs chores every second, and glances four times a second, until stopped."""

    def __init__(self, chores: list[Callable[[], object]], beat: Callable[[], None]) -> None:
        self.chores = chores
        self.glances: list[Callable[[], object]] = []
        self._beat = beat
        self._stop = threading.Event()
        self._thread = Background(self._loop, "keeper", self._stop.set)

    def start(self) -> None:
        self._thread.start()

    def _loop(self) -> None:
        beaten = synced = time.monotonic()
        while not self._stop.wait(GLANCE_SECONDS if self.glances else SYNC_SECONDS):
            due = time.monotonic() - synced > SYNC_SECONDS - GLANCE_SECONDS / 2
            synced = time.monotonic() if due else synced
            for chore in [*self.glances, *(self.chores if due else ())]:
                with guard("look after the journal"):
                    chore()
            if time.monotonic() - beaten >= BEAT_SECONDS:
                beaten = time.monotonic()
                with guard("write a heartbeat"):
                    self._beat()

    def stop(self, timeout: float = 1.0) -> None:
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
