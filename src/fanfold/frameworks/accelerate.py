"""Accelerate: its real Accelerator with our tracking behind the same methods, and our run as one of its trackers.

`Accelerator` writes a fanfold run on every rank and serves the trackers from it. `FanfoldTracker` is for users who keep
Accelerate's own class: the run is then one tracker among others, on the main process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RunError, SettingError, logger, needed, notices
from ..recording.api import init
from ..relay.attach import MODES, Silent, ThreadRelay, handle, silent_twin
from ..settings import DIRECTORY_NAME, TABLE
from ..trackers import native
from ..trackers.base import NO_STEP, GeneralTracker, is_tracker, on_main_process
from ..trackers.registry import LOGGER_TYPE_TO_CLASS, filter_trackers, without_setup
from ._session import note_of

with needed("accelerate", "accelerate", "fanfold.frameworks.accelerate"):
    accelerate: Any = importlib.import_module("accelerate")
    tracking: Any = importlib.import_module("accelerate.tracking")

CHECKPOINT_FILE = "fanfold.json"
__all__ = ["Accelerator", "FanfoldTracker", "register"]


class FanfoldTracker(tracking.GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
    """Our run as a tracker of Accelerate's own Accelerator; arguments are those of fanfold.init().

    `trackers=[...]` fans out from here, each tracker in its own process.
    """

    name = "fanfold"
    requires_logging_directory = False

    def __init__(self, project: str | None = None, **options: Any) -> None:
        super().__init__()
        self.project = project
        self.options = options
        self.run: Any = None

    @on_main_process
    def start(self) -> None:
        if self.run is None or self.run.status != "running":
            self.run = init(self.project, **self.options)

    @property
    def tracker(self) -> Any:
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(values, step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images under each key."""
        from ..media import Image

        self.run.log({key: [Image(picture) for picture in pictures] for key, pictures in values.items()}, step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()


def register() -> None:
    """Make `accelerate.Accelerator(log_with="fanfold")` work."""
    if tracking.LOGGER_TYPE_TO_CLASS.get(FanfoldTracker.name) is not FanfoldTracker:
        tracking.register_tracker_class(FanfoldTracker)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """Accelerate's Accelerator; what it tracks goes to a fanfold run on every rank, and from there to the trackers.

    Takes all of its arguments, and `relay`: "thread" keeps the trackers in this process, so that get_tracker() returns live
    objects; "process" runs each tracker given by name in its own process.
    """

    run: Any

    def __init__(self, *args: Any, relay: str = "thread", **kwargs: Any) -> None:
        if relay not in MODES:
            raise SettingError(f"relay={relay!r} is not known. Nothing was started. Known: {', '.join(MODES)}.")
        given = _SIGNATURE.bind(self, *args, **kwargs)
        log_with = given.arguments.pop("log_with", None)
        self.run = None
        self._relay = relay
        self._stepless: list[str] = []  # trackers that treat a value without a step differently
        super().__init__(*given.args[1:], **given.kwargs)
        self._own, wanted = _take_own(log_with)
        self.log_with = _filtered(wanted, self.logging_dir)
        if not self.log_with and log_with is not None and self._own is None:
            warnings.warn(f"`log_with={log_with}` was passed but no supported trackers are currently installed.", stacklevel=2)
        self.register_save_state_pre_hook(self._note_run)

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Open a run and start the trackers; call it on every rank. A second call only adds to the config.

        `init_kwargs` holds arguments by tracker name; those under "fanfold" go to fanfold.init(), and its `resume_from` names a
        checkpoint folder of save_state() whose run is continued.
        """
        if self.run is not None and self.run.status in ("running", "disabled"):
            self._again(project_name, config)
            return
        given = dict(init_kwargs or {})
        options = {**(self._own.options if self._own else {}), **given.pop("fanfold", {})}
        resume_from = options.pop("resume_from", None)
        if resume_from is not None:
            options["id"] = _run_of(resume_from, project_name)
        options = {"dir": self._runs_directory(), "relay": self._relay, **options}
        self.run = init(
            project_name, config=config, trackers=self.log_with, tracker_kwargs=self._tracker_kwargs(given), **options
        )
        self.trackers = [relay.tracker if hasattr(relay, "tracker") else relay for relay in self._relays()]
        self._stepless = [str(item) for item in self.log_with if str(item) == "clearml"]
        for relay in self._relays():
            if isinstance(relay, ThreadRelay) and relay.builtin:
                relay.catch_up()  # the config must be where user code looks for it: `wandb.config`

    def _again(self, project_name: str, config: dict[str, Any] | None) -> None:
        if config:
            self.run.config.update(config)
        if project_name != self.run.project:
            notices.once(
                f"init_trackers:{self.run.id}",
                f"init_trackers({project_name!r}) was called while run {self.run.name} of {self.run.project} is open; it goes "
                "on, and no new run was started. Call end_training() first to begin another run.",
            )

    def _runs_directory(self) -> Path | None:
        """Return the run's directory: None for FANFOLD_DIR or fanfold's default, else a folder in project_dir or logging_dir."""
        if os.environ.get(TABLE["dir"].variable):
            return None
        home = self.project_dir if self.project_dir is not None else self.logging_dir
        return None if home is None else Path(home) / DIRECTORY_NAME

    def _tracker_kwargs(self, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the arguments of the trackers given by name; like Accelerate, ignore names that are not used."""
        kwargs = {}
        for name in (str(item) for item in self.log_with if not is_tracker(item)):
            folder = {}
            if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and self.logging_dir is not None:
                folder = {"logging_dir": str(Path(self.logging_dir).absolute())}
            layout = {"layout": "accelerate"} if "accelerate" in getattr(LOGGER_TYPE_TO_CLASS[name], "layouts", ()) else {}
            kwargs[name] = {**folder, **layout, **given.get(name, {})}
        return kwargs

    def _attached(self) -> Any:
        return getattr(getattr(self.run, "_delivery", None), "attached", None)

    def _relays(self) -> Sequence[Any]:
        attached = self._attached()
        return attached.relays if attached is not None else ()

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Record values on this rank. The journal keeps every rank; trackers get the main process's. Never waits for them.

        An object of a tracker's own library (`wandb.Image`) is passed to that tracker unchanged; the journal has a note of it.
        """
        if self.run is None:
            return
        self.run.log(self._noted(values), step, log_kwargs=self._with_steps(step, log_kwargs))
        for relay in self._relays() if log_kwargs else ():
            if isinstance(relay, ThreadRelay) and not relay.builtin and relay.name in (log_kwargs or ()):
                relay.catch_up()  # arguments of a user-written tracker may only be valid now

    def _with_steps(self, step: int | None, log_kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Mark values for trackers that care whether the caller gave a step; the run has counted one."""
        if step is not None or not self._stepless:
            return log_kwargs
        given = log_kwargs or {}
        return {**given, **{name: {**given.get(name, {}), NO_STEP: True} for name in self._stepless}}

    def _noted(self, values: dict[str, Any]) -> Any:
        """Wrap objects that only one library understands, if that library runs in this process."""
        if not isinstance(values, Mapping) or self._relay == "process":
            return values
        trackers = [relay.tracker for relay in self._relays() if isinstance(relay, ThreadRelay)]
        elsewhere = [] if self._attached() is not None else [str(item) for item in self.log_with if not is_tracker(item)]
        return native.wrapped(values, trackers, elsewhere)

    @property
    def on_main_process(self) -> _OnMainProcess:
        """Accelerate's decorator; also usable as `with accelerator.on_main_process:`, as in its guide."""
        return _OnMainProcess(self)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or with `unwrap` its library's object.

        On other ranks, and before init_trackers(), it is an object of the same class whose methods all do nothing.
        """
        if name == FanfoldTracker.name:
            return self._own_tracker(unwrap)
        wanted = {str(item.name if is_tracker(item) else item): item for item in self.log_with}
        if wanted and name not in wanted:
            raise ValueError(f"{name} is not an available tracker stored inside the `Accelerator`.")
        if not wanted:  # tracking is off; a script written with tracking still works
            return Silent() if unwrap else silent_twin(name, LOGGER_TYPE_TO_CLASS.get(name, GeneralTracker))
        return handle(name, wanted, self._attached(), unwrap)

    def _own_tracker(self, unwrap: bool) -> Any:
        if self.run is None:
            return Silent() if unwrap else silent_twin(FanfoldTracker.name, FanfoldTracker)
        tracker = FanfoldTracker(self.run.project)
        tracker.run = self.run
        return self.run if unwrap else tracker

    def end_training(self, timeout: float = 30.0) -> None:
        """Finish the run and its trackers, within `timeout` seconds, and leave the process group. A second call does nothing."""
        if self.run is not None:
            self.run.finish(timeout)
        self.state.destroy_process_group()

    # Checkpoints

    def _note_run(self, _models: Any, _weights: Any, output_dir: str | os.PathLike[str]) -> None:
        """Write the run's id next to a checkpoint, so that training resumed from it continues in the same run."""
        known = note_of(self.run)
        if not known or not self.is_main_process:
            return
        try:
            (Path(output_dir) / CHECKPOINT_FILE).write_text(json.dumps(known), encoding="utf-8")
        except OSError as error:
            logger.warning(
                "the run's id was not kept in %s: %s. The checkpoint is not touched; resume_from= cannot use it.",
                output_dir,
                error,
            )


class _OnMainProcess:
    """Accelerate's decorator, which its guide uses in a with statement: there trackers act on the main process only."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __call__(self, function: Any = None) -> Any:
        return super(Accelerator, self._accelerator).on_main_process(function)

    def __enter__(self) -> None:
        if not self._accelerator.is_main_process:
            notices.once(
                "with on_main_process",
                "`with accelerator.on_main_process:` cannot leave out its block, which runs on this rank too; trackers do "
                "nothing here, anything else does. Write `if accelerator.is_main_process:`.",
            )

    def __exit__(self, *_error: object) -> None:
        """Propagate errors."""


_SIGNATURE = inspect.signature(accelerate.Accelerator.__init__)
Accelerator.__signature__ = _SIGNATURE.replace(
    parameters=[
        *list(_SIGNATURE.parameters.values())[1:],
        inspect.Parameter("relay", inspect.Parameter.KEYWORD_ONLY, default="thread", annotation=str),
    ]
)


def _take_own(log_with: Any) -> tuple[FanfoldTracker | None, Any]:
    """Remove fanfold itself from the trackers: the run always exists, and is not a separate tracker."""
    wanted = list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    own = [item for item in wanted if isinstance(item, FanfoldTracker) or (isinstance(item, str) and item == FanfoldTracker.name)]
    if not own:
        return None, log_with
    found = next((item for item in own if isinstance(item, FanfoldTracker)), None)
    return found or FanfoldTracker(), [item for item in wanted if not any(item is one for one in own)]


def _filtered(log_with: Any, logging_dir: Any) -> list[Any]:
    """Return the usable trackers, including those registered through Accelerate, without those that would prompt the user."""
    for name, cls in tracking.LOGGER_TYPE_TO_CLASS.items():
        if cls.__module__ not in (tracking.__name__, __name__) and not cls.__module__.startswith("fanfold.trackers."):
            LOGGER_TYPE_TO_CLASS[name] = cls
    found = filter_trackers(log_with, logging_dir)
    wanted = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    if "all" not in [str(item) for item in wanted if not is_tracker(item)]:
        return found
    usable = without_setup([str(item) for item in found if not is_tracker(item)], "log_with='all'")
    return [item for item in found if is_tracker(item) or str(item) in usable]


def _run_of(checkpoint: str | os.PathLike[str], project: str) -> str:
    """Return the id of the run a checkpoint was saved in."""
    path = Path(checkpoint) / CHECKPOINT_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        run, of = str(known["run"]), str(known["project"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"resume_from={os.fspath(checkpoint)!r} names no run: {path} cannot be read ({error}). The run was not started. "
            "Pass a folder that this Accelerator's save_state() made, or leave resume_from out."
        ) from error
    if of != project:
        raise RunError(
            f"the checkpoint belongs to the project {of!r}, not {project!r}. The run was not started. "
            f"Call init_trackers({of!r}), or leave resume_from out."
        )
    return run
