"""Text for people: names made safe for a terminal, ages, durations, sizes and numbers."""

from __future__ import annotations

import math
import time
import unicodedata
from typing import Any

# status: symbol and colour. The symbol differs too, so that nothing depends on colour alone.
STATUS = {
    "running": ("●", "green"),
    "finished": ("✓", "blue"),
    "failed": ("✗", "red"),
    "killed": ("■", "red"),
    "preempted": ("‖", "yellow"),
    "lost": ("?", "magenta"),
}
_UNITS = ((86400 * 365, "year"), (86400 * 30, "month"), (86400, "day"), (3600, "h"), (60, "min"), (1, "s"))
# Categories of characters that can move the cursor, change colours or reverse the reading order; text from a run must not.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def clean(text: str, *, lines: bool = False) -> str:
    """Return text that is safe to print: control characters become visible escapes."""
    if text.isascii() and text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(char if char in kept or unicodedata.category(char) not in _UNSAFE else _escape(char) for char in text)


_LOOK_ALIKES = {
    "●": "*", "✓": "v", "✗": "x", "■": "#", "‖": "|", "…": "...", "\u2013": "-", "—": "-", "\u2212": "-", "→": "->", "←": "<-",
    "·": ".", "\u00d7": "x", "µ": "u", "≤": "<=", "≥": ">=", "│": "|", "┃": "|", "─": "-", "━": "-", "╸": "-", "┼": "+",
    **dict(zip("▁▂▃▄▅▆▇█", "__..--=#", strict=True)),
}  # fmt: skip


def look_alikes(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a stream cannot encode: ours by an ASCII look-alike, any other by its escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_LOOK_ALIKES.get(char) or char.encode("ascii", "backslashreplace").decode() for char in missing), error.end


def _escape(char: str) -> str:
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char) or char.encode("unicode_escape").decode("ascii")


def short(value: Any, width: int = 60) -> str:
    """Return any value on one line, cut to a width."""
    text = clean(value if isinstance(value, str) else number(value))
    return text if len(text) <= width else text[: width - 1] + "…"


def number(value: Any) -> str:
    """Return a number with about four digits, and anything else as text."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3e}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def age(when: float, now: float | None = None) -> str:
    """Return how long ago a time was."""
    if when <= 0:
        return "unknown"
    seconds = (time.time() if now is None else now) - when
    if seconds < 0:
        return "in the future"
    if seconds < 2:
        return "just now"
    size, unit = next(row for row in _UNITS if seconds >= row[0])
    count = int(seconds // size)
    plural = "s" if unit in ("day", "month", "year") and count != 1 else ""
    return f"{count} {unit}{plural} ago"


def took(nanoseconds: float) -> str:
    """Return a duration in its most readable unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:,.0f} {unit}"
    return f"{nanoseconds:.0f} ns"


def size(count: float) -> str:
    """Return a number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
