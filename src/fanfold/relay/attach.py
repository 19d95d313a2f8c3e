"""Starting relays for the trackers given to init(): names, "all" or tracker objects, each in its own process or in a thread."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import json
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .. import approvals
from ..errors import SettingError, guard, logger, notices, outcome, shown, suggestion
from ..fold import check as check_fold
from ..probes import energy
from ..trackers import _mlflow as mlflow_runs
from ..trackers.base import is_tracker
from ..trackers.face import destination_of, own_class, tracker_of
from ..trackers.registry import LOGGER_TYPE_TO_CLASS, TABLE, find_class, installed, load_entry_points, without_setup
from .cursor import Cursor
from .deadline import can_limit
from .process import Relay, address_of, check_arguments, cursor_of, hold_seconds, left_line, make, split_options
from .worker import Worker

MODES = ("process", "thread")
START_SECONDS = 20.0
TURN_SECONDS = 5.0  # how long a user's call waits for the relay
COUNT_SECONDS = 0.5  # the part of finish()'s timeout reserved for counting undelivered values


def check_folds(fold: Any) -> dict[str, str]:
    """Return a fold policy, {key or pattern: mean | min | max | sum | std | last}, or raise."""
    if fold is None:
        return {}
    if isinstance(fold, str):
        fold = {"*": fold}
    return {str(key): check_fold(str(how)) for key, how in dict(fold).items()}


def resolve(trackers: Any) -> list[Any]:
    """Return names and tracker objects from any form of init(trackers=…); raise for unknown names and list the known ones."""
    wanted = [] if trackers is None else list(trackers) if isinstance(trackers, (list, tuple, set)) else [trackers]
    chosen: list[Any] = []
    for item in wanted:
        if energy.named(item):
            continue  # a probe, whose metrics go to all the others
        tracker = tracker_of(item)
        found = [tracker] if is_tracker(tracker) else _all() if str(item) == "all" else [_named(item)]
        chosen += [one for one in found if one not in chosen]
    return chosen


def _named(item: Any) -> str:
    if not isinstance(item, (str, enum.Enum)):
        raise SettingError(
            f"init(trackers={shown(item)}) is neither a name nor a GeneralTracker or Destination object. "
            f"The run was not started. Known: {', '.join(LOGGER_TYPE_TO_CLASS)}."
        )
    name = str(item)
    if name not in LOGGER_TYPE_TO_CLASS:
        load_entry_points()
    if name not in LOGGER_TYPE_TO_CLASS:
        known = suggestion(name, [*LOGGER_TYPE_TO_CLASS, "all"])
        raise SettingError(f"there is no tracker {name!r}. The run was not started.{known}")
    find_class(name)
    return name


def _all() -> list[str]:
    """Return every installed tracker that works without further setup; log one warning that names the others."""
    found = [row.name for row in TABLE if installed(row.name)]
    if not found:
        notices.once(
            "all:none",
            "trackers='all' was requested, but no tracker's library is installed. The run is kept on this machine only. "
            f"Run: pip install 'fanfold[NAME]', where NAME is one of {', '.join(row.extra for row in TABLE)}.",
        )
    return without_setup(found, "trackers='all'")


def check(chosen: list[Any], kwargs: Mapping[str, Mapping[str, Any]], fold: Any, mode: str) -> None:
    """Raise for anything that cannot work, before any of the run is written."""
    if mode not in MODES:
        raise SettingError(f"relay={mode!r} is not known. The run was not started.{suggestion(mode, MODES)}")
    unknown = set(kwargs) - {item if isinstance(item, str) else item.name for item in chosen} - {energy.NAME}
    if unknown:
        raise SettingError(
            f"tracker_kwargs names {', '.join(sorted(unknown))}, which trackers= does not. The run was not started."
        )
    check_folds(fold)
    for name in chosen if mode == "process" else ():
        if isinstance(name, str):
            address_of(name)
            check_arguments(name, kwargs.get(name, {}))


class Attached:
    """The trackers of one run, held by rank 0."""

    def __init__(
        self, run: Path, chosen: list[Any], kwargs: Mapping[str, Mapping[str, Any]], fold: Mapping[str, str], mode: str,
        flush: Callable[[float], Any] = lambda _timeout: None,
    ) -> None:  # fmt: skip
        names = [item if isinstance(item, str) else str(item.name) for item in chosen]
        self.relays: list[Relay | ThreadRelay] = [
            Relay(run, item, kwargs.get(item, {}), fold)
            if isinstance(item, str) and mode == "process"
            else ThreadRelay(run, item, kwargs.get(names[i], {}), fold, flush, copy=names[:i].count(names[i]))
            for i, item in enumerate(chosen)
        ]

    def start(self) -> None:
        for relay in self.relays:
            with guard(f"start the relay to {relay.name}"):
                approvals.remember(relay.name, relay.cursor().kwargs)  # `fanfold sync` sends only where this user sent before
                relay.start()

    def wait(self, timeout: float) -> list[str]:
        """Wait for all relays together; return a line for each that has not finished."""
        self.look_after(ended=True)  # all that died at once, not each in its turn
        deadline = time.monotonic() + timeout
        enough = deadline - min(COUNT_SECONDS, timeout / 4)
        self.hurry()
        return self._lines([relay for relay in self.relays if not relay.wait(max(0.0, enough - time.monotonic()))], deadline)

    def look_after(self, *, ended: bool = False) -> None:
        """Restart relay processes that died. Called from the run's keeper thread, and when the run has `ended`."""
        for relay in self.relays:
            if isinstance(relay, Relay):
                with guard(f"look after the relay to {relay.name}"):
                    relay.look_after(ended=ended)

    def restarted(self) -> list[str]:
        """Return a line for each relay that died during the run and was restarted."""
        counts = {relay.name: relay.restarts for relay in self.relays if isinstance(relay, Relay) and relay.restarts}
        return [f"the relay to {name} died during the run and was started again {_times(n)}." for name, n in counts.items()]

    @property
    def here(self) -> bool:
        """Whether any tracker runs in this process."""
        return any(isinstance(relay, ThreadRelay) for relay in self.relays)

    def hurry(self, *, here: bool = False) -> None:
        """Tell the relays (`here`: only those in this process) that the run has ended."""
        for relay in self.relays:
            if isinstance(relay, ThreadRelay) or not here:
                relay.hurry()

    def wait_here(self, timeout: float) -> None:
        """Wait for the trackers that run in this process, all together."""
        deadline = time.monotonic() + timeout
        self.hurry(here=True)
        for relay in self.relays:
            if isinstance(relay, ThreadRelay):
                relay.wait(max(0.0, deadline - time.monotonic()))

    def _lines(self, late: list[Relay | ThreadRelay], deadline: float) -> list[str]:
        """Describe what is undelivered, with counts if time allows: counting a long journal takes a while."""
        lines = [relay.left(counted=False) for relay in late]

        def count() -> None:
            with guard("count what is left for the trackers"):
                for at, relay in enumerate(late):
                    lines[at] = relay.left()

        if late:
            counter = threading.Thread(target=count, name="fanfold-count", daemon=True)
            counter.start()
            counter.join(max(0.0, deadline - time.monotonic()))
        return list(lines)

    def get(self, name: str) -> Any:
        return next((relay for relay in self.relays if relay.name == name), None)


class ThreadRelay:
    """The relay worker inside the training process: for tracker objects, and for callers who want the live object."""

    def __init__(
        self, run: Path, item: Any, kwargs: Mapping[str, Any], fold: Mapping[str, str], flush: Callable[[float], Any], *,
        copy: int = 0,
    ) -> None:  # fmt: skip
        self.run = run
        self._flush = flush  # waits until device values and media are in the journal
        self._options, plain = split_options(kwargs)
        by_name = isinstance(item, str)
        self.name: str = find_class(item).name if by_name else item.name
        told = by_name or destination_of(item) is not None  # so another process can construct it again
        destination = {key: value for key, value in kwargs.items() if _is_json(value)} if told else {}
        self._cursor = cursor_of(run, self.name, {**destination, **({"copy": copy} if copy else {})})
        self.tracker: Any = make(item, plain, run, self._cursor.project) if by_name else item
        self.destination = destination_of(self.tracker)  # None for a user-written tracker
        self._address = _address(self.tracker)
        self._done = threading.Event()
        self._first_try = threading.Event()
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._fold, self._hold = fold, hold_seconds(run)
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._mlflow_runs: Any = None  # MLflow's active runs, as seen by the tracker's thread
        self._inside = threading.local()  # whether a thread is inside a user's call

    def start(self) -> None:
        """Start the tracker and serve it from a thread; random states are restored afterwards.

        A built-in tracker starts on this thread: its library may tie the current run to the thread or context, and the user calls
        the library from here. A user-written one runs in the relay's thread from start to finish, so that whatever it opens
        (SQLite, say) is used on the thread that opened it. In both cases a tracker that hangs delays the caller by at most
        START_SECONDS: if a hanging library could not be interrupted on this thread, it starts in the relay's thread as well.
        """
        with undisturbed():
            with guard(f"take up the tracker {self.name}"):
                self._cursor.acquire()
                self._worker = Worker(
                    self.run, self.tracker, self._cursor, self._options, fold=self._fold, hold=self._hold, stop=self._stop,
                    hurry=self._hurry, live=True,
                )  # fmt: skip
                if self.destination is not None and can_limit(START_SECONDS):
                    self._try_start(self._worker, START_SECONDS)
            before, context = contextvars.copy_context(), contextvars.copy_context()
            name = f"fanfold-relay-{self.name}"
            self._thread = threading.Thread(target=context.run, args=(self._serve,), name=name, daemon=True)
            if self.destination is not None:
                self.destination.users_turn = self.users_turn
            self._thread.start()
            if not self._first_try.wait(START_SECONDS):
                self._say_slow()
            with guard(f"make the run of {self.name} the current one"):
                self._show_here(before, context)

    def _show_here(self, before: contextvars.Context, context: contextvars.Context) -> None:
        """Make visible here what the tracker's start tied to another thread or context: users call the library from here."""
        if self.destination is not None:
            if self._worker is not None and self._worker.started_elsewhere:
                self.destination.show_here()
            return
        for variable, value in context.items():
            if before.get(variable, self) is not value:
                variable.set(value)
        mlflow_runs.show(self._mlflow_runs)

    @property
    def builtin(self) -> bool:
        """Whether the tracker is one of ours, started on the thread that started the run."""
        return self.destination is not None

    @contextlib.contextmanager
    def users_turn(self) -> Iterator[None]:
        """Pause the relay while the user calls the tracker, after delivering everything logged before."""
        worker = self._worker
        elsewhere = worker is None or not worker.started or threading.current_thread() is self._thread
        if elsewhere or getattr(self._inside, "turn", False):  # not served yet, called by the relay itself, or a nested call
            yield
            return
        assert worker is not None
        self.catch_up()
        held = worker.turns.acquire(timeout=TURN_SECONDS)  # a tracker that hangs must not block its caller forever
        self._inside.turn = True
        try:
            yield
        finally:
            self._inside.turn = False
            if held:
                worker.turns.release()

    def later(self, errand: Callable[[], Any]) -> None:
        """Run something with the tracker on the relay's thread, after everything logged so far."""
        if self._worker is not None:
            self._worker.errands.append(errand)
            self._worker.nudge.set()

    @property
    def started(self) -> bool:
        """Whether the tracker has started, so that its library's objects exist."""
        return self._worker is not None and self._worker.started

    def catch_up(self, *, settled: bool = False) -> None:
        """Wait until everything logged so far has been handed to the tracker (`settled`: and written), at most TURN_SECONDS."""
        if self._worker is not None and threading.current_thread() is not self._thread:
            self._flush(TURN_SECONDS)
            self._worker.catch_up(TURN_SECONDS)
            if settled:  # a second turn: during the first, the values may not have been read yet
                self.later(self._worker.settle)
                self._worker.catch_up(TURN_SECONDS)

    def _say_slow(self) -> None:
        logger.warning(
            "the tracker %s has not started within %g s. Training continues and nothing is lost: it gets everything "
            "when it is there, or with `fanfold sync`.", self.name, START_SECONDS,
        )  # fmt: skip

    def _try_start(self, worker: Worker, limit: float | None = None) -> None:
        """Make the first attempt to start; if it fails, the worker warns, retries, and delivers everything later."""
        if isinstance(worker.begin(limit=limit), TimeoutError) and limit is not None:
            self._say_slow()
        self._mlflow_runs = mlflow_runs.of_this_thread()
        self._first_try.set()

    def _serve(self) -> None:
        try:
            if self._worker is not None:
                if not self._first_try.is_set():
                    self._try_start(self._worker)
                self._worker.serve()
        finally:
            self._first_try.set()
            self._cursor.release()
            self._done.set()

    def unwrapped(self) -> Any:
        """Return the library's own object, or a silent stand-in if the tracker could not start."""
        found, error = outcome(lambda: self.tracker.tracker)
        if error is None and not (found is None and self.builtin):
            return found
        why = f" ({type(error).__name__}: {error})" if error is not None else ""
        notices.once(
            f"{self.name}:unwrap",
            f"the tracker {self.name} has no object yet, because it has not started{why}. Training continues; calls to it "
            "do nothing.",
        )
        return Silent()

    def cursor(self) -> Cursor:
        return self._cursor

    def hurry(self) -> None:
        """Signal that the run has ended."""
        self._hurry.set()
        if self._worker is not None:
            self._worker.nudge.set()

    def wait(self, timeout: float) -> bool:
        done = self._done.wait(timeout) and self._worker is not None and self._worker.closed
        if not done:
            self._stop.set()
        if self.destination is not None and not self._options.joined:
            with guard(f"take {self.name} back from this thread"):
                self.destination.hide_here()
        return done

    def left(self, *, counted: bool = True) -> str:
        return left_line(self.run, self._cursor, self._address, counted=counted)


class undisturbed:  # noqa: N801 - reads as a statement
    """A context manager that restores random states and process-wide hooks changed by a tracker library's start."""

    def __enter__(self) -> None:
        self._undo = [*_random_states(), *_hooks(), *_signal_handlers()]

    def __exit__(self, *_error: object) -> None:
        for undo in self._undo:
            undo()


def _random_states() -> list[Callable[[], Any]]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    undo: list[Callable[[], Any]] = [partial(random.setstate, random.getstate())]
    if numpy is not None:
        undo.append(partial(numpy.random.set_state, numpy.random.get_state()))
    if torch is not None:
        undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            undo.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    return undo


def _hooks() -> list[Callable[[], Any]]:
    names = ((sys, "excepthook"), (sys, "unraisablehook"), (sys, "displayhook"), (sys, "stdout"), (sys, "stderr"),
             (threading, "excepthook"), (warnings, "showwarning"))  # fmt: skip
    return [partial(setattr, module, name, getattr(module, name)) for module, name in names]


def _signal_handlers() -> list[Callable[[], Any]]:
    if threading.current_thread() is not threading.main_thread():
        return []  # only the main thread can change them
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def undo() -> None:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    return [undo]


def handle(name: str, wanted: Mapping[str, Any], attached: Attached | None, unwrap: bool) -> Any:
    """Return a tracker: the live one of a thread relay, a silent twin on other ranks, or raise an error that explains how."""
    if name not in wanted:
        raise ValueError(f"{name} is not an available tracker stored inside the run. Known: {', '.join(wanted) or 'none'}.")
    if attached is None:
        return Silent() if unwrap else silent_twin(name, wanted[name])
    relay = attached.get(name)
    if isinstance(relay, ThreadRelay):
        return relay.unwrapped() if unwrap else relay.tracker
    if unwrap:
        raise SettingError(
            f"the tracker {name} runs in a process of its own, so its object is not available here. Nothing was changed. "
            "Pass relay='thread' to fanfold.init to have it in this process."
        )
    return relay


def silent_twin(name: str, item: Any) -> Any:
    """Return an object of the tracker's class whose methods all do nothing, for ranks other than 0."""
    cls = item if isinstance(item, type) else type(item) if is_tracker(item) else find_class(name)
    public = {key: getattr(cls, key, None) for key in dir(cls) if not key.startswith("_")}
    methods = {key: nothing for key, found in public.items() if callable(found) and not isinstance(found, type)}
    missing = {"tracker": property(lambda _self: Silent()), "__getattr__": _silent_attribute}
    twin = type(cls.__name__, (cls,), {**methods, **missing})
    return object.__new__(twin)


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: trackers act on rank 0 only."""


def _silent_attribute(_self: Any, name: str) -> Any:
    """Stand in for attributes that a tracker's start() would have set, such as `writer` or `run`."""
    if name.startswith("_"):
        raise AttributeError(name)
    return Silent()


class Silent:
    """A stand-in for a tracker library's object that ignores every operation, for ranks without the tracker."""

    def __getattr__(self, name: str) -> Any:
        return _silent_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Ignore the assignment."""

    def __getitem__(self, _key: Any) -> Any:
        return self

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Ignore the assignment."""

    __call__ = nothing

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _address(tracker: Any) -> str:
    """Return the address by which `fanfold sync` finds a tracker's class."""
    cls = own_class(type(tracker))
    return tracker.name if cls.__module__.startswith("fanfold.") else f"{cls.__module__}:{cls.__qualname__}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _is_json(value: Any) -> bool:
    """Return whether a cursor can store this argument for a later `fanfold sync`."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
