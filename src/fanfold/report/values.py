"""Logged values other than numbers and pictures: the runs' last tables, histograms and texts, within limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..drawing import Markup, table, tag
from ..drawing.markup import join, stroke, swatch
from ..drawing.numbers import number
from ..errors import JournalError
from ..store import StoredRun
from ..store.run import MediaPoint
from .pictures import PICTURES, Budget

KEYS, ROWS, COLUMNS, CELL, TEXT, TABLE_BYTES = 24, 50, 20, 200, 4_000, 16 << 20
WIDE, TALL = 320, 120
REASONS = {
    "audio": "audio is not included",
    "html": "HTML is not included, for security",
}


def tables(runs: Sequence[StoredRun], budget: Budget) -> Iterator[Markup]:
    """Yield the last table of each key and run."""
    yield from _by_key(runs, "table", budget, _table)


def histograms(runs: Sequence[StoredRun], budget: Budget) -> Iterator[Markup]:
    """Yield the last histogram of each key and run."""
    for part in _by_key(runs, "histogram", budget, _histogram):
        yield tag("div", part, class_="pictures") if part.startswith("<figure") else part


def texts(runs: Sequence[StoredRun], budget: Budget) -> Iterator[Markup]:
    """Yield the last text of each key and run, both strings and fanfold.Text."""
    keys = list(dict.fromkeys(key for run in runs for key in run.keys("text")))
    for key in keys[:KEYS]:
        yield tag("h3", key)
        for place, run in enumerate(runs):
            found = run.texts(key)
            if found:
                budget.shown["texts"] += 1
                yield _written(key, found[-1].step, found[-1].text, _caption(place, run, found[-1].step), budget)
    yield from _by_key(runs, "text", budget, _text)
    budget.left_out += [f"{key}: a report shows texts of {KEYS} keys" for key in keys[KEYS:]]


def others(runs: Sequence[StoredRun], budget: Budget) -> None:
    """Record media of kinds that a report does not show."""
    for key in dict.fromkeys(key for run in runs for key in run.keys("media")):
        for kind in sorted({point.kind for run in runs for point in run.media(key)} - {*PICTURES, "table", "histogram", "text"}):
            budget.left_out.append(f"{key}: {REASONS.get(kind, f'media of type {kind} are not included')}")


def _by_key(
    runs: Sequence[StoredRun], kind: str, budget: Budget, draw: Callable[[MediaPoint, Any, int, Markup, Budget], Markup]
) -> Iterator[Markup]:
    found = {key: None for run in runs for key in run.keys("media") if _last(run, key, kind)}
    for count, key in enumerate(found):
        if count >= KEYS:
            budget.left_out.append(f"{key}: a report shows {kind}s of {KEYS} keys")
            continue
        shown = []
        for place, run in enumerate(runs):
            for point in _last(run, key, kind):
                loaded = _loaded(point, budget)
                if loaded is not None:
                    budget.shown[f"{kind}s"] += 1
                    shown.append(draw(point, loaded, place, _caption(place, run, point.step), budget))
        if shown:
            yield join([tag("h3", key), *shown])


def _last(run: StoredRun, key: str, kind: str) -> list[MediaPoint]:
    points = [point for point in run.media(key) if point.kind == kind]
    return [point for point in points if point.step == points[-1].step] if points else []


def _loaded(point: MediaPoint, budget: Budget) -> Any:
    said = f"{point.key} at step {point.step}"
    size = point.entry.get("size")
    if isinstance(size, int) and size > TABLE_BYTES:
        budget.left_out.append(f"{said}: {size / 1e6:.1f} MB, too large")
        return None
    try:
        return point.load()
    except (OSError, JournalError):
        budget.left_out.append(f"{said}: its file is missing or damaged")
        return None


def _caption(place: int, run: StoredRun, step: int) -> Markup:
    return tag("figcaption", swatch(place), run.name, tag("span", f", step {step}", class_="dim"))


def _text(point: MediaPoint, found: Any, _place: int, caption: Markup, budget: Budget) -> Markup:
    return _written(point.key, point.step, found.text, caption, budget)


def _written(key: str, step: int, text: str, caption: Markup, budget: Budget) -> Markup:
    if len(text) > TEXT:
        budget.left_out.append(f"{key} at step {step}: {len(text) - TEXT:,} of {len(text):,} characters")
    return tag("figure", caption, tag("pre", text[:TEXT], class_="text"))


def _table(point: MediaPoint, found: Any, _place: int, caption: Markup, budget: Budget) -> Markup:
    rows, titles = found.rows, list(found.columns)
    if len(rows) > ROWS or len(titles) > COLUMNS:
        shown = (
            f"{min(len(rows), ROWS)} of {len(rows):,} rows and {min(len(titles), COLUMNS)} of {len(titles):,} columns are shown"
        )
        budget.left_out.append(f"{point.key} at step {point.step}: {shown}")
    cells = [[_cell(cell) for cell in row[:COLUMNS]] for row in rows[:ROWS]]
    drawn = table(titles[:COLUMNS], cells, label=point.key) if titles else tag("p", "An empty table.", class_="dim")
    return tag("figure", caption, drawn)


def _cell(value: Any) -> str:
    kind = getattr(value, "kind", None)
    text = f"<{kind}>" if isinstance(kind, str) else number(value)
    return text if len(text) <= CELL else text[: CELL - 1] + "…"


def _histogram(point: MediaPoint, found: Any, place: int, caption: Markup, _budget: Budget) -> Markup:
    summary = found.summary
    top = max(summary.counts, default=0) or 1
    low, high = (summary.edges[0], summary.edges[-1]) if len(summary.edges) > 1 else (0.0, 1.0)
    wide = WIDE / max(1, len(summary.counts))
    bars = "".join(
        f"M{at * wide:.2f} {TALL}V{TALL - (TALL - 4) * count / top:.2f}h{wide:.2f}V{TALL}"
        for at, count in enumerate(summary.counts)
    )
    said = f"{number(summary.count)} values from {number(low)} to {number(high)}"
    if summary.mean is not None:
        said += f", mean {number(summary.mean)}"
    odd = {"NaN": summary.nan, "+Inf": summary.pos_inf, "-Inf": summary.neg_inf}
    said += "".join(f", {count} {name}" for name, count in odd.items() if count)
    look = {**stroke(place), "stroke_width": 1, "stroke_dasharray": None}
    path = tag("path", d=bars, **look)
    picture = tag(
        "svg", tag("title", f"{point.key}: {said}"), path, viewBox=f"0 0 {WIDE} {TALL}", width=WIDE, height=TALL, role="img"
    )
    return tag("figure", picture, caption, tag("span", said, class_="dim"))
