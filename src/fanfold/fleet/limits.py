"""Back-pressure: limits on a gateway's memory for requests, and on the rate of each project and unauthenticated caller."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .wire import Rejected

CALLERS = 10_000  # buckets kept; the least recently used is dropped, and starts full again


def party(peer: str) -> str:
    """Return what limits per address count: an IPv4 address, or the /64 network that one machine with IPv6 has to itself."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv4Address):
        return peer
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


class Busy(Rejected):
    """Too many requests: retry after `seconds`."""

    def __init__(self, status: int, message: str, seconds: float) -> None:
        super().__init__(status, message)
        self.seconds = seconds


class Budget:
    """Bytes of request bodies in memory. A request reserves its size before its body is read. For a single event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0

    @contextmanager
    def reserve(self, amount: int) -> Iterator[None]:
        if self.used and self.used + amount > self.size:  # a request larger than the whole budget passes if it is the only one
            raise Busy(503, "the gateway has its hands full. Nothing was stored. Try again.", 1.0)
        self.used += amount
        try:
            yield
        finally:
            self.used -= amount


class Rates:
    """Token buckets by name, refilled at `rate` per second up to `burst`; an empty bucket reports when to retry."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # amount left, and when that was

    def left(self, name: str) -> float:
        amount, since = self._buckets.get(name, (self.burst, 0.0))
        return min(self.burst, amount + (self._clock() - since) * self.rate)

    def check(self, name: str, what: str) -> None:
        """Raise Busy while the bucket is empty or in debt."""
        left = self.left(name)
        if left <= 0:
            raise Busy(
                429,
                f"{what} comes faster than this gateway allows. Nothing was stored. Try again later.",
                -left / self.rate + 0.1,
            )

    def take(self, name: str, amount: float) -> None:
        """Take from the bucket, into debt if necessary: a request's size is known only once it has been read."""
        self._buckets[name] = (self.left(name) - amount, self._clock())
        self._buckets.move_to_end(name)
        while len(self._buckets) > CALLERS:
            self._buckets.popitem(last=False)
