"""Objects of a tracker's own library (`wandb.Image`): only that library understands them, so they are passed on unchanged.

The journal keeps a note instead. The object waits here, in the process that logged it, until it is delivered to its tracker.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import notices
from ..media import Encoded, Text
from .base import Refused
from .face import destination_of
from .tools import OWNERS, library_of

MOST = 1000  # waiting objects; a tracker that hangs must not fill the memory
_waiting: dict[str, tuple[Any, list[int]]] = {}
_lock = threading.Lock()


class Native(Text):
    """A note for the journal, in place of an object that waits for `takers`."""

    def __init__(self, value: Any, takers: Sequence[Any]) -> None:
        self.of = _class_of(value)
        super().__init__(f"{self.of}, which only its own library can show")
        self.mark = uuid.uuid4().hex
        with _lock:
            if takers and len(_waiting) < MOST:
                _waiting[self.mark] = (value, [id(destination_of(tracker) or tracker) for tracker in takers])
                return
        if takers:
            notices.once(
                "native:many",
                f"{MOST} objects of tracker libraries wait to be delivered; those logged until they are have a note in the "
                "journal only. Log fewer of them, or find out why the tracker is stuck.",
            )

    def encode(self) -> Encoded:
        encoded = super().encode()
        return encoded._replace(meta={**encoded.meta, "native": self.mark, "of": self.of})


class _Held:
    """An object being delivered, kept with its entry so that a failed call can be retried."""

    def __init__(self, value: Any) -> None:
        self.value = value


def takes(tracker: Any, library: str) -> bool:
    """Return whether a tracker gets a library's objects: that library's adapter does, and every user-written tracker."""
    return destination_of(tracker) is None or OWNERS[library] == tracker.name


def wrapped(values: Mapping[str, Any], trackers: Sequence[Any], elsewhere: Sequence[str]) -> Mapping[str, Any]:
    """Return values with a note in place of each object that one of `trackers`, or a tracker on another rank, accepts."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if type(value) in (float, int, str):
            continue
        if isinstance(value, Mapping):
            inner = wrapped(value, trackers, elsewhere)
            if inner is not value:
                found[key] = inner
        elif (library := library_of(value)) in OWNERS:
            takers = [tracker for tracker in trackers if takes(tracker, library)]
            if takers or OWNERS[library] in elsewhere:
                found[key] = Native(value, takers)
    return {**values, **found} if found else values


def take(entry: dict[str, Any], tracker: Any, otherwise: Any) -> Any:
    """Return the object a note stands for, or `otherwise` if it is not for this tracker, with a warning logged once."""
    held = entry.get("held")
    if not isinstance(held, _Held):
        held = entry["held"] = _claimed(str(entry["native"]), getattr(tracker, "inner", tracker))
    if held is not None:
        return held.value
    of = str(entry.get("of"))
    if OWNERS.get(of.partition(".")[0]) == tracker.name:
        raise Refused(f"it was a {of}, and the process that had it is gone")
    notices.once(
        f"native:{of.partition('.')[0]}",
        f"{of} and other objects of that library go to its own tracker only; the journal has a note of them. "
        "Log fanfold.Image, Table, Histogram, … to have them everywhere.",
    )
    return otherwise


def _claimed(mark: str, tracker: Any) -> _Held | None:
    with _lock:
        value, takers = _waiting.get(mark, (None, []))
        if id(tracker) not in takers:
            return None
        takers.remove(id(tracker))
        if not takers:
            del _waiting[mark]
    return _Held(value)


def _class_of(value: Any) -> str:
    one = value[0] if isinstance(value, (list, tuple)) else value
    return f"{type(one).__module__.partition('.')[0]}.{type(one).__qualname__}"
