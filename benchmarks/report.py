"""Tables for the terminal and the same tables as Markdown for the page, with the machine they were measured on."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from peers import PEERS

START = "<!-- benchmarks: written by `make bench`, do not edit by hand -->"
END = "<!-- benchmarks: end -->"


@dataclass
class Sheet:
    """One table: a title, what to know to read it, and rows of text."""

    title: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def print(self, console: Console) -> None:
        table = Table(title=self.title, caption=self.note, title_justify="left", caption_justify="left")
        for at, name in enumerate(self.head):
            table.add_column(name, justify="right" if at else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{table}\n" + (f"\n{self.note}\n" if self.note else "")


def machine() -> list[str]:
    """Describe what the figures depend on."""
    return [
        f"{cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        f"Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f} before",
        ", ".join(sorted({f"{peer.package} {version(peer.package)}" for peer in PEERS.values() if peer.package})),
    ]


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(source tree)"


def write_page(page: Path, facts: list[str], sheets: list[Sheet], *, marks: tuple[str, str] = (START, END)) -> None:
    """Put the tables between the two markers of the page; a page without them gets them at its end."""
    start, end = marks
    body = "\n".join(["\n".join(f"- {fact}" for fact in facts), "", *(sheet.markdown() for sheet in sheets)])
    block = f"{start}\n\n{body}\n{end}\n"
    text = page.read_text() if page.exists() else ""
    if start in text and end in text:
        before, rest = text.split(start, 1)
        after = rest.split(end, 1)[1].lstrip("\n")
        text = before + block + ("\n" + after if after else "")
    else:
        text = text + ("\n" if text else "") + block
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)


def short(value: float) -> str:
    """Write three digits, never in powers of ten."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def us(value: float | None) -> str:
    """Write microseconds with the unit that reads best."""
    if value is None:
        return "-"
    for unit in ("µs", "ms"):
        if value < 1000:
            return f"{short(value)} {unit}"
        value /= 1000
    return f"{short(value)} s"


def ms(value: float | None) -> str:
    return us(None if value is None else value * 1000)


def ratio(value: float | None, to: float | None) -> str:
    return f"{short(value / to)}x" if value is not None and to else "-"
