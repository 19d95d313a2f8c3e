"""A tracker of the user's own (a GeneralTracker), as the worker likes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..trackers.base import Adapter, Point, Refused

# Mistakes of a tracker's own code, which trying again does not cure; anything else may be an outage and is tried again.
_ITS_OWN = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, NotImplementedError)


class Custom(Adapter):
    """Log call by call, so that what went through is not logged again when a later call fails."""

    name = ""

    def __init__(self, tracker: Any) -> None:
        self.name = tracker.name  # type: ignore[misc]  # a class's word elsewhere, an object's here
        self.inner = tracker

    def start(self) -> None:
        self.inner.start()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if values:
            self.inner.store_init_configuration(values)

    def write(self, points: Sequence[Point]) -> None:
        """Hand over points; a call its code cannot take is passed over, as trying again would hold up all calls after it."""
        for point in points:
            try:
                self.inner.log(point.values, step=point.step, **point.kwargs)
            except _ITS_OWN as error:
                raise Refused(f"its log() raised {type(error).__name__}: {error}") from error

    def finish(self) -> None:
        self.inner.finish()
