"""In each process of a job: looks every second where the training thread is, publishes it, and writes stacks when asked.

A look costs a few microseconds while training moves. Only a thread that stays on one line is looked at more closely.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import guard
from ..threads import Background
from . import activity, flight, position
from .pulse import Collective, Pulse, PulseFile, Spot, as_data, file_of
from .requests import StackRequests

LOOK_SECONDS = 1.0
CLOSER_SECONDS = 3.0  # on one line, before CPU time, data and collectives are looked at
IDLE_SHARE, IDLE_BURST = 0.05, 0.2  # of one core, and CPU seconds besides: threads that poll
MOVED_BYTES, OWN_BYTES = 1 << 20, 1 << 16  # of data, and what this thread reads and writes itself in a second
MAX_ANSWERS = 16
PAUSE_SECONDS = 15.0
WHERE = 24  # frames in a pulse: data loaders alone have ten


class TrainingThread:
    """Follows one thread: since when it is on the same line, and since when nothing happens around it."""

    def __init__(self, ident: int, native: int) -> None:
        self.ident, self.native = ident, native
        self.same_since = self.idle_since = 0.0
        self.busy = ""
        self._signature: position.Signature = ()
        self._strayed = False
        self._mark: tuple[float, float, int] | None = None  # time, CPU seconds, bytes

    def look(self, now: float, *, moved: bool) -> Any:
        """Look at the thread; return its frame. `moved`: a step was taken since the last look."""
        frame = position.frame_of(self.ident)
        signature = position.signature(frame)
        if moved or not self._stays(signature):
            self._signature, self._strayed, self._mark = signature, False, None
            self.same_since, self.idle_since, self.busy = now, 0.0, ""
        elif now - self.same_since >= CLOSER_SECONDS:
            self._look_closer(frame, now)
        return frame

    def _stays(self, signature: position.Signature) -> bool:
        """Return whether the thread is on the same line. One look elsewhere is forgiven: code that polls leaves its line."""
        same = signature == self._signature
        forgiven = not same and not self._strayed and bool(self._signature)
        self._strayed = not same
        return same or forgiven

    def _look_closer(self, frame: Any, now: float) -> None:
        pid = os.getpid()
        cpu, moved = activity.cpu_of_all(pid), activity.bytes_moved(pid)
        self.busy = position.slow_activity(frame)
        state = activity.thread_state(pid, self.native)
        if not self.busy and state == "D":
            self.busy = "waiting for a disk"
        since, cpu_before, bytes_before = self._mark or (now, cpu, moved)
        seconds = now - since
        works = state == "R"  # on a node with too few cores, it may get none
        if (
            works
            or cpu < cpu_before  # a child has ended, and with it its CPU time
            or cpu - cpu_before > IDLE_SHARE * seconds + IDLE_BURST
            or moved - bytes_before > MOVED_BYTES + OWN_BYTES * seconds
        ):
            self._mark, self.idle_since = (now, cpu, moved), 0.0  # it works, on a line that takes long
        else:
            self._mark, self.idle_since = (since, cpu_before, bytes_before), since


class Watch:
    """The thread of one process that looks, publishes, and answers."""

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], step: Callable[[], int], write: Callable[[Mapping[str, Any]], bool],
        *, interval: float = LOOK_SECONDS, chores: Sequence[Callable[[int], object]] = (),
    ) -> None:  # fmt: skip
        self._folder, self._step, self._write = folder, step, write
        self._pulse = Pulse(**facts)
        self._file = PulseFile(file_of(folder, self._pulse.rank, self._pulse.process))
        self._inbox = StackRequests(folder)
        self._interval, self._chores = interval, chores
        self._answers = 0
        self._taken: list[tuple[int, int]] = [(0, 0)]  # steps of an optimizer, and the thread that took the last one
        self._progress: tuple[int, int] = (-1, 0)
        self._progress_at = time.time()
        self._paces: deque[float] = deque(maxlen=32)
        main = threading.main_thread()
        self._thread = TrainingThread(main.ident or 0, main.native_id or 0)
        self._unhook: Callable[[], None] | None = None
        self._stopping = threading.Event()
        self._background = Background(self._loop, "blackbox", self._stopping.set)

    def start(self) -> None:
        self._look()
        self._background.start()

    def stop(self, timeout: float) -> None:
        """End the thread and say that this process ends as it should: its pulse is no longer watched."""
        self._stopping.set()
        if self._background is not threading.current_thread():
            self._background.join(min(timeout, 1.0))
        if self._unhook is not None:
            self._unhook()
        self._pulse.ended = True
        with guard("end the pulse of a rank"):
            self._file.write(self._pulse)
            self._file.close(remove=False)

    def _loop(self) -> None:
        while not self._stopping.wait(self._interval):
            with guard("watch the training thread"):
                self._look()

    def _look(self) -> None:
        now = time.time()
        paused = not -1.0 < now - self._pulse.time < self._interval + PAUSE_SECONDS  # the node did, or the clock was set
        moved = self._moved(now) or paused
        frame = self._thread.look(now, moved=moved)
        pulse, thread = self._pulse, self._thread
        pulse.time, pulse.step, pulse.thread = now, self._progress[0], thread.ident
        pulse.usual = statistics.median(self._paces) if len(self._paces) > 2 else 0.0
        pulse.same_since, pulse.idle_since, pulse.busy = thread.same_since, thread.idle_since, thread.busy
        pulse.where = [Spot(**spot) for spot in position.spots(frame, most=WHERE)]
        pulse.waiting, pulse.enqueued = [], {}
        if now - thread.same_since >= CLOSER_SECONDS or thread.idle_since:
            active, pulse.enqueued = flight.waiting()
            pulse.waiting = [Collective(**one) for one in active]
        del frame
        self._file.write(pulse)
        for token in self._inbox.new():
            self._answer(token)
        if now - thread.same_since < CLOSER_SECONDS:  # the allocator may be locked by a thread that stands still
            self._do_chores()

    def _do_chores(self) -> None:
        for chore in self._chores:
            with guard("look at GPU memory for the black box"):
                chore(self._taken[0][0])

    def _moved(self, now: float) -> bool:
        """Return whether a step was taken or a value logged since the last look."""
        self._follow_steps()
        taken, ident = self._taken[0]
        progress = (self._step(), taken)
        if progress == self._progress:
            return False
        steps = max(progress[0] - self._progress[0], progress[1] - self._progress[1], 1)
        if self._progress != (-1, 0):
            self._paces.append((now - self._progress_at) / steps)
        self._progress, self._progress_at = progress, now
        if ident and ident != self._thread.ident:
            native = next((one.native_id for one in threading.enumerate() if one.ident == ident), 0)
            self._thread = TrainingThread(ident, native or 0)
        return True

    def _follow_steps(self) -> None:
        """Count optimizer steps once torch is imported: the thread that takes them is the one to follow."""
        import sys

        if self._unhook is None and "torch.optim.optimizer" in sys.modules and "torch.compiler" in sys.modules:
            from ..probes import step_hooks

            def stepped() -> None:
                self._taken[0] = (self._taken[0][0] + 1, threading.get_ident())

            self._unhook = step_hooks.after_step(stepped)

    def _answer(self, token: str) -> None:
        """Write this process's stacks and its last collectives to its journal."""
        if self._answers >= MAX_ANSWERS:
            return
        self._answers += 1
        active, enqueued = flight.waiting()
        pulse = as_data(self._pulse) | {"waiting": active, "enqueued": enqueued}
        data = {"pulse": pulse, "threads": position.all_threads(), "collectives": flight.recent()}
        self._write({"event": "blackbox", "kind": "stacks", "id": token, "data": data})
