"""Shared by the frameworks: one run across training, evaluation and restarts, and the end of a training that raised."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import notices
from ..journal.directory import is_run, run_path
from ..recording import api
from ..settings import resolve

LIVE = ("running", "disabled")
_opened: weakref.WeakSet[Any] = weakref.WeakSet()  # runs opened here: only those may be ended here
_training: weakref.WeakSet[Any] = weakref.WeakSet()  # those of them whose training has not ended
_watched: weakref.WeakSet[Any] = weakref.WeakSet()  # wrapped training methods
_calls = threading.local()


def _nothing() -> None:
    """Do nothing."""


class TrainingSession:
    """The run of one callback or logger. Opened on first use, and left open after training.

    A run the user opened (`run=`, or the current one) is written to and never ended here. `options` go to fanfold.init().
    """

    def __init__(self, project: str | None = None, run: Any = None, **options: Any) -> None:
        self.options: dict[str, Any] = {"project": project, **options}
        self.run = run
        self.owner: Any = None  # the object whose watched method is training
        self.settle: Callable[[], None] = _nothing  # waits for values the framework still logs from other threads
        self._given = run is not None
        self._trials = 0

    @property
    def ours(self) -> bool:
        return self.run is not None and self.run in _opened

    def begin(
        self, note: Any = None, *, apart: bool = False, again: bool = False, describe_users_run: bool = True, **facts: Any
    ) -> Any:
        """Open the run of a training that begins: the user's, the one a checkpoint's note names, or a new one.

        `apart` requests a separate run even if the user has one open, as for each trial of a search; `again` continues the run of
        the last training. A run the user opened gets the `config` among the facts only if `describe_users_run`.
        """
        finish_ended(but=self.run if again else None)
        if again and self.run is not None:
            self.live()
        elif not self._given and (apart or not self._join_current()):
            self._open(self._trial_id() if apart else None, **{**facts, **self._from_note(note)})
        else:
            self._warn_if_another(note)
            if describe_users_run and facts.get("config"):
                self.run.config.update(facts["config"])
        if self.ours:
            _training.add(self.run)
        calls = getattr(_calls, "stack", None)
        if calls:
            calls[-1].sessions.append(self)
            self.owner = calls[-1].owner
        return self.run

    def _warn_if_another(self, note: Any) -> None:
        """Warn if training continues a checkpoint of one run while the user has opened another to log to."""
        known = note.get("run") if isinstance(note, Mapping) else None
        if not known or known == self.run.id or self.run.id == "disabled":
            return
        notices.once(
            f"another run:{known}:{self.run.id}",
            f"fanfold: the checkpoint was saved by run {known}, but training now logs to run {self.run.id}, which was opened "
            "before. One training is recorded as two runs. To continue the first one, call "
            f'fanfold.init({note.get("project")!r}, id="{known}") instead, or do not call init() and let the loop open its run.',
        )

    def end(self) -> None:
        """Mark the training as over; the run stays open."""
        if self.run is not None:
            _training.discard(self.run)
        self.owner = None

    def live(self, facts: Callable[[], Mapping[str, Any]] = dict) -> Any:
        """Return an open run to log to, also outside training: the last one, as a new attempt if it ended, else a new one."""
        if self._given or (self.run is not None and self.run.status in LIVE):
            return self.run
        if self.run is not None:
            self._open(project=self.run.project, again={"id": self.run.id, "dir": self.run.path.parents[1], "resume": "allow"})
        elif not self._join_current():
            self._open(**facts())
        return self.run

    def fail(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the run of a training that raised; a pruned trial is not a failure."""
        self.end()
        self.settle()
        if not self.ours:
            return
        if kind is not None and kind.__name__ == "TrialPruned":
            self.run.tags = (*self.run.tags, "pruned")
            self.run.finish()
        else:
            self.run.__exit__(kind, error, trace)

    def note(self) -> dict[str, str]:
        """Return what a checkpoint stores, so that training resumed from it continues in the same run."""
        return note_of(self.run)

    def _join_current(self) -> bool:
        current = _users_run()
        if current is None:
            return False
        self.run = current
        return True

    def _open(self, again: Mapping[str, Any] | None = None, **facts: Any) -> None:
        """Start a run; the user's options override the framework's facts, and `again`, which continues a run, overrides both."""
        given = {name: value for name, value in self.options.items() if value is not None}
        users = _users_run()
        self.run = api.init(**{**facts, **given, **(again or {})})
        _opened.add(self.run)
        if users is not None:
            api.make_current(users)  # fanfold.log() still refers to the user's run

    def __getstate__(self) -> dict[str, Any]:
        # A run is written from one process: a copy in another process opens its own part of it.
        return {**self.__dict__, "run": None, "owner": None, "settle": _nothing, "_given": False}

    def _trial_id(self) -> dict[str, str]:
        """Return a separate id for a trial if the user has set one id for all."""
        self._trials += 1
        base = self.options.get("id") or resolve("run_id")
        return {"id": f"{base}-{self._trials}"} if base else {}

    def _from_note(self, note: Any) -> dict[str, Any]:
        """Return the arguments that open the run a checkpoint names; the user's options take precedence."""
        if not isinstance(note, Mapping) or not note.get("run") or self.options.get("id") or resolve("run_id"):
            return {}
        if self.options.get("resume") in ("never", False):
            return {}
        project, path = self.options.get("project"), Path(str(note.get("path")))
        if project is not None and project != note.get("project"):
            notices.once(
                f"other project:{note['run']}",
                f"the checkpoint belongs to run {note.get('name')} of project {note.get('project')!r}, not of {project!r}; "
                "a new run is started. Leave project out to continue that run.",
            )
            return {}
        found: dict[str, Any] = {"id": str(note["run"]), "project": str(note.get("project"))}
        # A run without an explicit directory may have been started from another working directory. A checkpoint may come from
        # anyone: it must name exactly that run.
        if resolve("dir") is None and is_run(path) and path == run_path(path.parents[1], found["project"], found["id"]):
            found["dir"] = path.parents[1]
        return found


def _users_run() -> Any:
    """Return the current run if the user opened it and it is still open."""
    current = api.run
    return None if current is None or current in _opened or current.status not in LIVE else current


def finish_ended(but: Any = None) -> None:
    """Finish the runs whose training is over: another training begins, and otherwise they would stay open until process exit."""
    for run in list(_opened):
        if run is not but and run not in _training and run.status == "running":
            run.finish()


class _WatchedCall:
    """One call of a watched method: the sessions that began training in it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.sessions: list[TrainingSession] = []

    def __enter__(self) -> _WatchedCall:
        if not hasattr(_calls, "stack"):
            _calls.stack = []
        _calls.stack.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _calls.stack.remove(self)
        for session in self.sessions:
            session.fail(kind, error, trace) if error is not None else session.end()


def watch(owner: type, method: str) -> None:
    """Wrap a framework's training method, once, so that an exception leaving it ends the runs it was training.

    For frameworks that do not report exceptions to their callbacks. A script that catches the exception, or a notebook, keeps
    running, so process exit is too late.
    """
    original = getattr(owner, method)
    if original in _watched:
        return

    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _WatchedCall(self):
            return original(self, *args, **kwargs)

    _watched.add(watched)
    setattr(owner, method, watched)


def note_of(run: Any) -> dict[str, str]:
    """Return what tells a training that is resumed which run it continues; nothing if there is no run."""
    if run is None or run.id == "disabled":
        return {}
    return {"run": run.id, "project": run.project, "name": run.name, "path": str(run.path)}
