"""Line charts of runs as SVG: extremes are kept, NaN and infinities marked, restarts flagged, gaps dotted."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .markup import LIGHT, Markup, escape, stroke, tag
from .numbers import number, span_tick, tick, ticks, time_tick

GAP = 8  # a step this many times the usual one is a gap in the data
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 8, 20
TICK_X, TICK_Y = 76, 28  # pixels between two labels
_GREY, _GRID = "#5b6370", "#e4e5e3"


@dataclass
class Line:
    """One run's series, ready to be drawn. `low` and `high` bound the band: over ranks, or a bucket's extremes."""

    name: str
    place: int  # index of its colour
    x: Any
    y: Any
    lo: Any = None
    hi: Any = None
    low: Any = None
    high: Any = None
    marks: Sequence[tuple[float, str]] = ()
    restarts: Sequence[float] = ()
    raw: bool = True
    total: int = 0
    marked: int = 0
    axis: str = "step"
    low_rank: Any = None
    high_rank: Any = None
    parts: list[tuple[int, int]] = field(default_factory=list)
    smooth: Any = None


class Frame(NamedTuple):
    """The mapping from numbers to pixels."""

    x: Callable[[float], float]
    y: Callable[[float], float]
    bottom: float
    right: float


class View(NamedTuple):
    """The range of numbers a chart covers."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool


def line_of(name: str, place: int, found: Any, *, smooth: float = 0.0) -> Line:
    """Return a line made from a store's buckets; `smooth` from 0 to 1 adds an average that does not lag."""
    thinned = not found.raw
    line = Line(
        name, place, found.x_last, found.last, found.min if thinned else None, found.max if thinned else None,
        found.low if found.low is not None else found.min if thinned else None,
        found.high if found.high is not None else found.max if thinned else None,
        found.marks, found.restarts, found.raw, found.total, found.marked, found.axis, found.low_rank, found.high_rank,
    )  # fmt: skip
    line.parts = stretches(line.x, line.y)
    if smooth > 0:
        line.smooth = _smoothed(line.y, line.parts, smooth)
    return line


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


def _extent(lines: Sequence[Line], log: bool) -> View | None:
    import numpy as np

    xs = [np.asarray(line.x, float) for line in lines] + [np.array([x for x, _ in line.marks]) for line in lines]
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
    return View(x0, x1, *_padded(low, high, log), log)


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        down, up = math.log10(low), math.log10(high)
        room = (up - down) * 0.04 or 0.3
        return max(10.0 ** (down - room), 5e-324), 10.0 ** min(up + room, 308.25)
    room = abs(low) * 0.05 or 0.5 if low == high else (high / 2 - low / 2) * 0.08  # halved: the difference may overflow
    return max(low - room, -sys.float_info.max), min(high + room, sys.float_info.max)


def _frame(view: View, width: int, height: int) -> Frame:
    wide, tall = width - LEFT - RIGHT, height - TOP - BOTTOM
    low, high = (math.log(view.y0), math.log(view.y1)) if view.log else (view.y0, view.y1)

    def x(value: float) -> float:
        return LEFT + (value / 2 - view.x0 / 2) / (view.x1 / 2 - view.x0 / 2) * wide

    def y(value: float) -> float:
        if view.log:
            value = math.log(value) if value > 0 else low
        return TOP + tall - (value / 2 - low / 2) / (high / 2 - low / 2) * tall

    return Frame(x, y, TOP + tall, width - RIGHT)


def chart(lines: Sequence[Line], *, label: str, width: int = 640, height: int = 260, log: bool = False) -> Markup:
    """Draw lines, or a message if there are no points. `label` describes the chart for screen readers."""
    view = _extent(lines, log)
    if view is None:
        return tag("p", "No points.", class_="dim")
    frame = _frame(view, width, height)
    axis = lines[0].axis
    said = drawn(lines, log=log)
    parts = [tag("title", label), tag("desc", said), _axes(view, frame, axis, width, height)]
    for draw in (_restarts, _band, _curve, _marks):
        parts += [draw(line, frame, view) for line in lines]
    return tag(
        "svg", *parts, class_="plot", viewBox=f"0 0 {width} {height}", role="img", aria_label=f"{label}. {said}"
    )  # fmt: skip


def drawn(lines: Sequence[Line], *, log: bool = False) -> str:
    """Return a description of which data a chart shows."""
    total, shown = sum(line.total for line in lines), sum(len(line.x) for line in lines)
    words = [f"{total:,} points" if shown == total else f"{shown:,} of {total:,} points, extremes kept"]
    marked = sum(line.marked for line in lines)
    words += [f"{marked:,} not finite, marked"] if marked else []
    restarts = sum(len(line.restarts) for line in lines)
    words += [f"{restarts} restart{'s' if restarts > 1 else ''}"] if restarts else []
    words += [f"over {lines[0].axis}"] if lines and lines[0].axis != "step" else []
    hidden = sum(int((line.y <= 0).sum()) for line in lines) if log else 0
    words += [f"log scale{f', {hidden} at or below 0 not drawn' if hidden else ''}"] if log else []
    return ", ".join(words)


def _axes(view: View, frame: Frame, axis: str, width: int, height: int) -> Markup:
    parts = []
    for value in ticks(view.y0, view.y1, (height - TOP - BOTTOM) / TICK_Y, log=view.log):
        y = round(frame.y(value)) + 0.5
        parts.append(tag("line", x1=LEFT, x2=width - RIGHT, y1=y, y2=y, class_="grid", stroke=_GRID))
        parts.append(tag("text", tick(value), x=LEFT - 7, y=y + 4, text_anchor="end", fill=_GREY, font_size=11))
    span = view.x1 - view.x0
    for value in ticks(view.x0, view.x1, (width - LEFT - RIGHT) / TICK_X):
        name = time_tick(value, span) if axis == "time" else span_tick(value, span) if axis == "relative" else tick(value)
        x = min(frame.x(value), width - 4 * len(name))
        parts.append(tag("text", name, x=_px(x), y=height - 5, text_anchor="middle", fill=_GREY, font_size=11))
    return tag("g", *parts, aria_hidden="true")


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _path(points: Sequence[tuple[float, float]], *, close: bool = False) -> str:
    return "M" + "L".join(f"{_px(x)} {_px(y)}" for x, y in points) + ("Z" if close else "")


def _colour(line: Line) -> dict[str, object]:
    return {"class_": f"f{line.place % 8}", "fill": LIGHT[line.place % 8]}


def _restarts(line: Line, frame: Frame, _view: View) -> Markup:
    """Draw a dotted line with a flag where the run was restarted."""
    parts = []
    for at in line.restarts:
        x = frame.x(at)
        look = {**stroke(line.place), "stroke_dasharray": "1 3"}
        parts.append(tag("path", d=_path([(x, TOP), (x, frame.bottom)]), opacity=0.55, **look))
        parts.append(tag("path", tag("title", f"{line.name}: restarted at {number(at)}"),
                         d=_path([(x, TOP), (x + 6, TOP + 3), (x, TOP + 6)], close=True), **_colour(line)))  # fmt: skip
    return Markup("".join(parts))


def _band(line: Line, frame: Frame, view: View) -> Markup:
    if line.low is None:
        return Markup("")
    parts = []
    for a, b in stretches(line.x, line.low):
        top = [(frame.x(line.x[i]), frame.y(_above(line.high[i], view))) for i in range(a, b)]
        floor = [(frame.x(line.x[i]), frame.y(_above(line.low[i], view))) for i in range(b - 1, a - 1, -1)]
        parts.append(tag("path", d=_path(top + floor, close=True), opacity=0.16, stroke="none", **_colour(line)))
    return Markup("".join(parts))


def _above(value: float, view: View) -> float:
    return view.y0 if view.log and value <= 0 else value


def _curve(line: Line, frame: Frame, view: View) -> Markup:
    parts = []
    for a, b in line.parts:
        own = tag("path", d=_path(_points(line, a, b, frame, view)), stroke_linejoin="round",
                  stroke_width=1.5, opacity=0.28 if line.smooth is not None else None, **stroke(line.place))  # fmt: skip
        parts.append(own)
        if line.smooth is not None:
            even = [(frame.x(line.x[i]), frame.y(_above(line.smooth[i], view))) for i in range(a, b)]
            parts.append(tag("path", d=_path(even), stroke_linejoin="round", stroke_width=1.8, **stroke(line.place)))
    for (_, a), (b, _) in zip(line.parts, line.parts[1:], strict=False):
        ends = [(frame.x(line.x[i]), frame.y(_above(line.y[i], view))) for i in (a - 1, b)]
        parts.append(tag("path", d=_path(ends), opacity=0.5, **{**stroke(line.place), "stroke_dasharray": "1 4"}))
    return Markup("".join(parts) + _dots(line, frame, view))


def _points(line: Line, a: int, b: int, frame: Frame, view: View) -> list[tuple[float, float]]:
    """Return a curve's vertices: in each bucket the extreme nearer to the previous point, the other, and the last value."""
    found: list[tuple[float, float]] = []
    for i in range(a, b):
        x, y = frame.x(line.x[i]), line.y[i]
        if line.lo is not None and line.hi[i] > line.lo[i]:
            ends = [line.lo[i], line.hi[i]]
            before = line.y[i - 1] if i > a else ends[0]
            if abs(before - ends[1]) < abs(before - ends[0]):
                ends.reverse()
            found += [(x, frame.y(_above(end, view))) for end in ends]
        found.append((x, frame.y(_above(y, view))))
    return found


def _dots(line: Line, frame: Frame, view: View) -> str:
    """Draw dots if points are far enough apart, and always for an isolated point."""
    sparse = line.raw and len(line.x) * 9 < frame.right - LEFT
    places = [i for a, b in line.parts if sparse or b - a == 1 for i in range(a, b) if not (view.log and line.y[i] <= 0)]
    return "".join(tag("circle", cx=_px(frame.x(line.x[i])), cy=_px(frame.y(line.y[i])), r=2.2, **_colour(line)) for i in places)


def _marks(line: Line, frame: Frame, _view: View) -> Markup:
    """Draw NaN as a cross at the bottom, and infinities as arrows at the top or bottom edge."""
    parts = []
    for at, kind in line.marks:
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
    from .markup import swatch

    return tag("ul", *(tag("li", swatch(line.place), escape(line.name)) for line in lines), class_="legend")
