"""Output of commands: JSON, tables (rich on a terminal, plain in a pipe), and a progress bar for slow operations."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .text import STATUS, clean

if TYPE_CHECKING:
    from ..store import StoredRun

T = TypeVar("T")
LEAST = 14  # a column cut shorter than this is useless: the last column is dropped instead
SLOW_SECONDS = 0.4  # anything faster needs no progress bar


def as_json(value: Any, *, indent: int | None = 2) -> str:
    """Return JSON in ASCII, so that no control character of a name reaches a terminal."""
    import json

    from ..plain import json_safe

    return json.dumps(json_safe(value), allow_nan=False, indent=indent)


def print_json(value: Any, *, line: bool = False) -> None:
    """Print one JSON document, or one line of JSON lines."""
    sys.stdout.write(as_json(value, indent=None if line else 2) + "\n")


def remark(args: Any, text: str) -> None:
    """Print a notice on stderr, beside the result, unless -q."""
    if not args.quiet:
        print(clean(text, lines=True), file=sys.stderr)


def console(**options: Any) -> Any:
    """Return a rich console without markup: names of runs are text, whatever is in them."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def listed(
    args: Any,
    rows: Sequence[T],
    titles: Sequence[str],
    cells: Callable[[T], Sequence[str]],
    *,
    facts: Callable[[T], Any] = lambda row: row,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    empty: str = "",
) -> int:
    """Print rows as JSON (`facts` of each), or as a table of their `cells`, or a notice that there are none.

    Return the exit code: 1 if there are no rows.
    """
    if args.json:
        print_json([facts(row) for row in rows])
    elif rows:
        table(titles, map(cells, rows), right=right, whole=whole)
    elif empty:
        remark(args, empty)
    return 0 if rows else 1


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), whole: Sequence[str] = ()) -> None:
    """Print a table: complete in a pipe; on a terminal cut to its width, except the `whole` columns."""
    cells = [[clean(cell) for cell in row] for row in rows]
    if is_terminal():
        _rich_table(titles, cells, right, whole)
    else:
        _plain_table(titles, cells)


def _plain_table(titles: Sequence[str], cells: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in (titles, *cells))
    sys.stdout.write("\n".join(lines) + "\n")


def fit(widths: Sequence[int], fixed: Sequence[bool], room: int, *, least: int = LEAST, gap: int = 2) -> list[int]:
    """Return the widths of as many columns as fit, with `gap` blanks between them; the widest shrink first, fixed ones never."""
    found = list(widths)
    while sum(found) + gap * (len(found) - 1) > room:
        free = [place for place in range(len(found)) if not fixed[place] and found[place] > least]
        if not free:
            return fit(widths[:-1], fixed, room, least=least, gap=gap) if len(found) > 1 else found
        found[max(free, key=found.__getitem__)] -= 1
    return found


def _rich_table(titles: Sequence[str], cells: list[list[str]], right: Sequence[str], whole: Sequence[str]) -> None:
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
        looks = (STATUS.get(cell.rpartition(" ")[2], ("", ""))[1] if title == "status" else ""
                 for title, cell in zip(titles, row, strict=True))  # fmt: skip
        view.add_row(*(Text(cell, style=look) for cell, look, _ in zip(row, looks, widths, strict=False)))
    # Both sizes, or rich assumes 80 columns on a terminal that is dumb or does not know its size.
    console(width=width(), height=24).print(view)


def mark(status: str) -> str:
    """Return a status with its symbol, as plain text."""
    return f"{STATUS.get(status, ('?', ''))[0]} {status}"


def heading(run: StoredRun) -> str:
    """Return the line that begins what a command prints about one run."""
    return f"{mark(run.status)}  {clean(run.name)}  {clean(run.id)}"


def confirmed(question: str) -> bool:
    """Ask a question on the terminal; anything but yes means no."""
    print(f"{question} [y/N] ", file=sys.stderr, end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def progress(args: Any, items: Iterable[T], total: int, label: str, *, at: Callable[[T], int] | None = None) -> Iterator[T]:
    """Yield the items; a progress bar appears on stderr if it takes long. `at` returns the position, if it is not the count."""
    if args.quiet or args.json or not sys.stderr.isatty():
        yield from items
        return
    began, bar, task = time.monotonic(), None, None
    try:
        for count, item in enumerate(items):
            if bar is None and time.monotonic() - began > SLOW_SECONDS:
                bar, task = _bar(label, total)
            if bar is not None:
                bar.update(task, completed=count if at is None else at(item))
            yield item
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
    """Return the width of the output: the terminal's, COLUMNS, or 100 in a pipe."""
    import shutil

    return shutil.get_terminal_size((100, 24)).columns if is_terminal() or "COLUMNS" in os.environ else 100
