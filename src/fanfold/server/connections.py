"""Limits on connections, so that incomplete requests, idle connections and floods cannot make the server unavailable.

uvicorn waits indefinitely for the rest of a request. Here, a request's head and body have a time limit, and the head a
size limit. When connections run out, the ones we have waited for longest are closed, then those with the longest responses.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..fleet.limits import party

HEAD_SECONDS = 20.0
BODY_SECONDS = 90.0
MAX_HEAD = 64 << 10
SWEEP_SECONDS = 1.0
LONG_SECONDS = 2.0  # a longer response may be cut off when there are too many; browsers reopen live streams
RESERVED = 128  # file descriptors for everything else: journals, the catalogue, a database
FEWEST = 32


class Connections:
    """All open connections of one server: at most `most`, and a quarter of them from one party unless it is `trusted`."""

    def __init__(self, most: int | None = None, *, trusted: Callable[[str], bool] = lambda _: False) -> None:
        self.most = most or max(FEWEST, raise_descriptor_limit() - RESERVED)
        self.each = max(FEWEST // 2, self.most // 4)
        self.refused = 0
        self._trusted = trusted
        self._open: dict[Connection, None] = {}
        self._by_party: Counter[str] = Counter()
        self._sweep: asyncio.TimerHandle | None = None

    def protocol(self) -> type[asyncio.Protocol]:
        """Return the class to pass to uvicorn as `http`."""
        return type("LimitedConnection", (Connection,), {"held": self})

    def add(self, one: Connection) -> None:
        """Register a new connection; if there are too many, close the one we have waited for longest."""
        self._open[one] = None
        self._by_party[one.party] += 1
        if self._by_party[one.party] > self.each and not self._trusted(one.peer):
            self._make_room([other for other in self._open if other.party == one.party], one)
        elif len(self._open) > self.most:
            self._make_room(list(self._open), one)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._close_late)

    def drop(self, one: Connection) -> None:
        """Unregister a closed connection."""
        if one in self._open:
            del self._open[one]
            self._by_party[one.party] -= 1
            if not self._by_party[one.party]:
                del self._by_party[one.party]

    def _make_room(self, among: list[Connection], newest: Connection) -> None:
        """Close the connection we have waited for longest; if none, the longest response, such as a live stream."""
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


class Outlet:
    """A transport that sends the head of an answer and what follows at once in one go: apart, they wake the peer twice.

    uvloop writes what it is given right away. So the first part waits for the next one, but only until the event loop's turn is
    over: a stream that has nothing to say yet still shows its head.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: bytes | None = None
        self.is_closing = transport.is_closing  # asked for each answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            held, self._held = self._held, b""
            self._transport.writelines([held, data] if held else [data])

    def _flush(self) -> None:
        held, self._held = self._held, None
        if held:
            self._transport.write(held)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._held = None
        self._transport.abort()


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # whichever parser uvicorn found
    """One connection, and since when we have been waiting for its peer."""

    held: Connections
    transport: Any
    cycle: Any
    client: tuple[str, int] | None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(Outlet(transport))
        self.peer = self.client[0] if self.client else ""
        self.party = party(self.peer)
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
        """Return whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def owing(self) -> bool:
        """Return whether we are waiting for the peer: for its next request, or for the rest of this one."""
        return self.waiting or bool(self.cycle.more_body)

    def late(self, now: float) -> bool:
        """Return whether the peer did not finish a request in time, or never started its first."""
        if self.waiting:
            return bool(self._head or self.cycle is None) and now - self.since > HEAD_SECONDS
        return bool(self.cycle.more_body) and now - self.since > BODY_SECONDS


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as allowed (at most 65536), and return it."""
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
