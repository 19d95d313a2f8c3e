"""What commands print with: JSON, tables (rich on a terminal, plain in a pipe), and a progress bar for slow things."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .text import STATUS, clean

T = TypeVar("T")
LEAST = 14  # below this a cut name says too little: the last column goes instead
SLOW_SECONDS = 0.4  # what is done sooner needs no progress bar


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it. NaN and the infinities become strings, so that nothing is lost or invalid."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    return str(value)


def as_json(value: Any, *, indent: int | None = 2) -> str:
    """Return JSON in ASCII, so that no control character of a name reaches a terminal."""
    import json

    return json.dumps(plain(value), allow_nan=False, indent=indent)


def print_json(value: Any, *, line: bool = False) -> None:
    """Print one JSON document, or one line of JSON lines."""
    sys.stdout.write(as_json(value, indent=None if line else 2) + "\n")


def remark(args: Any, text: str) -> None:
    """Say something beside the result, on stderr, unless -q."""
    if not args.quiet:
        print(clean(text, lines=True), file=sys.stderr)


def console(**options: Any) -> Any:
    """Return a rich console that takes no markup from anybody: names of runs are text, whatever is in them."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def status_text(status: str, *, long: str | None = None) -> Any:
    """Return a status as rich text: symbol, word, colour."""
    from rich.text import Text

    symbol, colour = STATUS.get(status, ("?", "white"))
    return Text(f"{symbol} {long or status}", style=colour)


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    status: int | None = None,
) -> None:
    """Print a table. On a terminal it fits the width (`whole` columns are not cut, the last may go); in a pipe all is there."""
    cells = [[clean(cell) for cell in row] for row in rows]
    if is_terminal():
        _rich_table(titles, cells, right, whole, status)
    else:
        _plain_table(titles, cells)


def _plain_table(titles: Sequence[str], cells: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (titles, *cells))
    sys.stdout.write("\n".join(lines) + "\n")


def fit(widths: Sequence[int], fixed: Sequence[bool], room: int) -> list[int]:
    """Return the widths of as many columns as have room, two blanks between them: the widest give way, fixed ones do not."""
    found = list(widths)
    while sum(found) + 2 * len(found) - 2 > room:
        free = [place for place in range(len(found)) if not fixed[place] and found[place] > LEAST]
        if not free:
            return fit(widths[:-1], fixed, room) if len(found) > 1 else found
        found[max(free, key=found.__getitem__)] -= 1
    return found


def _rich_table(
    titles: Sequence[str], cells: list[list[str]], right: Sequence[str], whole: Sequence[str], status: int | None
) -> None:
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    widest = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]
    widths = fit(widest, [title in whole for title in titles], width())
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    for title, wide in zip(titles, widths, strict=False):
        side: Any = "right" if title in right else "left"
        view.add_column(Text(title), justify=side, no_wrap=True, overflow="ellipsis", width=wide)
    for row in cells:
        shown: list[Any] = [Text(cell) for cell in row[: len(widths)]]
        if status is not None and status < len(shown):
            shown[status] = status_text(row[status].partition(" ")[2])
        view.add_row(*shown)
    # Both sizes, or rich takes 80 columns of its own on a terminal that is dumb or does not know its size.
    console(width=width(), height=24).print(view)


def mark(status: str) -> str:
    """Return a status with its symbol, as plain text."""
    return f"{STATUS.get(status, ('?', ''))[0]} {status}"


def progress(args: Any, items: Iterable[T], total: int, label: str) -> Iterator[T]:
    """Yield the items; a bar appears on stderr once it takes long enough to wonder."""
    waiting: deque[T] = deque(maxlen=1)

    def positions() -> Iterator[int]:
        for count, item in enumerate(items):
            waiting.append(item)
            yield count

    for _ in moving(args, positions(), total, label):
        yield waiting[0]


def moving(args: Any, positions: Iterator[int], total: int, label: str) -> Iterator[int]:
    """Yield the positions; a bar that stands at each appears on stderr once it takes long enough to wonder."""
    if args.quiet or args.json or not sys.stderr.isatty():
        yield from positions
        return
    began, bar, task = time.monotonic(), None, None
    try:
        for position in positions:
            if bar is None and time.monotonic() - began > SLOW_SECONDS:
                bar, task = _bar(label, total)
            if bar is not None:
                bar.update(task, completed=position)
            yield position
    finally:
        if bar is not None:
            bar.stop()


def _bar(label: str, total: int) -> tuple[Any, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    bar.start()
    return bar, bar.add_task(label, total=total)


def width() -> int:
    """Return how wide the output may be: the terminal's, COLUMNS, or 100 in a pipe."""
    import shutil

    return shutil.get_terminal_size((100, 24)).columns if is_terminal() or "COLUMNS" in os.environ else 100
