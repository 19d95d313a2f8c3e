"""The filter language for runs, used everywhere: `lr<1e-3 and status=running and tag:baseline and loss.min<0.2`.

The grammar and every rule of comparison are in docs/query.md; tests/data/filter_cases.json has test cases for other
implementations. A filter is parsed once and applied to the rows of a store's runs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from ..errors import SettingError
from . import deadline
from .rows import RunRow

Stats = Callable[[RunRow, str], Mapping[str, Any] | None]
Test = Callable[[RunRow, float, Stats], bool]

FIELDS = ("id", "name", "project", "status", "group", "notes", "tags", "created", "seen", "age", "duration", "ranks", "attempts")
STATUSES = ("running", "finished", "failed", "killed", "preempted", "lost")
STATISTICS = ("min", "max", "mean", "first", "last", "count")
MOMENTS = frozenset({"created", "seen"})
LENGTHS = frozenset({"age", "duration"})
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_TOKEN = re.compile(
    r"""\s*(?:(?P<op><=|>=|!=|!~|==|[<>=~])|(?P<bracket>[()])|(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<word>[^\s()<>=!~"']+))""",
    re.DOTALL,
)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
}
_DEPTH = 100
MOST_CHARACTERS = 4_000  # the cost of a filter for each run grows with its length
MOST_CONDITIONS = 200
MOST_PLACES = 1 << 16  # longest text matched against a pattern with ?: every character takes a step
_STRETCH = 1 << 14  # characters matched between two deadline checks
_MOST_DIGITS = 400  # of a number stored as text


class FilterError(SettingError):
    """A filter that cannot be parsed; `column` is the position of the error, counted from 1."""

    def __init__(self, text: str, column: int, what: str, noun: str = "filter") -> None:
        self.column, self.text, self.what = column, text, what
        shown = text.replace("\n", " ").replace("\t", " ")
        super().__init__(f"the {noun} has a mistake at column {column}: {what}\n  {shown}\n  {'^':>{column}}")


class FilterToken:
    def __init__(self, kind: str, text: str, column: int) -> None:
        self.kind, self.text, self.column = kind, text, column

    def is_word(self, word: str) -> bool:
        return self.kind == "word" and self.text.lower() == word


class Filter:
    """A parsed filter. An empty one matches everything."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.names: list[str] = []
        parser = Parser(text, self.names)
        self._test: Test | None = parser.whole()

    def matches(self, row: RunRow, *, now: float | None = None, stats: Stats = lambda *_: None) -> bool:
        """Return whether a row matches. `stats` is called for a metric's min, max, … only if the result depends on it."""
        deadline.check()
        return self._test is None or self._test(row, time.time() if now is None else now, stats)

    def unknown(self, rows: Sequence[RunRow]) -> list[str]:
        """Return the names in the filter that no row has; most likely they are misspelled."""
        from .goodput import PARTS, PREFIX

        named = [name for name in self.names if name not in {PREFIX + part for part in PARTS}]  # these are computed when needed
        return [name for name in named if not any(value_of(row, name) is not None for row in rows)]


class Parser:
    """A recursive descent parser: or, and (also implicit between conditions), not, brackets, comparisons."""

    def __init__(self, text: str, names: list[str]) -> None:
        if len(text) > MOST_CHARACTERS:
            raise FilterError(text[:60], 61, f"it has {len(text)} characters, and at most {MOST_CHARACTERS} are allowed.")
        self.text = text
        self.names = names
        self.conditions = 0
        self.tokens = tokens_of(text)
        self.at = 0
        self.depth = 0

    def fail(self, what: str, token: FilterToken | None = None) -> FilterError:
        return FilterError(self.text, token.column if token else len(self.text) + 1, what)

    @property
    def next(self) -> FilterToken | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> FilterToken:
        self.at += 1
        return self.tokens[self.at - 1]

    def whole(self) -> Test | None:
        if not self.tokens:
            return None
        test = self.either()
        if self.next is not None:
            raise self.fail("this bracket was never opened.", self.next)
        return test

    def either(self) -> Test:
        tests = [self.both()]
        while self.next is not None and self.next.is_word("or"):
            self.take()
            tests.append(self.both())
        return tests[0] if len(tests) == 1 else lambda *row: any(test(*row) for test in tests)

    def both(self) -> Test:
        tests = [self.unary()]
        while (token := self.next) is not None and not token.is_word("or") and token.text != ")":
            if token.is_word("and"):
                self.take()
            tests.append(self.unary())
        return tests[0] if len(tests) == 1 else lambda *row: all(test(*row) for test in tests)

    def unary(self) -> Test:
        token = self.next
        if token is None or token.is_word("and") or token.is_word("or") or (token.kind, token.text) == ("bracket", ")"):
            raise self.fail("a condition is missing here, such as lr<0.1.", token)
        self.depth += 1
        self.conditions += 1
        if self.depth > _DEPTH:
            raise self.fail(f"brackets are nested more than {_DEPTH} deep.", token)
        if self.conditions > MOST_CONDITIONS:
            raise self.fail(f"there are more than {MOST_CONDITIONS} conditions.", token)
        try:
            return self.condition(self.take())
        finally:
            self.depth -= 1

    def condition(self, token: FilterToken) -> Test:
        if token.is_word("not"):
            test = self.unary()
            return lambda *row: not test(*row)
        if token.kind == "bracket":
            return self.bracket(token)
        if token.kind == "op":
            raise self.fail(f"{token.text} has no name on its left.", token)
        if token.kind == "word" and token.text.lower().startswith("tag:"):
            return self.tag(token)
        if self.next is not None and self.next.kind == "op":
            return self.comparison(token, self.take())
        return _contains(token.text)

    def bracket(self, opened: FilterToken) -> Test:
        test = self.either()
        if self.next is None:
            raise self.fail("this bracket is never closed.", opened)
        self.take()
        return test

    def tag(self, token: FilterToken) -> Test:
        wanted = token.text[4:]
        if not wanted:
            if self.next is None or self.next.kind != "quoted":
                raise self.fail("tag: needs a tag, such as tag:baseline.", token)
            wanted = self.take().text
        return lambda row, _now, _stats: wanted in (row.get("tags") or ())

    def comparison(self, name: FilterToken, op: FilterToken) -> Test:
        value = self.next
        if value is None or value.kind not in ("word", "quoted"):
            raise self.fail(f"{op.text} has no value on its right.", value)
        self.take()
        self.names.append(name.text)
        return self.checked(name.text, "=" if op.text == "==" else op.text, value)

    def checked(self, name: str, op: str, value: FilterToken) -> Test:
        """Build a comparison. Values that can never match are rejected here, where their column is known."""
        text = value.text
        if name == "status" and op in ("=", "!=") and text not in STATUSES:
            raise self.fail(f"there is no status {text!r}. Known: {', '.join(STATUSES)}.", value)
        if name in MOMENTS and op not in ("~", "!~"):
            span = moment(text)
            if span is None:
                raise self.fail(f"{text!r} is not a date. Write 2026-01-31 or 2026-01-31T12:00, or use age<2d.", value)
            return _moments(name, op, span)
        if name in LENGTHS and op not in ("~", "!~"):
            seconds = length(text)
            if seconds is None:
                raise self.fail(f"{text!r} is not a duration. Write 90s, 15m, 3h, 2d or 1w.", value)
            return _comparison(name, op, repr(seconds))
        return _comparison(name, op, text)


def tokens_of(text: str) -> list[FilterToken]:
    found, at = [], 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            odd = text[at]
            what = (
                "this quote is never closed."
                if odd in "\"'"
                else f"{odd!r} does not belong here. Put quotes around it, or write !=."
            )
            raise FilterError(text, at + 1, what)
        kind = str(match.lastgroup)
        word = match.group(kind)
        if kind == "quoted":
            word = re.sub(r"\\(.)", r"\1", word[1:-1], flags=re.DOTALL)
        found.append(FilterToken(kind, word, match.start(kind) + 1))
        at = match.end()
    return found


# Values of names


def value_of(row: RunRow, name: str, *, now: float | None = None, stats: Stats = lambda *_: None) -> Any:
    """Return the value of a name in a row, or None: a field, else a config path, else a metric's last value or statistic."""
    kind, _, rest = name.partition(".")
    if rest and kind == "config":
        return config_value(row.get("config") or {}, rest)
    if rest and kind in ("summary", "latest"):
        return (row.get(kind) or {}).get(rest)
    if name == "age":
        return (time.time() if now is None else now) - row["created"]
    if name in FIELDS:
        return row.get(name)
    found = config_value(row.get("config") or {}, name)
    if found is None:
        found = metric_value(row, name, stats)
    return found


def config_value(config: Mapping[str, Any], path: str) -> Any:
    """Look up a path such as model.dim; keys that contain dots themselves are found too."""
    if path in config:
        return config[path]
    for key, value in config.items():
        if isinstance(value, Mapping) and path.startswith(f"{key}."):
            found = config_value(value, path[len(key) + 1 :])
            if found is not None:
                return found
    return None


def metric_value(row: RunRow, name: str, stats: Stats) -> Any:
    latest = row.get("latest") or {}
    if name in latest:
        return latest[name]
    summary = row.get("summary") or {}
    if name in summary:
        return summary[name]
    if name.startswith("goodput/"):
        return (stats(row, name) or {}).get("last")
    key, _, which = name.rpartition(".")
    if which not in STATISTICS or key not in latest:
        return None
    return latest[key] if which == "last" else ((row.get("stats") or {}).get(key) or stats(row, key) or {}).get(which)


# Comparing


def _contains(word: str) -> Test:
    wanted = matcher(word)
    return lambda row, _now, _stats: wanted(str(row.get("name") or "")) or wanted(str(row.get("id") or ""))


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a test for ~: case-insensitive "contains"; with * or ? the whole text must match. Each test checks the deadline."""
    small = pattern.lower()
    whole: Callable[[str], bool] = glob(small) if "*" in pattern or "?" in pattern else lambda text: small in text

    def test(text: str) -> bool:
        deadline.check()
        return whole(text.lower())

    return test


def glob(pattern: str) -> Callable[[str], bool]:
    """Return a function that tests whether a whole text matches a pattern with * and ?."""
    return _by_places(pattern) if "?" in pattern else _by_parts(pattern.split("*"))


def _by_parts(parts: list[str]) -> Callable[[str], bool]:
    """Return a test for texts that start and end with the first and last part, with the others between them in order."""
    if len(parts) == 1:
        return lambda text: text == parts[0]
    first, *middle, last = parts
    middle = [part for part in middle if part]
    shortest = len(first) + sum(map(len, middle)) + len(last)

    def test(text: str) -> bool:
        if len(text) < shortest or not text.startswith(first) or not text.endswith(last):
            return False
        at, end = len(first), len(text) - len(last)
        for part in middle:  # the first match of a part leaves the most room for the others
            found = text.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True

    return test


def _by_places(pattern: str) -> Callable[[str], bool]:
    """Return the same test for a pattern with ?, in one step per character of the text. Very long texts never match.

    A regular expression would try every way to divide a text among the stars, which with thirty of them takes forever. Here bit i
    of `places` says whether the text so far matches the pattern up to its i-th character.
    """
    characters = [character for character in pattern if character != "*"]
    stars = places = 0
    for character in pattern:  # bit i of `stars`: a star precedes the i-th character, so the match can stay at that position
        if character == "*":
            stars |= 1 << places
        else:
            places += 1
    anything = sum(1 << place for place, character in enumerate(characters) if character == "?")
    fits = dict.fromkeys(characters, anything)
    for place, character in enumerate(characters):
        fits[character] |= 1 << place
    end = 1 << len(characters)

    def test(text: str) -> bool:
        if len(text) > MOST_PLACES:
            return False
        places = 1
        for start in range(0, len(text), _STRETCH):
            deadline.check()
            for character in text[start : start + _STRETCH]:
                places = ((places & fits.get(character, anything)) << 1) | (places & stars)
                if not places:
                    return False
        return bool(places & end)

    return test


def _comparison(name: str, op: str, text: str) -> Test:
    negated = op.startswith("!")
    compare = _comparer(op.removeprefix("!") if negated else op, text)

    def test(row: RunRow, now: float, stats: Stats) -> bool:
        deadline.check()
        value = value_of(row, name, now=now, stats=stats)
        found = any(map(compare, value)) if isinstance(value, (list, tuple)) else compare(value)
        return found != negated

    return test


def _comparer(op: str, text: str) -> Callable[[Any], bool]:
    if op == "=":
        return lambda value: same(value, text)
    if op == "~":
        wanted = matcher(text)
        return lambda value: value is not None and wanted(as_text(value))
    order, wanted_number = _ORDER[op], number(text)
    return lambda value: _ordered(value, text, wanted_number, order)


def _ordered(value: Any, text: str, wanted: float | None, order: Callable[[Any, Any], bool]) -> bool:
    """Compare two numbers by value and two texts alphabetically; a number and a text have no order."""
    if value is None or isinstance(value, Mapping):
        return False
    own = float(value) if isinstance(value, (int, float)) else number(str(value))
    if own is not None and wanted is not None:
        return order(own, wanted)
    return isinstance(value, str) and own is None and wanted is None and order(value, text)


def same(value: Any, text: str) -> bool:
    """Return whether a value equals the typed text. Numbers, also those stored as text, compare by value: 1e-3 finds 0.001."""
    if isinstance(value, bool) or value is None:
        return text.lower() in ({"true", "1"} if value else {"false", "0"} if value is False else {"none", "null"})
    own, wanted = value if isinstance(value, (int, float)) else number(str(value)), number(text)
    if own is None or wanted is None:
        return as_text(value) == text
    return own == wanted or (math.isnan(own) and math.isnan(wanted))


def as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


_NUMBER = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)", re.IGNORECASE)


def number(text: str) -> float | None:
    """Parse a number in common notation; return None for any other text."""
    return float(text) if len(text) <= _MOST_DIGITS and _NUMBER.fullmatch(text.strip()) else None


def length(text: str) -> float | None:
    """Parse a duration and return seconds: 90, 90s, 15m, 3h, 2d, 1w."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.lower())
    if match is None or (match[2] or "s") not in _SECONDS:
        return None
    return float(match[1]) * _SECONDS[match[2] or "s"]


def moment(text: str) -> tuple[float, float] | None:
    """Parse a date or time; return its first second and its length (a date: the whole day). UTC unless a zone is given."""
    try:
        # Python 3.10 does not parse Z.
        when = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    day = timedelta(days=1) if len(text) == 10 else timedelta(seconds=60 if len(text) == 16 else 1)
    return when.timestamp(), day.total_seconds()


def _moments(name: str, op: str, span: tuple[float, float]) -> Test:
    """Compare times: a date means its first second, except that = means any time of that day."""
    start, lasts = span
    if op in ("=", "!="):
        return lambda row, _now, _stats: (start <= float(row.get(name) or 0) < start + lasts) == (op == "=")
    order = _ORDER[op]
    return lambda row, _now, _stats: order(float(row.get(name) or 0), start)


def sort_rows(rows: list[Any], by: str, *, stats: Stats = lambda *_: None) -> list[Any]:
    """Sort rows by a name: ascending, or descending with a leading minus. Rows without a value are always last."""
    if not isinstance(by, str):
        raise SettingError(f"sort={by!r} is not the name of a column. Nothing was read. Pass a text such as '-loss'.")
    down, name = by.startswith("-"), by.removeprefix("-")
    keyed = [(value_of(row, name, stats=stats), row) for row in rows]
    if name not in FIELDS and rows and all(value is None for value, _ in keyed):
        raise SettingError(f"no run has {name!r} to sort by. Nothing was read. Sort by a field, a config value or a metric.")
    numbers = [(float(value), row) for value, row in keyed if isinstance(value, (int, float)) and not _is_nan(value)]
    words = [(str(value), row) for value, row in keyed if value is not None and not isinstance(value, (int, float))]
    rest = [row for value, row in keyed if value is None or _is_nan(value)]
    for some in (numbers, words):
        some.sort(key=lambda pair: pair[0], reverse=down)
    return [row for _, row in (*numbers, *words)] + rest


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
