"""Curves drawn with braille dots: four by two points in each character, extremes kept, NaN and infinities left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .text import number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The bit of each dot in a braille character, by row from the top and column from the left.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Chart:
    """A drawn curve: its lines (axis labels included), and how many values could not be drawn."""

    lines: list[str]
    left_out: int


def draw(steps: Any, values: Any, *, width: int, height: int, log: bool = False) -> Chart:
    """Draw values over steps in `width` by `height` characters. `log`: by powers of ten; what is not above 0 is left out."""
    import numpy as np

    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    good = np.isfinite(y) & ((y > 0) if log else True)
    left_out = int(len(y) - good.sum())
    x, y = x[good], y[good]
    if not len(y):
        return Chart(["no finite values".center(width)], left_out)
    low, high = float(y.min()), float(y.max())
    labels = _labels(low, high, height)
    margin = max(map(len, labels))
    wide = max(width - margin - 2, 4)
    scaled = np.log10(y) if log else y
    cells = _cells(*_envelope(x, scaled, wide * 2), wide, height)
    lines = [f"{label:>{margin}} ┤{row}" if label else f"{'':{margin}} │{row}" for label, row in zip(labels, cells, strict=True)]
    return Chart([*lines, _axis(float(x.min()), float(x.max()), margin, wide)], left_out)


def spark(values: Any, width: int = 16) -> str:
    """Draw a curve on one line with blocks; gaps where there is no number."""
    import numpy as np

    y = np.asarray(values, np.float64)
    if not np.isfinite(y).any():
        return ""
    parts = [part[np.isfinite(part)] for part in np.array_split(y, min(width, len(y)))]
    with np.errstate(over="ignore"):
        means = [float(part.mean()) if len(part) else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, high = min(known), max(known)
    span = high - low
    if not np.isfinite(span) or span <= 1e-12 * max(abs(low), abs(high)):  # means of equal numbers differ in their last bit
        return "".join(" " if mean is None else _BLOCKS[3] for mean in means)
    return "".join(" " if mean is None else _BLOCKS[min(7, int((mean - low) / span * 8))] for mean in means)


def _labels(low: float, high: float, height: int) -> list[str]:
    """Name the top, the bottom, and nothing between: a curve that never changes has one label."""
    labels = [""] * height
    if low == high:
        labels[(height - 1) // 2] = number(high)
    else:
        labels[0], labels[-1] = number(high), number(low)
    return labels


def _axis(first: float, last: float, margin: int, wide: int) -> str:
    left, right = f"{first:.0f}", f"{last:.0f}"
    gap = max(1, wide - len(left) - len(right))
    return f"{'':{margin}}  {left}{'':{gap}}{right}" if first != last else f"{'':{margin}}  {left}"


def _envelope(x: NDArray[np.float64], y: NDArray[np.float64], columns: int) -> tuple[Any, Any, Any, Any, Any]:
    """Return, for each dot column that has points: its place, lowest, highest, first and last value."""
    import numpy as np

    order = np.argsort(x, kind="stable") if np.any(np.diff(x) < 0) else slice(None)
    x, y = x[order], y[order]
    span = x[-1] - x[0]
    place = ((x - x[0]) / span * (columns - 1)).astype(np.int64) if span > 0 else np.zeros(len(x), np.int64)
    starts = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    ends = np.append(starts[1:], len(place)) - 1
    return place[starts], np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts), y[starts], y[ends]


def _cells(place: Any, low: Any, high: Any, first: Any, last: Any, wide: int, height: int) -> list[str]:
    """Set the dots of each column from its lowest to its highest value, joined to the column before."""
    dots = height * 4
    bottom, top = float(low.min()), float(high.max())
    grid = [[0] * wide for _ in range(height)]

    def level(value: float) -> int:
        # Halves, because the distance of two huge numbers may be beyond a float.
        share = 0.5 if top == bottom else (value / 2 - bottom / 2) / (top / 2 - bottom / 2)
        return min(dots - 1, max(0, round(share * (dots - 1))))

    before: tuple[int, int] | None = None
    for at, lowest, highest, begin, end in zip(place, low, high, first, last, strict=True):
        column = int(at)
        _line(grid, column, level(lowest), level(highest))
        if before is not None:
            _join(grid, before, (column, level(begin)))
        before = (column, level(end))
    return ["".join(chr(_BLANK + cell) for cell in row) for row in grid]


def _line(grid: list[list[int]], column: int, low: int, high: int) -> None:
    dots = len(grid) * 4
    for level in range(low, high + 1):
        row = dots - 1 - level
        grid[row // 4][column // 2] |= _DOTS[row % 4][column % 2]


def _join(grid: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    """Draw a straight line between two dots, so that sparse points make a curve."""
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0))
    for i in range(1, count):
        x, y = x0 + round((x1 - x0) * i / count), y0 + round((y1 - y0) * i / count)
        _line(grid, x, y, y)
