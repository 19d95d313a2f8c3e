"""The HTML page shown by a Flyte Deck: facts about the run, and a table of everything logged."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

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

    def html(self) -> str:
        """Render the table, with a note about rows left out."""
        rows = list(self.rows.items())
        keys = list(dict.fromkeys(key for _, cells in rows for key in cells))
        more = f"<p>{self.left_out} earlier rows are in the journal: <code>fanfold show</code></p>" if self.left_out else ""
        head = "".join(f"<th>{escape(key)}</th>" for key in ["step", *keys])
        body = "".join(_row(step, keys, cells) for (step, *_), cells in rows)
        return f"{more}<table class='history'><tr>{head}</tr>{body}</table>"


def draw(title: str, facts: Mapping[str, Mapping[str, Any]], history: History) -> str:
    """Render the page."""
    tables = "".join(_facts_table(heading, values) for heading, values in facts.items())
    return f"{_STYLE}<h2>{escape(title)}</h2>{tables}{history.html()}"


def _facts_table(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in values.items())
    return f"<h3>{escape(title)}</h3><table class='{escape(title.lower())}'>{rows}</table>"


def _row(step: int | None, keys: Sequence[str], cells: Mapping[str, str]) -> str:
    columns = "".join(f"<td>{cells.get(key, '')}</td>" for key in keys)
    return f"<tr><td>{'' if step is None else step}</td>{columns}</tr>"


def media(item: Any) -> Iterator[str]:
    """Render a text or media object as self-contained HTML."""
    value = item.value
    if item.kind == "text":
        yield f"<pre>{escape(item.text)}</pre>"
    elif item.kind == "table":
        yield _table(value.columns, value.rows)
    elif item.kind == "histogram":
        yield _table(["from", "to", "count"], zip(value.edges[:-1], value.edges[1:], value.counts, strict=True))
    elif item.kind in ("html", "plotly"):
        yield f'<iframe sandbox="allow-scripts" srcdoc="{escape(value.html)}"></iframe>'
    else:
        data, ext = item.content
        yield _element(item.kind, ext, data)
    if item.caption:
        yield f"<div>{escape(item.caption)}</div>"


def _element(kind: str, ext: str, data: bytes) -> str:
    if kind in ("image", "figure") or ext == "gif":
        return f'<img src="{_data(f"image/{ext}", data)}">'
    return f'<{kind} controls src="{_data(f"{kind}/{ext}", data)}"></{kind}>'


def _data(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _table(columns: Sequence[str], rows: Any) -> str:
    head = "".join(f"<th>{escape(str(column))}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
