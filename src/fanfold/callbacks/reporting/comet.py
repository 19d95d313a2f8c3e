"""Comet's reporting callback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from ...errors import notices
from ...trackers.comet import CometMLTracker
from ..model_info import STAGED, arguments_of, model_config
from ..report import Target, TrackerReport
from ..tracking import TrackingCallback

# Comet's automatic logging, as in Transformers.
_USUAL = dict.fromkeys(
    "log_code log_graph parse_args log_git_metadata log_git_patch log_env_details log_env_gpu log_env_host log_env_cpu "
    "log_env_network log_env_disk".split(),
    True,
)
MODES = ("get_or_create", "create", "get")


class CometCallback(TrackingCallback):
    """Log to a Comet experiment; it stays open after training, for evaluations, and ends with the process.

    `COMET_MODE` (get_or_create, create, get), `COMET_START_ONLINE` and `COMET_PROJECT_NAME` select it, `COMET_LOG_ASSETS` uploads
    `output_dir` at the end.
    """

    system: ClassVar[str] = "comet_ml"
    ends_with_training: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # or Comet mirrors every MLflow run as a second experiment
        self._log_assets = os.environ.get("COMET_LOG_ASSETS", "FALSE").upper() in ("TRUE", "1")

    @property
    def _experiment(self) -> Any:
        return getattr(self.tracker, "writer", None)

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        mode = os.environ.get("COMET_MODE", "").lower()
        if mode and mode not in MODES:
            notices.once(
                "comet_ml:mode",
                f"COMET_MODE={mode!r} is not known, so nothing goes to Comet. Set it to one of {', '.join(MODES)}, or unset it.",
            )
            return
        super().setup(args, state, model, **kwargs)

    def destination(self, args: Any, state: Any) -> Target:
        mode = "create" if state.is_hyper_param_search else os.environ.get("COMET_MODE", "").lower() or None
        if mode != "create" and (joined := self.current()) is not None:
            return joined
        offline = Path(os.environ.get("COMET_OFFLINE_DIRECTORY") or ".cometml-runs").absolute()
        place, project = {"offline_directory": str(offline)}, os.environ.get("COMET_PROJECT_NAME", "")
        arguments = {"run_name": project, "experiment_config": place}
        config = {**_USUAL, **place}
        return Target(CometMLTracker, arguments, {"experiment_config": config, **({"mode": mode} if mode else {})})

    def current(self) -> Target | None:
        import comet_ml

        running = comet_ml.get_running_experiment()
        if running is None:
            return None
        arguments = {"run_name": running.project_name or ""}
        return Target(CometMLTracker, arguments, joined=True, name=running.name, given=running)

    def config(self, args: Any, model: Any) -> dict[str, Any]:
        found = {"args": arguments_of(args), "config": model_config(model), "peft_config": getattr(model, "peft_config", None)}
        return {key: value for key, value in found.items() if value is not None}

    def opened(self, args: Any, state: Any, model: Any) -> None:
        if hasattr(self._experiment, "set_model_graph"):
            self._experiment.set_model_graph(str(model))
        if state.is_hyper_param_search:
            self._experiment.log_optimization(optimization_id=state.trial_name, parameters=getattr(state, "trial_params", None))

    def record(self, report: TrackerReport, values: dict[str, Any], state: Any) -> None:
        report.log(values, state.global_step, **({} if state.epoch is None else {"epoch": state.epoch}))

    def training_ended(self, args: Any, state: Any, **kwargs: Any) -> None:
        if self._log_assets:
            self.later(self._upload, Path(args.output_dir), state.global_step)

    def _upload(self, folder: Path, step: int) -> None:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and not inside.parts[0].startswith(STAGED):
                self._experiment.log_asset(str(path), file_name=str(folder.name / inside), step=step)
