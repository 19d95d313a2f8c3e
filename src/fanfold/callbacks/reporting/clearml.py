"""ClearML's reporting callback: titles train, eval and test with a series per key; further trainings of a task are numbered."""

from __future__ import annotations

import os
from collections import Counter, deque
from pathlib import Path
from typing import Any, ClassVar

from ...errors import notices, outcome
from ...trackers.base import NO_STEP, flat_config
from ...trackers.clearml import ClearMLTracker
from ..model_info import SUMMARY, TRUE, arguments_of, model_config, rewrite_logs, unstage
from ..report import Target, TrackerReport
from ..tracking import TrackingCallback

PROJECT, TASK = "HuggingFace Transformers", "Trainer"
SECTION, MODEL_SECTION = "Transformers", "Model Configuration"
KEEP_ARGS, KEEP_CONFIG = "_ignore_hparams_ui_overrides_", "_ignore_model_config_ui_overrides_"
NOTE = "Whether a remote run of this task keeps {} as the script has it, whatever was changed on the server."
_USUAL = {  # defaults of Task.init(), as in Transformers
    "auto_connect_frameworks": {"tensorboard": False, "pytorch": False}, "auto_connect_arg_parser": True,
    "auto_connect_streams": True, "auto_resource_monitoring": True, "output_uri": True,
}  # fmt: skip
_trainings: Counter[str] = Counter()  # per task in this process


class ClearMLCallback(TrackingCallback):
    """Log to the open ClearML task, or to a new one named by `CLEARML_PROJECT` and `CLEARML_TASK`, which ends with training.

    `CLEARML_LOG_MODEL` uploads checkpoints: by default those of a task the callback created.
    """

    system: ClassVar[str] = "clearml"
    keeps_config: ClassVar[bool] = False  # arguments and model are connected to the task, which may change them

    def __init__(self) -> None:
        super().__init__()
        import clearml

        self._clearml = clearml
        self._log_model = False
        self._suffix = ""
        self._checkpoints: deque[Any] = deque()

    @property
    def _clearml_task(self) -> Any:
        return getattr(self.tracker, "task", None)

    def destination(self, args: Any, state: Any) -> Target:
        task = self._clearml.Task
        joined = not task.running_locally() or task.current_task() is not None
        self._log_model = os.environ.get("CLEARML_LOG_MODEL", str(not joined)).upper() in TRUE
        return self._at(joined=joined)

    def _at(self, *, joined: bool) -> Target:
        project, name = os.environ.get("CLEARML_PROJECT", PROJECT), os.environ.get("CLEARML_TASK", TASK)
        arguments = {"run_name": project, "project_name": project, "task_name": name, "layout": "transformers"}
        return Target(ClearMLTracker, arguments, _USUAL, joined=joined)

    def current(self) -> Target | None:
        return None if self._clearml.Task.current_task() is None else self._at(joined=True)

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        self._suffix = ""
        super().setup(args, state, model, **kwargs)
        if self._clearml_task is not None:
            _trainings[self._clearml_task.id] += 1
            number = _trainings[self._clearml_task.id]
            self._suffix = f"_{number}" if number > 1 else ""
        self._checkpoints.clear()

    # Config: when the task runs remotely, the server's config may override the script's

    def opened(self, args: Any, state: Any, model: Any) -> None:
        task, section = self._clearml_task, f"{SECTION}{self._suffix}"
        if self._script_decides(f"{section}/{KEEP_ARGS}", "the training arguments"):
            task.update_parameters({f"{section}/{key}": value for key, value in flat_config(arguments_of(args)).items()})
        else:
            task.connect(args, section)
        config, name = model_config(model), f"{MODEL_SECTION}{self._suffix}"
        if config is None:
            return
        if self._script_decides(f"{section}/{KEEP_CONFIG}", "the model's configuration"):
            task.set_configuration_object(name=name, config_dict=config, description=f"Model of training {self._suffix or '_1'}")
        else:
            model.config = model.config.from_dict(task.get_configuration_object_as_dict(name))

    def _script_decides(self, parameter: str, what: str) -> bool:
        if not self._clearml.Task.running_locally():
            return bool(self._clearml_task.get_parameter(parameter, default=True, cast=True))
        self._clearml_task.set_parameter(name=parameter, value=True, value_type=bool, description=NOTE.format(what))
        return True

    # Values

    def rewrite(self, logs: Any, state: Any) -> dict[str, Any]:
        once = {key: value for key, value in logs.items() if key in SUMMARY or key == "epoch"}
        curves = rewrite_logs({key: value for key, value in logs.items() if key not in once})
        titled = {f"{key.partition('/')[0]}{self._suffix}/{key.partition('/')[2]}": value for key, value in curves.items()}
        return {**{f"{key}{self._suffix}": value for key, value in once.items()}, **titled}

    def record(self, report: TrackerReport, values: dict[str, Any], state: Any) -> None:
        report.log({key: value for key, value in values.items() if "/" not in key}, state.global_step, **{NO_STEP: True})
        report.log({key: value for key, value in values.items() if "/" in key}, state.global_step)

    # Checkpoints

    def checkpoint_saved(self, args: Any, state: Any) -> None:
        if self._log_model:
            self._upload_later(self._upload, args, state, state.global_step, args.save_total_limit)

    def _upload(self, folder: Path, step: int, most: int | None) -> None:
        name = f"{folder.name}{self._suffix}"
        if self._clearml_task.is_offline():  # without a server there are no models, only files
            self._clearml_task.upload_artifact(name, artifact_object=str(folder), wait_on_upload=True)
            unstage(folder)
            return
        model = self._clearml.OutputModel(task=self._clearml_task, name=name)
        model.connect(task=self._clearml_task, name=name)
        model.update_weights_package(
            weights_path=str(folder), target_filename=folder.name, iteration=step, auto_delete_file=False
        )
        unstage(folder)
        self._checkpoints.append(model)
        while most and len(self._checkpoints) > most:
            self._remove(self._checkpoints.popleft())

    def _remove(self, model: Any) -> None:
        remove = self._clearml.model.Model.remove
        _, error = outcome(remove, model, delete_weights_file=True, force=True, raise_on_errors=True)
        if error is not None:
            notices.once(
                "clearml:remove",
                f"ClearML did not remove the checkpoint {model.name}, one more than save_total_limit: {error}. It stays there.",
            )
