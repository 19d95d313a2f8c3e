"""Curves drawn with braille dots, two by four in each character: extremes are kept, NaN and infinities left out."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..drawing.numbers import share
from .text import number

# The bit of each dot in a braille character, by row from the top and column from the left.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_BLOCKS = "▁▂▃▄▅▆▇█"


class Chart(NamedTuple):
    """A drawn curve: its lines, with axis labels, and how many values could not be drawn."""

    lines: list[str]
    left_out: int


def draw(steps: Any, values: Any, *, width: int, height: int, log: bool = False) -> Chart:
    """Draw values over steps in `width` by `height` characters. `log`: by powers of ten, leaving out values up to 0."""
    import numpy as np

    x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    good = np.isfinite(y) & ((y > 0) if log else True)
    x, y, left_out = x[good], y[good], int(len(y) - good.sum())
    if not len(y):
        return Chart(["no finite values".center(width)], left_out)
    low, high, first, last = float(y.min()), float(y.max()), f"{x.min():.0f}", f"{x.max():.0f}"
    labels = [""] * height
    if low == high:
        labels[(height - 1) // 2] = number(high)
    else:
        labels[0], labels[-1] = number(high), number(low)
    margin = max(map(len, labels))
    wide = max(width - margin - 2, 4)
    dots = _dots(x, np.log10(y) if log else y, wide * 2, height * 4)
    cells = (dots[::-1].reshape(height, 4, wide, 2) * np.array(_DOTS)[:, None, :]).sum(axis=(1, 3))
    rows = ("".join(chr(_BLANK + cell) for cell in row) for row in cells.tolist())
    lines = [f"{label:>{margin}} {'┤' if label else '│'}{row}" for label, row in zip(labels, rows, strict=True)]
    axis = first if first == last else first + last.rjust(max(1 + len(last), wide - len(first)))
    return Chart([*lines, " " * (margin + 2) + axis], left_out)


def _dots(x: Any, y: Any, columns: int, rows: int) -> Any:
    """Return the dots as an array of rows, from the bottom, and columns: each column's range, joined to its neighbours."""
    import numpy as np

    order = np.argsort(x, kind="stable")
    place = (share(x[order], x.min(), x.max()) * (columns - 1) * (x.min() < x.max())).astype(np.int64)
    level = np.rint(share(y[order], y.min(), y.max()) * (rows - 1)).astype(np.int64)
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    ends = np.append(starts[1:], len(place)) - 1
    lowest, highest = np.minimum.reduceat(level, starts), np.maximum.reduceat(level, starts)
    dots = np.zeros((rows, columns), bool)
    for low, high, start, before in zip(lowest, highest, starts, np.append(starts[0], ends[:-1]), strict=True):
        dots[low : high + 1, place[start]] = True
        across, up = place[start] - place[before], level[start] - level[before]
        way = np.linspace(0, 1, max(abs(across), abs(up)) + 1)
        dots[np.rint(level[before] + up * way).astype(int), np.rint(place[before] + across * way).astype(int)] = True
    return dots


def spark(values: Any, width: int = 16) -> str:
    """Draw a curve on one line with blocks; gaps where there is no finite value."""
    import numpy as np

    y = np.asarray(values, np.float64)
    if not np.isfinite(y).any():
        return ""
    parts = [part[np.isfinite(part)] for part in np.array_split(y, min(width, len(y)))]
    with np.errstate(over="ignore"):
        means = [float(part.mean()) if len(part) else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, high = min(known), max(known)
    # Means of equal numbers differ in their last bit.
    flat = not np.isfinite(high - low) or high - low <= 1e-12 * max(abs(low), abs(high))
    levels = (None if mean is None else 3 if flat else min(7, int(share(mean, low, high) * 8)) for mean in means)
    return "".join(" " if level is None else _BLOCKS[level] for level in levels)
