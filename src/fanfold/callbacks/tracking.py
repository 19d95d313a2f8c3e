"""One callback for every tracker: which process reports, under which names, and when a report begins and ends."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..errors import FanfoldError, SettingError, guard, logger, notices, outcome
from ..relay.attach import undisturbed
from ..trackers.base import is_tracker
from ..trackers.registry import find_class
from .events import TrainerCallback
from .model_info import configuration, rewrite_logs, staged_checkpoint
from .report import Target, TrackerReport, earlier_arguments, host_run, latest_number

PROJECT = "huggingface"
_open: weakref.WeakSet[Any] = weakref.WeakSet()  # callbacks whose report has begun


class TrackingCallback(TrainerCallback):
    """Send a Trainer's logs to one tracker: a name, with the arguments of its class, or a tracker object.

    Override `setup(args, state, model, **kwargs)` to open the run yourself; call `super().setup(...)` to extend it.
    """

    system: ClassVar[str] = ""  # the tracker's name
    ends_with_training: ClassVar[bool] = True  # otherwise the run stays open after training, until the process ends
    ends_evaluations: ClassVar[bool] = False  # whether it ends again after each evaluation that follows training
    keeps_names: ClassVar[bool] = False  # whether values are reported under the Trainer's own names
    keeps_config: ClassVar[bool] = True  # otherwise arguments and model are recorded in another way, or by the platform

    def __init__(self, tracker: Any = None, **kwargs: Any) -> None:
        tracker = tracker or self.system
        if not (tracker and (isinstance(tracker, str) or is_tracker(tracker))):
            raise SettingError(
                f"TrackingCallback({tracker!r}) does not name a tracker, so nothing would be reported. "
                "Pass a name or a tracker object."
            )
        self._object = None if isinstance(tracker, str) else tracker
        self._class = find_class(tracker) if isinstance(tracker, str) else type(tracker)
        self.name = str((self._class if self._object is None else tracker).name)
        self._kwargs = kwargs
        self.report: TrackerReport | None = None
        self._host: Any = None  # the run that holds the report, if it was opened here
        self._state: Any = None  # distinguishes one training from another
        self._thread: threading.Thread | None = None  # the training thread, during training
        self._initialized = False
        self._trained = False

    # Overridden by specific callbacks

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Open the run. Called once before anything is logged, on every process."""
        if state.is_world_process_zero:
            config = self.config(args, model) if self.keeps_config else {}
            self.begin(self.destination(args, state), args, state, model, config)

    def destination(self, args: Any, state: Any) -> Target:
        """Return the tracker and its arguments; for a run the user has open, one that joins it."""
        if self._object is not None:
            return Target(lambda: self._object)
        first = next(iter(inspect.signature(self._class).parameters))
        known = {first: getattr(args, "project", None) or PROJECT}
        if self._class.requires_logging_directory:
            known["logging_dir"] = str(Path(args.output_dir, "runs").absolute())
        return Target(self._class, {**known, **self._kwargs})

    def resumed(self, where: Target, _earlier: Mapping[str, Any]) -> Target:
        """Return the target of a report that continues; `_earlier` are the arguments it had."""
        return where

    def current(self) -> Target | None:
        """Return how to join the run that the library has open in this process, after a user-written setup()."""

    def config(self, args: Any, model: Any) -> dict[str, Any]:
        """Return the config for the tracker."""
        return configuration(args, model)

    def names(self, args: Any, state: Any) -> dict[str, Any]:
        """Return name and group of the run; a trial of a search has its own name."""
        name = getattr(args, "run_name", None)
        if state.is_hyper_param_search:  # some systems identify a run by its name: trials with one name would be merged
            return {"name": state.trial_name, "group": name or args.output_dir}
        return {"name": name}

    def opened(self, args: Any, state: Any, model: Any) -> None:
        """Add what only the library's own objects can hold. Called once, when the tracker has started."""

    def rewrite(self, logs: Mapping[str, Any], state: Any) -> dict[str, Any]:
        """Return logged values under their final names."""
        return dict(logs) if self.keeps_names else rewrite_logs(logs)

    def record(self, report: TrackerReport, values: dict[str, Any], state: Any) -> None:
        """Write values to the report."""
        report.log(values, state.global_step)

    def checkpoint_saved(self, args: Any, state: Any) -> None:
        """Upload the checkpoint just saved, on the process that reports."""

    def training_ended(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Upload what belongs to the end of training, on the process that reports and before the report ends."""

    def leave(self) -> None:
        """Release what the library ties to the Trainer's thread, after the report has ended."""

    # Events

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        begins_again = self._trained and state.global_step == 0
        if self._training or begins_again or state.is_hyper_param_search:
            self._forget()
        self._ready(args, state, model, **kwargs)
        self._thread = threading.current_thread()

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        self._report(args, state, model, logs, kwargs)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, model: Any = None, **kwargs: Any) -> None:
        self._report(args, state, model, metrics, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._training:
            return
        if self.report is not None and state.is_world_process_zero:
            self.training_ended(args, state, **kwargs)
        self._thread, self._trained = None, True
        if self.ends_with_training:
            self.finish("finished")
        elif self.report is not None:
            self.report.catch_up()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.checkpoint_saved(args, state)

    def on_exception(self, args: Any, state: Any, control: Any, exception: BaseException, **kwargs: Any) -> None:
        self._thread, self._trained = None, True
        self.finish("failed")
        self._finish_host("failed")

    # Implementation

    @property
    def tracker(self) -> Any:
        """The tracker, once it is created."""
        return self._object if self.report is None else self.report.tracker

    @property
    def _training(self) -> bool:
        return self._thread is not None

    def begin(self, where: Target, args: Any, state: Any, model: Any, config: Mapping[str, Any] | None = None) -> None:
        """Open the report: in the current run, or in one opened for it."""
        facts = self.names(args, state)
        host, opened = host_run(args, facts.get("name"), configuration(args, model), PROJECT)
        if host is None:
            return
        self._host = host if opened else None
        last = latest_number(host, self.name)
        number = max(last, 1) if state.global_step else last + 1  # a resumed training continues in the same run
        with guard(f"open the report to {self.name}, so nothing is reported there"):
            if number == last:
                where = self.resumed(where, earlier_arguments(host, self.name, number))
            own = host.name if number == 1 else f"{host.name}-{number}"
            facts["name"] = where.name or facts.get("name") or own
            self.report = TrackerReport(host, self.name, where, number, config=config, **facts)
            _open.add(self)

    def _ready(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Call setup() if that has not been done; reopen a report that has ended."""
        self._state = state
        if not self._initialized:
            self._initialized = True
            self._set_up(args, state, model, kwargs)
        elif self.report is not None and self.report.ended and _alive(self.report):
            with guard(f"continue the report to {self.name}"):
                self.report.open()

    def _set_up(self, args: Any, state: Any, model: Any, kwargs: Mapping[str, Any]) -> None:
        main = state.is_world_process_zero
        if main:
            for other in list(_open):
                other.make_way(self.name, state)
        accepted = inspect.signature(self.setup).parameters
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        given = {key: value for key, value in kwargs.items() if every or key in accepted}
        with undisturbed():
            _, error = outcome(partial(self.setup, args, state, model, **given))
        if isinstance(error, FanfoldError):
            raise error  # a configuration mistake: raise now, not after hours of training
        if error is not None:
            self._warn_failed(error)
        if main and self.report is None:
            joined = self.current() if error is None else self.destination(args, state)
            if joined is None:
                return
            self.begin(joined, args, state, model)
        if main and self.report is not None:
            self._add(partial(self.opened, args, state, model))

    def _add(self, action: Any) -> None:
        """Run something with the library's own objects: now, or when they exist."""
        assert self.report is not None
        if self.report.started:
            with undisturbed(), guard(f"add to the run of {self.name}"):
                action()
        else:
            self.report.later(action)

    def _warn_failed(self, error: Exception) -> None:
        notices.once(
            f"report:{self.name}:setup",
            f"setup() of {type(self).__name__} failed: {type(error).__name__}: {error}. Training continues, and the callback "
            "reports to a run of its own. Correct setup().",
        )
        logger.debug("setup of %s", type(self).__name__, exc_info=error)

    def _report(self, args: Any, state: Any, model: Any, logs: Mapping[str, Any] | None, kwargs: Mapping[str, Any]) -> None:
        self._ready(args, state, model, **kwargs)
        if not logs or not state.is_world_process_zero or self.report is None:
            return
        known = {key: value for key, value in logs.items() if value is not None}
        if self._host is not None and self._host.status == "running":
            self._host.log(rewrite_logs(known), state.global_step)
        self.record(self.report, self.rewrite(known, state), state)
        if self._training:
            return
        if self._trained and self.ends_evaluations:
            self.finish("finished")
        else:
            self.report.catch_up(settled=True)  # no training to delay, and the caller wants to see the result

    def later(self, action: Callable[..., Any], *args: Any) -> None:
        """Run something with the tracker on the relay's thread, after everything logged so far."""
        if self.report is not None:
            self.report.later(action, *args)

    def _upload_later(self, upload: Any, args: Any, state: Any, *more: Any) -> None:
        """Queue the upload of the checkpoint just saved: `upload(a copy of its folder, *more)`."""
        if self.report is not None and (folder := staged_checkpoint(args, state)) is not None:
            self.report.later(upload, folder, *more)

    def finish(self, status: str = "finished") -> None:
        """End the report. A second call does nothing."""
        _open.discard(self)
        if self.report is not None and not self.report.ended:
            self.report.finish(status)
            if not self.report.destination.joined:
                with undisturbed(), guard(f"let go of the run of {self.name}"):
                    self.leave()

    def _finish_host(self, status: str) -> None:
        if self._host is not None:
            self._host.finish(status=status)
            self._host = None

    def make_way(self, name: str, state: Any) -> None:
        """End a report that an earlier Trainer left open: its library would treat its run as the user's own, and continue it."""
        if state is self._state:
            return
        status = "failed" if self._training else "finished"
        if self.name == name:
            self.finish(status)
        if not self._training:
            self._finish_host(status)

    def _forget(self) -> None:
        """End what an earlier training left open, and reset for the next one."""
        status = "failed" if self._training else "finished"
        self.finish(status)
        self._finish_host(status)
        self._initialized = self._trained = False
        self._thread = self.report = None


def _alive(report: TrackerReport) -> bool:
    """Return whether a report was opened in this process; a forked child must not continue its parent's."""
    return report.pid == os.getpid()
