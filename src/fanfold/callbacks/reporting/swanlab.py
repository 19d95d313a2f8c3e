"""SwanLab's reporting callback. SwanLab takes one value of a key and step, so what is said twice is sent once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import notices
from ...trackers.swanlab import SwanLabTracker
from ..subjects import SUMMARY, parameter_count, rewrite_logs
from ..tracking import TrackingCallback

AXIS, EPOCH = "train/global_step", "train/epoch"


class SwanLabCallback(TrackingCallback):
    """Log to the open SwanLab run, or to a new one, which stays open after training and ends with the process.

    `SWANLAB_PROJECT`, `SWANLAB_RUN_ID`, `SWANLAB_RESUME`, `SWANLAB_MODE` and `SWANLAB_LOG_DIR` say which.
    """

    system: ClassVar[str] = "swanlab"
    ends_with_training: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        import swanlab

        self._swanlab = swanlab
        self._last_step = -1
        if os.environ.get("SWANLAB_LOG_MODEL") is not None:
            notices.once("swanlab:log model", "SwanLab cannot keep models, so SWANLAB_LOG_MODEL does nothing. Unset it.")

    def open(self, args: Any, state: Any) -> None:
        self._last_step = -1
        self.tracker = self.current()
        self._owns = self.tracker is None
        if self.tracker is None:
            self.tracker = SwanLabTracker(os.environ.get("SWANLAB_PROJECT"), **_names(args, state))
            self.tracker.start()

    def current(self) -> Any:
        if not self._swanlab.has_run():
            return None
        found = SwanLabTracker("")
        found.run = self._swanlab.get_run()
        return found

    def keep(self, args: Any, state: Any, model: Any) -> None:
        super().keep(args, state, model)
        found = {"model_num_parameters": parameter_count(model)}
        if hasattr(model, "get_nb_trainable_parameters"):
            found["peft_model_trainable_params"], found["peft_model_all_param"] = model.get_nb_trainable_parameters()
        self.tracker.run.config.update({key: value for key, value in found.items() if value is not None})

    def rewrite(self, logs: Mapping[str, Any], state: Any) -> dict[str, Any]:
        once = {f"single_value/{key}": value for key, value in logs.items() if key in SUMMARY}
        curves = {**rewrite_logs({key: value for key, value in logs.items() if key not in SUMMARY}), AXIS: state.global_step}
        if state.global_step == self._last_step:
            curves = {key: value for key, value in curves.items() if key not in (AXIS, EPOCH)}
        self._last_step = state.global_step
        return {**once, **curves}


def _names(args: Any, state: Any) -> dict[str, Any]:
    """Return how a new run is called, and which one it goes on with."""
    name = "-".join(part for part in (getattr(args, "run_name", None), state.trial_name) if part is not None)
    resume = os.environ.get("SWANLAB_RESUME") or ("allow" if getattr(args, "resume_from_checkpoint", None) else None)
    found = {"experiment_name": name or None, "id": os.environ.get("SWANLAB_RUN_ID"), "resume": resume}
    return {key: value for key, value in found.items() if value is not None}
