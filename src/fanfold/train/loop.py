"""Loop: callbacks and control for your own training loop. Iterating is all it takes; no framework is imported.

A loop can observe three things about its body: that it asked for the next batch (the last one is done), that it stopped asking
(`break`, or an exception, which look alike), and inside `with loop:` which of the two it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..callbacks import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
from ..callbacks.tell import ControlCallback
from ..errors import RunError, SettingError, notices
from ..probes.spans import Span, waited
from ..process import detect
from ..recording.agreement import FLAGS, Agreement, agreement_of, end_agreement
from . import checkpoints
from .arguments import LoopArguments, refuse_unknown
from .lengths import how_long, in_steps, length_of, updates_of, when_to_save
from .meter import Logs
from .reporter import Reporter

Skip = Callable[[Any, int], Iterable[Any]]


@dataclasses.dataclass
class Position:
    """The loop's position in its data: the epoch, and how many of its batches are done."""

    epoch: int = 0
    batch: int = 0
    length: int | None = None

    @property
    def done(self) -> bool:
        return self.length is not None and self.batch >= self.length


class Loop:
    """Add callbacks, logging, evaluation and saving to your own training loop.

    ::

        with fanfold.Loop(epochs=3, optimizer=optimizer, eval_steps=100, evaluate=evaluate) as loop:
            for epoch in loop.epochs():
                for batch in loop.steps(loader):
                    loop.log({"loss": train(batch)})

    `evaluate()` returns metrics; `save(folder)` writes into a folder created for it, and `load(folder)` reads it back, for
    resume() and `load_best_model_at_end`. Without the first two, check `loop.should_evaluate` and `loop.should_save` at the end
    of the body. Other arguments are those of TrainingArguments about timing: `eval_strategy`, `save_total_limit`,
    `metric_for_best_model`, `report_to`, …

    Args:
        run: The run values go to. Default: the current one, else a new one; False for none.
        epochs: How many epochs to train.
        max_steps: How many steps to train; overrides `epochs`.
        gradient_accumulation_steps: Batches per step.
        logging_steps: Callbacks get values every so many steps (below 1: this share of all steps).
        eval_steps: Evaluate every so many steps.
        save_steps: Save every so many steps.
        evaluate: As above.
        save: As above.
        load: As above.
        output_dir: Where checkpoints go.
        callbacks: Callbacks, or classes of them.
        model: Passed to callbacks.
        optimizer: Passed to callbacks; the `step()` of a torch optimizer is noticed.
        lr_scheduler: Passed to callbacks.
        processing_class: Passed to callbacks, such as a tokenizer.
        args: All timing arguments as one object.
        on_error: When a callback raises: `"raise"` ends training, `"disable"` continues without the callback.
        arguments: Further timing arguments, as above.

    Raises:
        SettingError: Arguments contradict each other, or one is unknown.
        CallbackError: A callback raised; it is named with its event.

    Example:
        ```python
        import fanfold

        with fanfold.Loop(epochs=2, logging_steps=5) as loop:
            for epoch in loop.epochs():
                for batch in loop.steps(range(10)):
                    loop.log({"loss": 1 / (batch + 1)})
        ```
    """

    _ends_run = True  # a run opened by the loop ends with its `with`
    _describes_users_run = False  # a run the user opened keeps the config they gave it

    def __init__(
        self,
        run: Any = None,
        *,
        epochs: float | None = None,
        max_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        logging_steps: float = 10,
        eval_steps: float | None = None,
        save_steps: float | None = None,
        evaluate: Callable[[], Mapping[str, Any]] | None = None,
        save: Callable[[Path], Any] | None = None,
        load: Callable[[Path], Any] | None = None,
        output_dir: str | os.PathLike[str] = "trainer_output",
        callbacks: Iterable[Any] = (),
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        args: LoopArguments | None = None,
        on_error: str = "raise",
        **arguments: Any,
    ) -> None:
        refuse_unknown("Loop", arguments, _NAMES)
        if args is None:
            epochs = arguments.pop("num_train_epochs", epochs)
            arguments |= {"gradient_accumulation_steps": gradient_accumulation_steps, "logging_steps": logging_steps}
            arguments |= {"eval_steps": eval_steps, "output_dir": os.fspath(output_dir), "max_steps": max_steps or -1}
            args = LoopArguments(**how_long(epochs, max_steps), **when_to_save(save, save_steps, arguments), **arguments)
        if args.load_best_model_at_end and load is None:
            raise SettingError(
                "load_best_model_at_end needs load=…, a function that reads a checkpoint's folder. Nothing was started."
            )
        self._evaluate, self._save, self._load = evaluate, save, load
        self._phase = "idle"  # idle, ready (epochs() was called), training
        self._inside = False
        self._open = False  # the body is working on a batch
        self._in_epoch = False
        self._hooks: list[Any] = []
        self._agreement: Agreement | None = None  # set if there is a process group, in which ranks wait for each other
        self._exhausted = False  # the loader had no batch: this rank cannot continue, whatever the others do
        self._length: int | None = None
        self.sync_gradients = True
        self.accumulation_steps = 1
        self.args = args
        self.state = TrainerState()
        self.control = TrainerControl()
        given = [*_reporting_callbacks(args), *callbacks]
        told = [] if run is False or any(_takes_requests(one) for one in given) else [ControlCallback]
        given = [DefaultFlowCallback, *told, *given]
        self.handler = CallbackHandler(given, model, processing_class, optimizer, lr_scheduler, on_error=on_error)
        self._reporter = self._make_reporter(run)
        self._reported = 0  # number of evaluations
        self._position: Position | None = Position()
        self._note: dict[str, Any] = {}
        self._loaded = False
        self._find_rank()
        self._fire("on_init_end")

    def _make_reporter(self, run: Any) -> Reporter:
        return Reporter(self.args, run)

    def _cannot(self) -> dict[str, str]:
        """Return what this loop cannot be asked to do, and why."""
        return {}

    def _find_rank(self) -> None:
        me = detect()
        self.state.is_world_process_zero, self.state.is_local_process_zero = me.main, me.local_main

    def _fire(self, event: str, **extra: Any) -> None:
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **extra)

    @property
    def run(self) -> Any:
        """The run values go to: the one given, else the current one, else a new one. None with run=False."""
        return self._reporter.run

    # Callbacks

    @property
    def callbacks(self) -> list[Any]:
        return self.handler.callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a callback at the end: an instance, or a class, which is instantiated without arguments.

        Args:
            callback: The callback.
        """
        self.handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, or the first one of a class; return None if there is none.

        Args:
            callback: The callback or its class.

        Returns:
            The callback.
        """
        return self.handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class.

        Args:
            callback: The callback or its class.
        """
        self.handler.remove_callback(callback)

    # Iterating

    def epochs(self) -> Iterator[int]:
        """Iterate over the epochs, from the checkpoint's position to the end of training; fire its start and end events.

        Returns:
            The numbers of the epochs, from 0.
        """
        with _Watch(self._left):
            self._start()
            while self._more():
                place = self._position or Position()
                yield place.epoch
                self._leave_epoch()
            self._finish()

    def steps(self, loader: Iterable[Any], *, skip: Skip | None = None) -> Iterator[Any]:
        """Iterate over the batches of an epoch, and fire the events of each step when its last batch is done.

        On a resume, completed batches are skipped one by one, or by `skip(loader, count)`, which returns the rest.

        Args:
            loader: The batches.
            skip: How batches that were done before a resume are skipped.

        Returns:
            The batches.
        """
        with _Watch(self._left, left_by_break=True):
            resumed = self._begin_epoch(loader)
            source = waited(self._rest(loader, skip) if resumed else iter(loader))
            empty = not resumed
            for batch, last, count in self._in_steps(source):
                empty = False
                self._open_batch(last, count)
                yield batch
                self._end_batch()
                if self.control.should_epoch_stop or self.control.should_training_stop:
                    break
            if empty:
                self._say_empty()
            self._end_epoch()

    def _start(self) -> None:
        if self._phase != "idle":
            raise RunError("epochs() is being iterated already. Nothing was changed. Let it end first, or make another Loop.")
        if not self._loaded:
            self.state, self._position, self._note = TrainerState(), Position(), {}
        self._loaded = False
        self._find_rank()
        self.control = TrainerControl()
        self._phase = "ready"
        self._reporter.last_logged = self.state.global_step

    def _more(self) -> bool:
        if self.control.should_training_stop:
            return False
        if self.args.max_steps > 0:
            return self.state.global_step < self.args.max_steps
        return self._position is None or self._position.epoch < math.ceil(self.args.num_train_epochs)

    def _begin_epoch(self, loader: Any) -> bool:
        """Begin an epoch, and the first time the training; return whether its position comes from a checkpoint."""
        if self._phase == "idle" or self._in_epoch:
            raise RunError(
                "steps() belongs once into each `for epoch in loop.epochs():`. No batch was given out. "
                "Chain several loaders with itertools.chain."
            )
        resumed = self._phase == "ready" and self.state.global_step > 0
        self._length = length_of(loader)
        if self._phase == "ready":
            self._begin(loader)
        self._in_epoch = True
        self._fire("on_epoch_begin")
        if self.args.ignore_data_skip:
            self._at.batch = 0
        self._at.length = self._length
        return resumed

    def _begin(self, loader: Any) -> None:
        """Begin training, with everything known about it."""
        args, each = self.args, self.args.gradient_accumulation_steps
        updates, total = updates_of(args, self._length) if loader is not None else (None, self.state.max_steps)
        shares = [n for n in ("logging_steps", "eval_steps", "save_steps") if 0 < (getattr(args, n) or 1) < 1]
        if shares and math.isinf(total):
            raise SettingError(
                f"{', '.join(shares)} below 1 is a share of all steps, and a loader without a length does not say how many "
                "there are. Training did not begin. Give whole numbers, or max_steps."
            )
        self.state.max_steps = total  # type: ignore[assignment]  # infinite if unknown; tqdm treats it so
        self.state.num_train_epochs = math.ceil(total / updates) if updates else math.ceil(args.num_train_epochs)
        self.state.compute_steps(args, total)  # type: ignore[arg-type]  # as above
        if self._position is None:
            done = self.state.global_step
            self._position = Position(done // updates, done % updates * each) if updates else Position(0, done * each)
        self.handler.train_dataloader = loader
        if (session := self._reporter.session) is not None:
            session.begin(self._note, describe_users_run=self._describes_users_run, **self._reporter.facts())
            for callback in self.callbacks:
                if _takes_requests(callback):
                    callback.run, callback.cannot = session.run, self._cannot()
        self._phase = "training"
        self._exhausted = False
        agreement = agreement_of(self.state)
        self._agreement = None if agreement.alone else agreement
        self._watch_optimizer()
        self._fire("on_train_begin")
        if args.eval_on_start and self._evaluate is not None:
            self._evaluate_now(judge=False)  # nothing is trained yet: it is neither the best nor a plateau

    def _rest(self, loader: Any, skip: Skip | None) -> Iterator[Any]:
        """Return the remaining batches of a resumed epoch."""
        done = self._at.batch
        return iter(skip(loader, done)) if skip is not None else itertools.islice(iter(loader), done, None)

    # A batch, a step, an epoch

    def _in_steps(self, source: Iterator[Any]) -> Iterator[tuple[Any, bool, int]]:
        """Yield each batch, whether it is the last of its step, and the step's number of batches."""
        each, length = self.args.gradient_accumulation_steps, self._length
        if length is None:
            yield from in_steps(source, each)
            return
        for batch in source:
            at = self._at.batch
            left = length - at + at % each  # left in the epoch, from the first batch of this step on
            yield batch, (at + 1) % each == 0 or at + 1 == length, min(each, left) if left > 0 else each

    def _open_batch(self, last: bool, count: int) -> None:
        self.sync_gradients, self.accumulation_steps = last, count
        if self._at.batch % self.args.gradient_accumulation_steps == 0:
            self._fire("on_step_begin")
        self._open = True

    @property
    def _at(self) -> Position:
        if self._position is None:
            self._position = Position()
        return self._position

    def _close_batch(self) -> None:
        """End the open batch: fire the event of a substep, or of a step, and do what is due after it."""
        self._open = False
        self._at.batch += 1
        if not self.sync_gradients:
            self._fire("on_substep_end")
            return
        self.state.global_step += 1
        self.state.epoch = self._at.epoch + self._done_share()
        self._reporter.end_step(self.state.global_step)
        self._fire("on_step_end")
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        self._agree("on_step_end")
        self._log_interval()

    def _agree(self, event: str | None = None) -> None:
        """Make all ranks do what a callback requested on one of them, after the same step.

        Flags that the arguments set at an `event` are already the same on every rank. Between events only stopping matters:
        evaluating and saving are in progress.
        """
        if self._agreement is None:
            return
        expected = TrainerControl(should_training_stop=self.control.should_training_stop)
        if event is not None:
            getattr(_FLOW, event)(self.args, self.state, expected)
        expected.should_training_stop = self._exhausted or self.state.global_step >= self.state.max_steps
        same = [action for action, flag in FLAGS.items() if getattr(expected, flag)]
        only = FLAGS if event is not None else ("stop", "end epoch")
        self._agreement.steer(self.control, self.state.global_step, same, only, late=event != "on_step_end")

    def _done_share(self) -> float:
        length = self._length
        if length is None and self.args.max_steps > 0:
            length = self.args.max_steps * self.args.gradient_accumulation_steps
        return self._at.batch / length if length else 0.0

    def _end_batch(self) -> None:
        if self._open:
            self._close_batch()
        self._settle(answered=True)
        self._agree()

    def _end_epoch(self) -> None:
        """End the epoch, whether its batches ran out or training stops."""
        self._in_epoch = False
        if self._length is None and not self.control.should_training_stop and self.args.max_steps <= 0:
            self.state.epoch = self._at.epoch + 1.0
        if not self.control.should_training_stop or self._at.done:  # otherwise a longer training may continue in the middle of it
            self._position = Position(self._at.epoch + 1)
        self._fire("on_epoch_end")
        self._agree("on_epoch_end")
        self._log_interval()
        self._settle(answered=False)
        self._agree()

    def _leave_epoch(self) -> None:
        """Return from an epoch's body: finish what it left open, as after `break`."""
        if self._phase == "ready":
            raise RunError(
                "an epoch passed without steps(). Training did not begin. Write `for batch in loop.steps(loader):` inside "
                "`for epoch in loop.epochs():`."
            )
        if self._in_epoch:
            self._abandon()
            self._end_epoch()
        self._settle(answered=True)

    def _abandon(self) -> None:
        """Count a batch whose body was left by `break` if it logged something; otherwise treat it as not handed out."""
        if self._open and self._reporter.meter.touched:
            self._close_batch()
            self._settle(answered=True)
        self._open = False

    def _say_empty(self) -> None:
        notices.once(
            "loop:empty",
            f"the loader gave no batch at step {self.state.global_step}, so training ends here. A generator gives its items "
            "only once: pass steps() something that can be iterated again each epoch.",
        )
        self._exhausted = True
        self.control.should_training_stop = True

    # The optimizer

    @contextlib.contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Notify callbacks of an update made inside. Not needed for torch optimizers passed as `optimizer`.

        Returns:
            A context manager.
        """
        self._fire("on_pre_optimizer_step")
        yield
        self._fire("on_optimizer_step")

    def _watch_optimizer(self) -> None:
        """Observe torch optimizers through their own hooks; a wrapper (Accelerate's) holds the real one."""
        optimizer = self.handler.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not hasattr(optimizer, "register_step_pre_hook"):
            return

        def before(*_call: Any) -> None:
            if not self.sync_gradients:
                notices.once(
                    "loop:substep",
                    "the optimizer stepped before the last batch of a step. Gradients are not accumulated as "
                    "gradient_accumulation_steps says. Step only `if loop.sync_gradients:`.",
                )
            self._fire("on_pre_optimizer_step")

        def after(*_call: Any) -> None:
            self._fire("on_optimizer_step")

        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    # Actions due after a step: done by the functions passed to the loop, or by its body

    def log(self, values: Mapping[str, Any], *, mean: bool = True) -> None:
        """Log values of the current batch. The run gets them every step; callbacks get their mean every `logging_steps`.

        With `mean=False`, for example for a learning rate, the latest value counts. Between steps values are sent immediately.

        Args:
            values: What to record, by key.
            mean: Average over the steps between two reports to callbacks; False keeps the last value.
        """
        if self._open:
            self._reporter.meter.add(values, mean=mean)
            return
        due = self.control.should_log
        self._reporter.record(values, self.state.global_step)
        self._tell_log(values)
        self.control.should_log |= due  # a callback's own log is not the one that is due: ranks reduce the loss for that one

    @property
    def should_evaluate(self) -> bool:
        """Whether to evaluate now. Reading it ends the step, so do it at the end of the body; then call evaluated(metrics)."""
        self._ask()
        return self.control.should_evaluate

    @property
    def should_save(self) -> bool:
        """Whether to save now. Reading it ends the step, so do it at the end of the body; then call saved(folder)."""
        self._ask()
        return self.control.should_save

    def _ask(self) -> None:
        if self._open:
            self._close_batch()
            self._settle(answered=False)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Report an evaluation; keys without the prefix `eval_` get it.

        Args:
            metrics: The metrics.
        """
        self._ask()
        self.report(prefixed(metrics))
        self._judge(metrics)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report an evaluation that does not affect which model is best, such as one after training.

        Args:
            metrics: The metrics.
        """
        self._reported += 1
        self._tell_evaluation(metrics)

    def _settle(self, *, answered: bool) -> None:
        """Evaluate and save if due. `answered` means that the body had its chance to do it itself."""
        if self.control.should_evaluate and self._evaluate is not None:
            self._evaluate_now()
        if self.control.should_evaluate:
            if not answered:
                return  # a checkpoint comes after the evaluation
            self._say_undone("evaluation", "evaluate=… to Loop, or ask loop.should_evaluate")
            self.control.should_evaluate = False
        if self.control.should_save and self._save is not None:
            self._save_now()
        elif self.control.should_save and answered:
            self._say_undone("checkpoint", "save=… to Loop, or ask loop.should_save")
            self.control.should_save = False

    def _evaluate_now(self, *, judge: bool = True) -> None:
        with Span("evaluation"):
            self._evaluate_and_report(judge=judge)

    def _evaluate_and_report(self, *, judge: bool) -> None:
        before = self._reported
        metrics = self._evaluate() if self._evaluate is not None else None
        if metrics is None and self._reported == before:
            raise SettingError("evaluate() returned nothing. The evaluation is lost. Return a dict of metrics: {'loss': …}.")
        if self._reported == before:
            self.report(prefixed(metrics or {}))
        self.control.should_evaluate = False
        if metrics is not None and judge:
            self._judge(metrics)

    def _say_undone(self, what: str, how: str) -> None:
        notices.once(
            f"loop:{what}",
            f"{what} was due at step {self.state.global_step}, but nothing handled it. Training continues without it. "
            f"Give {how} at the end of the loop's body.",
        )

    # Values

    def _tell_log(self, values: Mapping[str, Any]) -> None:
        """Send values to the callbacks, and add them to the history."""
        if self.state.log_history and isinstance(self.state.log_history[-1], Logs):
            self.state.log_history[-1].land()  # available by now
        told = {**values, "epoch": self.state.epoch}
        self.state.log_history.append(Logs({**told, "step": self.state.global_step}))
        self._fire("on_log", logs=Logs(told))

    def _log_interval(self) -> None:
        """Send the callbacks the means of the steps since the last log, if a log is due and there are any."""
        if not self.control.should_log or self.state.global_step <= self._reporter.last_logged:
            return
        values = self._reporter.end_interval(self.state.global_step)
        if values:
            self._tell_log(values)

    def _tell_evaluation(self, metrics: Mapping[str, Any]) -> None:
        self._reporter.record(metrics, self.state.global_step)
        self._tell_log(metrics)
        self._fire("on_evaluate", metrics={**Logs(metrics), "epoch": self.state.epoch})

    def _judge(self, metrics: Mapping[str, Any]) -> None:
        """Remember whether an evaluation is the best so far."""
        name = self.args.metric_for_best_model
        if name is None:
            return
        found = next((metrics[key] for key in (name, f"eval_{name}", name.removeprefix("eval_")) if key in metrics), None)
        if found is None:
            raise SettingError(
                f"metric_for_best_model={name!r} is not among what this evaluation gave: {', '.join(metrics) or 'nothing'}. "
                "Which model is best is unknown. Set metric_for_best_model to one of these."
            )
        value, best = float(found), self.state.best_metric
        if best is None or math.isnan(best) or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            if self.args.save_strategy == "best":
                self.control.should_save = True

    # Checkpoints

    def _save_now(self) -> None:
        """Save a checkpoint: the user's data, then our state, which comes last because it makes the checkpoint complete."""
        with Span("checkpoint"):
            self._save_into(checkpoints.folder_for(self.args.output_dir, self.state.global_step))

    def _save_into(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.state.is_world_process_zero:
            (folder / checkpoints.STATE_FILE).unlink(missing_ok=True)
        if self._save is not None:
            self._save(folder)
        self._barrier()
        self.saved(folder)

    def _barrier(self) -> None:
        """Wait until every rank is here; overridden where ranks can be synchronised."""

    def saved(self, folder: str | os.PathLike[str]) -> None:
        """Report that a checkpoint was saved in `folder`: the loop adds its own state to it and notifies the callbacks.

        Args:
            folder: The folder of the checkpoint.
        """
        with Span("checkpoint"):
            self._note_saved(Path(folder))

    def _note_saved(self, folder: Path) -> None:
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        if self.state.is_world_process_zero:
            checkpoints.write_note(folder, {**self._reporter.note(), **dataclasses.asdict(self._position or Position())})
            self.state.stateful_callbacks = self.handler.export_states()
            self.state.save_to_json(folder / checkpoints.STATE_FILE)
            checkpoints.rotate(self.args.output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        self._barrier()
        self._fire("on_save")

    def resume(self, checkpoint: str | os.PathLike[str] | bool | None = None) -> Path | None:
        """Resume from a checkpoint: the one named, or the latest complete one in `output_dir`. Return its folder, or None.

        Call it before epochs(). What save() wrote is read by load(), or by you.

        Args:
            checkpoint: The folder; True or None for the latest.

        Returns:
            The folder, or None if there is none.

        Raises:
            SettingError: There is no complete checkpoint.
        """
        if checkpoint is None:
            checkpoint = bool(checkpoints.checkpoints(self.args.output_dir))
        folder = checkpoints.choose(self.args.output_dir, checkpoint)
        if folder is not None:
            note = checkpoints.read_note(folder)
            self._take_state(TrainerState.load_from_json(folder / checkpoints.STATE_FILE), note)
            if self._load is not None:
                self._load(folder)
        return folder

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's state as plain data, for your own checkpoints.

        Returns:
            The state.
        """
        self.state.stateful_callbacks = self.handler.export_states()
        state = dataclasses.asdict(self.state)
        return {"state": state, "note": {**self._reporter.note(), **dataclasses.asdict(self._position or Position())}}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Continue from a loop's state; call it before epochs().

        Args:
            kept: What state_dict() returned.
        """
        known = {field.name for field in dataclasses.fields(TrainerState)}
        self._take_state(TrainerState(**{name: kept["state"][name] for name in known & set(kept["state"])}), kept["note"])

    def _take_state(self, state: TrainerState, note: Mapping[str, Any]) -> None:
        self.state, self._note, self._loaded = state, dict(note), True
        self._find_rank()
        best = state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            state.best_model_checkpoint = None  # moved or removed since: it can no longer be loaded
        # A checkpoint of Transformers stores only the number of steps; the position follows from the loader.
        self._position = Position(note["epoch"], note["batch"], note.get("length")) if "batch" in note else None
        if self._position is not None and self._position.done:
            self._position = Position(self._position.epoch + 1)
        if self.args.restore_callback_states_from_checkpoint and state.stateful_callbacks:
            self.handler.restore_states(state.stateful_callbacks)

    # The end

    def _finish(self) -> None:
        """End training normally."""
        if self._phase == "ready":
            self._begin(None)  # a checkpoint of a finished training: nothing is left to do, but events still fire
        if self.args.logging_last_step and self.args.logging_strategy != "no":
            self.control.should_log = True
            self._log_interval()
        self._closing()
        self._fire("on_train_end")
        self._stop()

    def _closing(self) -> None:
        """Do what comes before on_train_end: load the best model if requested."""
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None and self._load is not None:
            self._load(Path(best))

    def _stop(self) -> None:
        self._phase, self._open, self._in_epoch = "idle", False, False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._reporter.meter.drop_step()
        end_agreement(self.state)
        if self._reporter.session is not None:
            self._reporter.session.end()

    def _fail(self, error: BaseException) -> None:
        """End training because of an exception: every callback is notified, and the run is marked failed."""
        self._stop()
        self.handler.on_exception(self.args, self.state, self.control, exception=error)
        session = self._reporter.session
        run = session.run if session is not None else None
        if run is not None:
            run.__exit__(type(error), error, error.__traceback__)

    def __enter__(self) -> Loop:
        self._inside = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inside = False
        if error is not None and not isinstance(error, GeneratorExit):
            self._fail(error)
            return
        if self._phase == "training":  # both loops were left by `break`, and Python reports no exception
            if self._in_epoch:
                self._abandon()
                self._end_epoch()
            self._finish()
        self._phase = "idle"
        session = self._reporter.session
        if self._ends_run and session is not None and session.ours:
            session.run.finish()

    def _left(self, error: BaseException) -> None:
        """Handle a generator or the `with` being left by an exception, or a generator that is no longer iterated."""
        if self._phase == "idle":
            return
        if not isinstance(error, GeneratorExit):
            self._fail(error)
        elif not self._inside:
            if self._phase == "training":
                self._fire("on_train_end")
            self._stop()


def prefixed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with the prefix of an evaluation."""
    return {key if key.startswith(("eval_", "eval/")) else f"eval_{key}": value for key, value in metrics.items()}


def _reporting_callbacks(args: LoopArguments) -> list[Any]:
    names = [name for name in args.report_to if name != "fanfold"]  # the run is always there
    if not names:
        return []
    from ..callbacks.reporting import get_reporting_integration_callbacks

    return list(get_reporting_integration_callbacks(names))


def _takes_requests(callback: Any) -> bool:
    return callback is ControlCallback or isinstance(callback, ControlCallback)


_NAMES = {item.name for item in dataclasses.fields(LoopArguments)} | {*inspect.signature(Loop).parameters} - {"arguments"}


_FLOW = DefaultFlowCallback()


class _Watch:
    """A context manager that observes how a generator of the loop is left."""

    def __init__(self, left: Callable[[BaseException], None], *, left_by_break: bool = False) -> None:
        self.left = left
        self.left_by_break = left_by_break  # epochs continue when the steps are left

    def __enter__(self) -> None:
        """Start observing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not (self.left_by_break and isinstance(error, GeneratorExit)):
            self.left(error)
