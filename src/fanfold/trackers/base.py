"""What a tracker is: Accelerate's interface, and what ours add to it so that a relay can deliver without loss or repeats.

`GeneralTracker` is the interface custom trackers implement. `Adapter` is the base of the built-in ones: plain and
synchronous, it takes cleaned values and knows how its system avoids repeats.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from .. import process
from .._config import plain
from ..errors import notices
from ..values import flatten, split

F = TypeVar("F", bound=Callable[..., Any])
NO_STEP = "fanfold_no_step"  # among a point's arguments: the caller gave no step, and the point's own was counted


def is_main_process() -> bool:
    """Tell whether this is the main process: Accelerate's word where it has one already, else the launcher's."""
    state = sys.modules.get("accelerate.state")
    if state is not None and state.PartialState._shared_state:  # noqa: SLF001 - reading it never opens a process group
        return bool(state.PartialState().is_main_process)
    return process.is_main_process()


def on_main_process(function: F) -> F:
    """Run a tracker's method on the main process only, unless its class says `main_process_only = False`. Decided per call.

    While a relay serves the tracker from this process, the call waits its turn: see `Adapter.users_turn`.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not is_main_process():
            return None
        with getattr(self, "users_turn", nullcontext)():
            return function(self, *args, **kwargs)

    return call  # type: ignore[return-value]


class GeneralTracker:
    """The interface of every tracker. A subclass sets `name`, `requires_logging_directory` and a property `tracker`.

    Set up in `start()`, not in `__init__`; older trackers that do it in `__init__` work too.
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [name for name in ("name", "requires_logging_directory") if not hasattr(self, name)]
        if "tracker" not in dir(self):
            missing.append("tracker")
        if missing:
            names = ", ".join(f"`{name}`" for name in missing)
            raise NotImplementedError(
                "The implementation for this tracker class is missing the following required attributes. "
                f"Please define them in the class definition: {names}"
            )

    def start(self) -> None:
        """Open what the tracker needs; called once, before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's configuration."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values under a step."""

    def finish(self) -> None:
        """Close the tracker."""


def tracker_bases() -> tuple[type, ...]:
    """Return the classes a tracker may derive from: ours, and Accelerate's where it is imported."""
    theirs = getattr(sys.modules.get("accelerate.tracking"), "GeneralTracker", None)
    return (GeneralTracker, theirs) if isinstance(theirs, type) else (GeneralTracker,)


def is_tracker(value: Any) -> bool:
    """Tell whether something is a tracker object."""
    return isinstance(value, tracker_bases())


class Point(NamedTuple):
    """One call to deliver: numbers, texts and media under their keys, with step, time (seconds) and tracker arguments."""

    values: dict[str, Any]
    step: int | None
    time: float | None = None
    kwargs: Mapping[str, Any] = {}


class Alert(NamedTuple):
    """Something a person should see. `id` is the same whenever the same alert is sent again."""

    title: str
    text: str
    level: str  # info, warning or error
    step: int | None
    time: float
    id: str


class Identity(NamedTuple):
    """Who the run is, for trackers that can take an id, a name or a directory from it."""

    run_id: str
    name: str
    project: str
    group: str | None
    directory: Path
    live: bool = False  # served from the user's process: the library's own globals (`wandb.run`) are to mean this run
    layout: str = "fanfold"  # names and places at the destination: ours, or as "accelerate" has them


class Refused(Exception):
    """The system will never take this value, so it is not retried. The relay warns once per key and counts it."""


class Refusal(NamedTuple):
    """One value of a batch that was refused while everything else of the batch was written."""

    point: int  # its index in the batch
    key: str
    why: str


def clean(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain numbers, texts and media under flat keys: tensors and arrays of one element become numbers."""
    parts = split(values)
    device = {key: value.item() for key, value in parts.device.items()}
    order = {key: i for i, (key, _) in enumerate(flatten(values))}
    found = {**parts.numbers, **device, **parts.texts, **parts.media}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], 0)))


def clean_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration made of dicts, lists, texts, numbers and None, whatever came in."""
    return plain(values)  # type: ignore[no-any-return]


def flat_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of one level: nested keys joined by `/`, lists kept.

    Where `{"a/b": 1, "a": {"b": 2}}` gives one name twice, the key with the fewest levels has it and the other becomes `a.b`.
    """
    paths = sorted(_paths(clean_config(values)), key=lambda found: len(found[0]))
    names: dict[tuple[str, ...], str] = {}
    for path, _ in paths:
        name = "/".join(path)
        if name in names.values():
            name = _other_name(path, set(names.values()))
        names[path] = name
    return {names[path]: value for path, value in _paths(clean_config(values))}


def _paths(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, key))
        else:
            yield (*above, key), value


def _other_name(path: Sequence[str], taken: Collection[str]) -> str:
    name = ".".join(path)
    while name in taken:
        name += "_"
    notices.once(
        f"config:{'/'.join(path)}",
        f"the configuration has {'/'.join(path)!r} both as a key and as a value inside {path[0]!r}. Trackers with flat "
        f"configurations keep the inner one as {name!r}. Rename one of them.",
    )
    return name


def prepared(points: Sequence[Point], make: Callable[[Point, str, Any], Any]) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """Convert every value of a batch before any is sent; return the converted values by point, and what was refused."""
    ready: list[dict[str, Any]] = []
    refused = []
    for index, point in enumerate(points):
        ready.append({})
        for key, value in point.values.items():
            try:
                ready[-1][key] = make(point, key, value)
            except Refused as why:
                refused.append(Refusal(index, key, str(why)))
    return ready, refused


class Adapter(GeneralTracker):
    """Base of the built-in trackers. Users and Accelerate call `log`; the relay calls `write`, `settle` and `close`.

    How repeats are avoided after a crash (`delivery`):
      idempotent      the same point sent again is the same point
      readable        `counts()` says how many points of each key have arrived; the relay skips those
      at least once   neither; a crash between send and settle may repeat points
    The contract suite proves it for what is written on this disk. `delivery_online` says it for a service.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False
    delivery: ClassVar[str] = "at least once"
    delivery_online: ClassVar[str | None] = None  # the same where a service takes the points; None: there is no such thing
    counts_each: ClassVar[bool] = False  # whether a list of media under one key makes as many entries in counts()

    layouts: ClassVar[tuple[str, ...]] = ("fanfold",)  # with "accelerate", names and places are Accelerate's where asked for

    # Set by a relay in this process: a call of the user's is made when everything logged before it has been handed over, and
    # while the relay waits, so that the library sees the order of the program.
    users_turn: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    # What an adapter writes

    @classmethod
    def unusable(cls) -> str | None:
        """Say why this tracker cannot start without asking the user (no key, say), or None. Never touches the network."""
        return None

    def adopt(self, identity: Identity) -> None:
        """Take id, name and directory from our run where the user gave none. Called by the relay, before start().

        The remote id must derive from ours, so that a relay killed while it creates the remote run makes no second one.
        """

    def show_here(self) -> None:
        """Make the run the library's current one on this thread, where that is a matter of threads and none is.

        Called in the user's process only (`Identity.live`), on the thread that started the tracker; `hide_here` undoes it.
        """

    def hide_here(self) -> None:
        """Undo `show_here`, when the run has ended."""

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        """Send points, oldest first, and return the values that the system will never take; all others are written.

        Values are clean. An exception means that the batch is to be sent again: for `readable` systems `counts()` then says
        what arrived, and `Refused` promises that nothing did. This one calls `add` for each value; a system that takes whole
        points or batches overrides it (see `prepared`).
        """
        refused = []
        for index, point in enumerate(points):
            for key, value in point.values.items():
                try:
                    self.add(key, value, point)
                except Refused as why:
                    refused.append(Refusal(index, key, str(why)))
        return refused

    def add(self, key: str, value: Any, point: Point) -> None:
        """Send one value of a point, or raise Refused before anything of it is sent."""
        raise NotImplementedError

    def settle(self) -> None:
        """Return when everything sent so far is safe at the destination."""

    def counts(self) -> dict[str, int] | None:
        """Return how many points of each key the destination has, or None if it cannot tell."""
        return None

    def close(self, status: str) -> None:
        """End the remote run as finished, failed, killed or preempted."""
        del status
        self.finish()

    @property
    def remote(self) -> str | None:
        """The remote run's id, once there is one; `resume(remote)` continues it."""
        return None

    def resume(self, remote: str) -> None:
        """Continue a remote run: called before start(), with what `remote` was."""

    def artifact(self, path: Path, name: str) -> None:
        """Keep a file. Systems without artifacts say so once."""
        self._cannot("keep files", name, path)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep what was assigned to `run.summary`: all of it, whenever some of it has changed."""
        del values
        self._lacks("a run summary", "the values assigned to run.summary are")

    def define_metric(self, key: str, *, x: str | None, summary: str | None) -> None:
        """Set the x axis of a key (or of `val/*`), and its summary statistic. Defining it again replaces the definition."""
        del key, x, summary
        self._lacks("definitions of metrics", "define_metric() calls are")

    def alert(self, alert: Alert) -> None:
        """Show an alert. One that was sent right before a kill is sent again, with the same id."""
        del alert
        self._lacks("alerts", "they are")

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        """Take over name, tags, notes and group as far as the system has them. Called after start()."""

    # What Accelerate and users call

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values now. A value that the system will never take is left out with a warning; the others are recorded."""
        self.warn_refused(self.write([Point(clean(values), step, None, kwargs)]))

    def warn_refused(self, refused: Sequence[Refusal]) -> None:
        """Warn once per key about values that were left out."""
        for _, key, why in refused:
            notices.once(
                f"{self.name}:refused:{key}",
                f"{self.name} does not take {key!r}: {why}. It is left out there and the other values are recorded. "
                "Later cases are counted.",
            )

    def _lacks(self, what: str, kept: str) -> None:
        """Warn once that this system has no place for something."""
        notices.once(
            f"{self.name}:lacks:{what}",
            f"{self.name} has no place for {what}; {kept} kept in the journal only. See `fanfold show` or `fanfold ui`.",
        )

    def _cannot(self, what: str, key: str, value: Any) -> None:
        """Say once what this system cannot hold."""
        notices.once(
            f"{self.name}:{what}:{key}",
            f"{self.name} cannot {what}; {key!r} ({type(value).__name__}) is not there, but it is kept in the journal. "
            "Look at it with `fanfold show`.",
        )
