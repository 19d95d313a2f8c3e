"""The arguments of a loop and a Trainer, with Transformers' names and defaults, so that its scripts and callbacks work.

LoopArguments is for any loop; TrainingArguments adds what the Trainer does itself. Neither imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SettingError, notices, suggestion
from ..facts.mask import mask
from ..process import detect

# Arguments of Transformers without effect here, with its defaults: callbacks may read them, and a script may pass a default.
_INERT: dict[str, Any] = {
    "accelerator_config": None, "auto_find_batch_size": False, "average_tokens_across_devices": True, "batch_eval_metrics": False,
    "ddp_backend": None, "ddp_broadcast_buffers": None, "ddp_bucket_cap_mb": None, "ddp_static_graph": None, "ddp_timeout": 1800,
    "dataloader_in_order": True, "dataloader_multiprocessing_context": None, "debug": "", "deepspeed": None, "do_eval": False,
    "do_predict": False, "do_train": False, "enable_jit_checkpoint": False, "eval_accumulation_steps": None,
    "eval_do_concat_batches": True, "eval_use_gather_object": False, "fsdp": None, "fsdp_config": None, "full_determinism": False,
    "hub_always_push": False, "hub_model_id": None, "hub_private_repo": None, "hub_revision": None, "hub_strategy": "every_save",
    "hub_token": None, "include_for_metrics": [], "include_num_input_tokens_seen": "no", "label_smoothing_factor": 0.0,
    "length_column_name": "length", "local_rank": -1, "log_level": "passive", "log_level_replica": "warning",
    "log_on_each_node": True, "logging_dir": None, "logging_nan_inf_filter": True, "neftune_noise_alpha": None,
    "optim_target_modules": None, "parallelism_config": None, "push_to_hub": False, "save_on_each_node": False,
    "skip_memory_metrics": True, "tf32": None, "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None,
    "torch_empty_cache_steps": None, "trackio_bucket_id": None,
    "trackio_space_id": None, "trackio_static_space_id": None, "use_cache": False, "use_liger_kernel": False,
}  # fmt: skip
# Those whose other values do not affect training: accepted with a warning, and kept for callbacks to read.
_HARMLESS = frozenset(
    "average_tokens_across_devices ddp_timeout do_eval do_predict do_train eval_accumulation_steps eval_use_gather_object "
    "hub_token local_rank log_level log_level_replica log_on_each_node logging_dir logging_nan_inf_filter skip_memory_metrics "
    "trackio_bucket_id trackio_space_id trackio_static_space_id hub_private_repo".split()
)
_STRATEGIES = ("no", "steps", "epoch")


@dataclass
class LoopArguments:
    """Arguments of a loop: how long, and when to log, evaluate and save. Steps below 1 are a fraction of all steps."""

    output_dir: str = "trainer_output"
    num_train_epochs: float = 3.0
    max_steps: int = -1
    gradient_accumulation_steps: int = 1
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    logging_last_step: bool = True  # ours: the steps after the last full interval are logged, too
    eval_strategy: str | None = None  # None: "steps" if eval_steps is given, else "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    ignore_data_skip: bool = False
    restore_callback_states_from_checkpoint: bool = True
    report_to: Any = "none"
    project: str | None = None
    run_name: str | None = None
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        self.output_dir = os.fspath(self.output_dir)
        if self.eval_strategy is None:
            self.eval_strategy = "steps" if self.eval_steps else "no"
        self.logging_strategy = _one_of("logging_strategy", self.logging_strategy, _STRATEGIES)
        self.eval_strategy = _one_of("eval_strategy", self.eval_strategy, _STRATEGIES)
        self.save_strategy = _one_of("save_strategy", self.save_strategy, (*_STRATEGIES, "best"))
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        self._check_numbers()
        self._choose_best()
        self.report_to = _names_of(self.report_to)
        self.disable_tqdm = bool(self.disable_tqdm)

    def _check_numbers(self) -> None:
        for name in ("gradient_accumulation_steps", "logging_steps", "eval_steps", "save_steps", "save_total_limit"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise SettingError(f"{name}={number!r} is not above 0. Nothing was started. Give a positive number.")
        if self.max_steps <= 0 and not self.num_train_epochs > 0:
            raise SettingError(
                f"num_train_epochs={self.num_train_epochs!r} leaves nothing to train. Nothing was started. "
                "Give a positive number of epochs, or max_steps."
            )

    def _choose_best(self) -> None:
        """Fill in how the best model is determined, and refuse settings that could never find it."""
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.save_strategy == "best"):
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        if self.save_strategy == "best" and self.eval_strategy == "no":
            raise SettingError('save_strategy="best" without evaluation saves nothing. Nothing was started. Set eval_strategy.')
        if self.load_best_model_at_end and self.save_strategy != "best":
            self._check_best_is_saved()

    def _check_best_is_saved(self) -> None:
        why = ""
        if self.eval_strategy != self.save_strategy or self.eval_strategy == "no":
            why = f"eval_strategy={self.eval_strategy!r} and save_strategy={self.save_strategy!r} differ or are off"
        elif self.eval_strategy == "steps" and not _whole_multiple(self.save_steps, self.eval_steps or 1):
            why = f"save_steps={self.save_steps} is not a multiple of eval_steps={self.eval_steps}"
        if why:
            raise SettingError(
                f"load_best_model_at_end needs every saved model evaluated, but {why}. Nothing was started. "
                'Make the two alike, or use save_strategy="best".'
            )

    def __getattr__(self, name: str) -> Any:
        if name in _INERT:  # Transformers' arguments that have no effect here: its callbacks read the default
            return _INERT[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def world_size(self) -> int:
        return detect().world_size

    @property
    def process_index(self) -> int:
        return detect().rank

    @property
    def local_process_index(self) -> int:
        return detect().local_rank

    @property
    def should_save(self) -> bool:
        return self.process_index == 0

    @property
    def should_log(self) -> bool:
        return self.process_index == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments by name; secrets are masked."""
        masked: Any = mask({item.name: getattr(self, item.name) for item in dataclasses.fields(self)})
        return dict(masked)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the arguments with everything but numbers and texts converted to text."""
        return {name: value if type(value) in (bool, int, float, str) else str(value) for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)


@dataclass
class TrainingArguments(LoopArguments):
    """Arguments of the Trainer, with the names and meanings of Transformers. Steps below 1 are a share of all steps.

    Args:
        output_dir: Where checkpoints go.
        num_train_epochs: How many epochs to train.
        max_steps: How many steps to train; above 0, it overrides the epochs.
        gradient_accumulation_steps: Batches per step.
        logging_strategy: When callbacks get values: `"steps"`, `"epoch"` or `"no"`.
        logging_steps: Every so many steps.
        logging_first_step: Also after the first step.
        logging_last_step: Also after the last step.
        eval_strategy: When to evaluate: `"steps"`, `"epoch"` or `"no"`. Default: `"steps"` if `eval_steps` is given.
        eval_steps: Every so many steps.
        eval_delay: Not before this step or epoch.
        eval_on_start: Also before training.
        save_strategy: When to save: `"steps"`, `"epoch"`, `"best"` or `"no"`.
        save_steps: Every so many steps.
        save_total_limit: Keep so many checkpoints.
        load_best_model_at_end: Load the best checkpoint after training.
        metric_for_best_model: The metric that decides which one is best.
        greater_is_better: Whether high values of it are better.
        ignore_data_skip: After a resume, begin the epoch from its first batch.
        restore_callback_states_from_checkpoint: After a resume, restore the state of callbacks.
        report_to: Trackers that get a run of their own, as in Transformers.
        project: The project of a new run.
        run_name: The name of a new run.
        disable_tqdm: Show no progress bar.
        per_device_train_batch_size: Examples per batch and process.
        per_device_eval_batch_size: The same, in evaluations.
        learning_rate: The learning rate after the warmup.
        lr_scheduler_type: The schedule, such as `"linear"` or `"cosine"`.
        lr_scheduler_kwargs: Arguments of the schedule.
        warmup_steps: How many steps the learning rate rises; below 1, a share of all steps.
        warmup_ratio: The same, as a share of all steps.
        optim: The optimizer. Default: AdamW, fused.
        optim_args: Arguments of the optimizer.
        weight_decay: The weight decay.
        adam_beta1: Adam's first beta.
        adam_beta2: Adam's second beta.
        adam_epsilon: Adam's epsilon.
        max_grad_norm: Clip gradients to this norm; 0 for never.
        bf16: Compute in bfloat16.
        fp16: Compute in float16, with loss scaling.
        gradient_checkpointing: Compute activations again in backward, to save memory.
        gradient_checkpointing_kwargs: Arguments for that.
        seed: The seed of all random generators.
        data_seed: The seed of the order of examples.
        use_cpu: Train on the CPU although there is a GPU.
        dataloader_drop_last: Leave out the last batch if it is smaller.
        dataloader_num_workers: Processes that load data.
        dataloader_pin_memory: Load into pinned memory.
        dataloader_persistent_workers: Keep these processes between epochs.
        dataloader_prefetch_factor: Batches that each of them loads ahead.
        train_sampling_strategy: The order of examples, such as `"random"`.
        remove_unused_columns: Leave out columns that the model does not take.
        label_names: The keys of labels in a batch. Default: `["labels"]`.
        prediction_loss_only: Evaluations return only the loss.
        save_only_model: Save no optimizer state; training cannot be resumed from it.
        resume_from_checkpoint: A checkpoint to continue from.
        ddp_find_unused_parameters: Passed to DistributedDataParallel.

    Raises:
        SettingError: An argument is unknown, or arguments contradict each other.

    Example:
        ```python
        import fanfold

        args = fanfold.TrainingArguments("out", max_steps=100, learning_rate=1e-3, eval_steps=20)
        ```
    """

    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0  # below 1: a fraction of all steps
    warmup_ratio: float | None = None
    optim: str | None = None  # None: "adamw_torch_fused", or "adamw_torch" before torch 2.8
    optim_args: Mapping[str, Any] | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    bf16: bool = False
    fp16: bool = False
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    seed: int = 42
    data_seed: int | None = None
    use_cpu: bool = False
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    train_sampling_strategy: str = "random"
    remove_unused_columns: bool = True
    label_names: list[str] | None = None  # None: ["labels"]
    prediction_loss_only: bool = False
    save_only_model: bool = False
    resume_from_checkpoint: str | None = None
    ddp_find_unused_parameters: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        from .optim import OPTIMIZERS, PLATEAU, SCHEDULES, default_optimizer

        self.lr_scheduler_type = _one_of("lr_scheduler_type", self.lr_scheduler_type, (*SCHEDULES, PLATEAU))
        self.optim = _one_of("optim", default_optimizer() if self.optim is None else self.optim, tuple(OPTIMIZERS))
        if self.lr_scheduler_type == PLATEAU:
            self._watch_a_metric()
        _one_of("train_sampling_strategy", self.train_sampling_strategy, ("random", "sequential"))
        if self.label_names is None:
            self.label_names = ["labels"]
        if self.bf16 and self.fp16:
            raise SettingError("bf16 and fp16 exclude each other. Nothing was started. Choose one.")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name}={getattr(self, name)!r} holds no sample. Nothing was started. Give 1 or more.")

    def _watch_a_metric(self) -> None:
        """Set the metric by which the schedule detects a plateau."""
        if self.eval_strategy == "no":
            raise SettingError(
                'lr_scheduler_type="reduce_lr_on_plateau" lowers the learning rate by what evaluations give, and there are none. '
                "Nothing was started. Set eval_strategy."
            )
        self.metric_for_best_model = self.metric_for_best_model or "loss"
        if self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")

    @property
    def train_batch_size(self) -> int:
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size

    @property
    def n_gpu(self) -> int:
        """How many GPUs this process uses; never more than one."""
        return int(self.device.type == "cuda")

    @property
    def device(self) -> Any:
        from accelerate import PartialState

        from .trainer_state import on_cpu

        return PartialState(cpu=on_cpu(self.use_cpu)).device

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return how many steps the learning rate rises.

        Args:
            num_training_steps: All steps.

        Returns:
            The number of steps.
        """
        steps = self.warmup_ratio if self.warmup_ratio is not None else self.warmup_steps
        return int(-(-num_training_steps * steps // 1)) if steps < 1 else int(steps)


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str:
    word = str(getattr(value, "value", value))  # Transformers' enums hold the name as their value
    if word not in known:
        raise SettingError(f"{name}={word!r} is not known. Nothing was started. Known: {', '.join(known)}.")
    return word


def _names_of(report_to: Any) -> list[Any]:
    """Return `report_to` as a list; "none" is an empty one."""
    names = list(report_to) if isinstance(report_to, (list, tuple)) else [report_to]
    return [] if names in (["none"], [None]) else names


def _whole_multiple(number: float, of: float) -> bool:
    times = number / of
    return times >= 1 and abs(times - round(times)) < 1e-9


def refuse_unknown(what: str, given: Iterable[str], known: set[str]) -> None:
    """Raise for the first name that is neither known nor one of Transformers'."""
    for name in given:
        if name not in known and name not in _INERT:
            raise SettingError(f"{what} does not know {name}. Nothing was started.{suggestion(name, sorted(known))}")


def _known_only(cls: type[LoopArguments], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate our arguments from Transformers' harmless ones; refuse the rest by name."""
    ours = {item.name for item in dataclasses.fields(cls)}
    others = {name: value for name, value in given.items() if name not in ours}
    refuse_unknown(cls.__name__, others, ours)
    for name, value in others.items():
        if value != _INERT[name] and name not in _HARMLESS:
            raise SettingError(
                f"{name}={value!r} is Transformers' and not done here. Nothing was started. Leave it out, or keep Transformers' "
                f"Trainer and give it fanfold's callback. Known: {', '.join(sorted(ours))}."
            )
        if value != _INERT[name]:
            notices.once(f"argument:{name}", f"{name}={value!r} has no effect in fanfold's Trainer. Training continues.")
    return {name: value for name, value in given.items() if name in ours}, others


def _check_names(cls: type[LoopArguments]) -> None:
    """Wrap the constructor so that unknown names are explained; its signature is unchanged."""
    made: Any = cls.__init__

    @functools.wraps(made)
    def checked(self: LoopArguments, *args: Any, **given: Any) -> None:
        ours, others = _known_only(cls, given)
        self.__dict__.update(others)
        made(self, *args, **ours)

    cls.__init__ = checked  # type: ignore[method-assign]


_check_names(LoopArguments)
_check_names(TrainingArguments)
