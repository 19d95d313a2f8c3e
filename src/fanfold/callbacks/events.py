"""The events of a training loop, and the base class of callbacks: one method per event that does nothing."""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Any

from ..errors import named

if TYPE_CHECKING:
    from .control import TrainerControl
    from .state import TrainerState

logger = logging.getLogger("fanfold.callbacks")
logger.addFilter(named)


class Event(str, enum.Enum):
    """An event of a training loop; its value is the name of the callback method.

    ::

        on_init_end
        on_train_begin                                  control.should_training_stop = False
        for epoch in epochs:
            on_epoch_begin                              control.should_epoch_stop = False
            for step in steps:
                on_step_begin                           control.should_log = should_evaluate = should_save = False
                for batch in the accumulated batches:
                    forward, backward
                    on_substep_end                      after each batch but the last
                clip the gradients
                on_pre_optimizer_step
                optimizer.step()
                on_optimizer_step
                scheduler.step(), gradients to zero, state.global_step += 1
                on_step_end
                if control.should_log:      on_log
                if control.should_evaluate: on_prediction_step for each batch, on_log, on_evaluate
                if control.should_save:     save, on_save
                if control.should_epoch_stop or control.should_training_stop: leave the epoch
            on_epoch_end
            log, evaluate, save as after a step
            if control.should_training_stop: leave the loop
        on_log                                          the summary
        on_train_end

        predict():     on_prediction_step for each batch, on_predict
        push_to_hub(): on_push_begin
        an exception:  on_exception, then on_train_end
    """

    INIT_END = "on_init_end"
    TRAIN_BEGIN = "on_train_begin"
    TRAIN_END = "on_train_end"
    EPOCH_BEGIN = "on_epoch_begin"
    EPOCH_END = "on_epoch_end"
    STEP_BEGIN = "on_step_begin"
    PRE_OPTIMIZER_STEP = "on_pre_optimizer_step"
    OPTIMIZER_STEP = "on_optimizer_step"
    SUBSTEP_END = "on_substep_end"
    STEP_END = "on_step_end"
    EVALUATE = "on_evaluate"
    PREDICT = "on_predict"
    SAVE = "on_save"
    LOG = "on_log"
    PREDICTION_STEP = "on_prediction_step"
    PUSH_BEGIN = "on_push_begin"
    EXCEPTION = "on_exception"


class TrainerCallback:
    """React to training events, and steer the loop through `control`. Override the events you care about.

    Every event gets `args`, `state` and `control`, and by keyword `model`, `processing_class`, `optimizer`,
    `lr_scheduler`, `train_dataloader` and `eval_dataloader`. Change `control` in place, or return another one, which
    then replaces it for the callbacks after this one and for the loop.
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the trainer's creation."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the start of training."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the end of training, normal or by an exception."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the start of an epoch."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the end of an epoch."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the start of a step; with gradient accumulation a step takes several batches."""

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """React before the optimizer step, when the gradients are complete and clipped."""

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React after the optimizer step; the gradients are still available."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the end of a batch that does not complete its step."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the end of a step: `state.global_step` includes it, and the gradients are cleared."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the end of an evaluation; `metrics` is passed by keyword."""

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> TrainerControl | None:
        """React to the end of a prediction."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to a saved checkpoint."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to logged values; `logs` is passed by keyword and shared by all callbacks: copy it before changing it."""

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React to the end of a batch of an evaluation or prediction."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> TrainerControl | None:
        """React before the model is pushed to a hub."""

    def on_exception(
        self, args: Any, state: TrainerState, control: TrainerControl, exception: BaseException, **kwargs: Any
    ) -> TrainerControl | None:
        """React to an exception that ends training; `on_train_end` follows if training was running."""
