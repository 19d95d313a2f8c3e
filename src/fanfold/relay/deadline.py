"""A time limit for code that must run on the caller's thread: a tracker library may tie its run to the thread, and may hang."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
AGAIN_SECONDS = 1.0  # between two looks; a library that swallows an interruption is interrupted again
WORKING = 0.02  # a thread that computes for a smaller share of the time is waiting
PATIENCE = 3  # times the limit, for a library that does work: a slow machine is not a hang
_SOON = 0.001


def can_limit(seconds: float) -> bool:
    """Return whether within() can be used: on the main thread, with no other alarm due sooner."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    due, _ = signal.getitimer(signal.ITIMER_REAL)
    return signal.getsignal(signal.SIGALRM) is not None and not 0 < due <= seconds


def within(seconds: float, action: Callable[[], T]) -> T:
    """Run something on this thread; raise TimeoutError in it if it takes too long. An alarm already set for later is kept.

    Interrupted in the middle of an import or of creating its tables, a library would never work again in this process, or a
    database in any. So what is still working is left alone for PATIENCE times as long, and an import as long as it works.
    """
    armed, began = True, time.monotonic()
    seen, used = began, time.thread_time()

    def look(_number: int, frame: FrameType | None) -> None:
        nonlocal seen, used
        before, seen, spent, used = seen, time.monotonic(), used, time.thread_time()
        if not armed or seen - began < seconds:
            return
        working, importing = used - spent > WORKING * (seen - before), _imports(frame)
        late = seen - began >= PATIENCE * seconds
        if (working and importing) if late else (working or importing):
            return
        raise TimeoutError(f"it took longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, look)
    due, every = signal.setitimer(signal.ITIMER_REAL, max(seconds - AGAIN_SECONDS, _SOON), AGAIN_SECONDS)
    try:
        return action()
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if due:
            signal.setitimer(signal.ITIMER_REAL, max(due - (time.monotonic() - began), _SOON), every)


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
