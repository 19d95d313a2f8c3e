"""DefaultFlowCallback: decides from the arguments when to log, evaluate, save and stop."""

from __future__ import annotations

from typing import Any

from .control import TrainerControl
from .events import TrainerCallback
from .state import TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Log, evaluate and save at the intervals in the arguments (steps or epochs), and stop at the last step.

    If `args.logging_last_step` is set, the steps after the last full interval are logged, too.
    """

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        step, last = state.global_step, state.global_step >= state.max_steps
        if step == 1 and args.logging_first_step:
            control.should_log = True
        if args.logging_strategy == "steps" and (_due(step, state.logging_steps) or (last and _logs_last(args))):
            control.should_log = True
        if args.eval_strategy == "steps" and args.eval_delay <= step and (last or _due(step, state.eval_steps)):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (last or _due(step, state.save_steps)):
            control.should_save = True
        if last:
            control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        stopped = control.should_training_stop and args.logging_strategy == "steps" and _logs_last(args)
        if args.logging_strategy == "epoch" or stopped:
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control


def _due(step: int, every: float) -> bool:
    return every > 0 and step % every == 0


def _logs_last(args: Any) -> bool:
    """Return whether the last step is logged; Transformers' arguments lack this setting, so its event order is kept."""
    return bool(getattr(args, "logging_last_step", False))
