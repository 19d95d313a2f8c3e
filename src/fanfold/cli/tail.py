"""Print a run's latest metrics, one line per step; -f follows it live until it ends.

Values are those of one rank (default: 0). With --json each line is one JSON object.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..drawing.order import curve_order
from ..errors import SettingError
from ..journal import Journal
from ..store import StoredRun
from . import choose, output
from .text import clean, number, short

EXAMPLE = """examples:
  fanfold tail -f -                       follow the newest run
  fanfold tail quick-otter-42 -n 50 --key loss 'val/*'
  fanfold tail -f - --json | jq .values.loss"""

POLL_SECONDS = 0.5
ENDED = frozenset({"finished", "failed", "killed", "preempted"})
FIRST_KEYS, CELL, MARGIN = 6, 12, 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="follow until the run ends (or Ctrl-C)")
    parser.add_argument("-n", type=int, default=10, metavar="N", help="number of steps to start with (default: 10)")
    parser.add_argument("--key", nargs="+", action="extend", metavar="KEY", help="these keys (patterns such as 'val/*')")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="of this rank (default: 0)")


def run(args: argparse.Namespace) -> int:
    stored = choose.one(args, args.run)
    if stored.ranks and args.rank not in stored.ranks and not args.follow:
        ranks = ", ".join(map(str, stored.ranks))
        raise SettingError(f"run {stored.id} has no rank {args.rank}. Nothing was shown. Its ranks: {ranks}.")
    printer = Printer(args)
    reader = Reader(stored, args.rank, args.key)
    printer.rows(reader.begin(max(args.n, 0)), reader.keys)
    if args.follow:
        follow(args, stored, reader, printer)
    return 0


def follow(args: argparse.Namespace, stored: StoredRun, reader: Reader, printer: Printer) -> None:
    """Print what comes until the run ends; what was written before its end is printed too."""
    said = ""
    while True:
        status = stored.status  # asked before reading on, so that nothing written before the end is missed
        printer.rows(reader.more(), reader.keys)
        if status in ENDED:
            output.remark(args, f"run {stored.name} {status}.")
            return
        if status != said == "lost" or status == "lost" != said:
            output.remark(args, f"run {stored.name} is {status}; waiting for more. Ctrl-C stops.")
        said = status
        time.sleep(POLL_SECONDS)
        stored.refresh()


class Row(NamedTuple):
    """What one rank logged at one step, as far as it is known now."""

    step: int | None
    time: float
    values: dict[str, Any]


@dataclass
class Reader:
    """Reads on in the journals of one rank, from the byte where it stopped."""

    stored: StoredRun
    rank: int
    patterns: list[str] | None
    keys: list[str] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)  # journal id: the byte to go on from

    def begin(self, count: int) -> list[Row]:
        """Return the last `count` steps, reading only the ends of the journals."""
        self._choose()
        for journal in self._journals():
            self._read[journal.id] = journal.back(self.keys, count)
        rows = list(self.more())
        return rows[-count:] if count else []

    def more(self) -> Iterator[Row]:
        """Yield what was written since the last time."""
        self._choose()
        for journal in self._journals():
            since = self._read.get(journal.id, 0)
            if journal.verified > since:
                self._read[journal.id] = journal.verified
                yield from _rows(journal, self.keys, since)

    def _journals(self) -> list[Journal]:
        return [journal for journal in self.stored.journals if journal.header.rank == self.rank]

    def _choose(self) -> None:
        """Settle which keys are shown: those asked for, else the first few that appear."""
        if self.patterns:
            self.keys = self.keys or choose.keys_of(self.stored, self.patterns)
        else:
            room = max(1, min(FIRST_KEYS, (output.width() - MARGIN) // (CELL + 2))) - len(self.keys)
            known = curve_order(self.stored.keys()) if room > 0 else []
            self.keys += [key for key in known if key not in self.keys][: max(room, 0)]


def _rows(journal: Journal, keys: list[str], since: int) -> list[Row]:
    """Gather the keys' points after a byte, and join those of one step that follow each other."""
    rows: list[Row] = []
    for found in journal.walk_rows(since):
        values = {key: found.values[key] for key in keys if key in found.values}
        if not values:
            continue
        if rows and found.step is not None and rows[-1].step == found.step and not rows[-1].values.keys() & values.keys():
            rows[-1].values.update(values)
        else:
            rows.append(Row(found.step, found.time / 1e9, values))
    return rows


class Printer:
    """Prints rows under a heading that is repeated when the keys change."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._heading: list[str] = []

    def rows(self, rows: Any, keys: list[str]) -> None:
        for row in rows:
            if self.args.json:
                output.print_json({"step": row.step, "time": row.time, "rank": self.args.rank, "values": row.values}, line=True)
            else:
                self._line(row, keys)
        _flush()

    def _line(self, row: Row, keys: list[str]) -> None:
        if keys != self._heading:
            self._heading = list(keys)
            print("  ".join([f"{'step':>{MARGIN}}", *(f"{_short_key(key):>{CELL}}" for key in keys)]))
        cells = [number(row.values[key]) if key in row.values else "" for key in keys]
        step = time.strftime("%H:%M:%S", time.localtime(row.time)) if row.step is None else str(row.step)
        print("  ".join([f"{step:>{MARGIN}}", *(f"{cell:>{CELL}}" for cell in cells)]).rstrip())


def _short_key(key: str) -> str:
    """Return a key cut at its front: the end tells more."""
    text = clean(key)
    return text if len(text) <= CELL else "…" + short(text[-CELL + 1 :], CELL)


def _flush() -> None:
    import sys

    sys.stdout.flush()
