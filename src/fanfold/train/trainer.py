"""Trainer: a small but complete trainer for torch models, on Loop and Accelerate, with Transformers' names.

It adds to a loop: placing model and data, the update itself, and checkpoints that resume to the same weights.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..callbacks import CallbackHandler, TrainerControl, TrainerState
from ..errors import SettingError, missing_extra
from . import checkpoints, data, trainer_state
from .arguments import TrainingArguments
from .evaluation import Gathered, PredictionOutput, TrainOutput, count_of
from .lengths import length_of, updates_of
from .model import call, labels_of, loss_of, predictions_of
from .optim import make_optimizer, make_scheduler, waits_for_evaluations
from .trainer_loop import TrainerLoop


class Trainer:
    """Train a torch model with callbacks.

    The model returns its loss: alone, first in a tuple, or as `loss` of a dict or object; or pass `compute_loss_func(outputs,
    labels)`, or override compute_loss(). Values go to `run`: the one given, else the current one, else a new one, which stays
    open after training; `run=False` for none. Each step's values are recorded on every rank.

    Args:
        model: The model. Or pass `model_init`.
        args: TrainingArguments.
        data_collator: Makes a batch of a list of examples.
        train_dataset: What to train on.
        eval_dataset: What to evaluate, or a dict of datasets.
        processing_class: A tokenizer or processor, saved with the model.
        model_init: Creates the model.
        compute_loss_func: As above.
        compute_metrics: Gets an EvalPrediction and returns metrics.
        callbacks: Callbacks, or classes of them.
        optimizers: An optimizer and a schedule, instead of those that args describe.
        optimizer_cls_and_kwargs: The class of the optimizer and its arguments.
        preprocess_logits_for_metrics: Reduces logits before they are kept for `compute_metrics`.
        run: As above.
        on_error: When a callback raises: `"raise"` ends training, `"disable"` continues without the callback.

    Raises:
        SettingError: There is no model, or arguments contradict each other.
        MissingExtra: accelerate is not installed.

    Example:
        ```python
        import torch

        import fanfold

        model = torch.nn.Linear(4, 1)
        data = [{"input": torch.randn(4), "labels": torch.zeros(1)} for _ in range(64)]
        args = fanfold.TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=8)
        trainer = fanfold.Trainer(
            model, args, train_dataset=data, compute_loss_func=lambda outputs, labels: (outputs - labels).square().mean()
        )
        print(trainer.train().global_step)
        ```
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        callbacks: Iterable[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        run: Any = None,
        on_error: str = "raise",
    ) -> None:
        if (model is None) == (model_init is None):
            raise SettingError("Trainer needs a model, or a model_init that makes one, not both. Nothing was started.")
        self.args = args if args is not None else TrainingArguments()
        _check(self.args, eval_dataset)
        self.label_names = list(self.args.label_names or ())
        self.accelerator = trainer_state.make_accelerator(self.args)
        trainer_state.seed_everything(self.args.seed)
        self.model_init = model_init
        self.model = model_init() if model_init is not None else model
        self.model_wrapped = self.model
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.data_collator = data.collator(data_collator, processing_class, self.model, self.args)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._given_optimizers = optimizers
        self._made_optimizer: Any = None
        self._optimizer_recipe = optimizer_cls_and_kwargs
        self._resumed_from: Path | None = None
        self._prepare_model()
        self.loop = TrainerLoop(self, callbacks or (), run, on_error)

    def _prepare_model(self) -> None:
        if self.args.gradient_checkpointing:
            enable = getattr(self.model, "gradient_checkpointing_enable", None)
            if enable is None:
                raise SettingError(
                    "gradient_checkpointing=True needs a model with gradient_checkpointing_enable(). Nothing was started. "
                    "Leave it out, or use torch.utils.checkpoint in the model."
                )
            enable(gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs or {})
        self.model.to(self.accelerator.device)

    # Delegated to the loop

    @property
    def state(self) -> TrainerState:
        return self.loop.state

    @property
    def control(self) -> TrainerControl:
        return self.loop.control

    @property
    def callback_handler(self) -> CallbackHandler:
        return self.loop.handler

    @property
    def run(self) -> Any:
        """The run that values go to."""
        return self.loop.run

    def add_callback(self, callback: Any) -> None:
        """Add a callback at the end: an instance, or a class, which is instantiated without arguments.

        Args:
            callback: The callback.
        """
        self.loop.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, or the first one of a class; return None if there is none.

        Args:
            callback: The callback or its class.

        Returns:
            The callback.
        """
        return self.loop.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class.

        Args:
            callback: The callback or its class.
        """
        self.loop.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def is_local_process_zero(self) -> bool:
        return bool(self.accelerator.is_local_main_process)

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values: inside a step they are averaged like the loss, outside they are sent immediately.

        Args:
            values: What to record, by key.
        """
        self.loop.log(values)

    # Data

    def get_train_dataloader(self) -> Any:
        """Return this rank's training batches. Override it to use your own loader.

        Returns:
            The batches.
        """
        if self.train_dataset is None:
            raise SettingError("train() needs a train_dataset. Nothing was trained. Give one to Trainer(train_dataset=…).")
        return data.train_loader(self.train_dataset, self.args, self.data_collator, **self._rank())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return this rank's part of an evaluation.

        Args:
            eval_dataset: The dataset. Default: the one of the Trainer.

        Returns:
            The batches.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise SettingError("evaluate() needs an eval_dataset. Nothing was evaluated. Give one to it or to Trainer(…).")
        return data.eval_loader(dataset, self.args, self.data_collator, **self._rank())

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return this rank's part of a prediction.

        Args:
            test_dataset: The dataset.

        Returns:
            The batches.
        """
        return data.eval_loader(test_dataset, self.args, self.data_collator, **self._rank())

    def _rank(self) -> dict[str, int]:
        return {"rank": self.accelerator.process_index, "world": self.accelerator.num_processes}

    # Training

    def train(self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None) -> TrainOutput:
        """Train, from the start or from a checkpoint: a folder, or True for the latest complete one in output_dir.

        Args:
            resume_from_checkpoint: Where to continue.

        Returns:
            The number of steps, the mean loss and metrics of speed.

        Raises:
            SettingError: There is no checkpoint, or no data.
            CallbackError: A callback raised; it is named with its event.
        """
        asked = resume_from_checkpoint if resume_from_checkpoint is not None else self.args.resume_from_checkpoint
        folder = checkpoints.choose(self.args.output_dir, asked)
        if self.model_init is not None:  # every training starts from the same model
            trainer_state.seed_everything(self.args.seed)
            self.model, self._made_optimizer = self.model_init().to(self.accelerator.device), None
        loader = self.get_train_dataloader()
        if folder is not None:
            self.loop.resume(folder)
        model = self._make_ready(_all_steps(self.args, loader))
        if folder is not None:
            trainer_state.load_optimizer(self, folder)
        self._resumed_from = folder
        with self.loop:
            for epoch in self.loop.epochs():
                data.set_epoch(loader, epoch)
                model.train()
                for batch in self.loop.steps(loader, skip=self._skip):
                    self._train_on(model, batch)
        return self.loop.output

    def _make_ready(self, steps: int) -> Any:
        """Create optimizer and schedule, and let Accelerate wrap model and optimizer."""
        self.accelerator.free_memory()
        trainer_state.reset_accumulation(self.accelerator)
        optimizer, scheduler = self._given_optimizers
        if optimizer is None:
            optimizer = self._made_optimizer  # a second training continues with the first one's optimizer state
        self.create_optimizer_and_scheduler(steps, optimizer, scheduler)
        self._made_optimizer = self.optimizer
        self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.optimizer.zero_grad()
        self._first_step = trainer_state.FirstStepCheck(self.optimizer)
        handler = self.loop.handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        return self.model_wrapped

    def create_optimizer_and_scheduler(self, num_training_steps: int, optimizer: Any = None, scheduler: Any = None) -> None:
        """Create the optimizer and the learning-rate schedule unless given.

        Args:
            num_training_steps: The length of the schedule.
            optimizer: Use this one.
            scheduler: Use this one.
        """
        self.optimizer = optimizer if optimizer is not None else make_optimizer(self.model, self.args, self._optimizer_recipe)
        self.lr_scheduler = scheduler if scheduler is not None else make_scheduler(self.optimizer, self.args, num_training_steps)

    def _skip(self, loader: Any, done: int) -> Iterable[Any]:
        """Move to the data position with the checkpoint's random states; called once on a resume.

        A pass over the data draws a random number as it begins: before the checkpoint, unless the epoch has not begun yet.
        """
        rest = data.from_place(loader, done) if done else None
        if self._resumed_from is not None:
            trainer_state.load_random_states(self._resumed_from, self.accelerator.process_index)
        return rest if rest is not None else data.from_place(loader, 0)

    def _train_on(self, model: Any, batch: Any) -> None:
        """Run forward and backward of a batch, and the update after the last batch of a step."""
        trainer_state.accumulate(self.accelerator, last=self.loop.sync_gradients)
        quiet = contextlib.nullcontext() if self.loop.sync_gradients else self.accelerator.no_sync(model)
        with quiet:
            loss = self.training_step(model, batch)
        self.loop.log({"loss": loss})
        if self.loop.sync_gradients:
            self.loop.log(self._update(model), mean=False)

    def training_step(self, model: Any, inputs: Any) -> Any:
        """Run forward and backward of one batch; return its loss, still on the device.

        Args:
            model: The model.
            inputs: The batch.

        Returns:
            The loss.
        """
        inputs = self._to_device(inputs)
        with self.accelerator.autocast():
            loss = self.compute_loss(model, inputs)
        weight = self.loop.weight
        weighted = loss if weight == 1.0 else loss * weight  # the last batch of an epoch may be split unevenly among ranks
        self.accelerator.backward(weighted / self.loop.accumulation_steps)
        self.loop.count_flos(self.floating_point_ops(inputs))
        return loss.detach()

    def floating_point_ops(self, inputs: Any) -> int:
        """Estimate the floating-point operations of a batch: six per parameter and token, for Transformers' models.

        Args:
            inputs: The batch.

        Returns:
            The estimate; 0 if it is not known.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        if not isinstance(inputs, Mapping) or name not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        return 6 * int(inputs[name].numel()) * int(self.model.num_parameters(exclude_embeddings=True))

    def _update(self, model: Any) -> dict[str, Any]:
        limit = self.args.max_grad_norm if self.args.max_grad_norm > 0 else float("inf")  # infinity: measure, do not clip
        values: dict[str, Any] = {"grad_norm": self.accelerator.clip_grad_norm_(model.parameters(), limit)}
        values["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        if self._first_step.pending:
            self._first_step.confirm(overflow=self.accelerator.optimizer_step_was_skipped)
        if not self.accelerator.optimizer_step_was_skipped and not waits_for_evaluations(self.lr_scheduler):
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return values

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:  # noqa: ARG002 - Transformers' signature
        """Return the loss of a batch, or (loss, outputs). Override it to use your own loss.

        Args:
            model: The model.
            inputs: The batch.
            return_outputs: Return the outputs, too.
            num_items_in_batch: The number of labels in all batches of this step.

        Returns:
            The loss, still on the device.
        """
        labels = labels_of(inputs, self.label_names)
        outputs = call(model, inputs, without_labels=self.label_names if self.compute_loss_func is not None else None)
        loss = self.compute_loss_func(outputs, labels) if self.compute_loss_func is not None else loss_of(outputs, must=True)
        return (loss, outputs) if return_outputs else loss

    def _to_device(self, inputs: Any) -> Any:
        from accelerate.utils import send_to_device

        return send_to_device(inputs, self.accelerator.device, non_blocking=self.args.dataloader_pin_memory)

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Evaluate a dataset, or each of a dict of datasets, and report the metrics to callbacks and run.

        Args:
            eval_dataset: The dataset. Default: the one of the Trainer.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Put before each metric.

        Returns:
            The metrics.

        Raises:
            SettingError: There is no dataset.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(dataset, dict):
            found: dict[str, Any] = {}
            for name, part in dataset.items():
                found |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        gathered = self._pass_over(self.get_eval_dataloader(dataset), ignore_keys, need=self.compute_metrics is not None)
        metrics = gathered.metrics(metric_key_prefix, self.compute_metrics)
        self.loop.report(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return the predictions for a dataset, and its metrics if it has labels.

        Args:
            test_dataset: The dataset.
            ignore_keys: Outputs of the model to leave out.
            metric_key_prefix: Put before each metric.

        Returns:
            Predictions, labels and metrics.
        """
        gathered = self._pass_over(self.get_test_dataloader(test_dataset), ignore_keys, need=True)
        metrics = gathered.metrics(metric_key_prefix, self.compute_metrics)
        self.loop.predicted(metrics)
        return PredictionOutput(gathered.all_predictions, gathered.all_labels, metrics)

    def _pass_over(self, loader: Any, ignore_keys: list[str] | None, *, need: bool) -> Gathered:
        """Run over data without gradients. Ranks synchronise only at the end, so their parts may differ in size."""
        import torch

        gathered, was_training = Gathered(), self.model.training
        self.loop.handler.eval_dataloader = loader
        loss_only = self.args.prediction_loss_only or not need
        self.model.eval()
        try:
            with torch.no_grad():
                for batch in loader:
                    loss, predictions, labels = self.prediction_step(self.model, batch, loss_only, ignore_keys)
                    if predictions is not None and self.preprocess_logits_for_metrics is not None:
                        predictions = self.preprocess_logits_for_metrics(predictions, labels)
                    gathered.add(loss, predictions, labels, count_of(batch))
                    self.loop.predicting()
        finally:
            self.model.train(was_training)
        gathered.over_ranks(self.accelerator)
        return gathered

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return loss, predictions and labels of a batch; None for those that do not exist.

        Args:
            model: The model.
            inputs: The batch.
            prediction_loss_only: Return only the loss.
            ignore_keys: Outputs of the model to leave out.

        Returns:
            The three of them.
        """
        inputs = self._to_device(inputs)
        labels = labels_of(inputs, self.label_names)
        with self.accelerator.autocast():
            if labels is not None:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            else:
                outputs = call(model, inputs)
                loss = loss_of(outputs)
        if prediction_loss_only:
            return loss, None, None
        return loss, predictions_of(outputs, ignore_keys, has_loss=self.compute_loss_func is None and loss is not None), labels

    # Saving

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the model's weights, from the main process.

        Args:
            output_dir: The folder. Default: that of args.
        """
        if self.is_world_process_zero():
            trainer_state.save_weights(
                self.model, Path(output_dir if output_dir is not None else self.args.output_dir), self.processing_class
            )

    def save_state(self) -> None:
        """Write the training state to output_dir, from the main process."""
        if self.is_world_process_zero():
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(Path(self.args.output_dir) / checkpoints.STATE_FILE)


def _all_steps(args: TrainingArguments, loader: Any) -> int:
    total = updates_of(args, length_of(loader))[1]
    if total == float("inf"):
        raise SettingError(
            "the training data has no length, so the number of steps is unknown. Nothing was trained. Set max_steps in "
            "TrainingArguments."
        )
    return int(total)


def _check(args: Any, eval_dataset: Any) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise missing_extra("accelerate", "accelerate", "Trainer")
    if not isinstance(args, TrainingArguments):
        raise SettingError(
            f"Trainer got args of type {type(args).__module__}.{type(args).__name__}. Nothing was started. "
            "Pass fanfold.TrainingArguments(…); it takes the same names."
        )
    if args.eval_strategy != "no" and eval_dataset is None:
        raise SettingError(
            f"eval_strategy={args.eval_strategy!r} needs an eval_dataset. Nothing was started. "
            'Give one to Trainer(eval_dataset=…), or set eval_strategy="no".'
        )
