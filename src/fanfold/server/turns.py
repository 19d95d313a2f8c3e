"""Fair sharing of the threads that run store queries: one caller gets only a few, so that others are served."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, fail_after, to_thread

from ..fleet.limits import Busy
from ..store import deadline

THREADS = 16  # concurrent queries: the dashboard must not take every thread of the process
EACH = 4  # of them for one caller
WAITING = 200  # queries of one caller that may wait for their turn
SECONDS = 60.0  # that a query may run, and may wait

T = TypeVar("T")


class _Line:
    def __init__(self, each: int) -> None:
        self.turns = CapacityLimiter(each)
        self.questions = 0


class Turns:
    """The query threads of one server, and how many each caller uses or waits for. For a single event loop."""

    def __init__(self, threads: int = THREADS, each: int = EACH, waiting: int = WAITING) -> None:
        self._threads = CapacityLimiter(threads)
        self._each = each
        self._most = each + waiting
        self._lines: dict[str, _Line] = {}

    async def run(self, caller: str, question: Callable[[], T]) -> T:
        """Run a caller's query in a thread, once it is that caller's turn."""
        line = self._lines.setdefault(caller, _Line(self._each))
        if line.questions >= self._most:
            raise _busy()
        line.questions += 1
        try:
            await _acquire(line.turns, question)
            try:
                return await to_thread.run_sync(_in_time, question, limiter=self._threads)
            finally:
                line.turns.release_on_behalf_of(question)
        finally:
            line.questions -= 1
            if not line.questions:
                del self._lines[caller]


async def _acquire(turns: CapacityLimiter, question: object) -> None:
    try:
        with fail_after(SECONDS):
            await turns.acquire_on_behalf_of(question)
    except TimeoutError as error:
        raise _busy() from error


def _in_time(question: Callable[[], T]) -> T:
    with deadline.within(SECONDS):
        return question()


def _busy() -> Busy:
    return Busy(429, "you ask more at once than this server answers to one caller. Nothing was done. Try again.", 5.0)
