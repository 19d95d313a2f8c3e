"""A time limit for code that must run on the caller's thread: a tracker library may tie its run to the thread, and may hang."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
AGAIN_SECONDS = 1.0  # a library that swallows the interruption is interrupted again
_SOON = 0.001


def can_limit(seconds: float) -> bool:
    """Return whether within() can be used: on the main thread, with no other alarm due sooner."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    due, _ = signal.getitimer(signal.ITIMER_REAL)
    return signal.getsignal(signal.SIGALRM) is not None and not 0 < due <= seconds


def within(seconds: float, action: Callable[[], T]) -> T:
    """Run something on this thread; raise TimeoutError in it if it takes too long. An alarm already set for later is kept."""
    armed = True

    def interrupt(_number: int, _frame: Any) -> None:
        if armed:
            raise TimeoutError(f"it took longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, interrupt)
    due, every = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    began = time.monotonic()
    try:
        return action()
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if due:
            signal.setitimer(signal.ITIMER_REAL, max(due - (time.monotonic() - began), _SOON), every)
