"""PreemptionCallback: when the scheduler wants the machine back, save a checkpoint and stop, all ranks at the same step."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ..errors import SettingError, notices
from ._common import current_run
from .control import TrainerControl
from .events import TrainerCallback, logger
from .state import TrainerState

ASK_SECONDS = 1.0
AHEAD_SECONDS = 2.0  # more than ASK_SECONDS: every rank hears of the step before it gets there
AHEAD_STEPS = 2


class PreemptionCallback(TrainerCallback):
    """On SIGTERM or SIGUSR1, save and stop after the step; `received` then names the signal, and a second one acts as before.

    Signals are taken over while training goes on and given back at its end. Where a process group is open, ranks agree
    on the step through its store, so that none waits for one that has left; a signal to one rank is enough.
    """

    def __init__(
        self, signals: Sequence[str] = ("SIGTERM", "SIGUSR1"), *, run: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        unknown = [name for name in signals if not hasattr(signal, name)]
        if unknown:
            raise SettingError(
                f"signals={list(signals)!r}: {', '.join(unknown)} is not known here. The callback was not made. "
                f"Known: {', '.join(s.name for s in signal.Signals)}."
            )
        self.signals = tuple(signals)
        self.received: str | None = None
        self.run = run
        self._clock = clock
        self._before: dict[int, Any] = {}
        self._trainings = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.received = None
        self._until: int | None = None
        self._trainings += 1
        self._first = (self._clock(), state.global_step)
        self._asked = self._clock()
        if threading.current_thread() is not threading.main_thread():
            notices.once(
                "preemption:thread",
                "PreemptionCallback works on the main thread only, and training runs on another. "
                "A preemption will end it without a checkpoint. Train on the main thread.",
            )
            return
        for name in self.signals:
            number = getattr(signal, name)
            if number not in self._before:
                self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:  # again: somebody is in a hurry
            self._give_back()
            os.kill(os.getpid(), number)
            return
        self.received = signal.Signals(number).name

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        if self._until is None:
            self._until = self._agreed(step)
            if self._until is not None:
                self._say(step)
        if self._until is not None and step >= self._until:
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._give_back()

    def on_exception(
        self, args: Any, state: TrainerState, control: TrainerControl, exception: BaseException, **kwargs: Any
    ) -> None:
        self._give_back()

    def _agreed(self, step: int) -> int | None:
        """Return the step to stop at: now where this process is alone, else one that no rank has passed."""
        store, key = _store(), f"fanfold/preempted/{self._trainings}"
        if self.received is not None:
            if store is None:
                return step
            return int(bytes(store.compare_set(key, "", str(step + self._ahead(step)))))
        now = self._clock()
        if store is None or now - self._asked < ASK_SECONDS:
            return None
        self._asked = now
        if not store.check([key]):
            return None
        self.received = "another rank's signal"
        return int(bytes(store.get(key)))

    def _ahead(self, step: int) -> int:
        began, first = self._first
        seconds = max(self._clock() - began, 1e-6)
        return max(AHEAD_STEPS, math.ceil(AHEAD_SECONDS * (step - first) / seconds))

    def _say(self, step: int) -> None:
        text = f"{self.received} came before step {step}: a checkpoint is saved and training stops after step {self._until}"
        logger.warning(f"{text}. Start the job again from that checkpoint.")
        run = current_run(self.run, self)
        if run is not None:
            run.alert("preempted", text)

    def _give_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:  # else somebody took it over after us, and keeps it
                signal.signal(number, before)
        self._before.clear()


def _store() -> Any:
    """Return the store of the process group the user has open, else None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch gives no public way to it
