"""The media of a report, embedded in the file: what each key and run logged last of every kind.

Sizes are limited, and only formats that a browser shows and never executes are included. HTML is in a frame without scripts.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..drawing.markup import Markup, lone, stroke, swatch, table, tag
from ..drawing.numbers import cut, number
from ..errors import JournalError
from ..store import StoredRun
from ..store.run import MediaPoint
from . import figures

PICTURES = ("image", "figure", "video")
ONE, ALL, KEYS, EACH = 2 << 20, 24 << 20, 24, 16  # bytes of one picture and of all media; keys; items per key, run and step
LONG = 8 << 20  # bytes of one sound or video
ROWS, COLUMNS, CELL, TEXT, TABLE_BYTES = 50, 20, 200, 4_000, 16 << 20
WIDE, TALL = 320, 120
# The format by its first bytes, because a run's claim about a file is not trusted.
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"), (b"BM", "image/bmp"),
          (b"OggS", "audio/ogg"), (b"fLaC", "audio/flac"), (b"ID3", "audio/mpeg"), (b"\xff\xfb", "audio/mpeg"),
          (b"\x1aE\xdf\xa3", "video/webm"))  # fmt: skip
_SHOWN = {*PICTURES, "table", "histogram", "text", "audio", "html"}


@dataclass
class PictureBudget:
    """The space left for pictures in the file, the number of items shown by kind, and what was left out."""

    room: int = ALL
    shown: Counter[str] = field(default_factory=Counter)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, point: Any, why: object) -> None:
        self.left_out.append(f"{point.key} at step {point.step}: {why}")


class NotInReport(Exception):
    """Raised with the reason why a point cannot be in a report."""


Draw = Callable[[StoredRun, int, MediaPoint, PictureBudget], Markup]


def pictures(runs: Sequence[StoredRun], budget: PictureBudget) -> Iterator[Markup]:
    """Yield images, figures and videos."""
    return _by_key(runs, PICTURES, "pictures", budget, _picture)


def sounds(runs: Sequence[StoredRun], budget: PictureBudget) -> Iterator[Markup]:
    return _by_key(runs, ("audio",), "sounds", budget, _picture)


def pages(runs: Sequence[StoredRun], budget: PictureBudget) -> Iterator[Markup]:
    """Yield logged HTML."""
    return _by_key(runs, ("html",), "pages", budget, _page, side_by_side=False)


def tables(runs: Sequence[StoredRun], budget: PictureBudget) -> Iterator[Markup]:
    return _by_key(runs, ("table",), "tables", budget, _table, side_by_side=False)


def histograms(runs: Sequence[StoredRun], budget: PictureBudget) -> Iterator[Markup]:
    return _by_key(runs, ("histogram",), "histograms", budget, _histogram)


def texts(runs: Sequence[StoredRun], budget: PictureBudget) -> Iterator[Markup]:
    """Yield logged strings, and fanfold.Text."""
    keys = list(dict.fromkeys(key for run in runs for key in run.keys("text")))
    for key in keys[:KEYS]:
        yield tag("h3", key)
        for place, run in enumerate(runs):
            for point in run.texts(key)[-1:]:
                budget.shown["texts"] += 1
                yield _written(run, place, point, point.text, budget)
    budget.left_out += [f"{key}: a report shows texts of {KEYS} keys" for key in keys[KEYS:]]
    yield from _by_key(runs, ("text",), "texts", budget, _text, side_by_side=False)


def others(runs: Sequence[StoredRun], budget: PictureBudget) -> None:
    """Record media of kinds that a report does not show."""
    for key in dict.fromkeys(key for run in runs for key in run.keys("media")):
        for kind in sorted({point.kind for run in runs for point in run.media(key)} - _SHOWN):
            budget.left_out.append(f"{key}: media of type {kind} are not included")


def _by_key(
    runs: Sequence[StoredRun], kinds: tuple[str, ...], what: str, budget: PictureBudget, draw: Draw, *, side_by_side: bool = True
) -> Iterator[Markup]:
    """Yield, by key, what each run logged of these kinds at the last step that has any."""
    keys = list(dict.fromkeys(key for run in runs for key in run.keys("media") if _last(run, key, kinds)))
    for key in keys[:KEYS]:
        figures = []
        for place, run in enumerate(runs):
            points = _last(run, key, kinds)
            if len(points) > EACH:
                budget.leave_out(points[0], f"{len(points) - EACH} of {len(points)} {what}")
            for point in points[:EACH]:
                try:
                    figures.append(draw(run, place, point, budget))
                except NotInReport as why:
                    budget.leave_out(point, why)
        budget.shown[what] += len(figures)
        if figures:
            yield tag("h3", key)
            yield tag("div", *figures, class_="pictures" if side_by_side else None)
    budget.left_out += [f"{key}: a report shows {what} of {KEYS} keys" for key in keys[KEYS:]]


def _last(run: StoredRun, key: str, kinds: tuple[str, ...]) -> list[MediaPoint]:
    points = [point for point in run.media(key) if point.kind in kinds]
    return [point for point in points if point.step == points[-1].step] if points else []


def _caption(run: StoredRun, place: int, step: int) -> Markup:
    return tag("figcaption", swatch(place), run.name, tag("span", f", step {step}", class_="dim"))


def _picture(run: StoredRun, _place: int, point: MediaPoint, budget: PictureBudget) -> Markup:
    """Return a picture, a sound or a video as a data URL; a Plotly figure as a drawing."""
    try:
        data = point.run.blob(str(point.entry.get("blob")))
    except (OSError, JournalError) as error:
        raise NotInReport("its file is missing or damaged") from error
    caption = str(point.entry.get("caption") or "")
    where = f"{run.name}, step {point.step}" + (f", rank {point.rank}" if len(run.ranks) > 1 else "")
    words = tag("figcaption", caption + " " if caption else "", tag("span", where, class_="dim"))
    kind = _kind(data)
    if kind is None and point.kind == "figure":
        return tag("figure", _drawn(data), words)
    if kind is None:
        raise NotInReport(f"a {point.kind} of this kind cannot be shown in a report")
    if len(data) > min(ONE if kind.startswith("image/") else LONG, budget.room):
        raise NotInReport(f"{len(data) / 1e6:.1f} MB, too large")
    budget.room -= len(data)
    address, named = f"data:{kind};base64,{base64.b64encode(data).decode()}", caption or f"{point.key} of {where}"
    if kind.startswith("image/"):
        return tag("figure", lone("img", src=address, alt=named), words)
    return tag("figure", tag(kind.partition("/")[0], src=address, controls="", aria_label=named), words)


def _kind(data: bytes) -> str | None:
    """Return the type of a picture, a sound or a video by its first bytes."""
    if data[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(data[8:12])
    if data[4:8] == b"ftyp":
        return "audio/mp4" if data[8:11] == b"M4A" else "video/mp4"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)


def _drawn(data: bytes) -> Markup:
    if len(data) > TABLE_BYTES:
        raise NotInReport(f"{len(data) / 1e6:.1f} MB, too large")
    try:
        return figures.figure(data.decode("utf-8", "replace"))
    except figures.CannotDraw as why:
        raise NotInReport(why) from why


def _page(run: StoredRun, place: int, point: MediaPoint, budget: PictureBudget) -> Markup:
    """Return logged HTML in a frame that runs no script, has no origin, and inherits the report's policy."""
    text = str(_loaded(point).html)
    if len(text) > min(ONE, budget.room):
        raise NotInReport(f"{len(text) / 1e6:.1f} MB, too large")
    budget.room -= len(text)
    frame = tag("iframe", srcdoc=text, sandbox="", title=f"{point.key} of {run.name}, step {point.step}", loading="lazy")
    return tag("figure", _caption(run, place, point.step), frame)


def _loaded(point: MediaPoint) -> Any:
    size = point.entry.get("size")
    if isinstance(size, int) and size > TABLE_BYTES:
        raise NotInReport(f"{size / 1e6:.1f} MB, too large")
    try:
        return point.load()
    except (OSError, JournalError) as error:
        raise NotInReport("its file is missing or damaged") from error


def _text(run: StoredRun, place: int, point: MediaPoint, budget: PictureBudget) -> Markup:
    return _written(run, place, point, _loaded(point).text, budget)


def _written(run: StoredRun, place: int, point: Any, text: str, budget: PictureBudget) -> Markup:
    if len(text) > TEXT:
        budget.leave_out(point, f"{len(text) - TEXT:,} of {len(text):,} characters")
    return tag("figure", _caption(run, place, point.step), tag("pre", text[:TEXT], class_="text"))


def _table(run: StoredRun, place: int, point: MediaPoint, budget: PictureBudget) -> Markup:
    found = _loaded(point)
    rows, titles = found.rows, list(found.columns)
    if len(rows) > ROWS or len(titles) > COLUMNS:
        some = f"{min(len(rows), ROWS)} of {len(rows):,} rows and {min(len(titles), COLUMNS)} of {len(titles):,} columns"
        budget.leave_out(point, f"{some} are shown")
    cells = [[_cell(cell) for cell in row[:COLUMNS]] for row in rows[:ROWS]]
    drawn = table(titles[:COLUMNS], cells, label=point.key) if titles else tag("p", "An empty table.", class_="dim")
    return tag("figure", _caption(run, place, point.step), drawn)


def _cell(value: Any) -> str:
    kind = getattr(value, "kind", None)
    return cut(f"<{kind}>" if isinstance(kind, str) else number(value), CELL)


def _histogram(run: StoredRun, place: int, point: MediaPoint, _budget: PictureBudget) -> Markup:
    summary = _loaded(point).summary
    top = max(summary.counts, default=0) or 1
    low, high = (summary.edges[0], summary.edges[-1]) if len(summary.edges) > 1 else (0.0, 1.0)
    wide = WIDE / max(1, len(summary.counts))
    bars = "".join(
        f"M{at * wide:.2f} {TALL}V{TALL - (TALL - 4) * count / top:.2f}h{wide:.2f}V{TALL}"
        for at, count in enumerate(summary.counts)
    )
    about = f"{number(summary.count)} values from {number(low)} to {number(high)}"
    about += f", mean {number(summary.mean)}" if summary.mean is not None else ""
    odd = {"NaN": summary.nan, "+Inf": summary.pos_inf, "-Inf": summary.neg_inf}
    about += "".join(f", {count} {name}" for name, count in odd.items() if count)
    path = tag("path", d=bars, **{**stroke(place), "stroke_width": 1, "stroke_dasharray": None})
    title = tag("title", f"{point.key}: {about}")
    picture = tag("svg", title, path, viewBox=f"0 0 {WIDE} {TALL}", width=WIDE, height=TALL, role="img")
    return tag("figure", picture, _caption(run, place, point.step), tag("span", about, class_="dim"))
