"""DVCLive's reporting callback: tables by `global_step`, with names split only at `train_` and `eval_`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ...errors import SettingError
from ...trackers.dvclive import DVCLiveTracker
from ..model_info import arguments_of, save_model, truth
from ..report import Target
from ..tracking import TrackingCallback


class DVCLiveCallback(TrackingCallback):
    """Log to `live`, or to a `dvclive.Live` created with the other arguments.

    `log_model` (`HF_DVCLIVE_LOG_MODEL`): True stores the final model, "all" the whole `output_dir` at each checkpoint.
    """

    system: ClassVar[str] = "dvclive"

    def __init__(self, live: Any = None, log_model: bool | str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        from dvclive import Live

        if live is not None and not isinstance(live, Live):
            raise SettingError(f"Found class {live.__class__} for live, expected dvclive.Live. Nothing was started.")
        self._given = live
        self._log_model: bool | str | None = log_model
        if log_model is None and os.environ.get("HF_DVCLIVE_LOG_MODEL", "").lower() == "all":
            self._log_model = "all"
        elif log_model is None:
            self._log_model = truth("HF_DVCLIVE_LOG_MODEL")

    @property
    def live(self) -> Any:
        """The Live object, once there is one."""
        return getattr(self.tracker, "live", None) or self._given

    def destination(self, args: Any, state: Any) -> Target:
        if self._given is not None:
            return Target(DVCLiveTracker, {"dir": str(Path(self._given.dir).absolute())}, {"live": self._given})
        own = {"dir": "dvclive", "save_dvc_exp": True, "dvcyaml": "dvc.yaml", **self._kwargs}  # the defaults of Live()
        return Target(DVCLiveTracker, {**own, "dir": str(Path(own["dir"]).absolute())})

    def config(self, args: Any, model: Any) -> dict[str, Any]:
        return arguments_of(args)

    def rewrite(self, logs: Mapping[str, Any], state: Any) -> dict[str, Any]:
        return {key.replace("train_", "train/").replace("eval_", "eval/"): value for key, value in logs.items()}

    def checkpoint_saved(self, args: Any, state: Any) -> None:
        if self._log_model == "all":
            self.later(lambda: self.live.log_artifact(args.output_dir))

    def training_ended(self, args: Any, state: Any, **kwargs: Any) -> None:
        if self._log_model is True:
            name = "best" if args.load_best_model_at_end else "last"
            save_model(kwargs.get("model"), kwargs.get("processing_class"), folder := Path(args.output_dir) / name)
            self.later(self._keep_model, folder, name)

    def _keep_model(self, folder: Path, name: str) -> None:
        self.live.log_artifact(str(folder), name=name, type="model", copy=True)
