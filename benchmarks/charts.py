"""Draw the tables of docs/benchmarks.md as charts, with our own drawing, and put each below its heading; copy the fault table's totals.

Part of `make bench`, `make bench-dashboard` and `make faults`. It measures nothing: what it draws is what the tables say.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

from fanfold.drawing.markup import Markup, join, tag

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FAULTS, FOLDER = DOCS / "benchmarks.md", DOCS / "guarantees.md", DOCS / "img" / "bench"
OURS, OTHERS, INK, FAINT = "#1da5a5", "#9aa3ad", "#7c8691", "#9aa3ad55"
WIDTH, ROW, LEFT, RIGHT = 720, 24, 190, 110
UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "MB": 1.0, "M": 1e6, "B": 1.0, "%": 1.0, "": 1.0, "x": 1.0}


class Chart(NamedTuple):
    """One picture: which table, which column, what it shows, and whether its axis is logarithmic."""

    heading: str
    column: str
    name: str
    title: str
    log: bool = False


CHARTS = (
    Chart(
        "One log() call", "10 floats, p50", "log", "Time of one log() call of ten numbers (logarithmic; shorter is better)", True
    ),
    Chart(
        "What is left after kill -9",
        "kept of 1,000 calls at full speed",
        "kill",
        "Calls kept of 1,000 after kill -9 (longer is better)",
    ),
    Chart(
        "Four processes at once", "one process, CPU per point", "cpu", "CPU time per point (logarithmic; shorter is better)", True
    ),
    Chart("Start and finish", "together", "start", "Import and first run (logarithmic; shorter is better)", True),
    Chart(
        "Trackers beside a training loop",
        "to nothing",
        "trackers",
        "CPU time of a training step, 1 is without logging (shorter is better)",
    ),
    Chart(
        "The callbacks of one step", "to fanfold", "callbacks", "Transformers' time over fanfold's, for the callbacks of one step"
    ),
    Chart(
        "100 runs x 20 metrics x 1,000 steps, side by side",
        "charts drawn",
        "dashboard",
        "Seconds until the charts are drawn (shorter is better)",
    ),
    Chart("The whole way", "points/s", "fleet", "Points per second through gateways into ClickHouse (longer is better)"),
)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for chart in (one for one in CHARTS if f"### {one.heading}\n" in text):  # `--only` measures some tables
        rows = values(text, chart)
        (FOLDER / f"{chart.name}.svg").write_text(drawn(chart, rows) + "\n", encoding="utf-8")
        text = placed(text, chart)
    PAGE.write_text(with_faults(text), encoding="utf-8")
    return 0


def values(text: str, chart: Chart) -> list[tuple[str, float, str]]:
    """Return name, number and shown text of each row of a table's column."""
    table = re.findall(
        r"^\|.*\|$", text.split(f"### {chart.heading}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0], re.MULTILINE
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    place = cells[0].index(chart.column)
    return [(row[0], number(row[place]), row[place]) for row in cells[2:]]


def number(shown: str) -> float:
    """Return the size of a cell such as `2.99 µs` or `907 to 989` (its lower end)."""
    digits, unit = re.match(r"([\d.,]+)\s*(?:to [\d.,]+)?\s*(\S*)", shown).groups()  # type: ignore[union-attr]
    return float(digits.replace(",", "")) * UNITS[unit]


def drawn(chart: Chart, rows: list[tuple[str, float, str]]) -> Markup:
    """Draw horizontal bars, ours in colour; readable on a light and on a dark page."""
    height = ROW * len(rows) + 42
    biggest, smallest = max(one[1] for one in rows), min(one[1] for one in rows if one[1] > 0)
    parts = [tag("text", chart.title, x=0, y=16, fill=INK, font_size=14, font_weight=600)]
    for place, (name, size, shown) in enumerate(rows):
        top = 34 + ROW * place
        ours = name.startswith("fanfold") or len({row[0] for row in rows if row[0].startswith("fanfold")}) == 0
        part = length(size, smallest, biggest, log=chart.log) * (WIDTH - LEFT - RIGHT)
        parts += [
            tag("text", name, x=LEFT - 8, y=top + 13, fill=INK, font_size=13, text_anchor="end"),
            tag("rect", x=LEFT, y=top, width=WIDTH - LEFT - RIGHT, height=ROW - 7, rx=2, fill=FAINT, fill_opacity=0.25),
            tag("rect", x=LEFT, y=top, width=f"{max(part, 1):.1f}", height=ROW - 7, rx=2, fill=OURS if ours else OTHERS),
            tag(
                "text",
                shown,
                x=f"{LEFT + part + 6:.1f}",
                y=top + 13,
                fill=INK,
                font_size=12,
            ),
        ]
    style = "font-family: system-ui, sans-serif"
    return tag(
        "svg",
        join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_label=chart.title,
        style=style,
    )


def length(size: float, smallest: float, biggest: float, *, log: bool) -> float:
    """Return the length of a bar as a share of the longest; a logarithmic axis begins at half of the smallest."""
    if not log:
        return size / biggest
    return math.log(size / (smallest / 2)) / math.log(biggest / (smallest / 2))


def placed(text: str, chart: Chart) -> str:
    """Put the picture below its heading, once."""
    picture = f"![{chart.title}](img/bench/{chart.name}.svg)"
    head, rest = text.split(f"### {chart.heading}\n", 1)
    rest = re.sub(rf"\A\n!\[[^\]]*\]\(img/bench/{chart.name}\.svg\)\n", "", rest)
    return f"{head}### {chart.heading}\n\n{picture}\n{rest}"


def with_faults(text: str) -> str:
    """Copy the totals of the fault tables, which `make faults` writes."""
    faults = FAULTS.read_text(encoding="utf-8").split("<!-- faults:", 1)[1]
    first, second = re.findall(r"^\| \*\*together\*\* \|(.*)\|$", faults, re.MULTILINE)
    date = re.findall(r"^(\d{4}-\d\d-\d\d, .*)$", faults, re.MULTILINE)[0]
    lines = [
        "| what was done | times | points | lost | doubled | raised |", "|---|---:|---:|---:|---:|---:|",
        f"| kills, full disks, torn writes, deleted folders, outages, hostile objects |{first}|", "",
        "| what was tried | inputs | crashes | hangs | memory | invented |", "|---|---:|---:|---:|---:|---:|",
        f"| forged and damaged files, hostile requests |{second}|", "", date,
    ]  # fmt: skip
    mark = re.compile(r"(<!-- fault totals: [^\n]*-->\n).*?(<!-- fault totals: end -->)", re.DOTALL)
    return mark.sub(lambda found: found[1] + "\n" + "\n".join(lines) + "\n\n" + found[2], text)


if __name__ == "__main__":
    sys.exit(main())
