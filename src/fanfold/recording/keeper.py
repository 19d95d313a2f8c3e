"""The thread that maintains a run's journal: fdatasync every second, a heartbeat every ten, and rescue of deleted files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import guard
from ..threads import Background

SYNC_SECONDS = 1.0
BEAT_SECONDS = 10.0


class Keeper:
    """A daemon thread that runs chores every second until stopped."""

    def __init__(self, chores: list[Callable[[], object]], beat: Callable[[], None]) -> None:
        self.chores = chores
        self._beat = beat
        self._stop = threading.Event()
        self._thread = Background(self._loop, "keeper", self._stop.set)

    def start(self) -> None:
        self._thread.start()

    def _loop(self) -> None:
        beaten = time.monotonic()
        while not self._stop.wait(SYNC_SECONDS):
            for chore in list(self.chores):
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
