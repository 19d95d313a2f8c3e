"""The report's HTML page: the runs, their config, summaries, charts and last pictures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._version import __version__
from ..drawing.chart import Line, chart, drawn, legend
from ..drawing.markup import STYLE, Markup, join, lone, status, swatch, table, tag
from ..drawing.numbers import cut, duration, moment, number, plural
from ..drawing.order import curve_order
from ..drawing.runs import lines
from ..plain import equal, flat
from ..store import StoredRun
from . import markdown, media
from .media import PictureBudget
from .views import ReportView

CHARTS = 24
BUCKETS = 560  # as many as the chart has pixels
SUMMARY = 60
AXES = ("step", "time", "relative")
LEFT_OUT = 50  # maximum number of lines about omitted content
# No script, no font, no frame, and nothing loaded from any address: pictures are in the file itself.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
_LAYOUT = (
    "body{margin:0}main{max-width:1180px;margin:0 auto;padding:24px 20px 48px;--ff-wide:520px}h1{font-size:22px;margin:0 0 2px;"
    "overflow-wrap:anywhere}h2{font-size:15px;margin:26px 0 8px}section h3,section h4{margin:14px 0 4px}details{margin-top:6px}"
    "summary{cursor:pointer}.note{max-width:75ch}.note pre{overflow-x:auto;padding:10px;background:var(--ff-panel);"
    "border:1px solid var(--ff-line);border-radius:7px}"
    "blockquote{margin:8px 0;padding-left:12px;border-left:3px solid var(--ff-line)}"
    "code,pre{font:12px ui-monospace,Menlo,Consolas,monospace}pre.bad,pre.text{white-space:pre-wrap;overflow-wrap:anywhere}"
    ".pictures{display:flex;flex-wrap:wrap;gap:12px}.pictures img{max-width:min(100%,320px);min-width:64px;height:auto;"
    "image-rendering:auto;display:block;background:var(--ff-panel)}.pictures video{max-width:min(100%,480px)}"
    ".pictures audio{width:280px}"
    ".pictures svg.plot{width:min(420px,80vw)}iframe{width:100%;height:280px;border:1px solid var(--ff-line);background:#fff}"
    "@media print{details,figure,tr{break-inside:avoid}}"
)


@dataclass(frozen=True)
class ReportOptions:
    """The content of a report, and its appearance."""

    keys: Sequence[str] | None = None  # None: the first two dozen, most interesting first
    title: str | None = None
    note: str = ""  # Markdown
    x: str | None = None  # None: the x that define_metric names for a key, else its step
    smooth: float = 0.0
    log: bool = False
    views: Sequence[tuple[ReportView, Sequence[StoredRun]]] = ()  # in place of one section of charts, each with the runs it shows


def page(runs: Sequence[StoredRun], options: ReportOptions) -> tuple[str, dict[str, Any]]:
    """Return the report as HTML, and what it contains: runs, keys, points, pictures, left_out."""
    numbers = (key for run in runs for key in run.keys("number"))  # system metrics only on request
    keys = list(options.keys) if options.keys is not None else curve_order(dict.fromkeys(numbers))
    shown = keys if options.keys is not None else keys[:CHARTS]
    projects = ", ".join(dict.fromkeys(run.project for run in runs))
    title = options.title or (runs[0].name if len(runs) == 1 else f"{projects}: {plural(len(runs), 'run')}")
    axes = {key: options.x or axis_of(runs, key) for key in shown}
    if options.views:
        axes = {}  # the views say what is drawn
    curves = {key: lines(runs, key, buckets=BUCKETS, x=axis, smooth=options.smooth) for key, axis in axes.items()}
    drawn_keys = {key: found for key, found in curves.items() if found}
    budget = PictureBudget(left_out=[f"{key}: nothing to draw over {axis}" for key, axis in axes.items() if not curves[key]])
    sections = [_view(view, shown_runs, runs, keys, options, drawn_keys) for view, shown_runs in options.views]
    media.others(runs, budget)
    body = tag(
        "main",
        tag("h1", title),
        tag("p", f"{plural(len(runs), 'run')}, as of {moment(time.time())}. Made by fanfold {__version__}.", class_="dim"),
        tag("section", markdown.html(options.note), class_="note") if options.note.strip() else Markup(""),
        _section("Runs", _runs(runs), *map(_error, runs)),
        _charts(drawn_keys, options, len(keys) - len(shown)) if not options.views else join(sections),
        _summary(runs),
        _config(runs),
        _section("Pictures", *media.pictures(runs, budget)),
        _section("Sounds", *media.sounds(runs, budget)),
        _section("Tables", *media.tables(runs, budget)),
        _section("Histograms", *media.histograms(runs, budget)),
        _section("Texts", *media.texts(runs, budget)),
        _section("Pages", *media.pages(runs, budget)),
        _left_out(budget),
    )
    points = sum(line.data.total for some in drawn_keys.values() for line in some)
    facts = {"title": title, "runs": [run.id for run in runs], "keys": list(drawn_keys), "points": points,
             **{kind: budget.shown[kind] for kind in ("pictures", "sounds", "tables", "histograms", "texts", "pages")},
             "views": [view.name for view, _ in options.views],
             "left_out": budget.left_out}  # fmt: skip
    return _document(title, body), facts


def _view(
    view: ReportView, shown: Sequence[StoredRun], runs: Sequence[StoredRun], keys: Sequence[str], options: ReportOptions,
    drawn_keys: dict[str, list[Line]],
) -> Markup:  # fmt: skip
    """Return the charts of one saved view. A run has the same colour in all of them."""
    chosen, places = view.chosen(keys), {run.id: place for place, run in enumerate(runs)}
    own = replace(options, smooth=view.smooth, log=view.log)
    found: dict[str, list[Line]] = {}
    for key in chosen[:CHARTS]:
        axis = view.x or options.x or axis_of(shown, key)
        some = [Line(line.name, places[run.id], line.data, smooth=view.smooth) for run in shown
                for line in lines([run], key, buckets=BUCKETS, x=axis)]  # fmt: skip
        if some:
            found[key] = some
            drawn_keys.setdefault(key, some)
    body = _charts(found, own, len(chosen) - CHARTS, title=f"View: {view.name}")
    return body or _section(f"View: {view.name}", tag("p", "This view shows none of these runs and keys.", class_="dim"))


def axis_of(runs: Sequence[StoredRun], key: str) -> str:
    """Return the x axis of a key: the one define_metric names, if all runs with the key have it, else the step."""
    logged = [(run, set(run.keys())) for run in runs]
    having = [(run, keys) for run, keys in logged if key in keys]
    wanted = {str(run.metric(key).get("x") or "step") for run, _ in having}
    axis = wanted.pop() if len(wanted) == 1 else "step"
    return axis if axis in AXES or (axis != key and all(axis in keys for _, keys in having)) else "step"


def _left_out(budget: PictureBudget) -> Markup:
    if not budget.left_out:
        return Markup("")
    items = [tag("li", line) for line in budget.left_out[:LEFT_OUT]]
    more = [tag("li", f"and {len(budget.left_out) - LEFT_OUT} more")] if len(budget.left_out) > LEFT_OUT else []
    return _section("Left out", tag("ul", *items, *more, class_="dim"))


def _document(title: str, body: Markup) -> str:
    head = tag(
        "head", lone("meta", charset="utf-8"), lone("meta", http_equiv="Content-Security-Policy", content=POLICY),
        lone("meta", name="viewport", content="width=device-width,initial-scale=1"),
        lone("meta", name="color-scheme", content="light dark"), lone("meta", name="referrer", content="no-referrer"),
        lone("link", rel="icon", href="data:,"), tag("title", title), tag("style", Markup(STYLE + _LAYOUT)),
    )  # fmt: skip
    return f'<!doctype html>\n<html lang="en">{head}<body class="fanfold">{body}</body></html>\n'


def _section(title: str, *parts: object) -> Markup:
    inside = join(parts)
    return tag("section", tag("h2", title), inside) if inside else Markup("")


def _named(place: int, run: StoredRun) -> Markup:
    return join([swatch(place), run.name])


def _runs(runs: Sequence[StoredRun]) -> Markup:
    titles = ("run", "id", "project", "status", "started", "lasted", "ranks", "attempts", "tags", "notes")
    rows = [
        [_named(place, run), run.id, run.project, status(run.status), moment(run.started), duration(run.duration), len(run.ranks),
         len(run.attempts), ", ".join(map(str, run.tags)), run.notes or ""]
        for place, run in enumerate(runs)
    ]  # fmt: skip
    kept = [place for place in range(len(titles)) if any(str(row[place]) for row in rows)]
    return table([titles[place] for place in kept], [[row[place] for place in kept] for row in rows], label="Runs")


def _error(run: StoredRun) -> Markup:
    if not run.error:
        return Markup("")
    return tag("details", tag("summary", f"Why {run.name} {run.status}"), tag("pre", run.error.strip(), class_="bad"))


def _charts(found: dict[str, list[Line]], options: ReportOptions, more: int, title: str = "Charts") -> Markup:
    """Return a figure per key: the chart, its legend, a description, and the same data as a table."""
    figures = [_figure(key, some, options) for key, some in found.items()]
    left = [tag("p", f"and {plural(more, 'key')} more; select with --keys.", class_="dim")] if more > 0 else []
    return _section(title, *([tag("div", *figures, class_="charts")] if figures else []), *left)


def _figure(key: str, some: Sequence[Line], options: ReportOptions) -> Markup:
    picture = chart(some, label=key, width=BUCKETS + 60, height=260, log=options.log)
    names = legend(some) if len(some) > 1 else Markup("")
    rows = [_statistics(line) for line in some]
    titles = ("run", "points", "first", "last", "lowest", "highest", "not finite", "restarts")
    asked = tag("details", tag("summary", "as a table"), table(titles, rows, label=f"{key} as a table", right=range(1, 8)))
    caption = tag("figcaption", names, tag("span", drawn(some, log=options.log), class_="dim"))
    return tag("figure", tag("h3", key), picture, caption, asked)


def _statistics(line: Line) -> list[object]:
    """Return a line's statistics; with ranks, the lowest and highest of any rank, and which one that was."""
    import numpy as np

    good = np.flatnonzero(np.isfinite(line.y))
    first, last = (number(float(line.y[good[place]])) if len(good) else "" for place in (0, -1))
    low, high = (line.y if one is None else one for one in (line.low, line.high))
    ends = []
    for column, ranks, pick in ((low, line.data.low_rank, np.nanargmin), (high, line.data.high_rank, np.nanargmax)):
        if not np.isfinite(column).any():
            ends.append("")
            continue
        place = int(pick(np.where(np.isfinite(column), column, np.nan)))
        ends.append(number(float(column[place])) + (f" (rank {int(ranks[place])})" if ranks is not None else ""))
    counts = [line.data.marked, len(line.data.restarts)]
    return [join([swatch(line.place), line.name]), number(line.data.total), first, last, *ends, *counts]


def _summary(runs: Sequence[StoredRun]) -> Markup:
    summaries = [run.summary for run in runs]
    keys = curve_order(dict.fromkeys(key for one in summaries for key in one))
    if not keys:
        return Markup("")
    rows = [[key, *(_value(one.get(key)) for one in summaries)] for key in keys]
    titles = ["key", *(_named(place, run) for place, run in enumerate(runs))]
    whole = [table(titles, rows[:SUMMARY], label="Summary", right=range(1, len(titles)))]
    if len(rows) > SUMMARY:
        rest = table(titles, rows[SUMMARY:], label="More of the summary", right=range(1, len(titles)))
        whole.append(tag("details", tag("summary", f"and {plural(len(rows) - SUMMARY, 'key')} more"), rest))
    return _section("Summary", *whole)


def _value(value: object) -> str:
    return cut(number(value), 200)


def _config(runs: Sequence[StoredRun]) -> Markup:
    """Return the config values that differ between runs; those equal in all are collapsed."""
    configs = [flat(run.config) for run in runs]
    names = list(dict.fromkeys(name for one in configs for name in one))
    absent = object()
    differing = [name for name in names if not all(equal(one.get(name, absent), configs[0].get(name, absent)) for one in configs)]
    same = [name for name in names if name not in set(differing)]
    titles = ["key", *(_named(place, run) for place, run in enumerate(runs))]
    rows = [[name, *(_value(one[name]) if name in one else "" for one in configs)] for name in differing]
    parts = [table(titles, rows, label="Config values that differ")] if rows else []
    if same:
        shared = table(("key", "value"), [[name, _value(configs[0][name])] for name in same], label="Config")
        title = f"{plural(len(same), 'value')} the same in all runs"
        parts.append(shared if len(runs) == 1 else tag("details", tag("summary", title), shared))
    return _section("Config" if len(runs) == 1 else "Config values that differ", *parts)
