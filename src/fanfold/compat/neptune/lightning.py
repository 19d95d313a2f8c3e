"""NeptuneLogger for Lightning's Trainer, on fanfold: the arguments and names of Neptune's, the run of ours."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ...errors import notices
from ...frameworks.lightning import FanfoldLogger, library
from .client import Run


class NeptuneLogger(FanfoldLogger):
    """Log to a run under `prefix`, as Neptune's logger does. `experiment` has Neptune's methods: experiment["a/b"].append(1)."""

    LOGGER_JOIN_CHAR = "/"
    PARAMETERS_KEY = "hyperparams"

    def __init__(
        self,
        *,
        api_key: str | None = None,
        project: str | None = None,
        name: str | None = None,
        run: Any = None,
        log_model_checkpoints: bool | None = True,
        prefix: str = "training",
        **options: Any,
    ) -> None:
        if api_key is not None:
            notices.once("neptune:api_key", "NeptuneLogger(api_key=…) has no meaning in fanfold and is ignored.")
        given = run.fanfold if isinstance(run, Run) else run
        notes = {"notes": options.pop("description")} if "description" in options else {}
        project = None if project is None else project.rpartition("/")[2]
        super().__init__(project, run=given, name=name, log_checkpoints=bool(log_model_checkpoints), **notes, **options)
        self._prefix = prefix
        self._users_run = run if isinstance(run, Run) else None
        self._shown: Run | None = None

    @property
    def experiment(self) -> Any:
        found = super().experiment
        if self._users_run is not None:
            return self._users_run
        if self._shown is None or self._shown.fanfold is not found:
            self._shown = Run(found)
        return self._shown

    @property
    def run(self) -> Any:
        return self.experiment

    @property
    def name(self) -> str:
        return str(self.experiment.fanfold.project)

    @property
    def version(self) -> str:
        return str(self.experiment.fanfold.id)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        super().log_metrics({self._key(name): value for name, value in metrics.items()}, step)

    def log_hyperparams(self, params: Any, *_args: Any, **_kwargs: Any) -> None:
        values = dict(params) if isinstance(params, Mapping) else vars(params)
        self.experiment[self._key(self.PARAMETERS_KEY)] = values

    def log_model_summary(self, model: Any, max_depth: int = -1) -> None:
        """Keep a text that describes the model."""
        summary: Any = importlib.import_module(f"{library.__name__}.utilities.model_summary").ModelSummary
        self.log_text(self._key("model/summary"), str(summary(model=model, max_depth=max_depth)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name
