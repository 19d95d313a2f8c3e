"""Means of logged values, over the batches of a step and the steps of an interval, without waiting for a device.

Numbers are summed on their device; no value is copied from it until it is read.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from typing import Any


class Mean:
    """The mean of one key, kept on the device of its values."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total: Any = None
        self.count = 0

    def add(self, value: Any) -> None:
        # A copy: the tensor may be a buffer that the next step overwrites, as with a captured graph.
        self.total = _copied(value) if self.count == 0 else self.total + value
        self.count += 1

    def value(self) -> Any:
        return self.total if self.count == 1 else self.total / self.count


class Meter:
    """Values logged since the last step, and since the last log."""

    def __init__(self) -> None:
        self._step: dict[str, Mean] = {}
        self._interval: dict[str, Mean] = {}
        self._latest: dict[str, Any] = {}
        self._told: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any], *, mean: bool = True) -> None:
        """Add values of a batch. Numbers are averaged unless `mean` is False; of anything else the latest counts."""
        for key, value in values.items():
            number = scalar(value) if mean and not isinstance(value, bool) else None
            if number is None:
                self._latest[key] = _held(value)
            else:
                self._step.setdefault(key, Mean()).add(number)

    @property
    def touched(self) -> bool:
        """Whether something was logged since the last step."""
        return bool(self._step or self._latest)

    def end_step(self) -> dict[str, Any]:
        """Close a step: return its values, and add them to the interval."""
        values = {key: mean.value() for key, mean in self._step.items()}
        for key, value in values.items():
            self._interval.setdefault(key, Mean()).add(value)
        values |= self._latest
        self._told |= {key: value for key, value in self._latest.items() if isinstance(value, (str, bool)) or _number(value)}
        self._step, self._latest = {}, {}
        return values

    def drop_step(self) -> None:
        """Discard values logged for a step that was not completed."""
        self._step, self._latest = {}, {}

    def end_interval(self) -> dict[str, Any]:
        """Close an interval: return the mean of each key over its steps, and the latest of values without a mean."""
        values = {**{key: mean.value() for key, mean in self._interval.items()}, **self._told}
        self._interval, self._told = {}, {}
        return values


class Logs(dict[str, Any]):
    """A log as callbacks see it: plain numbers. Those still on a device are copied when one is first read."""

    def land(self) -> None:
        """Copy values that are still on a device."""
        for key, value in [(key, value) for key, value in super().items() if hasattr(value, "item")]:
            super().__setitem__(key, _fetched(value))

    def __getitem__(self, key: str) -> Any:
        self.land()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:  # overridden so that dict(logs) and {**logs} read through __getitem__
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        self.land()
        return super().get(key, default)

    def items(self) -> Any:
        self.land()
        return super().items()

    def values(self) -> Any:
        self.land()
        return super().values()

    def pop(self, *args: Any) -> Any:
        self.land()
        return super().pop(*args)

    def copy(self) -> Any:
        return Logs(self)

    def __or__(self, other: Any) -> Any:
        self.land()
        return super().__or__(other)

    def __eq__(self, other: object) -> bool:
        self.land()
        return super().__eq__(other)

    __hash__ = None

    def __repr__(self) -> str:
        self.land()
        return super().__repr__()


def scalar(value: Any) -> Any:
    """Return a value that can be summed and divided, or None if it is not a single number."""
    if isinstance(value, numbers.Real):
        return value
    if not _number(value):
        return None
    if hasattr(value, "detach"):
        value = value.detach()
    return value.reshape(()) if getattr(value, "shape", ()) else value


def _number(value: Any) -> bool:
    if isinstance(value, numbers.Real):
        return True
    shape = getattr(value, "shape", None)
    return shape is not None and hasattr(value, "dtype") and hasattr(value, "item") and math.prod(shape) == 1


def _held(value: Any) -> Any:
    """Return the latest value without its graph."""
    number = scalar(value) if not isinstance(value, bool) else None
    return value if number is None else _copied(number)


def _copied(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value


def _fetched(value: Any) -> Any:
    return value.item() if math.prod(getattr(value, "shape", ())) == 1 else value
