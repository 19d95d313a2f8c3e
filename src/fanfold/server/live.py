"""Live notices: which runs changed, at most twice a second, to every page that is open and looked at.

A notice says that there is something new, not what it is: the page then asks for what it shows. So the server keeps
nothing per page, and a page that was away asks once and is up to date.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

INTERVAL = 0.5
QUIET = 15.0  # a comment line at least this often: proxies drop silent connections, and we learn of pages that left
MANY = 500  # more changed runs than this are not listed: the page asks for all


class Notices:
    """One watcher for all open pages. It looks only while somebody listens."""

    def __init__(self, changed: Callable[[Any], Awaitable[tuple[Any, list[Any]]]], interval: float = INTERVAL) -> None:
        self._changed = changed
        self._interval = interval
        self._listeners: set[asyncio.Queue[bytes]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until the page goes away."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=8)
        self._loop = asyncio.get_running_loop()
        self._listeners.add(queue)
        try:
            await self._begin()  # before we say hello: whatever comes later will be told
            yield b"retry: 1000\nevent: hello\ndata: {}\n\n"
            while True:
                try:
                    notice = await asyncio.wait_for(queue.get(), QUIET)
                    if not notice:
                        return
                    yield notice
                except asyncio.TimeoutError:  # another class than TimeoutError until Python 3.11
                    yield b": still here\n\n"
        finally:
            self._listeners.discard(queue)

    async def _begin(self) -> None:
        """Start the watcher unless it is at work; streams that begin together cost one look at the store."""
        async with self._starting:
            if self._watcher is None or self._watcher.done():
                token, _ = await self._changed(None)
                self._watcher = asyncio.create_task(self._watch(token))

    def close(self) -> None:
        """End all streams, from any thread or signal handler: a server that stops need not wait for them."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for queue in self._listeners:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(b"")

    async def _watch(self, token: Any) -> None:
        took = 0.0
        while self._listeners:
            await asyncio.sleep(max(self._interval, 4 * took))  # thousands of runs: looking must not become the main work
            began = time.monotonic()
            token, runs = await self._changed(token)
            took = time.monotonic() - began
            if runs:
                self._tell(runs)

    def _tell(self, runs: list[Any]) -> None:
        notice = _notice(runs if len(runs) <= MANY else None)
        for queue in self._listeners:
            if queue.full():  # a page that does not read: what it missed becomes one notice for everything
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(_notice(None))
            else:
                queue.put_nowait(notice)


def _notice(runs: list[Any] | None) -> bytes:
    return b"event: changed\ndata: " + msgspec.json.encode({"runs": runs}) + b"\n\n"
