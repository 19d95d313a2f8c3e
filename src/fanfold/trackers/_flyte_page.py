"""The HTML page shown by a Flyte Deck: facts about the run, and a table of everything logged."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..drawing.markup import Markup, join, lone, tag
from .destination import Item

_STYLE = "<style>table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:2px 6px;text-align:left}</style>"


class History:
    """Rows by step and time, each a dict of HTML cells; adding the same row again has no effect."""

    def __init__(self, shown: int) -> None:
        self.shown = shown
        self.rows: dict[tuple[Any, ...], dict[str, str]] = {}
        self.fresh: list[tuple[int | None, float | None, dict[str, str]]] = []
        self.left_out = 0

    def add(self, step: int | None, when: float | None, cells: Mapping[str, str]) -> None:
        """Add a row, or its missing cells."""
        self.fresh.append((step, when, dict(cells)))
        self._place(step, when, cells)

    def _place(self, step: int | None, when: float | None, cells: Mapping[str, str]) -> None:
        copy = 0 if when is not None else len(self.rows) + self.left_out  # without a time, each call is its own row
        while any(self.rows.get((step, when, copy), {}).get(key, cell) != cell for key, cell in cells.items()):
            copy += 1
        self.rows.setdefault((step, when, copy), {}).update(cells)
        while len(self.rows) > self.shown:
            del self.rows[next(iter(self.rows))]
            self.left_out += 1

    def load(self, path: Path) -> None:
        """Load the rows of an earlier start, skipping torn lines."""
        if not path.exists():
            return
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    self._place(*json.loads(line))
                except ValueError:  # the last line of a killed process; its row is sent again
                    continue

    def save(self, path: Path) -> None:
        """Append the new rows."""
        lines = "".join(json.dumps(row) + "\n" for row in self.fresh)
        if lines:
            with path.open("ab", buffering=0) as file:
                file.write(("\n" + lines).encode())  # the empty line terminates a torn one
        self.fresh = []

    def html(self) -> Markup:
        """Render the table, with a note about rows left out."""
        keys = list(dict.fromkeys(key for cells in self.rows.values() for key in cells))
        rows = (
            ["" if step is None else step, *(Markup(cells.get(key, "")) for key in keys)]
            for (step, *_), cells in self.rows.items()
        )
        note = (
            tag("p", f"{self.left_out} earlier rows are in the journal: ", tag("code", "fanfold show")) if self.left_out else ""
        )
        return join([note, _table(["step", *keys], rows, class_="history")])


def draw(title: str, facts: Mapping[str, Mapping[str, Any]], history: History) -> str:
    """Render the page."""
    tables = (part for heading, values in facts.items() for part in (tag("h3", heading), _facts_table(heading, values)))
    return join([Markup(_STYLE), tag("h2", title), *tables, history.html()])


def _facts_table(title: str, values: Mapping[str, Any]) -> Markup:
    rows = (tag("tr", tag("th", key), tag("td", value)) for key, value in values.items())
    return tag("table", *rows, class_=title.lower())


def _table(columns: Iterable[object], rows: Iterable[Iterable[object]], **attributes: object) -> Markup:
    head = tag("tr", *(tag("th", column) for column in columns))
    return tag("table", head, *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows), **attributes)


def media(item: Item) -> Markup:
    """Render a text or media object as self-contained HTML."""
    return join([_shown(item), tag("div", item.caption) if item.caption else ""])


def _shown(item: Item) -> Markup:
    value = item.value
    if item.kind == "text":
        return tag("pre", item.text)
    if item.kind == "table":
        return _table(value.columns, value.rows)
    if item.kind == "histogram":
        return _table(["from", "to", "count"], zip(value.edges[:-1], value.edges[1:], value.counts, strict=True))
    if item.kind in ("html", "plotly"):
        return tag("iframe", sandbox="allow-scripts", srcdoc=value.html)
    data, ext = item.content
    kind = "image" if item.kind == "figure" or ext == "gif" else item.kind
    source = f"data:{kind}/{ext};base64,{base64.b64encode(data).decode()}"
    return lone("img", src=source) if kind == "image" else tag(kind, controls="", src=source)
