"""ControlCallback: requests from outside (`fanfold tell`) steer a training: stop, save, evaluate, log, set the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..errors import describe, guard, notices, outcome
from ..recording import api
from ..recording.agreement import FLAGS, agreement_of
from ..recording.control import Control
from . import learning_rate
from .control import TrainerControl
from .events import TrainerCallback
from .state import TrainerState

NOTHING: Mapping[str, str] = MappingProxyType({})


class SteeredTraining:
    """A training whose steps end where the requests to its run are carried out, on all ranks after the same step."""

    def __init__(self, min_lr: float | None = None, max_lr: float | None = None, *, chosen: bool = False) -> None:
        self._limits = (min_lr, max_lr)
        self.chosen = chosen  # by the user: steers instead of the one that a framework's callback brings along
        self._control: Control | None = None
        self._knobs: list[str] = []

    def begin(
        self, run: Any, state: Any, optimizer: Any = None, scheduler: Any = None, cannot: Mapping[str, str] = NOTHING
    ) -> None:
        """Take requests to a run from here on; `state` is the training's TrainerState, `cannot` what it cannot do, and why."""
        self.end()
        control = getattr(run, "control", None)
        if not isinstance(control, Control) or getattr(run, "status", "") != "running":
            return
        if getattr(control.steered, "chosen", False) and not self.chosen:
            return
        with guard("take requests to this run"):
            control.steer(self, agreement_of(state, run), cannot)
            self._control = control
            self._knobs = learning_rate.make_adjustable(control, optimizer, scheduler, *self._limits)

    def step_end(self, step: int) -> set[str]:
        """Return the actions that the ranks decided on for this step."""
        found: set[str] = set()
        for decision in self._control.pass_boundary(self, step) if self._control is not None else ():
            if not decision.applied:
                decision.applied = True
                found |= decision.actions
        return found

    def did(self, action: str, why: str = "", *, step: int | None = None) -> None:
        """Answer the requests for something the training has just done, or is told to do by us."""
        if self._control is not None:
            self._control.did(action, why, step=step)

    def do(self, action: str, act: Callable[[], object], why: str = "", *, alone: bool = True) -> None:
        """Do what was asked for, and answer. A failure is the answer, and training continues, unless other ranks do the same."""
        error = outcome(act)[1]
        if error is None:
            self.did(action, why)
            return
        if self._control is None or not alone:
            raise error
        self._control.did(action, describe(error), state="refused")
        notices.once(f"tell:{action}", f"could not {action} as requested: {describe(error)}. Training continues.")

    def adjust_rate(self, value: float, **how: Any) -> None:
        """Make the learning rate adjustable, within the limits, in a training whose optimizer is not torch's."""
        if self._control is not None:
            with guard("make a value adjustable"):
                self._control.knob(learning_rate.NAME, value, *self._limits, **how)
                self._knobs.append(learning_rate.NAME)

    def end(self) -> None:
        """Stop taking requests."""
        control, self._control = self._control, None
        if control is not None and control.steered is self:
            control.release(self)
            for name in self._knobs:
                control.forget_knob(name)


def set_flags(training: SteeredTraining, control: Any, step: int) -> None:
    """Set the flags of what the ranks decided on for a step."""
    for action in training.step_end(step):
        setattr(control, FLAGS[action], True)
        if action == "stop":
            training.did("stop")


class ControlCallback(TrainerCallback):
    """Carry out requests to the run: stop, save, evaluate, log, and set the optimizer's learning rate (`lr`).

    Our Loop and Trainer have one by default. Add your own to limit the learning rate with `min_lr` and `max_lr`, also to
    Transformers' Trainer, where it acts instead of FanfoldCallback.
    """

    def __init__(self, *, run: Any = None, min_lr: float | None = None, max_lr: float | None = None) -> None:
        self.run = run
        self.cannot: Mapping[str, str] | None = None  # set by loops that know what they cannot do
        self._training = SteeredTraining(min_lr, max_lr, chosen=True)

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        cannot = self.cannot
        if cannot is None:  # Transformers' Trainer has data to evaluate on, if it evaluates at all
            cannot = {"evaluate": "eval_strategy is 'no'"} if getattr(args, "eval_strategy", "no") == "no" else {}
        self._training.begin(self.run if self.run is not None else api.run, state, optimizer, lr_scheduler, cannot)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        set_flags(self._training, control, state.global_step)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._training.did("save")

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._training.did("evaluate")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._training.did("log")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._training.end()
