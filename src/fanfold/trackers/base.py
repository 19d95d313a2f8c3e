"""Accelerate's interface, `GeneralTracker`, and the types that relays and destinations share: points, alerts, refusals."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .. import process
from ..errors import notices
from ..journal.bodies import Fork
from ..plain import plain
from ..values import flatten, split

F = TypeVar("F", bound=Callable[..., Any])
NO_STEP = "fanfold_no_step"  # in a point's kwargs: the caller gave no step, so the point's step was counted


def is_main_process() -> bool:
    """Return whether this is the main process, according to Accelerate if it is initialised, else to the launcher."""
    state = sys.modules.get("accelerate.state")
    if state is not None and state.PartialState._shared_state:  # noqa: SLF001 - reading it never starts a process group
        return bool(state.PartialState().is_main_process)
    return process.is_main_process()


def on_main_process(function: F) -> F:
    """Run a tracker's method on the main process only, unless its class sets `main_process_only = False`. Checked per call.

    While a relay serves the tracker from this process, the call waits its turn: see `Destination.users_turn`.
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
        """Open the tracker's resources; called once, before anything is logged."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's config."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values at a step."""

    def finish(self) -> None:
        """Close the tracker."""


def tracker_bases() -> tuple[type, ...]:
    """Return the classes a tracker may derive from: ours, and Accelerate's if it is imported."""
    theirs = getattr(sys.modules.get("accelerate.tracking"), "GeneralTracker", None)
    return (GeneralTracker, theirs) if isinstance(theirs, type) else (GeneralTracker,)


def is_tracker(value: Any) -> bool:
    """Return whether something is a tracker object."""
    return isinstance(value, tracker_bases())


class Point(NamedTuple):
    """One call to deliver: numbers, texts and media under their keys, with step, time (seconds) and tracker arguments."""

    values: dict[str, Any]
    step: int | None
    time: float | None = None
    kwargs: Mapping[str, Any] = {}


class Alert(NamedTuple):
    """Something a person should see. Sending the same alert again keeps its `id`."""

    title: str
    text: str
    level: str  # info, warning or error
    step: int | None
    time: float
    id: str


class Identity(NamedTuple):
    """The run's identity, for trackers that can take an id, name or directory from it."""

    run_id: str
    name: str
    project: str
    group: str | None
    directory: Path
    live: bool = False  # served from the user's process: the library's globals (`wandb.run`) refer to this run
    layout: str = "fanfold"  # names and paths at the destination: ours, or those of "accelerate" or "transformers"
    fork: Fork | None = None  # the run it continues, if that one was sent to the same tracker

    def digest(self, length: int) -> str:
        """Return an id derived from project and run, for systems whose ids are hexadecimal digits."""
        return hashlib.sha256(f"{self.project}/{self.run_id}".encode()).hexdigest()[:length]


class Refused(Exception):
    """Raised for a value that the system will never accept, so it is not retried. The relay warns once per key and counts it."""


class Refusal(NamedTuple):
    """One value of a batch that was refused while the rest of the batch was written."""

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


def flat_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of one level: nested keys joined by `/`, lists kept.

    Where `{"a/b": 1, "a": {"b": 2}}` gives one name twice, the key with the fewest levels keeps it and the other becomes `a.b`.
    """
    paths = sorted(_paths(plain(values)), key=lambda found: len(found[0]))
    names: dict[tuple[str, ...], str] = {}
    for path, _ in paths:
        name = "/".join(path)
        if name in names.values():
            name = _other_name(path, set(names.values()))
        names[path] = name
    return {names[path]: value for path, value in _paths(plain(values))}


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
