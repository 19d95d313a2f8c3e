"""Neptune's reporting callback: everything under one namespace of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from ...errors import SettingError
from ...trackers.neptune import ASSIGN, NeptuneTracker
from ..model_info import arguments_of, model_config, rewrite_logs, unstage
from ..report import Target, TrackerReport
from ..tracking import TrackingCallback

CHECKPOINTS = (None, "same", "last", "best")
# Neptune's automatic capture, as in Transformers. Not stdout and stderr, which it replaces: if another library also replaces them
# in the meantime, restoring both ends in infinite recursion.
_USUAL = {"capture_hardware_metrics": True, "capture_traceback": True, "source_files": None, "git_ref": None}
FLAT = frozenset({"train/epoch"})  # a single value, not a series


class NeptuneCallback(TrackingCallback):
    """Log to a Neptune run under `base_namespace`; other arguments go to `neptune.init_run`.

    `log_checkpoints` uploads each ("same"), the latest ("last") or the best ("best") checkpoint. `run` is your own run.
    """

    system: ClassVar[str] = "neptune"
    keeps_config: ClassVar[bool] = False  # parameters have their own namespaces

    def __init__(
        self,
        *,
        api_token: str | None = None,
        project: str | None = None,
        name: str | None = None,
        base_namespace: str = "finetuning",
        run: Any = None,
        log_parameters: bool = True,
        log_checkpoints: str | None = None,
        **neptune_run_kwargs: Any,
    ) -> None:
        super().__init__()
        if log_checkpoints not in CHECKPOINTS:
            known = ", ".join(repr(item) for item in CHECKPOINTS)
            raise SettingError(f"log_checkpoints={log_checkpoints!r} is not known, so nothing was started. Known: {known}.")
        self._arguments = {"api_token": api_token, "project": project, "name": name, **neptune_run_kwargs}
        self._given = run
        self._base = base_namespace
        self._log_parameters = log_parameters
        self._log_checkpoints = log_checkpoints
        self._better = True
        self._uploaded: str | None = None

    @property
    def run(self) -> Any:
        """The Neptune run, once there is one."""
        return getattr(self.tracker, "run", self._given)

    @classmethod
    def get_run(cls, trainer: Any) -> Any:
        """Return the run of a Trainer's Neptune callback."""
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, cls):
                return callback.run
        raise SettingError("The trainer doesn't have a NeptuneCallback configured. Pass one in callbacks=[…].")

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._log_checkpoints == "best" and not args.load_best_model_at_end:
            raise SettingError("To save the best model checkpoint, the load_best_model_at_end argument must be enabled.")

    def destination(self, args: Any, state: Any) -> Target:
        given = {key: value for key, value in self._arguments.items() if value is not None}
        arguments = {"run_name": self._arguments["project"] or self.name, **given}
        if self._given is not None:
            return Target(NeptuneTracker, arguments, joined=True, given=self._given)
        return Target(NeptuneTracker, arguments, _USUAL)

    def names(self, args: Any, state: Any) -> dict[str, Any]:
        return {"name": self._arguments["name"]} if self._arguments["name"] else super().names(args, state)

    def opened(self, args: Any, state: Any, model: Any) -> None:
        if self._log_parameters:
            self._assign("trainer_parameters", arguments_of(args))
            if (found := model_config(model)) is not None:
                self._assign("model_parameters", found)
        if state.is_hyper_param_search:
            self.run[f"{self._base}/trial"] = str(state.trial_name)
            if state.trial_params is not None:
                self._assign("trial_params", state.trial_params)

    def _assign(self, name: str, values: dict[str, Any]) -> None:
        from neptune.utils import stringify_unsupported

        self.run[f"{self._base}/{name}"] = stringify_unsupported(values)

    def rewrite(self, logs: Any, state: Any) -> dict[str, Any]:
        return {f"{self._base}/{key}": value for key, value in rewrite_logs(logs).items()}

    def record(self, report: TrackerReport, values: dict[str, Any], state: Any) -> None:
        once = {place: values.pop(place) for key in FLAT if (place := f"{self._base}/{key}") in values}
        if once:
            report.log(once, state.global_step, **{ASSIGN: True})
        report.log(values, state.global_step)

    # Checkpoints

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._log_checkpoints != "best":
            return
        name = str(args.metric_for_best_model)
        value = (metrics or {}).get(name if name.startswith("eval_") else f"eval_{name}")
        best = state.best_metric
        self._better = value is not None and (best is None or (value > best if args.greater_is_better else value < best))

    def checkpoint_saved(self, args: Any, state: Any) -> None:
        if self._log_checkpoints is not None and (self._log_checkpoints != "best" or self._better):
            self._upload_later(self._upload, args, state)

    def _upload(self, folder: Path) -> None:
        """Upload a checkpoint, and remove the one it replaces. Offline, Neptune reads the files later, so they are kept."""
        single = self._log_checkpoints in ("last", "best")
        place = self.run[f"{self._base}/checkpoints" + (f"/{self._log_checkpoints}" if single else "")]
        here = Path.cwd()
        place.upload_files(os.path.relpath(folder, here), wait=True)
        if single and self._uploaded is not None:
            place.delete_files(self._uploaded)
        self._uploaded = os.path.relpath(folder, here)
        if self.tracker.init_kwargs.get("mode", os.environ.get("NEPTUNE_MODE")) != "offline":
            unstage(folder)
