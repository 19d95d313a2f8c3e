"""What reporting callbacks have open ends with the process: all of it, before the libraries' own exit hooks run."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any, Protocol

END_SECONDS = 30.0
PATIENCE_SECONDS = 5.0  # with one, before the next one is asked to end, too


class Open(Protocol):
    """What a callback with an open run lets this module do to it."""

    name: str
    trainer: Any  # what tells one training from another: its state
    thread: threading.Thread | None  # where it trains, while it does

    def finish(self, status: str, timeout: float = ...) -> None: ...
    def start_ending(self, status: str) -> None: ...
    def finish_ending(self, status: str, timeout: float, *, last: bool = True) -> None: ...


_open: dict[Any, int] = {}  # callback → the process that opened it: a forked child inherits this table, but no threads


def hold(callback: Open) -> None:
    """Remember a callback to end with the process. Called after its library has started, so as to come before its hooks."""
    _open[callback] = os.getpid()
    # What threading calls at its shutdown comes before atexit, when concurrent.futures takes no more work and Comet, which
    # registers here, too, has ended its experiment. Each time anew, because the latest is called first.
    early = getattr(threading, "_register_atexit", None)
    if early is not None and not getattr(threading, "_SHUTTING_DOWN", False):
        early(_at_thread_shutdown)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def drop(callback: Open) -> None:
    """Forget a callback that has ended by itself."""
    _open.pop(callback, None)


def end_other(callback: Open) -> None:
    """End the run an earlier Trainer left open: its library would take it for the user's own, and go on in it."""
    for other in _here():
        if other is not callback and other.name == callback.name and other.trainer is not callback.trainer:
            other.finish("failed" if other.thread else "finished")


def _here() -> list[Any]:
    return [callback for callback, pid in list(_open.items()) if pid == os.getpid()]


def _at_thread_shutdown() -> None:
    """End what is open, but for a training that goes on in a thread of the user's: the process waits for that one."""
    main = threading.main_thread()
    _end([callback for callback in _here() if callback.thread in (None, main) or not callback.thread.is_alive()])


def _at_exit() -> None:
    _end(_here())


def _end(callbacks: list[Any]) -> None:
    """End them one by one, the latest first, as what they did to stdout wants to be undone; none is waited for very long."""
    crashed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    deadline = time.monotonic() + END_SECONDS
    ending = [(callback, "failed" if crashed or callback.thread else "finished") for callback in reversed(callbacks)]
    for callback, status in ending:
        callback.start_ending(status)
        callback.finish_ending(status, min(PATIENCE_SECONDS, max(0.0, deadline - time.monotonic())), last=False)
    for callback, status in ending:
        callback.finish_ending(status, max(0.0, deadline - time.monotonic()))
