"""A tracker of the user's own (a GeneralTracker), as the worker likes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..trackers.base import Adapter, Point


class Custom(Adapter):
    """Log call by call, so that what went through is not logged again when a later call fails."""

    name = ""

    def __init__(self, tracker: Any) -> None:
        self.name = tracker.name  # type: ignore[misc]  # a class's word elsewhere, an object's here
        self.inner = tracker

    def start(self) -> None:
        self.inner.start()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.inner.store_init_configuration(values)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self.inner.log(point.values, step=point.step, **point.kwargs)

    def finish(self) -> None:
        self.inner.finish()
