"""The faults that `make faults` injects and their outcomes: counted by the tests, printed at the end, kept in docs/guarantees.md."""

from __future__ import annotations

from collections import Counter

from paths import DOCS

PAGE = DOCS / "guarantees.md"
BEGIN, END = "<!-- faults: written by `make faults`, do not edit by hand -->", "<!-- /faults -->"
COLUMNS = ("times", "points", "lost", "doubled", "raised")
TOTAL = "**together**"
ABUSES = ("inputs", "crashes", "hangs", "memory", "invented")
_rows: dict[str, Counter[str]] = {}
_abuses: dict[str, Counter[str]] = {}


def record(what: str, *, times: int = 1, points: int = 0, lost: int = 0, doubled: int = 0, raised: int = 0) -> None:
    """Count a kind of fault: how often, over how many points, and what was lost, duplicated or raised into training.

    Call it before the assertions, so that failures are in the table as well.
    """
    row = _rows.setdefault(what, Counter())
    row.update(times=times, points=points, lost=lost, doubled=doubled, raised=raised)


def abuse(what: str, *, inputs: int = 1, crashes: int = 0, hangs: int = 0, memory: int = 0, invented: int = 0) -> None:
    """Count hostile inputs: how many were tried, and how many made a reader crash, hang, use too much memory or invent a value."""
    row = _abuses.setdefault(what, Counter())
    row.update(inputs=inputs, crashes=crashes, hangs=hangs, memory=memory, invented=invented)


def lines() -> list[str]:
    """Return both tables in Markdown; empty if nothing was recorded."""
    tables = [_table("what was done", COLUMNS, _rows), _table("what was tried", ABUSES, _abuses)]
    return [line for number, table in enumerate(filter(None, tables)) for line in ([""] if number else []) + table]


def _table(title: str, columns: tuple[str, ...], rows: dict[str, Counter[str]]) -> list[str]:
    if not rows:
        return []
    total: Counter[str] = Counter()
    for row in rows.values():
        total.update(row)
    head = [f"| {title} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    named = [*rows.items(), (TOTAL, total)]
    return head + [f"| {what} | " + " | ".join(f"{row[name]:,}" for name in columns) + " |" for what, row in named]


def _rows_of(page: str, title: str, columns: tuple[str, ...]) -> dict[str, Counter[str]]:
    """Parse a table of the docs page."""
    table = page.partition(f"| {title} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    numbers = {what: Counter({name: int(n.replace(",", "")) for name, n in zip(columns, ns, strict=True)}) for what, *ns in cells}
    return {what: row for what, row in numbers.items() if what != TOTAL}


def write(when: str, *, whole: bool) -> None:
    """Write the tables into the docs page: all of them after a complete run, otherwise only the recorded rows."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if not whole:
        for rows, title, columns in ((_rows, "what was done", COLUMNS), (_abuses, "what was tried", ABUSES)):
            known = _rows_of(shown, title, columns)
            known.update(rows)
            rows.clear()
            rows.update(known)
    PAGE.write_text("\n".join([before + BEGIN, "", *lines(), "", f"{when}.", "", END + after]), encoding="utf-8")
