"""StragglerCallback: finds the rank the others wait for, from the busy time that each rank writes to its journal.

In synchronous training every rank's step takes equally long: the others spend the straggler's time waiting in a collective. So
the wait is subtracted: it begins when this rank has its last gradient, as reported by a hook on that parameter, and ends when the
optimizer is about to step. The rest, in the step and between steps, is the time to arrive at the collective.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import FanfoldError, guard
from ..probes import spans
from ..store import StoredRun
from ._common import check_every, current_run
from .control import TrainerControl
from .events import TrainerCallback, logger
from .state import TrainerState

KEYS = {"time/compute": "in its steps", "time/data": "between its steps, with data or input and output"}
LAST_SECONDS = 5.0
# A rank is named only if the others wait for it for a share of the step, and longer than a scheduling hiccup.
FLOOR_SHARE, FLOOR_SECONDS = 0.1, 0.005


class Straggler(NamedTuple):
    """A rank the others waited for during several intervals in a row; `ratio` is its time divided by the others' median."""

    rank: int
    key: str
    step: int
    ratio: float


class Arrival:
    """The time when this rank has all its gradients, from a hook on the parameter that gets its gradient last."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        self.at: float | None = None
        self._clock = clock
        parameters = list(model.parameters()) if hasattr(model, "parameters") else []
        hooked = [
            p for p in parameters if getattr(p, "requires_grad", False) and hasattr(p, "register_post_accumulate_grad_hook")
        ]
        self._last: Any = None
        self._hooks = {id(p): p.register_post_accumulate_grad_hook(self._on_gradient) for p in hooked}
        self.known = bool(hooked)

    def _on_gradient(self, parameter: Any) -> None:
        self.at, self._last = self._clock(), parameter

    def settle(self) -> None:
        """Keep only the hook on the last parameter after the first step: the others cost time without adding information."""
        if self._last is not None and len(self._hooks) > 1:
            for key in [key for key in self._hooks if key != id(self._last)]:
                self._hooks.pop(key).remove()

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}


class StragglerCallback(TrainerCallback):
    """Log each rank's busy time in and between steps; rank 0 reads all ranks' journals and names the slow ones.

    A rank is named when, for `patience` intervals of `every` steps in a row, it took `factor` times as long as the median of the
    others, and even its fast steps were late by a noticeable part of the step. Ranks do not communicate: the journals must be on
    a filesystem rank 0 can read.
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
        self._arrival: Arrival | None = None
        self._times: dict[str, list[float]] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any) -> None:
        self._began: float | None = None
        self._ended: float | None = None
        self._wait = 0.0
        self._times = {}
        self._close()
        self._arrival = Arrival(model, self._clock) if model is not None else None

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._began, self._wait = self._clock(), 0.0
        if self._ended is not None:
            self._add("time/data", self._began - self._ended)

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._arrival is not None and self._arrival.at is not None:
            self._wait = self._clock() - self._arrival.at
            if self._distributed():
                spans.add("ranks", self._wait)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._ended = None  # the time until the next step is not spent on data

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._ended = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._ended = self._clock()
        step = self._ended - (self._began if self._began is not None else self._ended)
        self._add("time/step", step)
        if self._knows_its_wait():
            self._add("time/compute", step - self._wait)
        if self._arrival is not None:
            self._arrival.settle()
        if state.global_step % self.every:
            return
        run = current_run(self.run, self)
        if run is not None:
            values = {key: statistics.median(times) for key, times in self._times.items()}
            fast = {f"{key}_fast": _fast(self._times[key]) for key in KEYS if key in self._times}
            run.log({**values, **fast}, step=state.global_step)
            self._look_aside(run)
        self._times = {}

    def _add(self, key: str, seconds: float) -> None:
        self._times.setdefault(key, []).append(seconds)

    def _knows_its_wait(self) -> bool:
        """Return whether waiting can be told from computing, or ranks do not wait at all because there is no process group."""
        if self._arrival is not None and self._arrival.known:
            return self._arrival.at is not None
        return not self._distributed()

    @staticmethod
    def _distributed() -> bool:
        dist = sys.modules.get("torch.distributed")
        return dist is not None and bool(dist.is_available()) and bool(dist.is_initialized())

    def _close(self) -> None:
        if self._arrival is not None:
            self._arrival.remove()
            self._arrival = None

    def on_exception(
        self, args: Any, state: TrainerState, control: TrainerControl, exception: BaseException, **kwargs: Any
    ) -> None:
        self._close()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close()
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)
            self._look_aside(current_run(self.run, self))  # the others may have been behind at the last check
            self._thread.join(LAST_SECONDS)

    def _look_aside(self, run: Any) -> None:
        """Read the journals in a separate thread: on a large job that takes a while, and training does not wait."""
        busy = self._thread is not None and self._thread.is_alive()
        if run is not None and run.rank == 0 and run.world_size > 1 and not busy:
            self._thread = threading.Thread(target=self._look, args=(run,), name="fanfold-stragglers", daemon=True)
            self._thread.start()

    def _look(self, run: Any) -> None:
        with guard("look for stragglers"):
            for straggler in self.look(run):
                self.found.append(straggler)
                text = (
                    f"rank {straggler.rank} takes {straggler.ratio:.2f} times as long as the others {KEYS[straggler.key]}, "
                    f"since before step {straggler.step}"
                )
                logger.warning(f"fanfold: {text}. The other ranks wait for it. Check its node: heat, other jobs, disk, network.")
                run.alert("straggler", text)

    def look(self, run: Any) -> list[Straggler]:
        """Read the current journals of all ranks; return the stragglers not found before."""
        if self._stored is None:
            self._stored = StoredRun(run.path)
        self._stored.refresh()
        known = {(straggler.rank, straggler.key) for straggler in self.found}
        found = [straggler for key in KEYS for straggler in self._judge(key, run.world_size)]
        return [straggler for straggler in found if (straggler.rank, straggler.key) not in known]

    def _judge(self, key: str, ranks: int) -> list[Straggler]:
        """Return the ranks that were significantly slower than the others in each of the last intervals logged by all."""
        import numpy as np

        read = [self._read(name, ranks) for name in (key, f"{key}_fast", "time/step")]
        steps = sorted(set.intersection(*(set(series) for table in read for series in table)))[-self.patience :]
        if len(steps) < self.patience:
            return []
        busy, fast, whole = (np.array([[series[step] for step in steps] for series in table]) for table in read)
        found = []
        for rank in range(ranks):
            others = np.median(np.delete(busy, rank, axis=0), axis=0)
            floor = np.maximum(FLOOR_SECONDS, FLOOR_SHARE * whole.max(axis=0))
            if (fast[rank] - others > floor).all() and (busy[rank] >= self.factor * others).all():
                ratio = float((busy[rank] / np.maximum(others, 1e-9)).mean())
                found.append(Straggler(rank, key, int(steps[0]), ratio))
        return found

    def _read(self, key: str, ranks: int) -> list[dict[int, float]]:
        """Return the values of each rank by step; empty for a rank that has not logged the key yet."""
        assert self._stored is not None
        found: list[dict[int, float]] = []
        for rank in range(ranks):
            try:
                series = self._stored.series(key, rank=rank, own=True)
            except FanfoldError:
                found.append({})
            else:
                found.append(dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)))
        return found


def _fast(times: list[float]) -> float:
    """Return the time of fast steps: a tenth are faster. Even a rank that temporarily shares its processor has some."""
    return sorted(times)[len(times) // 10]
