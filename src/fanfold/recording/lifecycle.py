"""How a process ends, reported to its open runs: exceptions, exit codes, signals, forks. Installed at the first init().

Exit codes do not change: a signal handler is installed only in place of the default one. It writes one frame, gives trackers
served from this process a moment, restores the default and raises the signal again. Everything is restored when the last run
has finished.

At exit, order matters: tracker libraries in this process have their own exit handlers, which would close their runs before
the last points have arrived, and as successful. `end_before_libraries` makes our runs end before any of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import guard, notices
from ..journal.writer import moved_up
from ..threads import Background

if TYPE_CHECKING:
    from .ending import Ending

# SIGTERM and the signals schedulers send before it mean preemption; a closed terminal means the job was killed.
SIGNALS = {
    "SIGTERM": "preempted",
    "SIGUSR1": "preempted",
    "SIGUSR2": "preempted",
    "SIGXCPU": "preempted",
    "SIGHUP": "killed",
}
# Exceptions that deliberately end a trial, by library and class name, so that no library needs to be imported.
STOPS = frozenset({
    ("optuna", "TrialPruned"), ("ray", "TaskCancelledError"), ("lightgbm", "EarlyStopException"),
    ("xgboost", "EarlyStopException"), ("fastai", "CancelFitException"), ("builtins", "GeneratorExit"),
})  # fmt: skip
STUCK_SECONDS = 2.0
SIGNAL_SECONDS = 8.0  # for trackers served from this process; `docker stop` kills after 10


class _Hooks:
    """Process-wide hooks are process-wide state: what is installed, and what was there before."""

    installed = False
    exit_code = 0
    real_exit: Callable[..., Any] | None = None
    own_exit: Callable[..., Any] | None = None
    wakeup: tuple[int, int] | None = None  # descriptors of the pipe that signals write to
    ending = False  # a signal is being handled


_open: list[Ending] = []
_previous: dict[int, Any] = {}  # signal handlers


def judge(error: BaseException) -> tuple[str, str]:
    """Return the status of a run ended by this exception, and the text that explains it."""
    if any((str(kind.__module__).partition(".")[0], kind.__name__) in STOPS for kind in type(error).__mro__):
        return "finished", "stopped early by " + "".join(traceback.format_exception_only(type(error), error)).strip()
    status = "killed" if isinstance(error, KeyboardInterrupt) else "failed"
    return status, "".join(traceback.format_exception(type(error), error, error.__traceback__))


def enter(run: Ending) -> None:
    """Report the end of the process to a run, until `leave`."""
    _open.append(run)
    _install_once()
    if threading.current_thread() is threading.main_thread():
        _install_signals()


def leave(run: Ending) -> None:
    """Stop watching a run; after the last one, restore all hooks."""
    with contextlib.suppress(ValueError):
        _open.remove(run)
    if not _open:
        _restore()


def _install_once() -> None:
    if not _Hooks.installed:
        _Hooks.installed = True
        atexit.register(_at_exit)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
    _wrap_exit()


def end_before_libraries() -> None:
    """Make open runs end before every exit handler registered so far. Call it after tracker libraries have started here.

    Python runs `threading`'s own exit functions, last registered first, before those of `atexit`. One of them shuts down all
    thread pools, which libraries need to deliver: importing it now makes it run after ours.
    """
    import concurrent.futures.thread  # noqa: F401 - see above

    register = getattr(threading, "_register_atexit", None)  # private, but in every Python since 3.9
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down already
            register(_before_libraries)


def _before_libraries() -> None:
    """End open runs now, or as the first exit handler if user threads are still working: Python waits for those."""
    atexit.unregister(_end_open_runs)
    atexit.register(_end_open_runs)
    if not _threads_at_work():
        _end_open_runs()


def _threads_at_work() -> bool:
    """Return whether the interpreter is about to wait for a thread. Pool threads do not count: they only wait for work."""
    from concurrent.futures import thread as pools

    idle = {threading.main_thread(), threading.current_thread(), *getattr(pools, "_threads_queues", ())}
    return any(not one.daemon and one not in idle for one in threading.enumerate())


def _wrap_exit() -> None:
    """Remember the code given to sys.exit: at exit, nothing else distinguishes failure from success."""
    if _Hooks.real_exit is None:
        _Hooks.real_exit = real = sys.exit

        def exit(status: Any = None, /) -> Any:
            _Hooks.exit_code = status if isinstance(status, int) else 0 if status is None else 1
            real(status)

        sys.exit = _Hooks.own_exit = exit


def _install_signals() -> None:
    for name in SIGNALS:
        number = getattr(signal, name, None)
        if number is not None and number not in _previous and signal.getsignal(number) is signal.SIG_DFL:
            _previous[number] = signal.signal(number, _on_signal)
    if _previous:
        _watch_for_stuck_main_thread()


def _on_signal(number: int, _frame: FrameType | None) -> None:
    if _Hooks.ending:
        return  # launchers send it twice; the first one is being handled
    _end_by_signal(number)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _end_by_signal(number: int) -> None:
    _Hooks.ending = True
    name = signal.Signals(number).name
    deadline = time.monotonic() + SIGNAL_SECONDS
    runs = list(_open)
    for run in runs:
        with guard("record a signal"):
            run.by_signal(SIGNALS[name], name)
    for run in runs:
        with guard("deliver what is left after a signal"):
            run.deliver_here(deadline)
    _Hooks.ending = False


def _watch_for_stuck_main_thread() -> None:
    """Let a signal kill a process whose main thread is inside C code, as it would without fanfold.

    Python runs handlers between bytecodes of the main thread, so a hung collective would swallow SIGTERM. The C-level
    handler writes to the wakeup descriptor immediately; if the process is still alive after a while, this thread ends it.
    """
    if _Hooks.wakeup is not None or sys.platform == "win32":
        return
    read, write = map(moved_up, os.pipe())
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if before != -1:  # already in use, for example by asyncio: leave it alone
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)
        return
    _Hooks.wakeup = (read, write)
    Background(lambda: _await_signal(read), "signals", _stop_watching).start()


_handled: list[int] = []  # one entry for each signal


def signal_handled(number: int) -> None:
    """Record that a foreign handler dealt with a signal, even if it has been removed since."""
    _handled.append(number)


def _await_signal(read: int) -> None:
    with contextlib.suppress(OSError), open(read, "rb", buffering=0):  # closed when the thread ends
        while got := os.read(read, 1):
            import ctypes

            number = got[0]
            if number not in _previous or signal.getsignal(number) is not _on_signal:
                continue  # a foreign handler is installed, perhaps only briefly
            time.sleep(STUCK_SECONDS)
            handled = number in _handled
            if handled:
                _handled.remove(number)
            if handled or signal.getsignal(number) is not _on_signal:
                continue  # a foreign handler took the signal
            if _Hooks.ending:
                time.sleep(SIGNAL_SECONDS)  # our handler is running; after this time nothing keeps the process alive
            else:
                _end_by_signal(number)
            ctypes.CDLL(None).signal(number, 0)  # signal.signal() works in the main thread only
            os.kill(os.getpid(), number)


def _restore() -> None:
    if _Hooks.real_exit is not None and sys.exit is _Hooks.own_exit:
        sys.exit = _Hooks.real_exit
        _Hooks.real_exit = None
    if threading.current_thread() is not threading.main_thread():
        return  # handlers can only be restored from the main thread; without open runs ours just raise the signal again
    for number, before in list(_previous.items()):
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, before)
        _previous.pop(number)
    _stop_watching()


def _stop_watching() -> None:
    """End the thread that watches for signals and release the wakeup descriptor; main thread only."""
    if _Hooks.wakeup is None:
        return
    _, write = _Hooks.wakeup
    current = signal.set_wakeup_fd(-1)
    if current not in (-1, write):
        signal.set_wakeup_fd(current)
    os.close(write)  # ends the thread
    _Hooks.wakeup = None


def _at_exit() -> None:
    _end_open_runs()
    if isinstance(_last_error(), KeyboardInterrupt):
        # Python exits with SIGINT if the last code it ran was interrupted, but forgets this after any exec() (creating a
        # dataclass in a thread is enough) and would exit with code 1. This reminds it.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102 - a constant


def _last_error() -> Any:
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _end_open_runs() -> None:
    error = _last_error()
    status: str = "finished"
    text: str | None = None
    if error is not None:
        status, text = judge(error)
    elif _Hooks.exit_code:
        status, text = "failed", f"the process left by sys.exit({_Hooks.exit_code})"
    runs = tuple(_open)
    deadline = time.monotonic() + max((run.exit_seconds for run in runs), default=0.0)  # one for all: they deliver in parallel
    waits = []
    for run in runs:
        with guard("close a run at exit"):
            waits.append(run.at_exit(status, text, 1 if error is not None else _Hooks.exit_code, deadline))
    for wait in filter(None, waits):
        with guard("close a run at exit"):
            wait(deadline)


def _after_fork() -> None:
    _Hooks.ending = False
    notices.after_fork_in_child()
    # A child gets the defaults back: it has no watching thread, so our handler would keep it alive when stuck in C code.
    for number, before in _previous.items():
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, before)
    _previous.clear()
    if _Hooks.wakeup is not None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        for fd in _Hooks.wakeup:
            os.close(fd)
        _Hooks.wakeup = None
    for run in tuple(_open):
        run.after_fork_in_child()
