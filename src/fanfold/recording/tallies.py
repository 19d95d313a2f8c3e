"""Summaries of a run's keys: the rules (last, min, max, mean, …), and how a live run keeps them up to date.

The journal's writer knows the last value of each key. Rules that need every value (min, mean, …) are updated as rows are
written, so `run.summary` costs the same after three calls as after three million, and reads no file.
"""

from __future__ import annotations

import fnmatch
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import SettingError, notices, shown
from ..journal.format import TYPE_SIZE, Shape

RULES = ("last", "min", "max", "mean", "sum", "count", "first", "none")
COUNTED = frozenset({"min", "max", "mean", "sum", "count", "first"})
NO_STEP = -(1 << 63)


class MetricRule(NamedTuple):
    """A define_metric() definition for the keys that match a pattern (`val/*`)."""

    key: str
    x: str | None = None
    summary: str | None = None

    @classmethod
    def check(cls, key: str, x: str | None, summary: str | None) -> MetricRule:
        for name, text in (("key", key), ("x", x)):
            if not isinstance(text, str) and not (name == "x" and text is None):
                raise SettingError(f"define_metric({name}={shown(text)}) is not the name of a metric. Nothing was changed.")
        if summary is not None and summary not in RULES:
            raise SettingError(
                f"define_metric({key!r}, summary={shown(summary)}) is not a rule. Nothing was changed. Known: {', '.join(RULES)}."
            )
        return cls(key, x, summary)

    def as_dict(self) -> dict[str, Any]:
        return {"x": self.x, "summary": self.summary}


def rule_for(key: str, metrics: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the definition that applies to a key: its own, else the last pattern that matches."""
    if key in metrics:
        return metrics[key]
    return next((rule for name, rule in reversed(list(metrics.items())) if fnmatch.fnmatchcase(key, name)), {})


def warn_about_patterns(metrics: Mapping[str, Any], newest: str) -> None:
    """Warn once if readers of the run will ignore a pattern."""
    from ..journal.bodies import MOST_PATTERN, MOST_PATTERNS, is_pattern

    if not is_pattern(newest):
        return
    if len(newest) > MOST_PATTERN:
        notices.once(
            "long pattern",
            f"define_metric({shown(newest)}) has a pattern of {len(newest)} characters. Readers such as the dashboard ignore "
            f"patterns of more than {MOST_PATTERN}. The metrics are logged. Use a shorter pattern.",
        )
    elif sum(map(is_pattern, metrics)) > MOST_PATTERNS:
        notices.once(
            "many patterns",
            f"define_metric was called with more than {MOST_PATTERNS} patterns such as 'val/*'. Readers such as the dashboard "
            f"use only the newest {MOST_PATTERNS}. The metrics are logged. Use fewer, broader patterns.",
        )


class Tally:
    """Running statistics of one key's values. Min, max and mean ignore NaN unless all values are NaN."""

    __slots__ = ("began", "count", "first", "first_step", "high", "kinds", "low", "numbers", "total")

    def __init__(self) -> None:
        self.count = self.numbers = 0
        self.total: Any = 0
        self.low: Any = None
        self.high: Any = None
        self.first: Any = None
        self.first_step = self.began = 0
        self.kinds: set[type] = set()

    def add(self, step: int, value: Any) -> None:
        if not self.count:
            self.began = step
        if not self.count or step < self.first_step:
            self.first_step, self.first = step, value
        self.count += 1
        self.kinds.add(type(value))
        if value == value:  # noqa: PLR0124 - False only for NaN
            self.numbers += 1
            self.total += value
            if self.low is None or value < self.low:
                self.low = value
            if self.high is None or value > self.high:
                self.high = value

    @classmethod
    def of(cls, steps: Any, values: Any) -> Tally:
        """Return the tally of arrays of steps and values."""
        import numpy as np

        tally = cls()
        if not len(values):
            return tally
        numbers = values[~np.isnan(values.astype(np.float64))]
        at = int(steps.argmin())
        tally.count, tally.numbers = len(values), len(numbers)
        tally.began, tally.first_step, tally.first = int(steps[0]), int(steps[at]), values[at].item()
        tally.kinds = {type(tally.first)}
        if len(numbers):
            tally.total, tally.low, tally.high = numbers.sum().item(), numbers.min().item(), numbers.max().item()
        return tally

    def plus(self, later: Tally) -> Tally:
        """Return the combined tally; on equal steps, `self` comes first."""
        if not self.count or not later.count:
            return self if self.count else later
        both = Tally()
        both.count, both.numbers, both.total = self.count + later.count, self.numbers + later.numbers, self.total + later.total
        both.began, both.kinds = self.began, self.kinds | later.kinds
        both.low = min((low for low in (self.low, later.low) if low is not None), default=None)
        both.high = max((high for high in (self.high, later.high) if high is not None), default=None)
        first = self if self.first_step <= later.first_step else later
        both.first_step, both.first = first.first_step, first.first
        return both

    def result(self, rule: str) -> Any:
        """Return the result of a rule, in the type the store uses."""
        if rule == "count":
            return self.count
        if rule == "mean":
            return self.total / self.numbers if self.numbers else float("nan")
        if rule == "sum":
            whole = self.total if self.numbers == self.count else float("nan")
            return float(whole) if float in self.kinds else whole
        found = self.first if rule == "first" else self.low if rule == "min" else self.high
        if found is None:
            return float("nan")
        return float(found) if float in self.kinds else int(found) if int in self.kinds else found


class Tallies:
    """The tallies of a process, for keys whose rule needs every value."""

    def __init__(self) -> None:
        self.metrics: dict[str, dict[str, Any]] = {}
        self.by_key: dict[str, Tally] = {}
        self._lock = threading.RLock()  # re-entrant: a signal handler may log

    def needs(self, key: str) -> bool:
        return rule_for(key, self.metrics).get("summary") in COUNTED

    def counting(self, shape: Shape) -> Callable[[bytes], None] | None:
        """Return a function that counts a row of this shape; None if no key in it needs counting."""
        wanted = [key for key in shape.keys if self.needs(key)] if self.metrics else []
        if not wanted:
            return None
        tallies = [self.by_key.setdefault(key, Tally()) for key in wanted]
        head = shape.codes[: len(shape.codes) - len(shape.types)]
        codes = (code if key in wanted else f"{TYPE_SIZE[code]}x" for key, code in zip(shape.keys, shape.types, strict=True))
        unpack = struct.Struct(head + "".join(codes)).unpack
        stepped, lock = head[3:4] in ("i", "q"), self._lock

        def count(body: bytes) -> None:
            fields = unpack(body)
            step = fields[2] if stepped else NO_STEP
            with lock:
                for tally, value in zip(tallies, fields[len(fields) - len(tallies) :], strict=True):
                    tally.add(step, value)

        return count

    def summarise(self, latest: Iterable[tuple[str, Any]], before: Callable[[str, Tally], Tally]) -> dict[str, Any]:
        """Return the summary of each key, given its last value and a function that returns the tally from before this process."""
        found = {}
        for key, value in latest:
            rule = rule_for(key, self.metrics).get("summary") if self.metrics else None
            if rule == "none" or key.startswith("system/"):
                continue
            if rule in COUNTED and not isinstance(value, str):
                own = self.by_key.get(key) or Tally()
                found[key] = before(key, own).plus(own).result(str(rule))
            else:
                found[key] = value
        return found

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
