"""EarlyStoppingCallback: stops training when a metric has not improved for a while."""

from __future__ import annotations

import math
from typing import Any

from ..errors import SettingError
from .control import ExportableState, TrainerControl
from .events import TrainerCallback, logger
from .state import TrainerState


class _Unset(SettingError, AssertionError):
    """Raised for a missing argument; an AssertionError for code that catches what Transformers raises."""


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stop after `early_stopping_patience` evaluations whose metric was not better by more than `early_stopping_threshold`.

    The metric is `args.metric_for_best_model`, compared with `state.best_metric` by `args.greater_is_better`.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def check_metric_value(self, args: Any, state: TrainerState, control: TrainerControl, metric_value: float) -> None:
        """Count an evaluation without improvement, or reset the count."""
        best = state.best_metric
        if best is None or math.isnan(best):
            better = True
        else:
            gain = metric_value - best if args.greater_is_better else best - metric_value
            better = gain > 0 and gain > (self.early_stopping_threshold or 0.0)  # NaN is never better
        self.early_stopping_patience_counter = 0 if better else self.early_stopping_patience_counter + 1

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback is used without load_best_model_at_end=True. Training will end with the last weights, "
                "not the best ones. Pass load_best_model_at_end=True to get the best ones."
            )
        if args.metric_for_best_model is None:
            raise _Unset(
                "EarlyStoppingCallback does not know which metric to watch. Training does not start. "
                'Set metric_for_best_model, for example metric_for_best_model="eval_loss".'
            )
        if args.eval_strategy == "no":
            raise _Unset(
                "EarlyStoppingCallback needs evaluations, and there are none. Training does not start. "
                'Set eval_strategy="steps" or eval_strategy="epoch".'
            )

    def on_evaluate(  # type: ignore[override]  # Transformers' signature
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: Any,
    ) -> None:
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = metrics.get(name)
        if value is None:
            logger.warning(
                f"early stopping looks for {name}, and this evaluation gave {', '.join(metrics) or 'nothing'}. "
                "This evaluation cannot stop training. Set metric_for_best_model to one that is given."
            )
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
