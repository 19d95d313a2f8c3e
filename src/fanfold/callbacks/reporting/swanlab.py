"""SwanLab's reporting callback. SwanLab accepts one value per key and step, so repeated values are sent once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ...errors import notices
from ...trackers.swanlab import SwanLabTracker
from ..model_info import SUMMARY, parameter_count, rewrite_logs
from ..report import Target
from ..tracking import TrackingCallback

AXIS, EPOCH = "train/global_step", "train/epoch"


class SwanLabCallback(TrackingCallback):
    """Log to the open SwanLab run, or to a new one, which stays open after training and ends with the process.

    `SWANLAB_PROJECT`, `SWANLAB_RUN_ID`, `SWANLAB_RESUME`, `SWANLAB_MODE` and `SWANLAB_LOG_DIR` select it.
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

    def destination(self, args: Any, state: Any) -> Target:
        self._last_step = -1
        if (joined := self.current()) is not None:
            return joined
        resume = os.environ.get("SWANLAB_RESUME") or ("allow" if getattr(args, "resume_from_checkpoint", None) else None)
        own = {"id": os.environ.get("SWANLAB_RUN_ID"), "resume": resume}
        arguments = {"run_name": os.environ.get("SWANLAB_PROJECT") or Path.cwd().name, "log_dir": _log_dir()}
        known = {key: value for key, value in own.items() if value is not None}
        return Target(SwanLabTracker, {**arguments, **known}, {"settings": self._swanlab.Settings()})

    def names(self, args: Any, state: Any) -> dict[str, Any]:
        found = [part for part in (getattr(args, "run_name", None), state.trial_name) if part is not None]
        return {"name": "-".join(found) or None}

    def current(self) -> Target | None:
        if not self._swanlab.has_run():
            return None
        run = self._swanlab.get_run()
        return Target(SwanLabTracker, {"run_name": "", "id": run.id, "log_dir": _log_dir()}, joined=True, given=run)

    def config(self, args: Any, model: Any) -> dict[str, Any]:
        found = {**super().config(args, model), "model_num_parameters": parameter_count(model)}
        if hasattr(model, "get_nb_trainable_parameters"):
            found["peft_model_trainable_params"], found["peft_model_all_param"] = model.get_nb_trainable_parameters()
        return found

    def rewrite(self, logs: Mapping[str, Any], state: Any) -> dict[str, Any]:
        once = {f"single_value/{key}": value for key, value in logs.items() if key in SUMMARY}
        curves = {**rewrite_logs({key: value for key, value in logs.items() if key not in SUMMARY}), AXIS: state.global_step}
        if state.global_step == self._last_step:
            curves = {key: value for key, value in curves.items() if key not in (AXIS, EPOCH)}
        self._last_step = state.global_step
        return {**once, **curves}


def _log_dir() -> str:
    return str(Path(os.environ.get("SWANLAB_LOG_DIR") or "swanlog").absolute())
