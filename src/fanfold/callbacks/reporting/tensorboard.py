"""TensorBoard's reporting callback."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ...trackers.tensorboard import TensorBoardTracker
from ..model_info import arguments_of, model_config
from ..report import Target
from ..tracking import TrackingCallback


class TensorBoardCallback(TrackingCallback):
    """Write event files to `TENSORBOARD_LOGGING_DIR`, else to a folder in `output_dir/runs`; or to `tb_writer`."""

    system: ClassVar[str] = "tensorboard"
    keeps_config: ClassVar[bool] = False  # arguments and model are logged as texts, as in Transformers

    def __init__(self, tb_writer: Any = None) -> None:
        super().__init__()
        self._given = tb_writer
        self.logging_dir = os.environ.get("TENSORBOARD_LOGGING_DIR")
        if self.logging_dir is not None:
            self.logging_dir = str(Path(self.logging_dir).expanduser())
        self._asked: str | None = None
        self._trainings = 0

    @property
    def tb_writer(self) -> Any:
        """The SummaryWriter, once there is one."""
        return getattr(self.tracker, "writer", self._given)

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        super().setup(args, state, model, **kwargs)
        if self.report is not None:
            found = {"args": arguments_of(args), "model_config": model_config(model)}
            texts = {key: json.dumps(value, indent=2, sort_keys=True, default=str) for key, value in found.items() if value}
            self.report.log(texts, 0)

    def destination(self, args: Any, state: Any) -> Target:
        self._trainings += 1
        if self._trainings == 1:
            self._asked = self.logging_dir
        folder = self._folder(args, state) if self._given is None else Path(self._given.log_dir)
        self.logging_dir = str(folder)
        arguments = {"run_name": folder.name, "logging_dir": str(folder.absolute().parent), "layout": "transformers"}
        return Target(TensorBoardTracker, arguments, joined=self._given is not None, given=self._given)

    def resumed(self, where: Target, earlier: Mapping[str, Any]) -> Target:
        """Continue in the folder of the first part, unless the user named one."""
        if self._asked is not None or self._given is not None or not {"run_name", "logging_dir"} <= earlier.keys():
            return where
        self.logging_dir = str(Path(earlier["logging_dir"], earlier["run_name"]))
        return where._replace(arguments={**where.arguments, **earlier})

    def _folder(self, args: Any, state: Any) -> Path:
        """Return the folder of a run: each training and each trial has its own, or their curves would mix."""
        trial = (state.trial_name or f"trial-{self._trainings}") if state.is_hyper_param_search else None
        if self._asked is None:
            return _new_folder(Path(args.output_dir, "runs"), trial)
        own = trial or (str(self._trainings) if self._trainings > 1 else "")
        return Path(self._asked, own)


def _new_folder(home: Path, trial: str | None) -> Path:
    """Return a new folder named after time and node, with a suffix if it exists: two runs in one second would mix."""
    stamp = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
    names = (f"{stamp}{mark}" for mark in itertools.chain([""], (f"_{i}" for i in itertools.count(2))))
    return next(folder for folder in (home / name / (trial or "") for name in names) if not folder.exists())
