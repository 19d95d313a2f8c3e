"""Live notices: which runs changed, sent to every open and visible page at most twice a second.

A notice says that a run changed, not how: the page then requests the data it shows. So the server keeps no state per page,
and a page that was disconnected is up to date after one request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

INTERVAL = 0.5
QUIET = 15.0  # a comment line at least this often: proxies drop silent connections, and sending detects closed pages
STILL_HERE = b": still here\n\n"
END = "end"
MANY = 500  # more changed runs than this are not listed: the page reloads all


class LiveNotices:
    """One watcher for all open pages. It polls only while there are listeners."""

    def __init__(self, changed: Callable[[Any], Awaitable[tuple[Any, list[Any]]]], interval: float = INTERVAL) -> None:
        self._changed = changed
        self._interval = interval
        self._listeners: set[asyncio.Queue[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()

    async def stream(self, sees: Callable[[str], bool] | None = None) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events about the projects a caller sees (None: all of them) until the page disconnects."""
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=8)
        self._loop = asyncio.get_running_loop()
        self._listeners.add(queue)
        try:
            await self._begin()  # before hello: every change from then on is reported
            yield b"retry: 1000\nevent: hello\ndata: {}\n\n"
            while True:
                try:
                    runs = await asyncio.wait_for(queue.get(), QUIET)
                except asyncio.TimeoutError:  # not the built-in TimeoutError before Python 3.11
                    yield STILL_HERE
                    continue
                if runs == END:
                    return
                yield notice(runs, sees)
        finally:
            self._listeners.discard(queue)

    async def _begin(self) -> None:
        """Start the watcher unless it is running; streams that start together cost one store query."""
        async with self._starting:
            if self._watcher is None or self._watcher.done():
                token, _ = await self._changed(None)
                self._watcher = asyncio.create_task(self._watch(token))

    def close(self) -> None:
        """End all streams, from any thread or signal handler, so that a stopping server need not wait for them."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for queue in self._listeners:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(END)

    async def _watch(self, token: Any) -> None:
        took = 0.0
        while self._listeners:
            await asyncio.sleep(max(self._interval, 4 * took))  # with thousands of runs, polling must not dominate
            began = time.monotonic()
            token, runs = await self._changed(token)
            took = time.monotonic() - began
            if runs:
                self._tell(runs)

    def _tell(self, runs: list[Any]) -> None:
        for queue in self._listeners:
            if queue.full():  # the page does not read: replace what it missed by one notice for all runs
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(runs if len(runs) <= MANY else None)


def notice(runs: list[Any] | None, sees: Callable[[str], bool] | None = None) -> bytes:
    """Return the event for changed runs (None: too many to list), or a comment line if the caller sees none of them."""
    shown = runs if runs is None or sees is None else [run for run in runs if sees(run[0])]
    return b"event: changed\ndata: " + msgspec.json.encode({"runs": shown}) + b"\n\n" if shown != [] else STILL_HERE
