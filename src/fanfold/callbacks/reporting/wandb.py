"""Weights & Biases' reporting callback: rows have `train/global_step` as their x axis, so that steps may come again."""

from __future__ import annotations

import numbers
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from ...errors import notices
from ...trackers.wandb import WandBTracker
from ..subjects import SUMMARY, model_config, parameter_count, rewrite_logs, saved_model, staged, unstage
from ..tracking import PROJECT, TrackingCallback
from .model_card import add_to_model_card

AXIS = "train/global_step"
COUNT = "model/num_parameters"
LOG_MODEL = ("end", "checkpoint", "false")


class WandbCallback(TrackingCallback):
    """Log to the open wandb run, or to a new one in `WANDB_PROJECT` ("huggingface").

    `WANDB_LOG_MODEL` (end, checkpoint, false) uploads the model, `WANDB_WATCH` (gradients, parameters, all, false) its
    gradients. A run of its own stays open after training, for evaluations, and ends with the process or the next training.
    """

    system: ClassVar[str] = "wandb"
    ends_with_training: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        import wandb

        self._wandb = wandb
        self._log_model = _log_model()

    def open(self, args: Any, state: Any) -> None:
        self.tracker = self.current()
        self._owns = self.tracker is None
        if self.tracker is None:
            self.tracker = WandBTracker(os.environ.get("WANDB_PROJECT", PROJECT), **_names(args, state))
            self.tracker.start()
        run = self.tracker.run
        run.define_metric(AXIS)
        run.define_metric("*", step_metric=AXIS, step_sync=True)

    def current(self) -> Any:
        if self._wandb.run is None:
            return None
        found = WandBTracker(self._wandb.run.project)
        found.run = self._wandb.run
        return found

    def keep(self, args: Any, state: Any, model: Any) -> None:
        super().keep(args, state, model)
        run, watched = self.tracker.run, os.environ.get("WANDB_WATCH", "false")
        if watched in ("all", "parameters", "gradients"):
            run.watch(model, log=watched, log_freq=max(100, int(state.logging_steps)))
        if (count := parameter_count(model)) is not None:
            run.config.update({COUNT: count}, allow_val_change=True)
        if self._log_model != "false":
            self._keep_architecture(args, model)

    def rewrite(self, logs: Any, state: Any) -> dict[str, Any]:
        curves = {key: value for key, value in logs.items() if key not in SUMMARY}
        once = {key: value for key, value in logs.items() if key in SUMMARY}
        return {**once, **rewrite_logs(curves), AXIS: state.global_step}

    def deliver(self, values: dict[str, Any], step: int, epoch: float | None) -> None:
        del step, epoch
        for key in SUMMARY & values.keys():
            self.tracker.run.summary[key] = values.pop(key)
        self.tracker.log(values)

    # The model

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del control, kwargs
        if self._log_model == "checkpoint" and self._initialized and state.is_world_process_zero:
            aliases = [f"epoch_{round(state.epoch or 0, 2)}", f"checkpoint_global_step_{state.global_step}"]
            self._upload_later(self._upload, args, state, self._facts(), aliases, self._model_name(args))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training and self._log_model != "false" and self.tracker is not None and state.is_world_process_zero:
            with saved_model(args, kwargs.get("model"), kwargs.get("processing_class")) as folder:
                if folder is not None:
                    facts = self._facts() if not args.load_best_model_at_end else self._best(args, state)
                    kept = staged(folder)
                    self._later(self._upload, kept, {**facts, "final_model": True}, ["final_model"], self._model_name(args))
        super().on_train_end(args, state, control, **kwargs)

    def _upload(self, folder: Path, metadata: dict[str, Any], aliases: list[str], name: str) -> None:
        found = self._wandb.Artifact(name=name, type="model", metadata=metadata)
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

    def _facts(self) -> dict[str, Any]:
        run = self.tracker.run
        found = {key: value for key, value in dict(run.summary).items() if isinstance(value, numbers.Number) and key[0] != "_"}
        return {**found, COUNT: run.config.get(COUNT)}

    def _best(self, args: Any, state: Any) -> dict[str, Any]:
        best = {f"eval/{args.metric_for_best_model}": state.best_metric, "train/total_flos": state.total_flos}
        return {**best, COUNT: self.tracker.run.config.get(COUNT)}


def _names(args: Any, state: Any) -> dict[str, Any]:
    """Return name and group of a new run: a trial of a search is named after itself."""
    if state.trial_name is not None:
        return {"name": state.trial_name, "group": getattr(args, "run_name", None) or args.output_dir}
    return {"name": args.run_name} if getattr(args, "run_name", None) is not None else {}


def _log_model() -> str:
    found = os.environ.get("WANDB_LOG_MODEL", "false")
    if found in LOG_MODEL:
        return found
    notices.once(
        "wandb:log model",
        f"WANDB_LOG_MODEL={found!r} is not known, so no model is uploaded. Set it to one of {', '.join(LOG_MODEL)}.",
    )
    return "false"
