"""The spans in a run's journals, and code that takes a known time."""

from __future__ import annotations

import time
from typing import Any

import fanfold


def spans_of(run: Any) -> dict[str, float]:
    """Return the total seconds per kind of span, over all journals of a run."""
    found: dict[str, float] = {}
    for event in fanfold.open(run.path)._events("span"):
        found[event["kind"]] = found.get(event["kind"], 0.0) + event["ns"] / 1e9
    return found


class Clock:
    """Sleeps, and records how long that really took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def spend(self, kind: str, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - began
