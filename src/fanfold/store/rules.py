"""Alert rules: `loss is nan`, `val/loss > 2 for 3`, `train/loss rises 10 % in 500 steps`, `stalled 10m`.

A rule has the words, names, numbers and operators of a filter (see filter.py), and is about the points of one run over time. It
is evaluated by whoever reads the run, from all of its points, so the result is the same whenever and wherever that happens. The
grammar, and when a rule fires again, are in docs/notifications.md.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from .filter import FilterError, FilterToken, Parser, length, number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .run import Series, StoredRun

    Bools = NDArray[np.bool_]
    Condition = Callable[[Series], Bools]

EXAMPLES = "loss is nan, val/loss > 2 for 3, train/loss rises 10 % in 500 steps, stalled 10m"
MOST_KEYS = 50  # keys that one rule watches, for a pattern such as val/*
SAME_SECONDS = 60.0  # several ranks that cross within this time are one crossing


class RuleError(FilterError):
    """A rule that cannot be parsed; `column` is the position of the error, counted from 1."""

    def __init__(self, text: str, column: int, what: str) -> None:
        super().__init__(text, column, what, "rule")


class Crossing(NamedTuple):
    """A point at which a rule fired."""

    key: str
    rank: int
    step: int | None
    time: float  # seconds since 1970, by the clock of the run's node
    value: float | None
    text: str  # what is the case, in words


@dataclass(frozen=True)
class Rule:
    """A parsed rule: which keys it watches, its condition, and for how long the condition must hold."""

    text: str
    key: str = ""
    condition: Condition | None = None
    words: str = ""  # the condition as it continues the sentence "loss …"
    points: int = 1  # how many points in a row must meet it
    seconds: float = 0.0  # or for how long
    stalled: float = 0.0  # of a rule without a key: seconds without a point

    def crossings(self, run: StoredRun, *, now: float) -> Iterator[Crossing]:
        """Return where the rule fired, in order of time for each key and rank; `now` is compared with points of this machine."""
        if self.condition is None:
            yield from self._stalls(run, now)
            return
        from .series import series_by_rank

        for key in self.keys(run):
            fired = [list(self._fired(key, rank, series)) for rank, series in series_by_rank(run, key, own=True)]
            last: float | None = None
            for one in sorted((one for of_rank in fired for one in of_rank), key=lambda one: one.time):
                if last is None or one.time - last > SAME_SECONDS or len(fired) == 1:
                    yield one
                    last = one.time

    def keys(self, run: StoredRun) -> list[str]:
        """Return the logged keys that the rule's name means: itself, a pattern, or a system metric such as gpu.memory."""
        numbers, system = run.keys("number"), run.keys("system")
        if self.key in numbers or self.key in system:
            return [self.key]
        if any(mark in self.key for mark in "*?["):
            return [key for key in (*numbers, *system) if fnmatchcase(key, self.key)][:MOST_KEYS]
        wanted = self.key.replace(".", "/")
        return [key for key in system if re.sub(r"/\d+(?=/|$)", "", key.removeprefix("system/")) == wanted][:MOST_KEYS]

    def _fired(self, key: str, rank: int, series: Series) -> Iterator[Crossing]:
        assert self.condition is not None
        for place in first_of_each(self.condition(series), series.times, self.points, self.seconds):
            value = float(series.values[place])
            step = int(series.steps[place]) if series.steps[place] >= 0 else None  # system metrics have no step
            what = f"{key} {self.words}: {value:.6g}" if self.words not in ("is nan", "is inf") else f"{key} {self.words}"
            lasting = f" for {self.points} points" if self.points > 1 else f" for {self.seconds:g} s" if self.seconds else ""
            yield Crossing(key, rank, step, float(series.times[place]), value, f"{what}{lasting}")

    def _stalls(self, run: StoredRun, now: float) -> Iterator[Crossing]:
        if run.status != "running":
            return
        newest, seen, step = last_point(run, now)
        if seen - newest >= self.stalled:
            what = f"no new point for {_span(self.stalled)}; the run still counts as running"
            yield Crossing("", 0, step, newest + self.stalled, None, what)


def last_point(run: StoredRun, now: float) -> tuple[float, float, int | None]:
    """Return when the last attempt logged its newest number, the time to compare that with, and its step.

    The clocks of other machines may differ, so their points are compared with their own heartbeats.
    """
    from ..process import boot_id

    attempt = run.attempts[-1]
    newest, seen, step = attempt.started / 1e9, attempt.seen / 1e9, None
    for journal in attempt.journals:
        if journal.header.role == "editor":
            continue
        last, own = journal.latest(), journal.keys("")
        for key in own:
            if key in last and last[key][1] / 1e9 > newest:
                newest, step = last[key][1] / 1e9, int(last[key][0])
        if journal.header.boot == boot_id():
            seen = max(seen, now)
    return newest, seen, step


def first_of_each(holds: Bools, times: NDArray[np.float64], points: int, seconds: float) -> list[int]:
    """Return the places at which a condition has held for long enough: one for each time it begins to hold.

    It can fire again once it has not held for as many points in a row as it takes to fire.
    """
    import numpy as np

    edges = np.flatnonzero(np.diff(holds.astype(np.int8), prepend=0, append=0))
    fired: list[int] = []
    until = -points  # the end of the last stretch that fired, or that kept the rule from being armed again
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if fired and start - until < points:
            until = stop
            continue
        at = start + points - 1
        if seconds:
            at = int(np.searchsorted(times[start:stop] - times[start], seconds)) + start
        if at < stop:
            fired.append(at)
            until = stop
    return fired


def _span(seconds: float) -> str:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def parse(text: str) -> Rule:
    """Parse a rule, or raise RuleError with the position of the mistake."""
    try:
        return _RuleParser(text, []).rule()
    except FilterError as error:
        raise RuleError(error.text, error.column, error.what) from error


class _RuleParser(Parser):
    """The parser of one rule."""

    def rule(self) -> Rule:
        if self.next is None:
            raise self.fail(f"there is no rule here. Examples: {EXAMPLES}.")
        name = self.take()
        if name.kind not in ("word", "quoted"):
            raise self.fail("a rule begins with the name of a metric, or with `stalled`.", name)
        if name.is_word("stalled") and (self.next is None or self.next.kind == "word"):
            found = Rule(self.text.strip(), stalled=self.span("stalled"))
        else:
            found = self.about(name)
        if self.at < len(self.tokens):
            raise self.fail("the rule is complete before this. One rule has one condition.", self.tokens[self.at])
        return found

    def about(self, name: FilterToken) -> Rule:
        """Parse what follows the name of a metric."""
        token = self.next
        if token is None:
            raise self.fail("a condition is missing here, such as > 2, is nan, or rises 10 % in 500 steps.")
        self.take()
        if token.is_word("is"):
            words, condition = self.state()
        elif token.kind == "op" and token.text not in ("~", "!~"):
            words, condition = self.limit(token)
        elif token.is_word("rises") or token.is_word("falls"):
            words, condition = self.trend(token)
        else:
            raise self.fail(f"{token.text!r} is not a condition. Write an operator such as >, is nan, rises or falls.", token)
        points, seconds = self.lasting()
        return Rule(self.text.strip(), name.text, condition, words, points, seconds)

    def state(self) -> tuple[str, Condition]:
        import numpy as np

        token = self.next
        word = self.take().text.lower() if token is not None else ""
        if word == "not" and self.next is not None and self.next.is_word("finite"):
            self.take()
            return "is not finite", lambda series: ~np.isfinite(series.values.astype(float))
        if word == "nan":
            return "is nan", lambda series: np.isnan(series.values.astype(float))
        if word == "inf":
            return "is inf", lambda series: np.isinf(series.values.astype(float))
        raise self.fail("after `is` comes nan, inf or not finite.", token)

    def limit(self, op: FilterToken) -> tuple[str, Condition]:
        wanted = self.amount(f"{op.text} needs a number on its right.")
        equal = {"=": "==", "==": "==", "!=": "!="}.get(op.text)

        def condition(series: Series) -> Bools:
            import numpy as np

            values: Any = series.values.astype(float)
            if equal:
                return np.asarray((values == wanted) == (equal == "=="))
            with np.errstate(invalid="ignore"):
                return np.asarray(_COMPARE[op.text](values, wanted))  # a filter's comparisons are of single values

        self.percent()
        return f"{op.text} {wanted:g}", condition

    def trend(self, token: FilterToken) -> tuple[str, Condition]:
        """Parse `rises 10 % in 500 steps`: the newer half of the window is higher than the older half by that much."""
        change = self.amount(f"{token.text} needs an amount, such as 10 %.")
        relative = self.percent()
        if self.next is None or not self.next.is_word("in"):
            raise self.fail("`in` and a window are missing here, such as in 500 steps or in 10m.", self.next)
        self.take()
        steps, seconds = self.window()
        sign = 1.0 if token.is_word("rises") else -1.0
        amount = change / 100 if relative else change
        words = f"{token.text.lower()} {change:g}{' %' if relative else ''} in {f'{steps} steps' if steps else _span(seconds)}"
        return words, lambda series: _trend(series, sign, amount, relative, steps, seconds)

    def window(self) -> tuple[int, float]:
        token = self.next
        text = self.take().text if token is not None else ""
        found = number(text)
        if found is not None and (self.next is None or self.next.text.lower() in ("steps", "step")):
            if self.next is not None:
                self.take()
            if found < 2 or found != int(found):
                raise self.fail("a window has at least 2 steps.", token)
            return int(found), 0.0
        seconds = length(text)
        if seconds is None:
            raise self.fail(f"{text!r} is not a window. Write 500 steps, or a time such as 10m.", token)
        return 0, seconds

    def lasting(self) -> tuple[int, float]:
        """Parse `for 3` or `for 10m`, if it is there."""
        if self.next is None or not self.next.is_word("for"):
            return 1, 0.0
        self.take()
        token = self.next
        text = self.take().text if token is not None else ""
        found = number(text)
        if found is None:
            seconds = length(text)
            if not seconds:
                raise self.fail("after `for` comes a number of points, or a time such as 10m.", token)
            return 1, seconds
        if not 1 <= found <= 1_000_000 or found != int(found):
            raise self.fail("`for` needs a whole number of points, at least 1.", token)
        if self.next is not None and self.next.text.lower() in ("points", "point"):
            self.take()
        return int(found), 0.0

    def amount(self, what: str) -> float:
        token = self.next
        if token is None or token.kind != "word":
            raise self.fail(what, token)
        self.take()
        text = token.text
        if text.endswith("%"):  # 10% is 10 %
            text = text[:-1]
            self.tokens.insert(self.at, FilterToken("word", "%", token.column + len(text)))
        found = number(text)
        if found is None or math.isnan(found):  # `is nan` tests for it
            raise self.fail(f"{token.text!r} is not a number. {what}", token)
        return found

    def percent(self) -> bool:
        if self.next is not None and self.next.text == "%":
            self.take()
            return True
        return False

    def span(self, word: str) -> float:
        token = self.next
        text = self.take().text if token is not None else ""
        seconds = length(text)
        if not seconds:
            raise self.fail(f"{word} needs a time, such as {word} 10m.", token)
        return seconds


_COMPARE: dict[str, Callable[[Any, float], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _trend(series: Series, sign: float, amount: float, relative: bool, steps: int, seconds: float) -> Bools:
    """Return, for each point, whether the mean of the newer half of its window differs enough from that of the older half."""
    import numpy as np

    at: Any = series.steps if steps else series.times
    window = steps or seconds
    values = series.values.astype(float)
    finite = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(finite)])
    here = np.arange(1, len(values) + 1)
    middle = np.searchsorted(at, at - window / 2, side="right")
    oldest = np.searchsorted(at, at - window, side="right")
    whole = at - window >= at[0] if len(at) else np.empty(0, bool)  # else the window is longer than the series
    with np.errstate(invalid="ignore", divide="ignore"):
        newer = (total[here] - total[middle]) / (count[here] - count[middle])
        older = (total[middle] - total[oldest]) / (count[middle] - count[oldest])
        change = sign * (newer - older)
        enough = change >= amount * np.abs(older) if relative else change >= amount
    return np.asarray(whole & enough & (change > 0))
