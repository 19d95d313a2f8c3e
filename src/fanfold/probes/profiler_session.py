"""Our own torch.profiler sessions: one at a time, on all threads, ended before the program starts one of its own.

torch has one session per process: a second one silently replaces it, and stopping or exporting the first then empties the
second or crashes. So the three functions that start and stop any session are wrapped, once for all runs of a process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from ..errors import guard
from . import step_hooks

Over = Callable[["ProfilerSession", bool], None]

USER_SCOPE = 7


class ProfilerTurns:
    """State of the process's sessions. Starting or ending one takes the lock: a single lock, so that there are no deadlocks."""

    lock: Any = threading.RLock()
    ours: ProfilerSession | None = None
    theirs = False  # the program's own session is running, or prepared: its warm-up counts
    calling = 0  # the thread that is calling torch for a session of ours
    wrapped = False
    unread = 0  # ended sessions whose open ranges are not known yet
    open: ClassVar[dict[int, int]] = {}  # thread id → steps until the ranges that a session left open there have ended
    names: ClassVar[list[str]] = []  # the program's own ranges among them, which may end at any time


def watch() -> Callable[[], None]:
    """Watch the program's own sessions from now on, and steps until the returned function is called."""
    from torch.autograd import profiler

    with ProfilerTurns.lock:
        if not ProfilerTurns.wrapped:
            ProfilerTurns.wrapped = True
            for name, before in (("_prepare_profiler", True), ("_enable_profiler", True), ("_disable_profiler", False)):
                if inner := getattr(profiler, name, None):
                    setattr(profiler, name, _give_way(inner) if before else _take_note(inner))
    return step_hooks.after_step(_stepped)


def _give_way(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def beginning(*args: Any, **more: Any) -> Any:
        if ProfilerTurns.calling != threading.get_ident():
            with ProfilerTurns.lock:
                ProfilerTurns.theirs = True
                if ProfilerTurns.ours is not None:
                    with guard("end a profile before another begins"):
                        ProfilerTurns.ours.end(early=True)
        return inner(*args, **more)

    return beginning


def _take_note(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def ending(*args: Any, **more: Any) -> Any:
        try:
            return inner(*args, **more)
        finally:
            if ProfilerTurns.calling != threading.get_ident():
                ProfilerTurns.theirs = False

    return ending


def _stepped() -> None:
    if ProfilerTurns.open:
        with ProfilerTurns.lock:
            here = threading.get_native_id()
            if here in ProfilerTurns.open:
                ProfilerTurns.open[here] -= 1
                if ProfilerTurns.open[here] <= 0:
                    del ProfilerTurns.open[here]


def hindrance() -> str:
    """Return why no session can start now; empty if one can."""
    from torch.autograd import profiler

    if ProfilerTurns.theirs or ProfilerTurns.ours is not None or profiler._is_profiler_enabled:  # noqa: SLF001 - torch has no public flag
        return "another profiler is on"
    if ProfilerTurns.names:
        return (
            f"the range {ProfilerTurns.names[0]!r} was open when the last profile ended, and torch crashes if it ends in another"
        )
    if _still_open():
        return "another thread was amid its work when the last profile ended, and torch crashes if that ends in another"
    return "the last profile is being read" if ProfilerTurns.unread else ""


def _still_open() -> bool:
    """Return whether a thread may still be inside a range of an ended session: not if it is gone."""
    tasks = Path("/proc/self/task")
    for thread in list(ProfilerTurns.open) if tasks.is_dir() else ():
        if not (tasks / str(thread)).exists():
            ProfilerTurns.open.pop(thread, None)
    return bool(ProfilerTurns.open)


def _call(action: Callable[[], None]) -> None:
    """Start or stop our own profiler, which is not the program's."""
    ProfilerTurns.calling = threading.get_ident()
    try:
        action()
    finally:
        ProfilerTurns.calling = 0


class ProfilerSession:
    """A running session, until end() or until the program starts its own; then `over(session, early)` is called."""

    def __init__(self, over: Over, **options: Any) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig

        self._over, self._ender = over, 0
        # On all threads: only such a session can be ended from the thread on which the program starts its own.
        self.profiler = torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True), **options)
        with ProfilerTurns.lock:
            _call(self.profiler.start)
            ProfilerTurns.ours = self

    def end(self, *, early: bool = False) -> None:
        with ProfilerTurns.lock:
            if ProfilerTurns.ours is not self:
                return
            ProfilerTurns.ours = None
            ProfilerTurns.unread += 1
            self._ender = 0 if early else threading.get_native_id()
            _call(self.profiler.stop)
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
        with ProfilerTurns.lock:
            for thread, count in steps.items():  # the ending thread is inside its step's range; others may be before theirs
                ProfilerTurns.open[thread] = max(1, count + (thread != self._ender))
            ProfilerTurns.names += names
            ProfilerTurns.unread -= 1
        return bool(events)


def after_fork_in_child() -> None:
    """Stop a session in a forked child. No other thread exists there, so the lock is replaced, not waited for."""
    ProfilerTurns.lock, ProfilerTurns.calling, ProfilerTurns.unread = threading.RLock(), 0, 0
    ours, ProfilerTurns.ours = ProfilerTurns.ours, None
    if ours is not None:
        with guard("end a profile in a forked child"):
            _call(ours.profiler.stop)
