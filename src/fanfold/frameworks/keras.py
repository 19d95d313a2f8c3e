"""Keras 3: a callback for fit(), evaluate() and predict() that writes a run, with any Keras backend."""

from __future__ import annotations

import importlib
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..callbacks.state import TrainerState
from ..callbacks.tell import SteeredTraining
from ..errors import guard, missing_extra, outcome
from ..probes.spans import Span
from ..recording.agreement import end_agreement
from ._session import TrainingSession, watch

try:
    keras: Any = importlib.import_module("keras")
except ImportError as error:
    if error.name not in (None, "keras"):
        raise  # Keras is installed but its backend is not: its own message explains it
    raise missing_extra("keras", "keras", "fanfold.frameworks.keras") from error

SETTLE_SECONDS = 2.0
NO_EVALUATION = "Keras evaluates at the end of an epoch, and cannot be asked to do so earlier"
__all__ = ["FanfoldCallback"]


class FanfoldCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Record training in a run. Arguments are those of fanfold.init(), or `run`, your own run.

    Metrics of an epoch are under `train/` and `val/`, those of evaluate() under `test/`, and Keras' running means within an epoch
    under `batch/`, every `every` batches (0: never). Steps are the optimizer's. fit() of the same model continues in the same
    run; it stays open until the process ends, another model is trained, or fanfold.finish() is called. `min_lr` and `max_lr`
    limit what `fanfold tell` may set.
    """

    # Keras may call us from its own threads, where it converts metrics to numbers: without this, one callback that uses batch
    # metrics makes it wait for the device on the training thread.
    async_safe = True

    def __init__(
        self, project: str | None = None, *, run: Any = None, every: int = 1, min_lr: float | None = None,
        max_lr: float | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._session = TrainingSession(project, run, **options)
        self._session.settle = self._await_batches
        self._every = every
        self._fitted: Any = lambda: None
        self._fitting = False
        self._evaluating = Span("evaluation")
        self._base = self._begun = self._done = self._predicted = 0
        self._started = 0.0
        self._changed = threading.Condition()
        self._told = SteeredTraining(min_lr, max_lr)
        self._last: tuple[int, Mapping[str, Any]] | None = None  # the step and metrics of the last batch
        watch(keras.Model, "fit")

    @property
    def run(self) -> Any:
        """The run, once it is open."""
        return self._session.run

    # Training

    def on_train_begin(self, logs: Any = None) -> None:
        again = self._fitted() is self.model
        self._fitted, self._fitting = weakref.ref(self.model), True
        config = {} if again else self._config()
        run = self._session.begin(again=again, config=config)
        self._base = self._iterations()
        if not again and run.is_main_process:
            self._describe()
        self._told.begin(run, TrainerState(global_step=self._base), cannot={"evaluate": NO_EVALUATION})
        if isinstance(rate := self._learning_rate(), float) and self._settable():
            self._told.adjust_rate(rate, current=self._learning_rate, change=self._set_learning_rate)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._base, self._begun, self._done = self._iterations(), 0, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # The end of a batch may be reported from another thread, so a step ends where the next batch begins.
        self._carry_out(self._told.step_end(self._base + self._begun), self._base + self._begun)
        self._begun += 1

    def _carry_out(self, actions: set[str], step: int) -> None:
        if "stop" in actions:
            self.model.stop_training = True
            self._told.did("stop", step=step + 1)  # Keras looks at it after the batch that begins now
        if "save" in actions:
            self._save(step)
        if "log" in actions and self._last is not None:
            at, values = self._last
            self._log({f"batch/{name}": value for name, value in values.items()}, at)
            self._told.did("log")

    def _save(self, step: int) -> None:
        run = self._session.run
        path = Path("checkpoints") / f"{run.id}-step-{step}.keras"
        self._told.do("save", lambda: self._write(path) if run.is_main_process else None, f"in {path}")

    def _write(self, path: Path) -> None:
        self._sync()
        path.parent.mkdir(exist_ok=True)
        self.model.save(path)

    def _sync(self) -> None:
        """Bring the model up to date: with JAX, its variables are stale between batches, and changes to them are lost."""
        sync = getattr(self.model, "jax_state_sync", None)
        if sync is not None:
            sync()

    def _settable(self) -> bool:
        """Return whether the learning rate is a number, and not a schedule."""
        return not isinstance(
            getattr(self.model.optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule
        )

    def _set_learning_rate(self, rate: float) -> None:
        self._sync()
        self.model.optimizer.learning_rate = rate

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._every and (batch + 1) % self._every == 0:
            self._log({f"batch/{name}": value for name, value in (logs or {}).items()}, self._base + batch + 1)
        self._last = (self._base + batch + 1, dict(logs or {}))
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._base = self._iterations(self._base + self._begun)
        values = {_epoch_name(name): value for name, value in (logs or {}).items()}
        rate = self._learning_rate()
        self._log({"train/epoch": epoch, **values, **({} if rate is None else {"train/learning_rate": rate})}, self._base)

    def on_train_end(self, logs: Any = None) -> None:
        self._fitting = False
        self._told.end()
        end_agreement()
        self._session.end()

    def _await_batches(self) -> None:
        """Give Keras' threads a moment to deliver the batches that ended before an exception."""
        self._fitting = False
        with self._changed:
            self._changed.wait_for(lambda: self._done >= self._begun - 1, SETTLE_SECONDS)

    # Evaluation and prediction

    def on_test_begin(self, logs: Any = None) -> None:
        self._evaluating.begin()

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._evaluating.end()
        if not self._fitting:  # within fit() its metrics come with the epoch's
            self._log({f"test/{name}": value for name, value in (logs or {}).items()}, self._at())

    def on_predict_begin(self, logs: Any = None) -> None:
        self._predicted, self._started = 0, time.perf_counter()

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._predicted += 1

    def on_predict_end(self, logs: Any = None) -> None:
        seconds = time.perf_counter() - self._started
        self._log({"predict/batches": self._predicted, "predict/seconds": seconds}, self._at())

    # Information about the model

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        if values:
            self._session.live(lambda: {"config": self._config()}).log(values, step)

    def _at(self) -> int:
        """Return the step for values logged outside training."""
        return self._iterations(self._base)

    def _iterations(self, otherwise: int | None = None) -> int:
        """Return how many batches the optimizer has seen; read once per epoch, because the number may be on a device."""
        steps = getattr(getattr(self.model, "optimizer", None), "iterations", None)
        if steps is not None:
            return int(steps)
        return self._base if otherwise is None else otherwise

    def _learning_rate(self) -> float | None:
        rate = getattr(getattr(self.model, "optimizer", None), "learning_rate", None)
        return None if rate is None else float(rate)

    def _config(self) -> dict[str, Any]:
        model: Any = self.model
        facts: dict[str, Any] = {"backend": keras.backend.backend(), "model": {"class": type(model).__name__, "name": model.name}}
        facts |= {name: self.params[name] for name in ("epochs", "steps") if self._fitting and name in (self.params or {})}
        with guard("read the model's configuration"):
            facts["compile"] = model.get_compile_config()
            if model.built:
                facts["model"]["parameters"] = model.count_params()
        return facts

    def _describe(self) -> None:
        """Record the model's layers, and its graph if Keras can serialise it."""
        lines: list[str] = []
        with guard("describe the model"):
            self.model.summary(print_fn=lambda text, **_style: lines.append(text))
            self._log({"model/summary": "\n".join(lines)}, self._base)
        graph, error = outcome(self.model.to_json)
        if error is None:  # a model defined in code has none
            self._log({"model/graph": graph}, self._base)


def _epoch_name(name: str) -> str:
    return f"val/{name[4:]}" if name.startswith("val_") else f"train/{name}"
