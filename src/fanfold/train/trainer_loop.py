"""The Trainer's loop: it knows the ranks, names values as Transformers' integrations do, and logs a summary at the end."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks import PrinterCallback, ProgressCallback
from ..callbacks.model_info import rewrite_logs
from . import data, trainer_state
from .evaluation import TrainOutput
from .loop import Loop
from .optim import waits_for_evaluations
from .reporter import Reporter

if TYPE_CHECKING:
    from .trainer import Trainer


class TrainerReporter(Reporter):
    """A reporter that names values as Transformers' integrations do, and averages the loss over the ranks."""

    def __init__(self, trainer: Trainer, run: Any) -> None:
        self._trainer = trainer
        self.sum: Any = 0.0  # of the losses of all steps
        super().__init__(trainer.args, run)

    def run_options(self) -> dict[str, Any]:
        return {**super().run_options(), "fold": {"train/loss": "mean"}}

    def facts(self) -> dict[str, Any]:
        return {"config": {**self.args.to_dict(), **trainer_state.model_facts(self._trainer.model)}}

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(rewrite_logs(dict(values)))

    def over_ranks(self, values: dict[str, Any], steps: int) -> dict[str, Any]:
        """Average the loss over the ranks, on the device; every rank calls this at the same step."""
        if "loss" in values:
            values["loss"] = self._trainer.accelerator.reduce(values["loss"], "mean")
            self.sum = self.sum + values["loss"] * steps
        return values


class TrainerLoop(Loop):
    """The Trainer's loop: it knows the ranks, names values as Transformers' integrations do, and logs a summary at the end."""

    _ends_run = False  # values logged after training go to the same run
    _describes_users_run = True  # as Transformers' integrations do
    _reporter: TrainerReporter

    def __init__(self, trainer: Trainer, callbacks: Iterable[Any], run: Any, on_error: str) -> None:
        self._trainer = trainer
        self.output = TrainOutput(0, 0.0, {})
        seen = PrinterCallback if trainer.args.disable_tqdm or importlib.util.find_spec("tqdm") is None else ProgressCallback
        super().__init__(
            run, args=trainer.args, callbacks=[*callbacks, seen],
            evaluate=trainer.evaluate, save=self._save_all, load=self._load_weights,
            model=trainer.model, processing_class=trainer.processing_class, on_error=on_error,
            optimizer=trainer.optimizer, lr_scheduler=trainer.lr_scheduler,
        )  # fmt: skip

    @property
    def weight(self) -> float:
        """The weight of this rank's batch, if the last one of an epoch is split unevenly."""
        batches = getattr(self.handler.train_dataloader, "batch_sampler", None)
        return batches.weight(self._at.batch) if isinstance(batches, data.Batches) else 1.0

    def _make_reporter(self, run: Any) -> TrainerReporter:
        return TrainerReporter(self._trainer, run)

    def _cannot(self) -> dict[str, str]:
        return {"evaluate": "the Trainer has no eval_dataset"} if self._trainer.eval_dataset is None else {}

    def _find_rank(self) -> None:
        self.state.is_world_process_zero = self._trainer.is_world_process_zero()
        self.state.is_local_process_zero = self._trainer.is_local_process_zero()

    def _barrier(self) -> None:
        if self._agreement is None or self._agreement.complete:  # otherwise a rank is gone, and the others save their state
            self._trainer.accelerator.wait_for_everyone()

    def _start(self) -> None:
        super()._start()
        self.state.train_batch_size = self._trainer.args.train_batch_size
        self._began, self._first, self._reporter.sum, self._flos = time.perf_counter(), self.state.global_step, 0.0, 0.0

    def _judge(self, metrics: Mapping[str, Any]) -> None:
        """Remember whether an evaluation is the best so far, and step a schedule that waits for it."""
        super()._judge(metrics)
        name = str(self.args.metric_for_best_model)
        if waits_for_evaluations(self._trainer.lr_scheduler):
            self._trainer.lr_scheduler.step(metrics[name if name in metrics else f"eval_{name.removeprefix('eval_')}"])

    def count_flos(self, flos: float) -> None:
        """Count floating-point operations of this rank. Ranks are summed where they synchronise: at saves and at the end."""
        self._flos += flos
        if self._trainer.accelerator.num_processes == 1:
            self._store_flos()

    def _store_flos(self) -> None:
        import torch

        accelerator, flos = self._trainer.accelerator, self._flos
        if accelerator.num_processes > 1 and (self._agreement is None or self._agreement.complete):
            kind = torch.float32 if accelerator.device.type == "mps" else torch.float64
            flos = accelerator.reduce(torch.tensor(flos, dtype=kind, device=accelerator.device), "sum").item()
        self.state.total_flos += flos
        self._flos = 0.0

    def predicting(self) -> None:
        """Fire the event for a finished batch of an evaluation or prediction."""
        self._fire("on_prediction_step")

    def predicted(self, metrics: dict[str, Any]) -> None:
        """Record a prediction's metrics and notify the callbacks."""
        self._reporter.record(metrics, self.state.global_step)
        self._fire("on_predict", metrics=dict(metrics))

    def _save_all(self, folder: Path) -> None:
        self._store_flos()
        trainer_state.save(self._trainer, folder)

    def _load_weights(self, folder: Path) -> None:
        trainer_state.load_weights(self._trainer.model, folder)

    def _closing(self) -> None:
        """Log the summary, and load the best model."""
        self._reporter.end_interval(self.state.global_step)  # values not logged yet, as with logging_strategy="no"
        seconds, steps = max(time.perf_counter() - self._began, 1e-9), self.state.global_step - self._first
        samples = steps * self._trainer.args.train_batch_size * self.args.gradient_accumulation_steps
        samples *= self._trainer.accelerator.num_processes
        loss = float(self._reporter.sum) / max(steps, 1)
        self._store_flos()
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": samples / seconds,
            "train_steps_per_second": steps / seconds,
            "total_flos": self.state.total_flos,
            "train_loss": loss,
        }
        self.log(metrics)
        super()._closing()
        self.output = TrainOutput(self.state.global_step, loss, {**metrics, "epoch": self.state.epoch})
