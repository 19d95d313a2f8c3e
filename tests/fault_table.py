"""What `make faults` did to fanfold and what came of it: counted by the tests, printed at the end, kept in docs/guarantees.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "guarantees.md"
BEGIN, END = "<!-- faults: written by `make faults`, do not edit by hand -->", "<!-- /faults -->"
COLUMNS = ("times", "points", "lost", "doubled", "raised")
ABUSES = ("inputs", "crashes", "hangs", "memory", "invented")
_rows: dict[str, Counter[str]] = {}
_abuses: dict[str, Counter[str]] = {}


def record(what: str, *, times: int = 1, points: int = 0, lost: int = 0, doubled: int = 0, raised: int = 0) -> None:
    """Count something that was done: how often, over how many points, and what was lost, doubled or raised into training.

    Call it before the assertions, so that a failure shows in the table, too.
    """
    row = _rows.setdefault(what, Counter())
    row.update(times=times, points=points, lost=lost, doubled=doubled, raised=raised)


def abuse(what: str, *, inputs: int = 1, crashes: int = 0, hangs: int = 0, memory: int = 0, invented: int = 0) -> None:
    """Count hostile inputs: how many were tried, and how many crashed a reader, kept it busy, took too much memory or gave a value."""
    row = _abuses.setdefault(what, Counter())
    row.update(inputs=inputs, crashes=crashes, hangs=hangs, memory=memory, invented=invented)


def lines() -> list[str]:
    """Return both tables in Markdown; empty when nothing was recorded."""
    tables = [_table("what was done", COLUMNS, _rows), _table("what was tried", ABUSES, _abuses)]
    return [line for number, table in enumerate(filter(None, tables)) for line in ([""] if number else []) + table]


def _table(title: str, columns: tuple[str, ...], rows: dict[str, Counter[str]]) -> list[str]:
    if not rows:
        return []
    total: Counter[str] = Counter()
    for row in rows.values():
        total.update(row)
    head = [f"| {title} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    named = [*rows.items(), ("**together**", total)]
    return head + [f"| {what} | " + " | ".join(f"{row[name]:,}" for name in columns) + " |" for what, row in named]


def write(when: str) -> None:
    """Put the table into the docs page, in place of the last one."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text("\n".join([before + BEGIN, "", *lines(), "", f"{when}.", "", END + after]), encoding="utf-8")
