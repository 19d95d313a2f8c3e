"""PreemptionCallback: when the scheduler reclaims the machine, save a checkpoint and stop, all ranks at the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..errors import SettingError, notices
from ..recording import api
from ..recording.agreement import Agreement, Request, agreement_of, end_agreement
from ..recording.lifecycle import signal_handled
from ._common import current_run
from .control import TrainerControl
from .events import TrainerCallback, logger
from .state import TrainerState

KIND = "preempted"


class PreemptionCallback(TrainerCallback):
    """On SIGTERM or SIGUSR1, save and stop after the step; `received` then names the signal. A second signal acts as usual.

    Signal handlers are installed during training and restored at its end. A signal to one rank is enough: ranks agree on the step
    (see agreement.py), through the process group's store or, without one, in the run's directory.
    """

    def __init__(self, signals: Sequence[str] = ("SIGTERM", "SIGUSR1"), *, run: Any = None) -> None:
        unknown = [name for name in signals if not hasattr(signal, name)]
        if unknown:
            raise SettingError(
                f"signals={list(signals)!r}: {', '.join(unknown)} is not known here. The callback was not made. "
                f"Known: {', '.join(s.name for s in signal.Signals)}."
            )
        self.signals = tuple(signals)
        self.received: str | None = None
        self.run = run
        self._agreement: Agreement | None = None
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.received = None
        self._stopped_at: int | None = None
        self._agreement = agreement_of(state, self.run if self.run is not None else api.run)
        if threading.current_thread() is not threading.main_thread():
            notices.once(
                "preemption:thread",
                "fanfold: PreemptionCallback works on the main thread only, and training runs on another. "
                "A preemption will end it without a checkpoint. Train on the main thread.",
            )
            return
        for name in self.signals:
            number = getattr(signal, name)
            if number not in self._before:
                self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:  # a second signal: act immediately
            self._give_back()
            os.kill(os.getpid(), number)
            return
        self.received = signal.Signals(number).name
        signal_handled(number)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._agreement is None:
            return
        asked = [Request(KIND, ("save", "stop"), self.received)] if self.received is not None and self._stopped_at is None else []
        decisions = self._agreement.at(state.global_step, asked)
        for decision in decisions:
            if decision.request(KIND) is not None and self._stopped_at is None:
                self._report(state.global_step)
        self._agreement.apply(control, decisions)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._give_back()
        end_agreement(state)

    def on_exception(
        self, args: Any, state: TrainerState, control: TrainerControl, exception: BaseException, **kwargs: Any
    ) -> None:
        self._give_back()
        end_agreement(state)

    def _report(self, step: int) -> None:
        self._stopped_at = step
        if self.received is None:
            self.received = "another rank's signal"
        text = f"{self.received} received: a checkpoint is saved and training stops after step {step}"
        logger.warning(f"fanfold: {text}. Start the job again from that checkpoint.")
        run = current_run(self.run, self)
        if run is not None:
            run.alert("preempted", text)

    def _give_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._on_signal:  # otherwise another handler was installed after ours, and is kept
                signal.signal(number, before)
        self._before.clear()
