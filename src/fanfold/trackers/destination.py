"""The interface a relay delivers to: one `Destination` per system. It opens, writes, settles and closes, without Accelerate.

Values arrive clean. How lists, texts and kinds of media are split is shared: a destination has a method `take_<kind>` for each
kind its system accepts, and a kind without such a method falls back to the nearest kind that has one.
"""

from __future__ import annotations

import importlib
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..errors import FanfoldError, notices
from ..media import Image, Media
from .base import Alert, Identity, Point, Refusal, Refused, clean
from .tools import OWNERS, content_of, library_of, until

LEFT_OUT = object()  # the result for a value that the system cannot hold
SETTLE_SECONDS = 60.0


class Item(NamedTuple):
    """One text or media object of a point; a list under one key yields several."""

    key: str
    value: Any
    kind: str  # text, image, audio, video, histogram, table, figure, plotly, html, or native for the library's own objects
    point: Point
    at: int = 0  # its position in a list of `of` items
    of: int = 1

    @property
    def step(self) -> int | None:
        return self.point.step

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else str(self.value.text)

    @property
    def caption(self) -> str | None:
        return getattr(self.value, "caption", None)

    @property
    def content(self) -> tuple[bytes, str]:
        """The object as the bytes of a file, and the file's extension."""
        return (self.text.encode(), "txt") if self.kind == "text" else content_of(self.value)


# The fallback for a kind without its own method: a rendered figure is an image, anything is a file.
_NEXT: Mapping[str, str] = {
    "figure": "image", "plotly": "html",
    **dict.fromkeys(("image", "audio", "video", "histogram", "table", "html", "text"), "file"),
}  # fmt: skip


def kind_of(value: Any) -> str:
    """Return the kind of a value that is not a number."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, Media):
        return "native"
    return "plotly" if value.kind == "figure" and not value.png else value.kind  # type: ignore[attr-defined]


def items_of(key: str, value: Any, point: Point) -> Iterator[Item]:
    """Yield the texts and media of one value."""
    listed = value if isinstance(value, list) else [value]
    for at, one in enumerate(listed):
        yield Item(key, one, kind_of(one), point, at, len(listed))


class Destination:
    """Base of every destination. A subclass sets `name`, opens its system in `open`, and defines `number` and `take_<kind>`.

    How repeats are avoided after a crash (`delivery`):
      idempotent      sending the same point again has no effect
      readable        `counts()` returns how many points of each key have arrived; the relay skips those
      at least once   neither; a crash between send and settle may repeat points
    The contract suite verifies it for data written to local disk. `delivery_online` states it for a service.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False  # whether the second argument is a folder
    main_process_only = True  # whether users' calls do nothing on other ranks
    delivery: ClassVar[str] = "at least once"
    delivery_online: ClassVar[str | None] = None  # the same when delivering to a service; None: there is no service
    counts_each: ClassVar[bool] = False  # whether each item of a media list counts as an entry in counts()
    settles_each_call: ClassVar[bool] = False  # whether a user's direct call is stored at once
    library_name: ClassVar[str] = ""  # the module that `library` imports; usually it has the tracker's name
    own_name: ClassVar[str] = "run"  # what users call `run`, the library's own object
    ends_with: ClassVar[str] = ""  # the method of `run` that ends it with the library's defaults
    own_media: ClassVar[frozenset[str]] = frozenset()  # classes of the library that log_images and log_table use instead of ours
    accepts: ClassVar[frozenset[str] | None] = None  # the arguments that a relay passes on with a point; None: all
    takes_points: ClassVar[bool] = True  # False: it reads the run itself, in `look`
    points_replace_summary: ClassVar[bool] = False  # True: the summary of a key is its last point, so it is sent again at the end
    layouts: ClassVar[tuple[str, ...]] = ("fanfold",)  # with "accelerate", names and paths can follow Accelerate

    run: Any = None  # the library's own object
    given: Any = None  # an object the user has already opened: if set before `open`, it is used instead of a new one
    identity: Identity | None = None  # of the delivered run; None if the user opened it directly

    # Set by a relay in this process: a user's call runs after everything logged before it has been delivered, and while the relay
    # is paused, so that the library sees the program's order.
    users_turn: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def __init__(self, run_name: Any = None, **kwargs: Any) -> None:
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._waiting: dict[Any, list[Any]] = {}

    @classmethod
    def unusable(cls) -> str | None:
        """Return why this cannot start without user input (no key, say), or None. Never accesses the network."""
        return None

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        """Open the system for a run, continuing the remote run `remote` if there is one; called again after a failure.

        A new remote run's id must be derived from `identity`, so that a relay killed during creation does not create a second
        one. Without an identity the user opened it directly: everything follows the library's defaults.
        """
        self.identity = identity if self.given is None else None
        self.run = self.begin(identity, remote) if self.given is None else self.given

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        """Return the library's own object, newly opened; what `open` calls unless the user has passed one."""
        raise NotImplementedError

    def close(self, status: str) -> None:
        """End the remote run as finished, failed, killed or preempted."""
        self.finish()

    def finish(self) -> None:
        """End the run with the library's own defaults; this is all that is needed if the user opened it directly."""
        if self.ends_with:
            getattr(self.run, self.ends_with)()

    @property
    def tracker(self) -> Any:
        """The library's own object."""
        return self.run

    @property
    def library(self) -> Any:
        """The system's module, imported on first use."""
        return importlib.import_module(self.library_name or self.name)

    @property
    def remote(self) -> str | None:
        """The remote run's id, once there is one; `open` with it continues that run."""
        found = getattr(self.run, "id", None)
        return None if found is None else str(found)

    def show_here(self) -> None:
        """Make the run the library's current one on this thread, if the library tracks that per thread and none is current.

        Called only in the user's process (`Identity.live`), on the thread that opened it; `hide_here` reverts it.
        """

    def hide_here(self) -> None:
        """Revert `show_here` after the run has ended."""

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        """Send points, oldest first, and return the values that the system will never accept; all others are written.

        An exception means that the batch must be sent again: for `readable` systems `counts()` then tells what arrived, and
        `Refused` guarantees that nothing did. This implementation sends value by value; a system that accepts whole points or
        batches overrides it and calls `converted`.
        """
        self._waiting = {}
        refused = []
        for index, point in enumerate(points):
            for key, value in point.values.items():
                try:
                    self.add(key, value, point)
                except Refused as why:
                    refused.append(Refusal(index, key, str(why)))
        for place in tuple(self._waiting):
            self.send_waiting(place)
        return refused

    def wait(self, place: Any, row: Any) -> None:
        """Keep a number until its batch is over, for a system that takes many numbers of one series at once."""
        self._waiting.setdefault(place, []).append(row)

    def send_waiting(self, place: Any) -> None:
        """Send what waits for a series; called before its other values, so that a kill leaves the first ones, in order."""
        if rows := self._waiting.pop(place, None):
            self.numbers(place, rows)

    def numbers(self, place: Any, rows: Sequence[Any]) -> None:
        """Send the numbers of a series that waited."""
        raise NotImplementedError

    def write_rows(self, points: Sequence[Point], row: Callable[[dict[str, float], Point], Any]) -> Sequence[Refusal]:
        """Send points as `write` does, but the numbers of each all at once, by `row`."""
        refused: list[Refusal] = []
        for index, point in enumerate(points):
            numbers = {key: value for key, value in point.values.items() if isinstance(value, (bool, int, float))}
            if numbers:
                row(numbers, point)
            if len(numbers) < len(point.values):
                others = point._replace(values={key: value for key, value in point.values.items() if key not in numbers})
                refused += [one._replace(point=index) for one in Destination.write(self, [others])]
        return refused

    def add(self, key: str, value: Any, point: Point) -> None:
        """Send one value of a point, or raise Refused before any of it is sent."""
        if isinstance(value, (bool, int, float)):
            self.number(key, value, point)
        else:
            for item in items_of(key, value, point):
                self.take(item)

    def number(self, key: str, value: float, point: Point) -> Any:
        """Send a number; if points are `converted`, return the converted value."""
        return value

    def take_native(self, item: Item) -> Any:
        """Return an object of the library's own."""
        return item.value

    def take(self, item: Item) -> Any:
        """Pass a text or media object to the method for its kind, or for the nearest kind that has one; else leave it out."""
        kind: str | None = item.kind
        while kind is not None:
            method = getattr(self, f"take_{kind}", None)
            if method is not None:
                return method(_as_picture(item) if item.kind == "figure" and kind == "image" else item)
            kind = _NEXT.get(kind)
        return self.left_out(item)

    def nested(self, value: Any, item: Item) -> Any:
        """Return media inside other media, such as an image in a table, as the library's own object."""
        return self.take(Item(item.key, value, kind_of(value), item.point))

    def left_out(self, item: Item) -> Any:
        """Warn once that the system cannot hold this kind of media."""
        self.cannot(f"hold this kind of {getattr(item.value, 'kind', item.kind)}", item.key, item.value)
        return LEFT_OUT

    def file_of(self, item: Item) -> Path:
        """Write media to a file for the library, which is there until the next batch is converted, or `drop_files`."""
        data, ext = item.content
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="fanfold-")
        path = Path(self._scratch.name) / f"{uuid.uuid4().hex}.{ext}"
        path.write_bytes(data)
        return path

    def drop_files(self) -> None:
        """Delete the files made by `file_of`."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def arguments(self, point: Point) -> dict[str, Any]:
        """Return the user's arguments for a point. In a relay, one that the system does not accept must not stop delivery."""
        if not point.kwargs or self.accepts is None or (self.identity is None and self.accepts):
            return dict(point.kwargs)
        for name in point.kwargs.keys() - self.accepts:
            self.warn(
                f"argument:{name}",
                f"{self.name} does not accept the argument {name!r} with a value, so the values are logged without it. "
                f"In log_kwargs={{{self.name!r}: ...}} it accepts: {', '.join(sorted(self.accepts)) or 'nothing'}.",
            )
        return {name: value for name, value in point.kwargs.items() if name in self.accepts}

    def converted(self, points: Sequence[Point]) -> tuple[list[dict[str, Any]], list[Refusal]]:
        """Convert all values of a batch before any is sent; return the rows and the refused values."""
        self.drop_files()
        rows: list[dict[str, Any]] = []
        refused = []
        for index, point in enumerate(points):
            rows.append({})
            for key, value in point.values.items():
                try:
                    made = self.convert(key, value, point)
                except Refused as why:
                    refused.append(Refusal(index, key, str(why)))
                    continue
                if made is not LEFT_OUT:
                    rows[-1][key] = made
        return rows, refused

    def convert(self, key: str, value: Any, point: Point) -> Any:
        """Return the converted value, or raise Refused."""
        if isinstance(value, (bool, int, float)):
            return self.number(key, value, point)
        try:
            made = [self.take(item) for item in items_of(key, value, point)]
            kept = [one for one in made if one is not LEFT_OUT]
            if isinstance(value, list):
                return self.together(key, kept) if kept or not made else LEFT_OUT
            return made[0]
        except (FanfoldError, TypeError, ValueError) as error:
            raise Refused(f"{self.name}'s own classes do not take it: {error}") from error

    def together(self, key: str, made: list[Any]) -> Any:
        """Return the result for a list of converted values."""
        return made

    def settle(self) -> None:
        """Wait until everything sent so far is stored safely at the destination."""

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for the library's own threads or processes; raise if they take too long, and the relay tries again later."""
        if not until(done, SETTLE_SECONDS):
            raise TimeoutError(
                f"{self.name} has not {what} within {SETTLE_SECONDS:g} s. Nothing is lost; the relay tries again. Check that its "
                "server can be reached, or that its folder can be written to."
            )

    def counts(self) -> dict[str, int] | None:
        """Return how many points of each key the destination has, or None if unknown."""
        return None

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        """Record one call the user made on the tracker directly; return the refused values."""
        own = {key: value for key, value in values.items() if OWNERS.get(library_of(value)) == self.name}
        found = clean({key: value for key, value in values.items() if key not in own}) if own else clean(values)
        refused = self.write([Point({**found, **own}, step, None, kwargs)])
        if self.settles_each_call:
            self.settle()
        return refused

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the run's config: all of it, whenever some of it has changed."""

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        """Set name, tags, notes and group as far as the system supports them."""

    def artifact(self, path: Path, name: str) -> None:
        """Store a file. Systems without artifacts log one warning."""
        self.cannot("keep files", name, path)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store the values assigned to `run.summary`: all of them, whenever some have changed."""
        self.lacks("a run summary", "the values assigned to run.summary are")

    def define_metric(self, key: str, *, x: str | None, summary: str | None) -> None:
        """Set the x axis of a key (or of `val/*`), and its summary statistic. Defining it again replaces the definition."""
        self.lacks("definitions of metrics", "define_metric() calls are")

    def alert(self, alert: Alert) -> None:
        """Show an alert. One sent right before a kill is sent again, with the same id."""
        self.lacks("alerts", "they are")

    def look(self, *, over: bool) -> bool:
        """Do what is due by the clock; called after each pass, and when the run is `over`. Return whether the end has to wait."""
        return False

    def warn_refused(self, refused: Sequence[Refusal]) -> None:
        """Warn once per key about values of the user's direct calls that were left out."""
        for _, key, why in refused:
            self.warn(
                f"refused:{key}",
                f"{self.name} does not take {key!r}: {why}. It is left out there and the other values are recorded. "
                "Later cases are counted.",
            )

    def lacks(self, what: str, kept: str) -> None:
        """Warn once that this system does not support something."""
        self.warn(
            f"lacks:{what}",
            f"{self.name} has no place for {what}; {kept} kept in the journal only. See `fanfold show` or `fanfold ui`.",
        )

    def cannot(self, what: str, key: str, value: Any) -> None:
        """Warn once that this system cannot hold a value."""
        self.warn(
            f"{what}:{key}",
            f"{self.name} cannot {what}; {key!r} ({type(value).__name__}) is not there, but it is kept in the journal. "
            "Look at it with `fanfold show`.",
        )

    def warn_renamed(self, key: str, name: str, why: str) -> None:
        """Warn once that a key has another name in this system."""
        self.warn(f"name:{key}", f"{self.name} has {key!r} as {name!r}: {why}. All of its values are there.")

    def warn_repeat(self, key: str, step: object) -> None:
        """Warn once that a step got a second value in a system that holds one per step."""
        self.warn(
            f"repeat:{key}",
            f"{self.name} holds one value per step, and {key!r} has several at step {step}; the last one is there, all of them "
            "are in the journal. Look at them with `fanfold show`, or log under different steps.",
        )

    def warn(self, cause: str, text: str) -> None:
        """Log a warning once for each cause."""
        notices.once(f"{self.name}:{cause}", text)


def _as_picture(item: Item) -> Item:
    return item._replace(value=Image(item.value.png, caption=item.value.caption))
