"""Runs as displayed in a notebook: a table and small charts, without a script. Runs are duck-typed, hence Any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..plain import flat
from .chart import Line, chart, drawn
from .markup import Markup, join, status, table, tag
from .numbers import cut, duration, moment, number, share
from .order import curve_order

CHARTS, SETTINGS, METRICS = 4, 16, 16  # of one run
ROWS, SPARKS = 50, 20  # of a list of runs: a curve needs the run's journals, a row does not
SPARK_BUCKETS = 60


def lines(runs: Iterable[Any], key: str, *, buckets: int = 330, x: str = "auto", smooth: float = 0.0) -> list[Line]:
    """Return one line per run that has the key, coloured by the run's position."""
    found = [(place, run, run.curve(key, buckets=buckets, x=x)) for place, run in enumerate(runs)]
    return [Line(run.name, place, one, smooth=smooth) for place, run, one in found if one is not None]


def run_html(run: Any) -> Markup:
    """Return one run: its status, config, summary, and its first charts."""
    keys = curve_order(run.keys())
    parts = [_head(run), _pairs("config", flat(run.config), SETTINGS)]
    parts.append(_pairs("summary", run.summary, METRICS))
    charts = [_figure(run, key) for key in keys[:CHARTS]]
    parts.append(tag("div", *charts, class_="charts", style="--ff-wide:300px;margin-top:8px"))
    if len(keys) > CHARTS:
        parts.append(tag("p", f"and {len(keys) - CHARTS} more keys: run.keys()", class_="dim"))
    if not keys:
        parts.append(tag("p", "No numbers yet.", class_="dim"))
    return join(parts)


def _head(run: Any) -> Markup:
    words = [run.project, run.id, f"started {moment(run.started)}", duration(run.duration)]
    words += [f"{len(run.ranks)} ranks"] if len(run.ranks) > 1 else []
    words += [f"tags: {', '.join(map(str, run.tags))}"] if run.tags else []
    error = (run.error or "").strip().splitlines()[-1:]
    name = tag("p", tag("strong", run.name), Markup(" "), status(run.status), style="margin:0")
    rest = tag("p", " · ".join(words), class_="dim", style="margin:0 0 6px")
    return join([name, rest, *(tag("p", line, class_="bad") for line in error)])


def _pairs(title: str, values: dict[str, Any], most: int) -> Markup:
    """Return names and values as one unobtrusive line; run.config and run.summary have all of them."""
    if not values:
        return Markup("")
    words = [f"{name} {cut(number(value), 40)}" for name, value in list(values.items())[:most]]
    words += [f"and {len(values) - most} more"] if len(values) > most else []
    return tag("p", tag("span", f"{title} ", class_="dim"), " · ".join(words), style="margin:0")


def _figure(run: Any, key: str) -> Markup:
    found = lines([run], key)
    last = number(run.latest.get(key))
    picture = chart(found, label=f"{key} of {run.name}", width=420, height=170)
    return tag("figure", tag("h3", key, Markup(" "), tag("span", last, class_="dim")), picture,
               tag("figcaption", drawn(found), class_="dim"))  # fmt: skip


def runs_html(runs: Sequence[Any]) -> Markup:
    """Return a table of runs in the given order, with a small curve of the most interesting key of each."""
    if not runs:
        return tag("p", "No runs. fanfold.init(project=…) starts one; dir=… looks elsewhere.", class_="dim")
    rows = [_row(run, place < SPARKS) for place, run in enumerate(runs[:ROWS])]
    titles = ("run", "status", "project", "started", "lasted", "key", "last", "")
    more = f" The first {ROWS} are shown." if len(runs) > ROWS else ""
    count = tag("p", f"{len(runs)} run{'' if len(runs) == 1 else 's'}.{more}", class_="dim", style="margin:0 0 4px")
    return join([count, table(titles, rows, label="Runs", right=(6,))])


def _row(run: Any, with_curve: bool) -> list[object]:
    latest = run.latest
    numbers = [key for key, value in latest.items() if isinstance(value, (int, float)) and not key.startswith("system/")]
    key = next(iter(curve_order(numbers)), "")
    curve = _spark(run, key) if key and with_curve else ""
    facts = [join([run.name, Markup("<br>"), tag("span", run.id, class_="dim")]), status(run.status), run.project]
    return [*facts, moment(run.started), duration(run.duration), key, number(latest.get(key)) if key else "", curve]


def _spark(run: Any, key: str) -> Markup:
    """Return a sparkline."""
    import numpy as np

    found = run.curve(key, buckets=SPARK_BUCKETS)
    if found is None or not np.isfinite(found.last).any():
        return Markup("")
    x, y = found.x_last, found.last
    good = np.isfinite(y)
    x, y = share(x[good], x[good][0], x[good][-1]), share(y[good], y[good].min(), y[good].max())
    points = " ".join(f"{2 + a * 96:.1f},{18 - b * 16:.1f}" for a, b in zip(x, y, strict=True))
    line = tag("polyline", points=points, class_="s0", stroke="#1da5a5", stroke_width=1.5, fill="none")
    return tag("svg", line, width=100, height=20, role="img", aria_label=f"curve of {key}")
