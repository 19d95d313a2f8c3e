"""How long and how often a peer may hold a connection: half requests, idle lines and floods never take the server away.

The library under the server waits for the rest of a request for as long as its sender likes. Here a request's head and
body have a time and the head a size. Where connections run out, those that have kept us waiting longest make room, then the
longest answers.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 20.0
BODY_SECONDS = 90.0
MAX_HEAD = 64 << 10
SWEEP_SECONDS = 1.0
LONG_SECONDS = 2.0  # an answer that takes longer may be cut off where there are too many; browsers open live streams again
RESERVED = 128  # descriptors for everything but connections: journals, the catalogue, a database
FEWEST = 32


class Connections:
    """Every open connection of one server. `most` in all, a quarter of them from one address unless it is `trusted`."""

    def __init__(self, most: int | None = None, *, trusted: Callable[[str], bool] = lambda _: False) -> None:
        self.most = most or max(FEWEST, raise_descriptor_limit() - RESERVED)
        self.each = max(FEWEST // 2, self.most // 4)
        self.refused = 0
        self._trusted = trusted
        self._open: dict[Connection, None] = {}
        self._by_peer: Counter[str] = Counter()
        self._sweep: asyncio.TimerHandle | None = None

    def protocol(self) -> type[asyncio.Protocol]:
        """Return the class to give the server as its `http` protocol."""
        return type("LimitedConnection", (Connection,), {"held": self})

    def add(self, one: Connection) -> None:
        """Take a new connection in; where there are too many, the one that keeps us waiting longest goes."""
        self._open[one] = None
        self._by_peer[one.peer] += 1
        if self._by_peer[one.peer] > self.each and not self._trusted(one.peer):
            self._make_room([other for other in self._open if other.peer == one.peer], one)
        elif len(self._open) > self.most:
            self._make_room(list(self._open), one)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._close_late)

    def drop(self, one: Connection) -> None:
        """Forget a connection that is closed."""
        if one in self._open:
            del self._open[one]
            self._by_peer[one.peer] -= 1
            if not self._by_peer[one.peer]:
                del self._by_peer[one.peer]

    def _make_room(self, among: list[Connection], newest: Connection) -> None:
        """Close the one that has kept us waiting longest; if none does, the longest answer, such as a live stream."""
        others = [one for one in among if one is not newest]
        owing = [one for one in others if one.owing]
        long = time.monotonic() - LONG_SECONDS
        self._close(min(owing or [one for one in others if one.since < long], key=lambda one: one.since, default=newest))

    def _close(self, one: Connection) -> None:
        self.refused += 1
        self.drop(one)
        one.transport.abort()

    def _close_late(self) -> None:
        now = time.monotonic()
        for one in [one for one in self._open if one.late(now)]:
            self._close(one)
        again = bool(self._open)
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._close_late) if again else None


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # whichever parser the library found
    """One connection, and since when its peer owes us something."""

    held: Connections
    transport: Any
    cycle: Any
    client: tuple[str, int] | None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else ""
        self.since = time.monotonic()  # when the connection, its newest request, or the wait for the next one began
        self._head = 0  # bytes of a request's head so far
        self._seen: Any = None
        self.held.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.held.drop(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.waiting:
            if not self._head:
                self.since = time.monotonic()
            self._head += len(data)
        super().data_received(data)
        if self.cycle is not self._seen:
            self._seen, self._head, self.since = self.cycle, 0, time.monotonic()
        elif self._head > MAX_HEAD:
            self.transport.abort()

    @property
    def waiting(self) -> bool:
        """Tell whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def owing(self) -> bool:
        """Tell whether we wait for the peer: for its next request, or for the rest of this one."""
        return self.waiting or bool(self.cycle.more_body)

    def late(self, now: float) -> bool:
        """Tell whether the peer began a request and did not finish it in time, or never began its first."""
        if self.waiting:
            return bool(self._head or self.cycle is None) and now - self.since > HEAD_SECONDS
        return bool(self.cycle.more_body) and now - self.since > BODY_SECONDS


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as it may, and return it."""
    if sys.platform == "win32":
        return 1024
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return soft
        return wanted
    return soft
