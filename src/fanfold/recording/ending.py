"""The end of a run in this process: by finish(), an exception, a signal, at exit, or in the child of a fork."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import guard, notices, verb
from ..facts.mask import mask_traceback
from ..journal import Kind, Writer
from . import lifecycle
from .delivery import Delivery
from .join import Membership
from .keeper import Keeper
from .recorder import Recorder

time_ns = time.time_ns
AT_EXIT_SECONDS = 10.0
HERE_SECONDS = 30.0  # if trackers are served from this process, which they do not outlive


class Ending:
    """Whoever ends a run first claims its end, with a status; then the end is written and trackers get their time."""

    def __init__(self, member: Membership, writer: Writer, recorder: Recorder, delivery: Delivery, *, quiet: bool) -> None:
        self.status = "running"
        self.strict = recorder.strict
        self.stoppers: list[Callable[[float], None]] = []  # of probes; each takes a timeout
        self.keeper = Keeper([writer.rescue, writer.sync, *member.chores, delivery.look_after], self.beat)
        self._member = member
        self._writer = writer
        self._recorder = recorder
        self._delivery = delivery
        self._quiet = quiet
        self._worker = False  # in a forked child
        self._lock = threading.RLock()  # re-entrant: a signal handler may finish a run that is being finished
        self._verdict: tuple[str, str | None, int | None] = ("running", None, None)  # status, error, exit code
        self._signal: str | None = None  # that ended the command of `fanfold exec`
        self._finisher: threading.Thread | None = None  # the thread that ends the run
        self._written = False
        self._ended = threading.Event()

    def start(self, run: object) -> None:
        """Watch for the end of the process, and start to look after the journal. `run` lives until it has ended."""
        self._run = run
        lifecycle.enter(self)
        self.keeper.start()

    def beat(self) -> None:
        """Write a heartbeat. Its step says that all earlier ones are in the journal."""
        self._recorder.announce()
        beat = [time_ns(), time.monotonic_ns(), int(self._recorder.high), self._writer.dropped]
        self._writer.append((Kind.BEAT, beat))

    def finish(
        self, timeout: float, status: str, error: str | None = None, exit_code: int | None = None, signal: str | None = None
    ) -> None:
        """End the run within `timeout`, unless it has ended already; `signal` ended the command that the run is about."""
        if self._claim(status, error, exit_code):
            self._signal = signal
            self._end(time.monotonic() + timeout, close=True)

    def _claim(self, status: str, error: str | None, exit_code: int | None) -> bool:
        """Set how the run ended; return False if another caller has already done so, and will write the end."""
        with self._lock:
            if self.status != "running":
                return False
            self._verdict = (status, error, exit_code)
            self._finisher = threading.current_thread()
            self.status = status
            return True

    @verb("end the run")
    def _end(self, deadline: float, *, close: bool) -> None:
        """Write the claimed end and wait for the trackers. Left open, the journal takes what other exit handlers log."""
        try:
            if self._worker:
                self.end_worker()
                return
            self._write(deadline, close=close)
            if close:
                self._settle(deadline)
                lifecycle.leave(self)
        finally:
            self._ended.set()

    def _write(self, deadline: float, *, close: bool) -> None:
        """Stop everything that writes to the run, then write the last frame."""
        with guard("stop the keeper"):
            self.keeper.stop(min(1.0, _left(deadline)))
        for stop in self.stoppers:
            with guard("stop a probe"):
                stop(_left(deadline))
        with guard("wait for device values and media"):
            self._recorder.drain(_left(deadline))
        end = self._frame(*self._verdict)
        if close:
            self._recorder.close(end)
        else:
            self._writer.end(end)
            self._writer.sync()
        self._written = True
        with guard("copy the journal to its directory"):
            self._member.done(close)
        self._delivery.hurry()

    def _frame(self, status: str, why: str | None, exit_code: int | None = None) -> dict[str, Any]:
        """Return the last frame; `why` is the error of a failed run, or the reason one stopped early."""
        name, why = "reason" if status == "finished" else "error", why and mask_traceback(why)
        known = {"t": time_ns(), "status": status, name: why, "exit_code": exit_code}
        known |= {"signal": self._signal} if self._signal else {}
        counts = {"lost": self._recorder.lost, "dropped": self._writer.dropped, "said": dict(notices.counts)}
        return {**known, "high": int(self._recorder.high), **counts}

    @verb("wait for the trackers")
    def _settle(self, deadline: float) -> None:
        """Wait for the trackers, and print how the run ended."""
        lines = self._delivery.wait(deadline)
        name, dropped = self._member.name, self._writer.dropped
        if dropped:
            lines.append(f"{dropped} log call(s) of run {name} could not be written and are lost.")
        if self._member.me.main and not self._quiet:
            lines.append(f"run {name} {self._verdict[0]} · fanfold show {self._member.run_id}")
        for line in lines:
            print(f"fanfold: {line}", file=sys.stderr)

    # The end of the process: see lifecycle.py

    @property
    def exit_seconds(self) -> float:
        return HERE_SECONDS if self._delivery.here else AT_EXIT_SECONDS

    def by_signal(self, status: str, name: str) -> None:
        """Write the last frame from a signal handler; the process is about to die."""
        if not self._written:
            self.status = status
            self._writer.end({**self._frame(status, None), "signal": name})
        if not self._worker:
            self._delivery.hurry(here=True)

    def deliver_here(self, deadline: float) -> None:
        """Wait for trackers served from this process, which is about to die; those in their own processes continue."""
        if not self._worker:
            self._delivery.wait_here(deadline)

    def at_exit(self, status: str, error: str | None, exit_code: int, deadline: float) -> Callable[[float], object] | None:
        """Write the end of an unfinished run at interpreter exit; return a function that waits for the rest until a deadline.

        The journal stays open: other exit handlers may still log.
        """
        finisher = self._finisher
        if self._claim(status, error, exit_code):
            self._end(deadline, close=False)
        elif finisher is not None and finisher is not threading.current_thread() and finisher.is_alive():
            # A daemon thread (Ray Tune runs a trial in one) is finishing the run, and would die with the interpreter.
            return lambda deadline: self._ended.wait(_left(deadline))
        elif finisher is not None and not self._written:
            self._end(deadline, close=False)  # the thread that was finishing the run was interrupted
        else:
            return None
        return None if self._worker else self._settle

    def after_fork_in_child(self) -> None:
        """Become a worker of the same rank: its own journal on first use, no threads, and it never ends the parent's run."""
        self._worker = True
        self._member.after_fork_in_child()
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._recorder.after_fork_in_child()
        self.keeper = Keeper([], lambda: None)
        self.stoppers = []
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # multiprocessing children leave through os._exit, which runs no atexit handler. Their finalizers are cleared right
            # after the fork, so ours is registered a moment later.
            util.register_after_fork(self, lambda ending: util.Finalize(ending, ending.end_worker, exitpriority=0))

    def end_worker(self) -> None:
        """End the journal of a forked child; only the parent ends the run."""
        if self._writer.sheet is not None:
            self._recorder.flush(5.0)
            self._recorder.close({"t": time_ns(), "status": "finished", "high": int(self._recorder.high)})


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
