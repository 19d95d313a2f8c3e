"""A user-written tracker (a GeneralTracker) as a destination that the worker can serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..media import Text
from ..trackers.base import Identity, Point, Refusal
from ..trackers.destination import Destination


class Custom(Destination):
    """A destination that logs call by call, so that delivered calls are not repeated when a later one fails."""

    name = ""

    def __init__(self, tracker: Any) -> None:
        super().__init__()
        self.name = tracker.name  # type: ignore[misc]  # a class attribute elsewhere, an instance attribute here
        self.inner = tracker

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        del identity, remote
        self.inner.start()

    def set_config(self, values: dict[str, Any]) -> None:
        self.inner.store_init_configuration(values)

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        for point in points:
            values = {key: value.text if type(value) is Text else value for key, value in point.values.items()}  # a long string
            self.inner.log(values, step=point.step, **point.kwargs)
        return ()

    def finish(self) -> None:
        self.inner.finish()
