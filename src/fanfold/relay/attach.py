"""From what init() was given to relays that run: names, "all", tracker objects; in processes of their own or in a thread."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingError, guard, logger
from ..fold import check as check_fold
from ..trackers.base import Adapter, is_tracker
from ..trackers.registry import LOGGER_TYPE_TO_CLASS, TABLE, find_class, installed
from .cursor import Owned
from .process import Relay, cursor_of, make
from .worker import Worker

MODES = ("process", "thread")


def check_folds(fold: Any) -> dict[str, str]:
    """Return a fold policy, {key or pattern: mean | min | max | sum | std | last}, or raise."""
    if fold is None:
        return {}
    if isinstance(fold, str):
        fold = {"*": fold}
    return {str(key): check_fold(str(how)) for key, how in dict(fold).items()}


def resolve(trackers: Any) -> list[Any]:
    """Return names and tracker objects from whatever init(trackers=…) was given; unknown names raise and list the known."""
    wanted = [] if trackers is None else list(trackers) if isinstance(trackers, (list, tuple, set)) else [trackers]
    chosen: list[Any] = []
    for item in wanted:
        found = [item] if is_tracker(item) else _all() if str(item) == "all" else [_named(item)]
        chosen += [one for one in found if one not in chosen]
    return chosen


def _named(item: Any) -> str:
    if not isinstance(item, (str, enum.Enum)):
        known = ", ".join(LOGGER_TYPE_TO_CLASS)
        raise SettingError(
            f"trackers={item!r} is neither a name nor a GeneralTracker object. The run was not started. Known: {known}."
        )
    name = str(item)
    find_class(name)
    return name


def _all() -> list[str]:
    """Return every tracker that is installed and can work without asking anybody; say in one line which cannot."""
    usable, not_so = [], []
    for row in TABLE:
        if not installed(row.name):
            continue
        why = LOGGER_TYPE_TO_CLASS[row.name].unusable()
        usable.append(row.name) if why is None else not_so.append(f"{row.name} ({why})")
    if not_so:
        logger.warning("trackers='all' leaves out what cannot start without a word from you: %s.", ", ".join(not_so))
    return usable


class Attached:
    """The trackers of one run, as its rank 0 holds them."""

    def __init__(
        self, run: Path, chosen: list[Any], kwargs: Mapping[str, Mapping[str, Any]], fold: Mapping[str, str], mode: str
    ) -> None:
        if mode not in MODES:
            raise SettingError(f"relay={mode!r} is not known. The run was not started. Known: {', '.join(MODES)}.")
        unknown = set(kwargs) - {item if isinstance(item, str) else item.name for item in chosen}
        if unknown:
            raise SettingError(
                f"tracker_kwargs names {', '.join(sorted(unknown))}, which trackers= does not. The run was not started."
            )
        self.relays: list[Relay | ThreadRelay] = [
            Relay(run, item, kwargs.get(item, {}), fold)
            if isinstance(item, str) and mode == "process"
            else ThreadRelay(run, item, kwargs.get(item if isinstance(item, str) else item.name, {}), fold)
            for item in chosen
        ]

    def start(self) -> None:
        for relay in self.relays:
            relay.start()

    def wait(self, timeout: float) -> list[str]:
        """Wait for all of them together; return a line for each that is not through."""
        deadline = time.monotonic() + timeout
        return [str(relay.left()) for relay in self.relays if not relay.wait(max(0.0, deadline - time.monotonic()))]

    def get(self, name: str) -> Any:
        return next((relay for relay in self.relays if relay.name == name), None)


class ThreadRelay:
    """The same worker inside the training process: for tracker objects, and where the live object is wanted."""

    def __init__(self, run: Path, item: Any, kwargs: Mapping[str, Any], fold: Mapping[str, str]) -> None:
        self.run = run
        self.tracker: Any = make(item, kwargs, run) if isinstance(item, str) else item
        self.name: str = self.tracker.name
        self.fold = dict(fold)
        self._stop = threading.Event()
        self._deadline: Callable[[], bool] = lambda: False
        self._done = threading.Event()
        self._cursor = cursor_of(run, self.name, kwargs if isinstance(item, str) else {})
        self._worker = Worker(run, self.tracker, self._cursor, fold=fold, stop=self._stop, started=True)

    def start(self) -> None:
        """Start the tracker here and now, with everybody's random numbers as they were, then serve it from a thread."""
        with undisturbed(), guard(f"start the tracker {self.name}"):
            if isinstance(self.tracker, Adapter):
                self._worker.feed.poll()
                self.tracker.adopt(self._worker.identity())
            self.tracker.start()
        threading.Thread(target=self._serve, name=f"fanfold-relay-{self.name}", daemon=True).start()

    def _serve(self) -> None:
        try:
            self._cursor.acquire()
            self._worker.serve(follow=True)
        except Owned as owned:
            logger.warning("%s", owned)
        finally:
            self._cursor.release()
            self._done.set()

    def wait(self, timeout: float) -> bool:
        done = self._done.wait(timeout) and self._cursor.closed is not None
        if not done:
            self._stop.set()
        return done

    def left(self) -> str:
        why = f" ({self._cursor.error})" if self._cursor.error else ""
        rest = f"fanfold sync {self.run.name} --to {self.name}"
        return f"{self.name} has {self._cursor.delivered} values settled so far{why}; the rest: {rest}"


class undisturbed:  # noqa: N801 - reads as a statement
    """Put back random states and process-wide hooks that a tracker library changes when it starts."""

    def __enter__(self) -> None:
        import random
        import sys

        self._random = random.getstate()
        self._hook = sys.excepthook
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._torch = torch.get_rng_state() if torch is not None else None

    def __exit__(self, *_error: object) -> None:
        import random
        import sys

        random.setstate(self._random)
        sys.excepthook = self._hook
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._torch is not None:
            sys.modules["torch"].set_rng_state(self._torch)


def handle(name: str, wanted: Mapping[str, Any], attached: Attached | None, unwrap: bool) -> Any:
    """Give out a tracker: the live one from a thread relay, a silent twin on other ranks, or an error that says how."""
    if name not in wanted:
        raise ValueError(f"{name} is not an available tracker stored inside the run. Known: {', '.join(wanted) or 'none'}.")
    if attached is None:
        return silent_twin(name, wanted[name])
    relay = attached.get(name)
    if isinstance(relay, ThreadRelay):
        return relay.tracker.tracker if unwrap else relay.tracker
    if unwrap:
        raise SettingError(
            f"the tracker {name} lives in a process of its own, so its object is not here. Nothing was changed. "
            "Pass relay='thread' to fanfold.init to have it in this process."
        )
    return relay


def silent_twin(name: str, item: Any) -> Any:
    """Return an object of the tracker's class whose every method does nothing: what other ranks get."""
    cls = type(item) if is_tracker(item) else find_class(name)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        """Do nothing: trackers act on rank 0."""

    methods = {key: nothing for key in dir(cls) if not key.startswith("_") and callable(getattr(cls, key, None))}
    twin = type(cls.__name__, (cls,), {**methods, "tracker": property(lambda self: self)})
    return object.__new__(twin)
