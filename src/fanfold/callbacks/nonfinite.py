"""NonFiniteCallback: finds NaN and infinity and reports step, parameter and rank, without waiting for the device."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, NamedTuple

from ..errors import SettingError, notices
from ..process import detect
from ..recording import api
from ..recording.agreement import Agreement, Request, agreement_of, end_agreement
from ..recording.deferred import Deferred
from ._common import check_every, current_run, norms_of, tensors_of, together
from .control import TrainerControl
from .events import TrainerCallback, logger
from .state import TrainerState

ACTIONS = ("warn", "stop", "raise")
KEPT = 100
LAST_SECONDS = 5.0


class NonFinite(NamedTuple):
    """The place of a non-finite value: `names` are parameters, or keys of logged values."""

    step: int
    rank: int
    what: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        return f"{self.what} of {', '.join(self.names[:3])}{more} at step {self.step} on rank {self.rank}"


class _TensorCheck(NamedTuple):
    """Flags being copied from the device."""

    step: int
    names: list[str]
    flight: Any  # a deferred.Flight


class NonFiniteCallback(TrainerCallback):
    """Check all gradients every `every` steps, and every logged number; `found` holds the non-finite ones.

    The check is launched on the device before the optimizer step and read when its result has arrived, some steps later: the step
    it names is the one it was launched at. `action`: "warn" reports the first finding, "stop" also ends training, on all ranks
    after the same step, "raise" raises a FloatingPointError at once on the rank that found it. Loss scaling in float16 produces
    infinities by design; use "warn" there.
    """

    def __init__(self, every: int = 1, *, action: str = "warn", run: Any = None) -> None:
        if action not in ACTIONS:
            raise SettingError(f"action={action!r} is not known. The callback was not made. Known: {', '.join(ACTIONS)}.")
        self.every = check_every(every, self)
        self.action = action
        self.run = run
        self.found: list[NonFinite] = []
        self.count = 0
        self._agreement: Agreement | None = None
        self._requests: list[Request] = []
        self._looks: deque[_TensorCheck] = deque()
        self._rings = Deferred(lambda _: None, lambda *_: None)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.action == "stop":
            self._agreement = agreement_of(state, self.run if self.run is not None else api.run)

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        step = state.global_step + 1
        if step % self.every:
            return
        names, tensors = tensors_of(model, gradients=True)
        if not tensors:
            return
        # The largest absolute value is finite only if all values are; a sum of squares could itself overflow.
        launched = self._rings.launch_array(together(norms_of(tensors, math.inf)))
        if isinstance(launched, str):
            notices.once(
                "nonfinite:launch", f"fanfold: NonFiniteCallback could not check step {step}: {launched}. Training continues."
            )
        else:
            self._looks.append(_TensorCheck(step, names, launched))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        while self._looks and self._looks[0].flight.landed():
            self._judge(control)
        if self._agreement is not None:
            requests, self._requests = self._requests, []
            self._agreement.apply(control, self._agreement.at(state.global_step, requests))

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        odd = tuple(key for key, value in (logs or {}).items() if isinstance(value, float) and not math.isfinite(value))
        if odd:
            self._report(NonFinite(state.global_step, detect().rank, "value", odd), control)
        if self._agreement is not None and self._requests:
            self._agreement.request(self._requests.pop())

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        deadline = time.monotonic() + LAST_SECONDS
        while self._looks and time.monotonic() < deadline:
            if self._looks[0].flight.landed():
                self._judge(control)
            else:
                time.sleep(0.001)
        self._looks.clear()
        end_agreement(state)

    def on_exception(
        self, args: Any, state: TrainerState, control: TrainerControl, exception: BaseException, **kwargs: Any
    ) -> None:
        end_agreement(state)

    def _judge(self, control: TrainerControl) -> None:
        look = self._looks.popleft()
        odd = tuple(name for name, value in zip(look.names, look.flight.read().tolist(), strict=True) if not math.isfinite(value))
        if odd:
            self._report(NonFinite(look.step, detect().rank, "gradient", odd), control)

    def _report(self, finding: NonFinite, control: TrainerControl) -> None:
        self.count += 1
        if len(self.found) < KEPT:
            self.found.append(finding)
        if self.action == "stop" and self._agreement is not None and not self._agreement.alone:
            self._requests = [Request("not finite", ("stop",), str(finding))]
        elif self.action != "warn":
            control.should_training_stop = True
        if self.count == 1:
            self._say(finding)
        if self.action == "raise":
            raise FloatingPointError(f"not finite: {finding}")

    def _say(self, finding: NonFinite) -> None:
        after = {"warn": "continues", "stop": "stops on all ranks", "raise": "stops here"}[self.action]
        logger.warning(
            f"fanfold: not finite: {finding}. Training {after}; later ones are only counted. "
            "Look at the batch of that step, lower the learning rate, or clip the gradients."
        )
        run = current_run(self.run, self)
        if run is not None:
            run.alert("not finite", str(finding), level="error")
