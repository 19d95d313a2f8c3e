"""Line charts of runs as SVG: extremes are kept, NaN and infinities marked, restarts flagged, gaps dotted."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from .markup import LIGHT, Markup, escape, stroke, swatch, tag
from .numbers import number, share, span_tick, tick, ticks, time_tick

GAP = 8  # a step this many times the usual one is a gap in the data
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 8, 20
TICK_X, TICK_Y = 76, 28  # pixels between two labels
_GREY, _GRID = "#5b6370", "#e4e5e3"


class Line:
    """One run's series, ready to be drawn: the store's buckets, in the colour of its place.

    `low` and `high` bound the band: over ranks, or a bucket's extremes. `smooth` from 0 to 1 adds an average that does not lag.
    """

    def __init__(self, name: str, place: int, data: Any, *, smooth: float = 0.0) -> None:
        self.name = name
        self.place = place
        self.data = data
        self.x, self.y = data.x_last, data.last
        self.lo: Any = None if data.raw else data.min
        self.hi: Any = None if data.raw else data.max
        self.low: Any = self.lo if data.low is None else data.low
        self.high: Any = self.hi if data.high is None else data.high
        self.parts = stretches(self.x, self.y)
        self.smooth = _smoothed(self.y, self.parts, smooth) if smooth > 0 else None


class PlotArea(NamedTuple):
    """The range of numbers a chart covers, and its size in pixels."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool
    width: int
    height: int

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        return float(LEFT + share(value, self.x0, self.x1) * (self.width - LEFT - RIGHT))

    def y(self, value: float) -> float:
        low, high = self.y0, self.y1
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return float(self.bottom - share(value, low, high) * (self.bottom - TOP))


def stretches(x: Any, y: Any) -> list[tuple[int, int]]:
    """Return index ranges without gaps: non-finite values, and steps far wider than usual, end a range."""
    import numpy as np

    good = np.flatnonzero(np.isfinite(y))
    if not len(good):
        return []
    wide = np.diff(x)
    usual = float(np.median(np.abs(wide))) if len(x) >= 4 else 0.0
    broken = np.diff(good) > 1
    if usual > 0:
        broken |= wide[good[1:] - 1] > usual * GAP
    cuts = np.flatnonzero(broken)
    firsts, lasts = good[np.append(0, cuts + 1)], good[np.append(cuts, len(good) - 1)]
    return [(int(a), int(b) + 1) for a, b in zip(firsts, lasts, strict=True)]


def _smoothed(y: Any, parts: Sequence[tuple[int, int]], amount: float) -> Any:
    """Return a local linear fit with a centred kernel: it does not lag or cross gaps, and its ends follow the trend."""
    import numpy as np

    out = np.full(len(y), np.nan)
    reach = max(1.0, amount * amount * len(y) / 10)
    middle = math.ceil(reach * 2.5)
    kernel = np.exp(-0.5 * (np.arange(-middle, middle + 1) / reach) ** 2)
    for a, b in parts:
        for i in range(a, b):
            first, last = max(a, i - middle), min(b, i + middle + 1)
            away = np.arange(first, last) - i
            weights = kernel[middle + first - i : middle + last - i]
            total, lean, spread = weights.sum(), weights @ away, weights @ away**2
            gap = np.asarray(y[first:last], np.float64) - y[i]
            whole = total * spread - lean * lean
            flat = whole <= 1e-9 * total * total  # a single point
            out[i] = y[i] + (
                weights @ gap / total if flat else (spread * (weights @ gap) - lean * (weights * away @ gap)) / whole
            )
    return out


def _frame(lines: Sequence[Line], width: int, height: int, log: bool) -> PlotArea | None:
    """Return the frame that holds all lines, or None if there are no points."""
    import numpy as np

    xs = [np.asarray(line.x, float) for line in lines] + [np.array([x for x, _ in line.data.marks]) for line in lines]
    x = np.concatenate(xs) if xs else np.empty(0)
    x = x[np.isfinite(x)]
    if not len(x):
        return None
    columns = [c for line in lines for c in (line.y, line.lo, line.hi, line.low, line.high) if c is not None]
    y = np.concatenate([np.asarray(c, float) for c in columns])
    y = y[np.isfinite(y) & ((y > 0) if log else True)]
    low, high = (float(y.min()), float(y.max())) if len(y) else (0.1, 1.0)  # nothing but NaN: a frame that shows the marks
    x0, x1 = float(x.min()), float(x.max())
    if x0 == x1:
        x0, x1 = x0 - 0.5, x1 + 0.5
    return PlotArea(x0, x1, *_padded(low, high, log), log, width, height)


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        down, up = math.log10(low), math.log10(high)
        room = (up - down) * 0.04 or 0.3
        return max(10.0 ** (down - room), 5e-324), 10.0 ** min(up + room, 308.25)
    room = abs(low) * 0.05 or 0.5 if low == high else (high / 2 - low / 2) * 0.08  # halved: the difference may overflow
    return max(low - room, -sys.float_info.max), min(high + room, sys.float_info.max)


def chart(lines: Sequence[Line], *, label: str, width: int = 640, height: int = 260, log: bool = False) -> Markup:
    """Draw lines, or a message if there are no points. `label` describes the chart for screen readers."""
    frame = _frame(lines, width, height, log)
    if frame is None:
        return tag("p", "No points.", class_="dim")
    about = drawn(lines, log=log)
    parts = [tag("title", label), tag("desc", about), _axes(frame, lines[0].data.axis)]
    parts += [draw(line, frame) for draw in (_restarts, _band, _curve, _marks) for line in lines]
    return tag("svg", *parts, class_="plot", viewBox=f"0 0 {width} {height}", role="img", aria_label=f"{label}. {about}")


def drawn(lines: Sequence[Line], *, log: bool = False) -> str:
    """Return a description of which data a chart shows."""
    total, shown = sum(line.data.total for line in lines), sum(len(line.x) for line in lines)
    words = [f"{total:,} points" if shown == total else f"{shown:,} of {total:,} points, extremes kept"]
    marked = sum(line.data.marked for line in lines)
    words += [f"{marked:,} not finite, marked"] if marked else []
    restarts = sum(len(line.data.restarts) for line in lines)
    words += [f"{restarts} restart{'s' if restarts > 1 else ''}"] if restarts else []
    words += [f"over {lines[0].data.axis}"] if lines and lines[0].data.axis != "step" else []
    hidden = sum(int((line.y <= 0).sum()) for line in lines) if log else 0
    words += [f"log scale{f', {hidden} at or below 0 not drawn' if hidden else ''}"] if log else []
    return ", ".join(words)


def _axes(frame: PlotArea, axis: str) -> Markup:
    parts = []
    for value in ticks(frame.y0, frame.y1, (frame.bottom - TOP) / TICK_Y, log=frame.log):
        y = round(frame.y(value)) + 0.5
        parts.append(tag("line", x1=LEFT, x2=frame.width - RIGHT, y1=y, y2=y, class_="grid", stroke=_GRID))
        parts.append(tag("text", tick(value), x=LEFT - 7, y=y + 4, text_anchor="end", fill=_GREY, font_size=11))
    span = frame.x1 - frame.x0
    for value in ticks(frame.x0, frame.x1, (frame.width - LEFT - RIGHT) / TICK_X):
        name = time_tick(value, span) if axis == "time" else span_tick(value, span) if axis == "relative" else tick(value)
        x = min(frame.x(value), frame.width - 4 * len(name))
        parts.append(tag("text", name, x=_px(x), y=frame.height - 5, text_anchor="middle", fill=_GREY, font_size=11))
    return tag("g", *parts, aria_hidden="true")


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _path(points: Sequence[tuple[float, float]], *, close: bool = False) -> str:
    return "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in points) + ("Z" if close else "")


def _colour(line: Line) -> dict[str, object]:
    return {"class_": f"f{line.place % 8}", "fill": LIGHT[line.place % 8]}


def _restarts(line: Line, frame: PlotArea) -> Markup:
    """Draw a dotted line with a flag where the run was restarted."""
    parts = []
    for at in line.data.restarts:
        x = frame.x(at)
        look = {**stroke(line.place), "stroke_dasharray": "1 3"}
        parts.append(tag("path", d=_path([(x, TOP), (x, frame.bottom)]), opacity=0.55, **look))
        parts.append(tag("path", tag("title", f"{line.name}: restarted at {number(at)}"),
                         d=_path([(x, TOP), (x + 6, TOP + 3), (x, TOP + 6)], close=True), **_colour(line)))  # fmt: skip
    return Markup("".join(parts))


def _band(line: Line, frame: PlotArea) -> Markup:
    if line.low is None:
        return Markup("")
    parts = []
    for a, b in stretches(line.x, line.low):
        top = [(frame.x(line.x[i]), frame.y(line.high[i])) for i in range(a, b)]
        floor = [(frame.x(line.x[i]), frame.y(line.low[i])) for i in range(b - 1, a - 1, -1)]
        parts.append(tag("path", d=_path(top + floor, close=True), opacity=0.16, stroke="none", **_colour(line)))
    return Markup("".join(parts))


def _curve(line: Line, frame: PlotArea) -> Markup:
    parts = []
    for a, b in line.parts:
        own = tag("path", d=_path(_points(line, a, b, frame)), stroke_linejoin="round",
                  stroke_width=1.5, opacity=0.28 if line.smooth is not None else None, **stroke(line.place))  # fmt: skip
        parts.append(own)
        if line.smooth is not None:
            even = [(frame.x(line.x[i]), frame.y(line.smooth[i])) for i in range(a, b)]
            parts.append(tag("path", d=_path(even), stroke_linejoin="round", stroke_width=1.8, **stroke(line.place)))
    for (_, a), (b, _) in zip(line.parts, line.parts[1:], strict=False):
        ends = [(frame.x(line.x[i]), frame.y(line.y[i])) for i in (a - 1, b)]
        parts.append(tag("path", d=_path(ends), opacity=0.5, **{**stroke(line.place), "stroke_dasharray": "1 4"}))
    return Markup("".join(parts) + _dots(line, frame))


def _points(line: Line, a: int, b: int, frame: PlotArea) -> list[tuple[float, float]]:
    """Return a curve's vertices: in each bucket the extreme nearer to the previous point, the other, and the last value."""
    found: list[tuple[float, float]] = []
    for i in range(a, b):
        x, y = frame.x(line.x[i]), line.y[i]
        if line.lo is not None and line.hi[i] > line.lo[i]:
            ends = [line.lo[i], line.hi[i]]
            before = line.y[i - 1] if i > a else ends[0]
            if abs(before - ends[1]) < abs(before - ends[0]):
                ends.reverse()
            found += [(x, frame.y(end)) for end in ends]
        found.append((x, frame.y(y)))
    return found


def _dots(line: Line, frame: PlotArea) -> str:
    """Draw dots if points are far enough apart, and always for an isolated point."""
    sparse = line.data.raw and len(line.x) * 9 < frame.width - RIGHT - LEFT
    places = [i for a, b in line.parts if sparse or b - a == 1 for i in range(a, b) if not (frame.log and line.y[i] <= 0)]
    return "".join(tag("circle", cx=_px(frame.x(line.x[i])), cy=_px(frame.y(line.y[i])), r=2.2, **_colour(line)) for i in places)


def _marks(line: Line, frame: PlotArea) -> Markup:
    """Draw NaN as a cross at the bottom, and infinities as arrows at the top or bottom edge."""
    parts = []
    for at, kind in line.data.marks:
        x, floor = frame.x(at), frame.bottom
        if kind == "nan":
            d = f"M{_px(x - 3)} {floor - 7}l6 6m0 -6l-6 6"
        else:
            tip, back = (TOP, 6) if kind == "inf" else (floor, -6)
            d = f"M{_px(x - 3.5)} {_px(tip + back)}L{_px(x)} {_px(tip)}L{_px(x + 3.5)} {_px(tip + back)}"
        said = tag("title", f"{line.name}: {kind} at {number(at)}")
        look = {**stroke(line.place), "stroke_dasharray": None}
        parts.append(tag("path", said, d=d, stroke_width=1.5, **look))
    return Markup("".join(parts))


def legend(lines: Sequence[Line]) -> Markup:
    """Return the legend of a chart."""
    return tag("ul", *(tag("li", swatch(line.place), escape(line.name)) for line in lines), class_="legend")
