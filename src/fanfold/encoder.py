"""Media off the training thread: snapshots go in, blobs and a VALUES frame come out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .deferred import Call
from .errors import guard
from .journal import blobs

MAX_WAITING = 256


class Encoder:
    """A thread that encodes media in the order they were logged. Beyond MAX_WAITING the caller encodes by itself."""

    def __init__(self, run: Path, landed: Callable[[Call, Mapping[str, Any]], None]) -> None:
        self.run = run
        self._landed = landed
        self._reset()

    def _reset(self) -> None:
        self._waiting: deque[tuple[Call, Mapping[str, Any]] | threading.Event] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def after_fork_in_child(self) -> None:
        self._reset()

    def put(self, call: Call, media: Mapping[str, Any]) -> None:
        """Take one call's media. Memory stays bounded: when too many wait, this call pays for its own encoding."""
        if len(self._waiting) >= MAX_WAITING:
            self._encode(call, media)
        else:
            self._enqueue((call, media))

    def _enqueue(self, item: tuple[Call, Mapping[str, Any]] | threading.Event) -> None:
        self._waiting.append(item)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._loop, name="fanfold-media", daemon=True)
            self._thread.start()
        self._wake.set()

    def _loop(self) -> None:
        while True:
            try:
                item = self._waiting.popleft()
            except IndexError:
                self._wake.wait()
                self._wake.clear()
                continue
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._encode(*item)

    def _encode(self, call: Call, media: Mapping[str, Any]) -> None:
        done: dict[str, Any] = {}
        for key, value in media.items():
            with guard(f"store the media {key!r}"):
                done[key] = [self.store(item) for item in value] if isinstance(value, list) else self.store(value)
        self._landed(call, done)

    def store(self, media: Any) -> dict[str, Any]:
        """Encode one thing now and store its bytes; return the frame's entry for it."""
        encoded = media.encode()
        entry = {**encoded.meta, "type": media.kind}
        if len(encoded.data):
            entry |= {"blob": blobs.put(self.run, encoded.data), "ext": encoded.ext, "size": len(encoded.data)}
        return entry

    def flush(self, timeout: float) -> bool:
        """Wait until everything given so far is stored; tell whether it is."""
        if self._thread is None:
            return True
        token = threading.Event()
        self._enqueue(token)
        return token.wait(timeout)
