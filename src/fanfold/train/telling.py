"""What a loop tells: events to callbacks, values to the run, and its own state to a checkpoint. When it tells is loop.py's."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..callbacks import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
from ..errors import SettingError
from ..frameworks._session import Session
from ..process import detect
from . import checkpoints
from .arguments import LoopArguments
from .meter import Logs, Meter


@dataclasses.dataclass
class Place:
    """Where a loop is in its data: the epoch, and how many of its batches are done."""

    epoch: int = 0
    batch: int = 0
    length: int | None = None

    @property
    def done(self) -> bool:
        return self.length is not None and self.batch >= self.length


class Teller:
    """The half of a loop that speaks: to callbacks, to the run, to a checkpoint."""

    _load: Callable[[Path], Any] | None

    def __init__(
        self,
        args: LoopArguments,
        callbacks: Iterable[Any],
        run: Any,
        save: Callable[[Path], Any] | None,
        *,
        on_error: str = "raise",
        **shared: Any,
    ) -> None:
        self.args = args
        self.state = TrainerState()
        self.control = TrainerControl()
        names = ("model", "processing_class", "optimizer", "lr_scheduler")
        given = [DefaultFlowCallback, *_reporters(args), *callbacks]
        self.handler = CallbackHandler(given, *(shared.get(name) for name in names), on_error=on_error)
        self._session = None if run is False else Session(args.project, run, **self._run_options())
        self._save = save
        self._meter = Meter()
        self._place: Place | None = Place()
        self._note: dict[str, Any] = {}
        self._loaded = False
        self._last_logged = 0
        self._look_around()
        self._fire("on_init_end")

    def _look_around(self) -> None:
        me = detect()
        self.state.is_world_process_zero, self.state.is_local_process_zero = me.main, me.local_main

    def _fire(self, event: str, **extra: Any) -> None:
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **extra)

    # Which callbacks

    @property
    def callbacks(self) -> list[Any]:
        return self.handler.callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a callback at the end: an instance, or a class, which is then made without arguments."""
        self.handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, or the first one of a class; None when it is not there."""
        return self.handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        self.handler.remove_callback(callback)

    # The run

    def _run_options(self) -> dict[str, Any]:
        return {"name": self.args.run_name}

    def _facts(self) -> dict[str, Any]:
        """Return what a run of our own is told of this loop."""
        return {"config": self.args.to_dict()}

    def _renamed(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values under the keys they have in the run."""
        return values

    @property
    def run(self) -> Any:
        """The run values go to: the one given, else the current one, else one of the loop's own. None under run=False."""
        if self._session is None:
            return None
        return self._session.run if self._session.run is not None else self._session.live(self._facts)

    def _record(self, values: Mapping[str, Any]) -> None:
        if values and self._session is not None:
            self._session.live(self._facts).log(self._renamed(values), self.state.global_step)

    # Values

    def _tell_log(self, values: Mapping[str, Any]) -> None:
        """Tell the callbacks of values, and keep them in the history."""
        if self.state.log_history and isinstance(self.state.log_history[-1], Logs):
            self.state.log_history[-1].land()  # long there by now
        told = {**values, "epoch": self.state.epoch}
        self.state.log_history.append(Logs({**told, "step": self.state.global_step}))
        self._fire("on_log", logs=Logs(told))

    def _log_interval(self) -> None:
        """Tell the callbacks the means of the steps since the last time, if a log is due and there are any."""
        if not self.control.should_log or self.state.global_step <= self._last_logged:
            return
        values = self._over_ranks(self._meter.end_interval())
        self._last_logged = self.state.global_step
        if values:
            self._tell_log(values)

    def _over_ranks(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return what callbacks see of an interval. The run keeps every rank's own; a loop calls no collective."""
        return values

    def _tell_evaluation(self, metrics: Mapping[str, Any]) -> None:
        self._record(metrics)
        self._tell_log(metrics)
        self._fire("on_evaluate", metrics={**Logs(metrics), "epoch": self.state.epoch})

    def _judge(self, metrics: Mapping[str, Any]) -> None:
        """Keep in mind whether an evaluation is the best so far."""
        name = self.args.metric_for_best_model
        if name is None:
            return
        found = next((metrics[key] for key in (name, f"eval_{name}", name.removeprefix("eval_")) if key in metrics), None)
        if found is None:
            raise SettingError(
                f"metric_for_best_model={name!r} is not among what this evaluation gave: {', '.join(metrics) or 'nothing'}. "
                "The best model cannot be told. Set metric_for_best_model to one of these."
            )
        value, best = float(found), self.state.best_metric
        if best is None or math.isnan(best) or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            if self.args.save_strategy == "best":
                self.control.should_save = True

    # Checkpoints

    def _save_now(self) -> None:
        """Make a checkpoint: what the user saves, then where we are. Its state comes last: before it, there is no checkpoint."""
        folder = checkpoints.folder_for(self.args.output_dir, self.state.global_step)
        folder.mkdir(parents=True, exist_ok=True)
        if self.state.is_world_process_zero:
            (folder / checkpoints.STATE_FILE).unlink(missing_ok=True)
        if self._save is not None:
            self._save(folder)
        self._barrier()
        self.saved(folder)

    def _barrier(self) -> None:
        """Wait until every rank is here, where somebody can make them wait."""

    def saved(self, folder: str | os.PathLike[str]) -> None:
        """Say that a checkpoint was saved in `folder`: the loop adds its own state to it and tells the callbacks."""
        folder = Path(folder)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        if self.state.is_world_process_zero:
            checkpoints.write_note(folder, {**self._run_note(), **dataclasses.asdict(self._place or Place())})
            self.state.stateful_callbacks = self.handler.export_states()
            self.state.save_to_json(folder / checkpoints.STATE_FILE)
            checkpoints.rotate(self.args.output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        self._barrier()
        self._fire("on_save")

    def _run_note(self) -> dict[str, Any]:
        return self._session.note() if self._session is not None else {}

    def resume(self, checkpoint: str | os.PathLike[str] | bool | None = None) -> Path | None:
        """Go on from a checkpoint: the one named, or the latest whole one in `output_dir`. Return its folder, or None.

        Call it before epochs(). What save() wrote is read by load(), or by you.
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
        """Return where the loop is, as plain data, for a checkpoint of your own making."""
        self.state.stateful_callbacks = self.handler.export_states()
        state = dataclasses.asdict(self.state)
        return {"state": state, "note": {**self._run_note(), **dataclasses.asdict(self._place or Place())}}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Go on from where a loop was; call it before epochs()."""
        known = {field.name for field in dataclasses.fields(TrainerState)}
        self._take_state(TrainerState(**{name: kept["state"][name] for name in known & set(kept["state"])}), kept["note"])

    def _take_state(self, state: TrainerState, note: Mapping[str, Any]) -> None:
        self.state, self._note, self._loaded = state, dict(note), True
        self._look_around()
        best = state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            state.best_model_checkpoint = None  # moved or removed since: it can no longer be loaded
        # A checkpoint of Transformers' says only how many steps were done; the loader tells the place.
        self._place = Place(note["epoch"], note["batch"], note.get("length")) if "batch" in note else None
        if self._place is not None and self._place.done:
            self._place = Place(self._place.epoch + 1)
        if self.args.restore_callback_states_from_checkpoint and state.stateful_callbacks:
            self.handler.restore_states(state.stateful_callbacks)


def _reporters(args: LoopArguments) -> list[Any]:
    names = [name for name in args.report_to if name != "fanfold"]  # the run is always there
    if not names:
        return []
    from ..callbacks.reporting import get_reporting_integration_callbacks

    return list(get_reporting_integration_callbacks(names))
