"""One callback for every tracker: which process reports, under which names and when a run begins and ends is decided here.

The tracker's object is made on the Trainer's thread, so the library's own functions find their run there. What is logged
goes through an outbox: in order, from a thread of its own.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..errors import FanfoldError, SettingError, logger, notices, outcome
from ..relay.attach import undisturbed
from ..trackers.base import is_tracker
from ..trackers.face import Adapter
from ..trackers.registry import find_class
from ..values import flatten
from .closing import END_SECONDS, drop, end_other, hold
from .events import TrainerCallback
from .outbox import Outbox
from .subjects import configuration, rewrite_logs, staged_checkpoint

PROJECT = "huggingface"


class TrackingCallback(TrainerCallback):
    """Send what a Trainer logs to one tracker: a name, with the arguments of its class, or a tracker object.

    Override `setup(args, state, model, **kwargs)` to open the run yourself; call `super().setup(...)` to add to it.
    """

    system: ClassVar[str] = ""  # the tracker's name
    ends_with_training: ClassVar[bool] = True  # else the run stays open for what comes after, until the process ends

    def __init__(self, tracker: Any = None, **kwargs: Any) -> None:
        tracker = tracker or self.system
        if not (tracker and (isinstance(tracker, str) or is_tracker(tracker))):
            raise SettingError(
                f"TrackingCallback({tracker!r}) names no tracker, so nothing would be reported. Pass a name or a tracker object."
            )
        self._named = isinstance(tracker, str)
        self.tracker: Any = None if self._named else tracker
        self._class = find_class(tracker) if self._named else type(tracker)
        self.name = str((self._class if self._named else tracker).name)
        self._kwargs = kwargs
        self.trainer: Any = None
        self.thread: threading.Thread | None = None
        self._initialized = False
        self._opened = False
        self._owns = True  # whether the run is ours to end
        self._trained = False
        self._closed = False
        self._ending = False
        self._outbox: Outbox | None = None

    # What a concrete callback changes

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Open the run and keep the configuration. Called once before anything is logged, on every process."""
        del kwargs
        if state.is_world_process_zero:
            if not self._opened:  # else it is tried again because something after it failed
                self.open(args, state)
                self._opened = True
            self.keep(args, state, model)

    def open(self, args: Any, state: Any) -> None:
        """Make the tracker and start it."""
        self.tracker = self.tracker or self.make(args, state)
        self.tracker.start()

    def make(self, args: Any, state: Any) -> Any:
        """Return the tracker, not started yet."""
        del state
        first = next(iter(inspect.signature(self._class).parameters))
        known = {first: getattr(args, "project", None) or PROJECT}
        if self._class.requires_logging_directory:
            known["logging_dir"] = str(Path(args.output_dir) / "runs")
        return self._class(**{**known, **self._kwargs})

    def keep(self, args: Any, state: Any, model: Any) -> None:
        """Keep the configuration of model and training."""
        del state
        self.tracker.store_init_configuration(configuration(args, model))

    def current(self) -> Any:
        """Return a tracker around the run the library has open in this process, or None."""

    def rewrite(self, logs: Mapping[str, Any], state: Any) -> dict[str, Any]:
        """Return what is logged under the names it shall have."""
        del state
        return rewrite_logs(logs)

    def deliver(self, values: dict[str, Any], step: int, epoch: float | None) -> None:
        """Hand values to the tracker. Called from the outbox's thread; what it raises is tried again."""
        del epoch
        self.tracker.log(values, step=step)

    def end(self, status: str) -> None:
        """End the run as finished or failed. Called from the outbox's thread."""
        if isinstance(self.tracker, Adapter):
            self.tracker.close(status)
        else:
            self.tracker.finish()

    def reopen(self) -> None:
        """Go on in a run that was ended, for what is logged after training."""
        if isinstance(self.tracker, Adapter) and self.tracker.remote is not None:
            self.tracker.resume(self.tracker.remote)
        self.tracker.start()

    def release(self, status: str) -> None:
        """Let go of what the library ties to the Trainer's thread. Called there, after end()."""

    # Events

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        del control
        begun_anew = self._trained and state.global_step == 0
        if self._training or begun_anew or state.is_hyper_param_search:
            self.finish("failed" if self._training else "finished")
            self._forget()
        self._ready(args, state, model, **kwargs)
        self.thread = threading.current_thread()

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        del control
        self._report(args, state, model, logs, kwargs)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, model: Any = None, **kwargs: Any) -> None:
        del control
        self._report(args, state, model, metrics, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if not self._training:
            return
        self.thread, self._trained = None, True
        if state.is_world_process_zero and self._initialized:
            if self.ends_with_training:
                self.finish("finished")
            else:
                self._wait()

    def on_exception(self, args: Any, state: Any, control: Any, exception: BaseException, **kwargs: Any) -> None:
        del args, state, control, exception, kwargs
        self.thread, self._trained = None, True
        self.finish("failed")

    # How it is done

    @property
    def _training(self) -> bool:
        return self.thread is not None

    def _report(self, args: Any, state: Any, model: Any, logs: Mapping[str, Any] | None, kwargs: Mapping[str, Any]) -> None:
        self._ready(args, state, model, **kwargs)
        if not state.is_world_process_zero or not logs:
            return
        values = {key: _snapshot(value) for key, value in flatten(self.rewrite(logs, state))}
        self._later(self._deliver, values, state.global_step, getattr(state, "epoch", None))
        if not self._training:
            self._wait()  # no training to hold up, and whoever evaluates wants to see it

    def _deliver(self, values: dict[str, Any], step: int, epoch: float | None) -> None:
        if self.tracker is not None:
            self.deliver(values, step, epoch)

    def _ready(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Call setup() where that was not done; what fails on the main process is tried again from the outbox."""
        self.trainer = state
        if not self._initialized:
            self._initialized = True
            set_up = partial(self._set_up, args, state, model, kwargs)
            if self.tracker is not None and not isinstance(self.tracker, Adapter):
                if state.is_world_process_zero:
                    hold(self)
                self._later(set_up)  # lives in one thread from start to finish: what it opens is used where it was opened
                return
            with undisturbed():
                _, error = outcome(set_up)
            if isinstance(error, FanfoldError):
                raise error  # a mistake in how it was set up: to be corrected now, not after hours of training
            if error is not None and state.is_world_process_zero:
                self._say_failed(error)
                self._later(set_up)
                hold(self)
        elif self._closed and state.is_world_process_zero:
            self._closed = False
            hold(self)
            self._later(self._reopen)

    def _reopen(self) -> None:
        self.reopen()
        hold(self)

    def _set_up(self, args: Any, state: Any, model: Any, kwargs: Mapping[str, Any]) -> None:
        if state.is_world_process_zero and isinstance(self.tracker, Adapter | None):
            end_other(self)
        accepted = inspect.signature(self.setup).parameters
        every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        self.setup(args, state, model, **{key: value for key, value in kwargs.items() if every or key in accepted})
        if not state.is_world_process_zero:
            return
        if self.tracker is None:  # a setup() of the user's own
            self.tracker, self._owns = self.current(), False
        hold(self)

    def _say_failed(self, error: Exception) -> None:
        notices.once(
            f"report:{self.name}:setup",
            f"{type(self).__name__} could not open its run: {type(error).__name__}: {error}. Training goes on; it is tried "
            "again, and then gets everything from the start. Check its address and key, or leave it out.",
        )
        logger.debug("setup of %s", type(self).__name__, exc_info=error)

    def _later(self, call: Any, *args: Any) -> None:
        if self._outbox is None:
            self._outbox = Outbox(self.name)
        self._outbox.put(partial(call, *args) if args else call)

    def _upload_later(self, upload: Any, args: Any, state: Any, *more: Any) -> None:
        """Queue the upload of the checkpoint that was saved just now: `upload(a copy of its folder, *more)`."""
        if (folder := staged_checkpoint(args, state)) is not None:
            self._later(upload, folder, *more)

    def _wait(self, timeout: float = END_SECONDS, *, last: bool = True) -> int:
        left = self._outbox.drain(timeout) if self._outbox is not None else 0
        if left and last:
            notices.once(
                f"report:{self.name}:left",
                f"the tracker {self.name} has {left} calls still to take. They are tried until the process ends, and lost then. "
                "Give the tracker to FanfoldCallback(trackers=[...]) to have them kept on disk.",
            )
        return left

    def finish(self, status: str = "finished", timeout: float = END_SECONDS) -> None:
        """End the run, if it is this callback's own, within `timeout` seconds. A second call does nothing."""
        self.start_ending(status)
        self.finish_ending(status, timeout)

    def start_ending(self, status: str) -> None:
        drop(self)
        self._ending = self._initialized and not self._closed
        if self._ending and self._owns and (self.tracker is not None or self._outbox is not None):
            self._closed = True
            self._later(self._end, status)

    def _end(self, status: str) -> None:
        """End the run, decided when its turn comes: a setup that was tried again may have opened it only now."""
        drop(self)
        if self._owns and self.tracker is not None:
            self.end(status)
        else:
            self._closed = False

    def finish_ending(self, status: str, timeout: float, *, last: bool = True) -> None:
        """Wait until it has ended. Unless it is the `last` time, what is left is not given up yet."""
        if not self._ending or self._wait(timeout, last=last) > 0:
            return
        self._ending = False
        if self._closed:
            with undisturbed():
                outcome(partial(self.release, status))

    def _forget(self) -> None:
        """Be as new, for the next run; what the last one still has to deliver goes on in its own outbox."""
        self._initialized = self._opened = self._closed = self._trained = False
        self.thread = None
        if self._named:
            self.tracker = None
        self._owns, self._outbox = True, None


def _snapshot(value: Any) -> Any:
    """Take a tensor as it is now, without waiting for its device: the training goes on and may change it."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return value.detach().clone()
    return value
