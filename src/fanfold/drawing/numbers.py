"""Numbers formatted for people, and round numbers for axis ticks. The dashboard formats them the same way."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
MOST_TICKS = 200
MINUS = "\N{MINUS SIGN}"


def number(value: Any) -> str:
    """Return a number with five significant digits, and anything else as plain text."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{MINUS}∞"
    if value == int(value) and abs(value) < 1e15:
        return _minus(f"{int(value):,}")
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return _minus(_exponent(f"{value:.4e}"))
    return _minus(f"{value:.5g}")


def plural(count: int, word: str) -> str:
    """Return a count with its noun."""
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count:,} {word}{ending}"


def _exponent(text: str) -> str:
    """Write 1.5000e-06 as 1.5e-6."""
    digits, _, power = text.partition("e")
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}e{int(power)}"


def _minus(text: str) -> str:
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def cut(text: str, width: int) -> str:
    """Return a text, shortened to a width."""
    return text if len(text) <= width else text[: width - 1] + "…"


def share(value: Any, low: float, high: float) -> Any:
    """Return the position of a number or array between two numbers: 0 at `low`, 1 at `high`, 0.5 if they are equal."""
    span = high / 2 - low / 2  # halved, because the difference may overflow
    return (value / 2 - low / 2) / span if span > 0 else value * 0 + 0.5


def tick(value: float) -> str:
    """Return a number short enough for an axis."""
    size = abs(value)
    if size >= 1e12 or 0 < size < 1e-3:
        return _minus(_exponent(f"{value:.1e}"))
    for least, unit, sign in _UNITS:
        if size >= least:
            return _minus(f"{value / unit:.4g}{sign}")
    return _minus(f"{value:.4g}")


def span_tick(seconds: float, span: float) -> str:
    """Return a duration as a tick label, for an axis that spans `span` seconds."""
    if span >= 2 * 86400:
        return f"{tick(seconds / 86400)} d"
    if span >= 2 * 3600:
        return f"{tick(seconds / 3600)} h"
    return f"{tick(seconds / 60)} min" if span >= 180 else f"{tick(seconds)} s"


def time_tick(seconds: float, span: float) -> str:
    """Return a time as a tick label, for an axis that spans `span` seconds: a date, or a time of day."""
    when = datetime.fromtimestamp(seconds).astimezone()
    if span > 3 * 86400:
        return f"{when.day} {when:%b}"
    return f"{when:%H:%M:%S}" if span < 300 else f"{when:%H:%M}"


def ticks(low: float, high: float, count: float, *, log: bool = False) -> list[float]:
    """Return about `count` round positions between two numbers."""
    if not high > low or not math.isfinite(high - low):
        return [low] if math.isfinite(low) else []
    found = _decades(low, high, count) if log and low > 0 else []
    return found if len(found) > 1 else _even(low, high, count)


def _even(low: float, high: float, count: float) -> list[float]:
    rough = (high - low) / max(1.0, count)
    if rough <= 0 or math.log10(rough) < -300:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999 or factor == 10)
    first = math.ceil(low / step - 1e-9)
    # Twelve digits hide that tenths are not exact; ticks that differ only beyond them are merged.
    places = dict.fromkeys(float(f"{(first + i) * step:.12g}") for i in range(MOST_TICKS))
    room = step * 1e-9
    return [place for place in places if low - room <= place <= high + room and math.isfinite(place)] or [low]


def _decades(low: float, high: float, count: float) -> list[float]:
    first, last = math.floor(math.log10(low)), min(math.ceil(math.log10(high)), 308)
    every = max(1, math.ceil((last - first) / max(1.0, count)))
    within = (1,) if last - first > count / 2 else (1, 3) if last - first > 2 else (1, 2, 5)
    places = (factor * 10.0**power for power in range(first, last + 1, every) for factor in within)
    return [place for place in places if low <= place <= high]


def duration(seconds: float) -> str:
    """Return a duration as text: 4.2 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(seconds: float) -> str:
    """Return a date and time of day with the name of the local time zone."""
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M %Z}" if seconds > 0 else "unknown"
