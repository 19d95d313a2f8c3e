"""Media encoding off the training thread: takes snapshots, writes blobs and a VALUES frame."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import describe, notices, outcome
from ..journal import blobs
from ..threads import Background
from .deferred import LogCall

MAX_WAITING = 256


class Encoder:
    """A thread that encodes media in the order they were logged. Beyond MAX_WAITING the caller encodes its own."""

    def __init__(
        self,
        run: Path,
        landed: Callable[[LogCall, Mapping[str, Any]], None],
        lose: Callable[[LogCall, Sequence[str], str], None],
    ) -> None:
        self.run = run
        self._landed = landed
        self._lose = lose
        self._reset()

    def _reset(self) -> None:
        # SimpleQueue is re-entrant, so media can be logged from a signal handler.
        self._waiting: queue.SimpleQueue[tuple[LogCall, Mapping[str, Any]] | threading.Event | None] = queue.SimpleQueue()
        self._calls = itertools.count()
        self._thread: threading.Thread | None = None

    def after_fork_in_child(self) -> None:
        self._reset()

    def put(self, call: LogCall, media: Mapping[str, Any]) -> None:
        """Queue one call's media. To bound memory, the caller encodes them itself when too many are waiting."""
        if self._waiting.qsize() >= MAX_WAITING:
            self._encode(call, media)
        else:
            self._enqueue((call, media))

    def _enqueue(self, item: tuple[LogCall, Mapping[str, Any]] | threading.Event) -> None:
        self._waiting.put(item)
        if next(self._calls) == 0:  # the first thread to get here starts it
            waiting = self._waiting
            self._thread = Background(lambda: self._loop(waiting), "media", lambda: waiting.put(None))
            self._thread.start()

    def _loop(self, waiting: queue.SimpleQueue[tuple[LogCall, Mapping[str, Any]] | threading.Event | None]) -> None:
        while (item := waiting.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._encode(*item)

    def close(self) -> None:
        """Let the thread end after the work already queued."""
        self._waiting.put(None)

    def _encode(self, call: LogCall, media: Mapping[str, Any]) -> None:
        done: dict[str, Any] = {}
        for key, value in media.items():
            found, error = outcome(self._store_all, value, key)
            if error is None:
                done[key] = found
            else:
                self._lose(call, [key], _reason(error))
        if done:
            self._landed(call, done)

    def _store_all(self, value: Any, key: str) -> Any:
        return [self.store(item, key) for item in value] if isinstance(value, list) else self.store(value, key)

    def store(self, media: Any, key: str = "") -> dict[str, Any]:
        """Encode one media object now and store its bytes; return its entry in the frame."""
        encoded = media.encode()
        if rescaled := encoded.meta.get("rescaled"):
            notices.once(
                f"image rescaled:{key}",
                f"the {media.kind} {key!r} has floats from {rescaled[0]:.4g} to {rescaled[1]:.4g}, outside 0..1. It was rescaled "
                "to its own range, so colours differ from the original. Undo the normalisation, or pass 0..1, to keep them.",
            )
        entry = {**encoded.meta, "type": media.kind}
        if len(encoded.data):
            entry |= {"blob": blobs.put(self.run, encoded.data), "ext": encoded.ext, "size": len(encoded.data)}
        return entry

    def flush(self, timeout: float) -> bool:
        """Wait until everything queued so far is stored; return whether it is."""
        if self._thread is None or not self._thread.is_alive():  # never started, or closed
            return True
        token = threading.Event()
        self._enqueue(token)
        return token.wait(timeout)


def _reason(error: Exception) -> str:
    """Return why media could not be stored, without the path, which differs every time."""
    return str(error.strerror) if isinstance(error, OSError) and error.strerror else describe(error)
