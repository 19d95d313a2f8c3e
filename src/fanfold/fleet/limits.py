"""Back-pressure: what a gateway holds in memory, and how fast a project or a stranger may come, is bounded from the start."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .wire import Refused

CALLERS = 10_000  # buckets remembered; the one unused for longest is forgotten, and starts full again


class Busy(Refused):
    """Too much at once: come again after `seconds`."""

    def __init__(self, status: int, message: str, seconds: float) -> None:
        super().__init__(status, message)
        self.seconds = seconds


class Budget:
    """Bytes of bodies in hand. A request reserves what it will take before any of it is read. For one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0

    @contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        if self.used and self.used + amount > self.size:  # one that is larger than all of it passes alone
            raise Busy(503, "the gateway has its hands full. Nothing was stored. Try again.", 1.0)
        self.used += amount
        try:
            yield
        finally:
            self.used -= amount


class Rates:
    """A bucket for each name, refilled at `rate` a second up to `burst`; one that is empty says when to come again."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, as of when

    def left(self, name: str) -> float:
        amount, since = self._buckets.get(name, (self.burst, 0.0))
        return min(self.burst, amount + (self._clock() - since) * self.rate)

    def check(self, name: str, what: str) -> None:
        """Raise Busy while the bucket is in debt."""
        left = self.left(name)
        if left <= 0:
            raise Busy(
                429,
                f"{what} comes faster than this gateway allows. Nothing was stored. Try again later.",
                -left / self.rate + 0.1,
            )

    def take(self, name: str, amount: float) -> None:
        """Take from the bucket, into debt if need be: the size of a request is known only when it is here."""
        self._buckets[name] = (self.left(name) - amount, self._clock())
        self._buckets.move_to_end(name)
        while len(self._buckets) > CALLERS:
            self._buckets.popitem(last=False)
