"""What a relay delivers to: one `Destination` per system. It opens, writes, settles and closes, and knows nothing of Accelerate.

Values arrive clean. How a list, a text or a kind of media is taken apart is shared by all: a destination has a method
`take_<kind>` for each kind its system takes, and what has no such method falls back to the nearest kind that does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..errors import FanfoldError, notices
from ..media import Image, Media
from .base import Alert, Identity, Point, Refusal, Refused, clean
from .tools import content_of

LEFT_OUT = object()  # what a value becomes that the system has no place for


class Item(NamedTuple):
    """One text or media object of a point; a list under one key makes several."""

    key: str
    value: Any
    kind: str  # text, image, audio, video, histogram, table, figure, plotly, html, or native for an object of the library's own
    point: Point
    at: int = 0  # its place in a list of `of`
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
        """The bytes of a file that holds it, and their extension."""
        return (self.text.encode(), "txt") if self.kind == "text" else content_of(self.value)


# Where a destination has no method for a kind, it is offered as the next one: a drawn figure is a picture, anything is a file.
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
    """Base of every destination. A subclass sets `name`, opens its system in `open`, and has `number` and `take_<kind>`.

    How repeats are avoided after a crash (`delivery`):
      idempotent      the same point sent again is the same point
      readable        `counts()` says how many points of each key have arrived; the relay skips those
      at least once   neither; a crash between send and settle may repeat points
    The contract suite proves it for what is written on this disk. `delivery_online` says it for a service.
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool] = False  # whether the second argument is a folder
    main_process_only = True  # whether users' calls do nothing on other ranks
    delivery: ClassVar[str] = "at least once"
    delivery_online: ClassVar[str | None] = None  # the same where a service takes the points; None: there is no such thing
    counts_each: ClassVar[bool] = False  # whether a list of media under one key makes as many entries in counts()
    library_name: ClassVar[str] = ""  # the module that `library` imports
    layouts: ClassVar[tuple[str, ...]] = ("fanfold",)  # with "accelerate", names and places are Accelerate's where asked for

    run: Any  # the library's own object, unless `tracker` says otherwise
    given: Any = None  # such an object that the user has open: set before `open`, it is used, and none is made
    identity: Identity | None = None  # of the run that is delivered; None where the user opened it by hand

    # Set by a relay in this process: a call of the user's is made when everything logged before it has been handed over, and
    # while the relay waits, so that the library sees the order of the program.
    users_turn: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(self, run_name: Any = None, **kwargs: Any) -> None:
        self.run_name = run_name
        self.init_kwargs = kwargs

    # Opening and closing

    @classmethod
    def unusable(cls) -> str | None:
        """Return why this cannot start without asking the user (no key, say), or None. Never touches the network."""
        return None

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        """Open the system for a run, in the remote run `remote` where there was one; called again when it fails.

        A new remote run's id must derive from `identity`, so that a relay killed while it creates it makes no second one.
        Without an identity the user opened it by hand: everything is as the library has it by default.
        """
        raise NotImplementedError

    def close(self, status: str) -> None:
        """End the remote run as finished, failed, killed or preempted."""
        del status
        self.finish()

    def finish(self) -> None:
        """End the run as the library does by itself; all there is to it where the user opened it by hand."""

    @property
    def tracker(self) -> Any:
        """The library's own object."""
        return self.run

    @property
    def library(self) -> Any:
        """The system's own module, imported when it is asked for."""
        return importlib.import_module(self.library_name)

    @property
    def remote(self) -> str | None:
        """The remote run's id, once there is one; `open` with it continues that run."""
        return None

    def show_here(self) -> None:
        """Make the run the library's current one on this thread, where that is a matter of threads and none is.

        Called in the user's process only (`Identity.live`), on the thread that opened it; `hide_here` undoes it.
        """

    def hide_here(self) -> None:
        """Undo `show_here`, when the run has ended."""

    # Points

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        """Send points, oldest first, and return the values that the system will never take; all others are written.

        An exception means that the batch is to be sent again: for `readable` systems `counts()` then says what arrived, and
        `Refused` promises that nothing did. This one sends value by value; a system that takes whole points or batches
        overrides it, and calls `converted`.
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
        if isinstance(value, (bool, int, float)):
            self.number(key, value, point)
        else:
            for item in items_of(key, value, point):
                self.take(item)

    def number(self, key: str, value: float, point: Point) -> Any:
        """Send a number; where points are `converted`, return what it becomes."""
        del key, point
        return value

    def take(self, item: Item) -> Any:
        """Hand a text or media object to the method for its kind, or for the nearest kind that has one; else leave it out."""
        kind: str | None = item.kind
        while kind is not None:
            method = getattr(self, f"take_{kind}", None)
            if method is not None:
                return method(_as_picture(item) if item.kind == "figure" and kind == "image" else item)
            kind = _NEXT.get(kind)
        self.cannot(f"hold this kind of {getattr(item.value, 'kind', item.kind)}", item.key, item.value)
        return LEFT_OUT

    def converted(self, points: Sequence[Point]) -> tuple[list[dict[str, Any]], list[Refusal]]:
        """Convert every value of a batch before any is sent; return the rows, and the values that were refused."""
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
        """Return what one value becomes, or raise Refused."""
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
        """Return what a list of converted values becomes."""
        del key
        return made

    def settle(self) -> None:
        """Return when everything sent so far is safe at the destination."""

    def counts(self) -> dict[str, int] | None:
        """Return how many points of each key the destination has, or None if it cannot tell."""
        return None

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        """Record one call that the user made on the tracker itself; return the values that were refused."""
        return self.write([Point(clean(values), step, None, kwargs)])

    # What else a run has

    def set_config(self, values: dict[str, Any]) -> None:
        """Keep the run's configuration: all of it, whenever some of it has changed."""

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        """Take over name, tags, notes and group as far as the system has them."""

    def artifact(self, path: Path, name: str) -> None:
        """Keep a file. For systems without artifacts one warning says so."""
        self.cannot("keep files", name, path)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep what was assigned to `run.summary`: all of it, whenever some of it has changed."""
        del values
        self.lacks("a run summary", "the values assigned to run.summary are")

    def define_metric(self, key: str, *, x: str | None, summary: str | None) -> None:
        """Set the x axis of a key (or of `val/*`), and its summary statistic. Defining it again replaces the definition."""
        del key, x, summary
        self.lacks("definitions of metrics", "define_metric() calls are")

    def alert(self, alert: Alert) -> None:
        """Show an alert. One that was sent right before a kill is sent again, with the same id."""
        del alert
        self.lacks("alerts", "they are")

    # Warnings, once for each cause

    def warn_refused(self, refused: Sequence[Refusal]) -> None:
        """Warn once per key about values of the user's own calls that were left out."""
        for _, key, why in refused:
            self.warn(
                f"refused:{key}",
                f"{self.name} does not take {key!r}: {why}. It is left out there and the other values are recorded. "
                "Later cases are counted.",
            )

    def lacks(self, what: str, kept: str) -> None:
        """Warn once that this system has no place for something."""
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

    def warn(self, cause: str, text: str) -> None:
        """Log a warning once for each cause."""
        notices.once(f"{self.name}:{cause}", text)


def _as_picture(item: Item) -> Item:
    return item._replace(value=Image(item.value.png, caption=item.value.caption))
