"""Weights & Biases' reporting callback: rows use `train/global_step` as their x axis, so that steps may repeat."""

from __future__ import annotations

import numbers
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from ...errors import notices
from ...trackers.wandb import WandBTracker
from ..model_info import SUMMARY, model_config, parameter_count, rewrite_logs, saved_model, staged, unstage
from ..report import Target, TrackerReport
from ..tracking import PROJECT, TrackingCallback
from .model_card import add_to_model_card

AXIS = "train/global_step"
COUNT = "model/num_parameters"
LOG_MODEL = ("end", "checkpoint", "false")


class WandbCallback(TrackingCallback):
    """Log to the open wandb run, or to a new one in `WANDB_PROJECT` ("huggingface").

    `WANDB_LOG_MODEL` (end, checkpoint, false) uploads the model, `WANDB_WATCH` (gradients, parameters, all, false) its gradients.
    A new run stays open after training, for evaluations, and ends with the process or the next training.
    """

    system: ClassVar[str] = "wandb"
    ends_with_training: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        import wandb

        self._wandb = wandb
        self._log_model = _log_model()

    def destination(self, args: Any, state: Any) -> Target:
        if (joined := self.current()) is not None:
            return joined
        folder = Path(os.environ.get("WANDB_DIR") or Path.cwd()).absolute()
        arguments = {"run_name": os.environ.get("WANDB_PROJECT", PROJECT), "dir": str(folder), "axis": AXIS}
        settings = self._wandb.Settings(x_transaction_log_flush_interval=0.2)  # everything else as the user configured it
        return Target(WandBTracker, arguments, {"settings": settings})

    def current(self) -> Target | None:
        run = self._wandb.run
        if run is None:
            return None
        folder = Path(run.settings.sync_dir).parent.parent
        arguments = {"run_name": run.project, "id": run.id, "dir": str(folder), "axis": AXIS, "reinit": "return_previous"}
        return Target(WandBTracker, arguments, {"settings": None}, joined=True, name=run.name)

    def config(self, args: Any, model: Any) -> dict[str, Any]:
        count = parameter_count(model)
        return {**super().config(args, model), **({} if count is None else {COUNT: count})}

    def opened(self, args: Any, state: Any, model: Any) -> None:
        watched = os.environ.get("WANDB_WATCH", "false")
        if watched in ("all", "parameters", "gradients"):
            self.tracker.run.watch(model, log=watched, log_freq=max(100, int(state.logging_steps)))
        if self._log_model != "false":
            self._keep_architecture(args, model)

    def rewrite(self, logs: Any, state: Any) -> dict[str, Any]:
        curves = {key: value for key, value in logs.items() if key not in SUMMARY}
        once = {key: value for key, value in logs.items() if key in SUMMARY}
        return {**once, **rewrite_logs(curves)}

    def record(self, report: TrackerReport, values: dict[str, Any], state: Any) -> None:
        once = {key: values.pop(key) for key in SUMMARY & values.keys()}
        if once:
            report.run.summary.update(once)
        report.log(values, state.global_step)

    # The model

    def checkpoint_saved(self, args: Any, state: Any) -> None:
        if self._log_model == "checkpoint":
            aliases = [f"epoch_{round(state.epoch or 0, 2)}", f"checkpoint_global_step_{state.global_step}"]
            self._upload_later(self._upload, args, state, aliases, args)

    def training_ended(self, args: Any, state: Any, **kwargs: Any) -> None:
        if self._log_model == "false":
            return
        with saved_model(args, kwargs.get("model"), kwargs.get("processing_class")) as folder:
            if folder is not None:
                best = {f"eval/{args.metric_for_best_model}": state.best_metric, "train/total_flos": state.total_flos}
                more = {"final_model": True, **(best if args.load_best_model_at_end else {})}
                self.later(self._upload, staged(folder), ["final_model"], args, more)

    def _upload(self, folder: Path, aliases: list[str], args: Any, more: dict[str, Any] | None = None) -> None:
        """Upload a folder, with the run's metrics as of when everything logged before has arrived."""
        metadata = {**({} if len(more or ()) > 1 else self._metrics()), COUNT: self.tracker.run.config.get(COUNT), **(more or {})}
        found = self._wandb.Artifact(name=self._model_name(args), type="model", metadata=metadata)
        found.add_dir(str(folder))
        self.tracker.run.log_artifact(found, aliases=aliases)
        unstage(folder)

    def _keep_architecture(self, args: Any, model: Any) -> None:
        facts = {"model_config": model_config(model), "num_parameters": parameter_count(model), "initial_model": True}
        found = self._wandb.Artifact(name=self._model_name(args), type="model", metadata=facts)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model_architecture.txt")
            path.write_text(f"{model}\n", encoding="utf-8")
            found.add_file(str(path))
        self.tracker.run.log_artifact(found, aliases=["base_model"])
        add_to_model_card(f"[Weights & Biases run]({self.tracker.run.url})")

    def _model_name(self, args: Any) -> str:
        run = self.tracker.run
        return f"model-{run.id if args.run_name in (None, args.output_dir) else run.name}"

    def _metrics(self) -> dict[str, Any]:
        known = dict(self.tracker.run.summary)
        return {key: value for key, value in known.items() if isinstance(value, numbers.Number) and key[0] != "_"}


def _log_model() -> str:
    found = os.environ.get("WANDB_LOG_MODEL", "false")
    if found in LOG_MODEL:
        return found
    notices.once(
        "wandb:log model",
        f"WANDB_LOG_MODEL={found!r} is not known, so no model is uploaded. Set it to one of {', '.join(LOG_MODEL)}.",
    )
    return "false"
