"""Plotly figures as pictures, without Plotly: lines, points and bars. A report runs no script, so nothing else can be drawn."""

from __future__ import annotations

import base64
import binascii
import json
import math
from itertools import pairwise
from typing import Any, NamedTuple

from ..drawing.markup import Markup, stroke, tag
from ..drawing.numbers import tick, ticks

WIDE, TALL, LEFT, BELOW, ABOVE = 420, 240, 52, 26, 10
MOST_TRACES, MOST_POINTS = 40, 5_000  # drawn of one figure
KINDS = ("scatter", "scattergl", "bar")
_TYPES = {"f8": "<f8", "f4": "<f4", "i1": "i1", "i2": "<i2", "i4": "<i4", "i8": "<i8", "u1": "u1", "u2": "<u2", "u4": "<u4"}


class CannotDraw(Exception):
    """Raised with the reason why a figure is not drawn."""


class FigureTrace(NamedTuple):
    name: str
    bars: bool
    lines: bool
    points: list[tuple[float, float]]


def figure(text: str) -> Markup:
    """Return a Plotly figure as SVG, or raise CannotDraw."""
    try:
        found = json.loads(text)
        traces = [_trace(one, place) for place, one in enumerate(found["data"][:MOST_TRACES])]
        layout = found.get("layout") or {}
        title = _title(layout.get("title"))
        axes = [_title((layout.get(name) or {}).get("title")) for name in ("xaxis", "yaxis")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CannotDraw("a Plotly figure that cannot be read") from error
    drawn = [trace for trace in traces if trace.points]
    if not drawn:
        raise CannotDraw("a Plotly figure without numbers")
    return _svg(drawn, title, axes)


def _title(title: Any) -> str:
    return str((title.get("text") if isinstance(title, dict) else title) or "")[:100]


def _trace(one: dict[str, Any], place: int) -> FigureTrace:
    kind = str(one.get("type") or "scatter")
    if kind not in KINDS:
        raise CannotDraw(f"a Plotly figure of type {kind[:40]} needs a script; lines, points and bars are drawn")
    y = _numbers(one.get("y"))
    x = _numbers(one.get("x")) if one.get("x") is not None else [float(i) for i in range(len(y))]
    if one.get("x") is not None and not any(math.isfinite(value) for value in x):
        x = [float(i) for i in range(len(y))]  # words: in their order
    points = [pair for pair in zip(x, y, strict=False) if all(map(math.isfinite, pair))][:MOST_POINTS]
    mode = str(one.get("mode") or "lines")
    return FigureTrace(str(one.get("name") or f"trace {place}")[:60], kind == "bar", "lines" in mode, points)


def _numbers(column: Any) -> list[float]:
    """Return a column: a list, or the bytes that newer versions of Plotly write."""
    if isinstance(column, dict):
        import numpy as np

        try:
            data = base64.b64decode(str(column.get("bdata")), validate=True)
            return [float(value) for value in np.frombuffer(data, _TYPES[str(column.get("dtype"))])]
        except (binascii.Error, KeyError) as error:
            raise ValueError("a column of an unknown type") from error
    return [float(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else math.nan for v in column or []]


def _svg(traces: list[FigureTrace], title: str, axes: list[str]) -> Markup:
    points = [point for trace in traces for point in trace.points]
    bars = any(trace.bars for trace in traces)
    x0, x1 = _span([x for x, _ in points], 0.5 if bars else 0.0)
    y0, y1 = _span([*(y for _, y in points), *([0.0] if bars else [])], 0.0)

    def at(x: float, y: float) -> tuple[float, float]:
        wide, tall = WIDE - LEFT - 8, TALL - BELOW - ABOVE
        return LEFT + (x - x0) / (x1 - x0) * wide, ABOVE + (1 - (y - y0) / (y1 - y0)) * tall

    parts = [_axis(at, (x0, x1), (y0, y1))]
    parts += [_marks(trace, place, at, bars=sum(one.bars for one in traces)) for place, trace in enumerate(traces)]
    named = f"{title or 'Plotly figure'}: {', '.join(trace.name for trace in traces)}"
    words = [text for text in (title, " over ".join(word for word in reversed(axes) if word)) if text]
    top = [tag("text", " · ".join(words)[:70], x=LEFT, y=TALL - 2)] if words else []
    return tag("svg", tag("title", named), *parts, *top, viewBox=f"0 0 {WIDE} {TALL + 12}", class_="plot", role="img")


def _span(values: list[float], room: float) -> tuple[float, float]:
    low, high = min(values) - room, max(values) + room
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _axis(at: Any, xs: tuple[float, float], ys: tuple[float, float]) -> Markup:
    lines = [tag("text", tick(x), x=f"{at(x, ys[0])[0]:.1f}", y=TALL - BELOW + 14, text_anchor="middle") for x in ticks(*xs, 5)]
    for y in ticks(*ys, 4):
        place = f"{at(xs[0], y)[1]:.1f}"
        lines.append(tag("line", x1=LEFT, x2=WIDE - 8, y1=place, y2=place, class_="grid"))
        lines.append(tag("text", tick(y), x=LEFT - 6, y=float(place) + 4, text_anchor="end"))
    return tag("g", *lines)


def _marks(trace: FigureTrace, place: int, at: Any, *, bars: int) -> Markup:
    if trace.bars:
        wide = min([abs(at(b[0], 0)[0] - at(a[0], 0)[0]) for a, b in pairwise(sorted(trace.points)) if b[0] > a[0]] or [60.0])
        each = max(1.0, wide * 0.8 / bars)
        shapes = [
            tag("rect", x=f"{at(x, 0)[0] - wide * 0.4 + (place % bars) * each:.1f}", y=f"{min(at(x, y)[1], at(x, 0)[1]):.1f}",
                width=f"{each:.1f}", height=f"{abs(at(x, y)[1] - at(x, 0)[1]):.1f}", class_=f"f{place % 8}")
            for x, y in trace.points
        ]  # fmt: skip
        return tag("g", *shapes)
    if trace.lines:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in trace.points))
        return tag("path", d=path, stroke_width=1.6, **stroke(place))
    dots = (at(*point) for point in trace.points)
    return tag("g", *(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=2.5, class_=f"f{place % 8}") for x, y in dots))
