"""Our own torch.profiler sessions: one at a time, on all threads, ended before the program starts one of its own.

torch has one session per process: a second one silently replaces it, and stopping or exporting the first then empties the
second or crashes. So the three functions that start and stop any session are wrapped, once for all runs of a process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from ..errors import guard
from . import step_hooks

Over = Callable[["Session", bool], None]

USER_SCOPE = 7


class Turns:
    """State of the process's sessions. Starting or ending one takes the lock: a single lock, so that there are no deadlocks."""

    lock: Any = threading.RLock()
    ours: Session | None = None
    theirs = False  # the program's own session is running, or prepared: its warm-up counts
    calling = 0  # the thread that is calling torch for a session of ours
    wrapped = False
    unread = 0  # ended sessions whose open ranges are not known yet
    open: dict[int, int] = {}  # noqa: RUF012 - thread id → steps until the ranges that a session left open there have ended
    names: list[str] = []  # noqa: RUF012 - the program's own ranges among them, which may end at any time


def watch() -> Callable[[], None]:
    """Watch the program's own sessions from now on, and steps until the returned function is called."""
    from torch.autograd import profiler

    with Turns.lock:
        if not Turns.wrapped:
            Turns.wrapped = True
            for name, before in (("_prepare_profiler", True), ("_enable_profiler", True), ("_disable_profiler", False)):
                if inner := getattr(profiler, name, None):
                    setattr(profiler, name, _give_way(inner) if before else _take_note(inner))
    return step_hooks.after_step(_stepped)


def _give_way(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def beginning(*args: Any, **more: Any) -> Any:
        if Turns.calling != threading.get_ident():
            with Turns.lock:
                Turns.theirs = True
                if Turns.ours is not None:
                    with guard("end a profile before another begins"):
                        Turns.ours.end(early=True)
        return inner(*args, **more)

    return beginning


def _take_note(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def ending(*args: Any, **more: Any) -> Any:
        try:
            return inner(*args, **more)
        finally:
            if Turns.calling != threading.get_ident():
                Turns.theirs = False

    return ending


def _stepped() -> None:
    if Turns.open:
        with Turns.lock:
            here = threading.get_native_id()
            if here in Turns.open:
                Turns.open[here] -= 1
                if Turns.open[here] <= 0:
                    del Turns.open[here]


def hindrance() -> str:
    """Return why no session can start now; empty if one can."""
    from torch.autograd import profiler

    if Turns.theirs or Turns.ours is not None or profiler._is_profiler_enabled:  # noqa: SLF001 - torch has no public flag
        return "another profiler is on"
    if Turns.names:
        return f"the range {Turns.names[0]!r} was open when the last profile ended, and torch crashes if it ends in another"
    if Turns.open:
        return "another thread was amid its work when the last profile ended, and torch crashes if that ends in another"
    return "the last profile is being read" if Turns.unread else ""


class Session:
    """A running session, until end() or until the program starts its own; then `over(session, early)` is called."""

    def __init__(self, over: Over, **options: Any) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig

        self._over, self._ender = over, 0
        # On all threads: only such a session can be ended from the thread on which the program starts its own.
        self.profiler = torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True), **options)
        with Turns.lock:
            self._call(self.profiler.start)
            Turns.ours = self

    def _call(self, action: Callable[[], None]) -> None:
        Turns.calling = threading.get_ident()
        try:
            action()
        finally:
            Turns.calling = 0

    def end(self, *, early: bool = False) -> None:
        with Turns.lock:
            if Turns.ours is not self:
                return
            Turns.ours = None
            Turns.unread += 1
            self._ender = 0 if early else threading.get_native_id()
            self._call(self.profiler.stop)
            self._over(self, early)

    def read(self) -> bool:
        """Find ranges that were still open; return whether there is anything to export. No other session starts before this.

        If another session on all threads is running when such a range ends, torch writes to the freed memory of the first one.
        """
        results = getattr(self.profiler.profiler, "kineto_results", None)
        events = results.events() if results is not None else []
        steps: dict[int, int] = {}
        names = []
        for event in events:
            if event.end_thread_id() or not event.start_thread_id():
                continue
            thread, step = event.device_resource_id(), event.name().startswith("Optimizer.step#")
            steps[thread] = steps.get(thread, 0) + step
            if event.scope() == USER_SCOPE and not step:
                names.append(event.name())
        with Turns.lock:
            for thread, count in steps.items():  # the ending thread is inside its step's range; others may be before theirs
                Turns.open[thread] = max(1, count + (thread != self._ender))
            Turns.names += names
            Turns.unread -= 1
        return bool(events)


def after_fork_in_child() -> None:
    """Stop a session in a forked child. No other thread exists there, so the lock is replaced, not waited for."""
    Turns.lock, Turns.calling, Turns.unread = threading.RLock(), 0, 0
    ours, Turns.ours = Turns.ours, None
    if ours is not None:
        with guard("end a profile in a forked child"):
            ours._call(ours.profiler.stop)  # noqa: SLF001 - same module
