"""Transformers: a callback for its real Trainer that writes a run on every rank and continues it after a restart.

Importing this module makes `TrainingArguments(report_to="fanfold")` work.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..callbacks.tell import SteeredTraining, set_flags
from ..errors import guard, needed
from ..probes.spans import Span
from ..recording.agreement import end_agreement
from ._session import TrainingSession, watch

with needed("transformers", "transformers", "fanfold.frameworks.transformers"):
    transformers: Any = importlib.import_module("transformers")
    integrations: Any = importlib.import_module("transformers.integrations")

NAME = "fanfold"
# Metrics each rank measures about itself, and how they are folded for trackers.
FOLD = {
    "rank/loss": "mean",
    "rank/step_seconds": "max",
    "rank/data_seconds": "max",
    "rank/samples_per_second": "sum",
    "rank/memory_bytes": "max",
}
__all__ = ["FanfoldCallback", "register"]


class FanfoldCallback(transformers.TrainerCallback):  # type: ignore[misc]  # Transformers is untyped here
    """Record a Trainer's training in a run, on every rank. Arguments are those of fanfold.init(), or `run`, your own run.

    The run stays open after train(), so that evaluate() and predict() log to it; it ends with the process, with fanfold.finish(),
    or when another training begins. A run the user has open is used, and left open. `min_lr` and `max_lr` limit what `fanfold
    tell` may set.
    """

    def __init__(
        self, project: str | None = None, *, run: Any = None, fold: Any = None, min_lr: float | None = None,
        max_lr: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        policy = {**FOLD, **(fold or {})} if fold is None or isinstance(fold, Mapping) else fold
        self._session = TrainingSession(project, run, fold=policy, **options)
        self._pace = Pace()
        self._epoch_at = -1
        self._evaluating, self._saving = Span("evaluation"), Span("checkpoint")
        self._told = SteeredTraining(min_lr, max_lr)
        watch(transformers.Trainer, "train")

    @property
    def run(self) -> Any:
        """The run, once it is open."""
        return self._session.run

    # Training

    def on_train_begin(self, args: Any, state: Any, _control: Any, model: Any = None, **more: Any) -> None:
        self._leave_spans()
        trial = bool(state.is_hyper_param_search)
        facts = _facts(args, model)
        if trial:
            facts |= {"name": state.trial_name, "group": args.run_name or args.output_dir}
            facts["config"]["trial"] = state.trial_params
        self._session.begin(state.stateful_callbacks.get(NAME), apart=trial, **facts)
        state.stateful_callbacks[NAME] = self._session.note()  # saved in every checkpoint's trainer_state.json
        self._epoch_at = -1
        self._pace.start(state.global_step)
        nothing = getattr(self._session.owner, "eval_dataset", None) is None
        cannot = {"evaluate": "the Trainer has no eval_dataset"} if nothing else {}
        self._told.begin(self._session.run, state, more.get("optimizer"), more.get("lr_scheduler"), cannot)

    def on_epoch_begin(self, *_event: Any, **_more: Any) -> None:
        self._leave_spans()
        self._pace.rest()

    def on_step_begin(self, *_event: Any, **_more: Any) -> None:
        self._leave_spans()
        self._pace.batch_came()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_more: Any) -> None:
        self._pace.step_ended()
        set_flags(self._told, control, state.global_step)
        if control.should_log:
            self._log_own_loss(state)
        self._enter_spans(control)

    def on_epoch_end(self, _args: Any, state: Any, control: Any, **_more: Any) -> None:
        self._leave_spans()
        if control.should_log:
            self._log_own_loss(state)
        self._enter_spans(control)

    def on_save(self, *_event: Any, **_more: Any) -> None:
        self._saving.end()
        self._pace.rest()
        self._told.did("save")

    def _enter_spans(self, control: Any) -> None:
        """Begin to time what the Trainer does next: it evaluates and saves between two events, without one of its own."""
        if control.should_evaluate:
            self._evaluating.begin()
        elif control.should_save:
            self._saving.begin()

    def _leave_spans(self) -> None:
        """Forget spans that did not happen because another callback decided otherwise."""
        self._evaluating.cancel()
        self._saving.cancel()

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_more: Any) -> None:
        self._leave_spans()
        self._log_own_loss(state)  # for the steps after the last full interval, which the Trainer itself never logs
        self._told.end()
        end_agreement(state)
        self._session.end()

    def _log_own_loss(self, state: Any) -> None:
        """Log this rank's loss before the Trainer averages it over the ranks; it stays on the device until it is copied."""
        trainer = self._session.owner
        total = getattr(trainer, "_tr_loss", None)
        steps = state.global_step - getattr(trainer, "_globalstep_last_logged", state.global_step)
        if steps > 0 and total is not None:
            self._session.live().log({"rank/loss": total / steps}, state.global_step)

    # Logged values

    def on_log(
        self, args: Any, state: Any, _control: Any, logs: Mapping[str, Any] | None = None, model: Any = None, **_more: Any
    ) -> None:
        values = dict(logs or {})
        if state.global_step == self._epoch_at:
            values.pop("epoch", None)  # an evaluation logs it again
        elif "epoch" in values:
            self._epoch_at = state.global_step
        named = integrations.rewrite_logs(values)
        if "loss" in values and self._session.owner is not None:
            batch = (state.train_batch_size or args.train_batch_size) * args.gradient_accumulation_steps
            named |= self._pace.take(state.global_step, batch)
        self._log(named, args, state, model)
        self._told.did("log")

    def on_evaluate(self, _args: Any, _state: Any, control: Any, **_more: Any) -> None:
        self._evaluating.end()
        if control.should_save and self._session.owner is not None:
            self._saving.begin()
        self._pace.rest()  # its metrics came through on_log
        self._told.did("evaluate")

    def on_predict(
        self, args: Any, state: Any, _control: Any, metrics: Mapping[str, Any] | None = None, model: Any = None, **_more: Any
    ) -> None:
        self._log(integrations.rewrite_logs(dict(metrics or {})), args, state, model)

    def _log(self, values: dict[str, Any], args: Any, state: Any, model: Any) -> None:
        if values:
            self._session.live(lambda: _facts(args, model)).log(values, state.global_step)


class Pace:
    """The speed of this rank, measured only by the host's clock.

    Seconds are exact over an interval although steps run ahead on a device: the Trainer itself waits for it before it logs.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.start(0)

    def start(self, step: int) -> None:
        self._step = step
        self._total = self._data = 0.0
        self.rest()

    def rest(self) -> None:
        """Exclude the time since the last event: evaluation, saving, setup."""
        self._mark = self._clock()

    def batch_came(self) -> None:
        """Count the time since the last event as waiting for data."""
        self._data += self._passed()

    def step_ended(self) -> None:
        self._total += self._passed()

    def _passed(self) -> float:
        now = self._clock()
        passed, self._mark = now - self._mark, now
        return passed

    def take(self, step: int, samples: int) -> dict[str, float]:
        """Return the metrics since the last call, with `samples` per step, and start over."""
        steps, seconds, data = step - self._step, self._total + self._data + self._passed(), self._data
        self.start(step)
        if steps <= 0:
            return {}
        return {
            "rank/step_seconds": seconds / steps,
            "rank/data_seconds": data / steps,
            "rank/samples_per_second": samples * steps / max(seconds, 1e-9),
            "rank/memory_bytes": _memory_bytes(),
        }


def _memory_bytes() -> int:
    """Return the peak memory this process allocated on its device, or without a device, its resident memory."""
    import torch

    for device in (torch.cuda, torch.xpu):
        if device.is_available() and device.is_initialized():
            return int(device.max_memory_allocated())
    import psutil

    return int(psutil.Process().memory_info().rss)


def _facts(args: Any, model: Any) -> dict[str, Any]:
    """Return a run's facts from a Trainer's arguments and model."""
    facts: dict[str, Any] = {"config": dict(args.to_dict())}
    default = next((field.default for field in args.__dataclass_fields__.values() if field.name == "project"), None)
    if getattr(args, "project", default) != default:
        facts["project"] = args.project
    if args.run_name and args.run_name != args.output_dir:
        facts["name"] = args.run_name
    with guard("read the model's configuration"):
        facts["config"] |= _model_facts(model)
    return facts


def _model_facts(model: Any) -> dict[str, Any]:
    count: Any = importlib.import_module("transformers.trainer_pt_utils").get_model_param_count
    facts: dict[str, Any] = {}
    config = getattr(model, "config", None)
    if config is not None:
        facts["model"] = config.to_dict() if hasattr(config, "to_dict") else config
    if getattr(model, "peft_config", None):
        facts["peft"] = {name: adapter.to_dict() for name, adapter in model.peft_config.items()}
    if model is not None:
        facts["parameters"] = count(model)
        facts["trainable_parameters"] = count(model, trainable_only=True)
    return facts


def register() -> None:
    """Make `TrainingArguments(report_to="fanfold")` work."""
    integrations.integration_utils.INTEGRATION_TO_CALLBACK[NAME] = FanfoldCallback


register()
