"""StragglerCallback: which rank the others wait for, by the fold of what each rank journals of its own step times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import FanfoldError, guard
from ..store import StoredRun
from ._common import check_every, current_run
from .control import TrainerControl
from .events import TrainerCallback, logger
from .state import TrainerState

KEYS = {"time/step": "its steps", "time/data": "waiting for data"}
LAST_SECONDS = 5.0


class Straggler(NamedTuple):
    """A rank that was the slowest for several intervals in a row, and by how much."""

    rank: int
    key: str
    step: int
    ratio: float


class StragglerCallback(TrainerCallback):
    """Log each rank's mean time in steps and between them; rank 0 reads all ranks' journals and names who lags.

    A rank is named when, `patience` intervals of `every` steps in a row, it was the slowest and took `factor` times as
    long as the others' mean. No rank talks to another: the journals must be on a filesystem rank 0 can read. In a loop
    that synchronises its ranks each step, a slow rank shows in "time/data", because the others wait inside their step.
    """

    def __init__(
        self,
        every: int = 50,
        *,
        factor: float = 1.3,
        patience: int = 3,
        run: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = check_every(every, self)
        self.factor = factor
        self.patience = patience
        self.run = run
        self.found: list[Straggler] = []
        self._clock = clock
        self._stored: StoredRun | None = None
        self._thread: threading.Thread | None = None
        self._forget()

    def _forget(self) -> None:
        self._step = self._data = 0.0
        self._steps = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._began: float | None = None
        self._ended: float | None = None
        self._forget()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._began = self._clock()
        if self._ended is not None:
            self._data += self._began - self._ended

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._ended = None  # what lies between is no wait for data

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._ended = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._ended = self._clock()
        self._step += self._ended - (self._began if self._began is not None else self._ended)
        self._steps += 1
        if state.global_step % self.every:
            return
        run = current_run(self.run, self)
        if run is not None:
            run.log({"time/step": self._step / self._steps, "time/data": self._data / self._steps}, step=state.global_step)
            self._look_aside(run)
        self._forget()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)
            self._look_aside(current_run(self.run, self))  # the others may have been behind at the last look
            self._thread.join(LAST_SECONDS)

    def _look_aside(self, run: Any) -> None:
        """Read the journals in a thread of their own: on a large job that takes a while, and training does not wait."""
        busy = self._thread is not None and self._thread.is_alive()
        if run is not None and run.rank == 0 and run.world_size > 1 and not busy:
            self._thread = threading.Thread(target=self._look, args=(run,), name="fanfold-stragglers", daemon=True)
            self._thread.start()

    def _look(self, run: Any) -> None:
        with guard("look for stragglers"):
            for straggler in self.look(run):
                self.found.append(straggler)
                text = (
                    f"rank {straggler.rank} is {straggler.ratio:.2f} times as slow as the others in {KEYS[straggler.key]}, "
                    f"since before step {straggler.step}"
                )
                logger.warning(f"{text}. The other ranks wait for it. Look at its node: heat, other jobs, its disk or network.")
                run.alert("straggler", text)

    def look(self, run: Any) -> list[Straggler]:
        """Read all ranks' journals as they are now; return the stragglers that were not found before."""
        if self._stored is None:
            self._stored = StoredRun(run.path)
        self._stored.refresh()
        known = {(straggler.rank, straggler.key) for straggler in self.found}
        judged = [self._judge(key, run.world_size) for key in KEYS]
        return [straggler for straggler in judged if straggler is not None and (straggler.rank, straggler.key) not in known]

    def _judge(self, key: str, ranks: int) -> Straggler | None:
        assert self._stored is not None
        try:
            folded = self._stored.series(key, fold="mean")
        except FanfoldError:  # nobody has logged it yet
            return None
        assert folded.count is not None and folded.max is not None and folded.max_rank is not None
        whole = folded.count == ranks
        mean, top, rank, steps = folded.values[whole], folded.max[whole], folded.max_rank[whole], folded.steps[whole]
        if len(steps) < self.patience:
            return None
        mean, top, rank = mean[-self.patience :], top[-self.patience :], rank[-self.patience :]
        others = (mean * ranks - top) / (ranks - 1)
        if (rank != rank[-1]).any() or (top < self.factor * others).any() or not others[-1] > 0:
            return None
        return Straggler(int(rank[-1]), key, int(steps[-self.patience]), float((top / others).mean()))
