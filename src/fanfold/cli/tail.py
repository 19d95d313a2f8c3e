"""Print a run's latest metrics, one line per step; -f follows it live until it ends.

Values are those of one rank (default: 0). With --json each line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..drawing.order import curve_order
from ..journal import Journal
from ..store import StoredRun
from . import choose, output
from .text import clean, number

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
    if stored.ranks and not args.follow:
        choose.check_rank(stored, args.rank)
    reader = Reader(stored, args.rank, args.key)
    _print(args, reader, reader.begin(max(args.n, 0)))
    if args.follow:
        _follow(args, stored, reader)
    return 0


def _follow(args: argparse.Namespace, stored: StoredRun, reader: Reader) -> None:
    """Print new rows until the run ends, including those written just before its end."""
    before, told = "", {one["id"] for one in stored.requests if one["answered"]}
    while True:
        status = stored.status  # checked before reading, so that nothing written before the end is missed
        _print(args, reader, reader.more())
        for one in stored.requests:
            if one["answered"] and one["id"] not in told:
                told.add(one["id"])
                after = f" after step {one['step']}" if one["state"] == "done" else f": {one['why']}"
                output.remark(args, f"{one['by']} asked to {one['action']}: {one['state']}{after}")
        if status in ENDED:
            output.remark(args, f"run {stored.name} {status}.")
            return
        if status != before and "lost" in (status, before):
            output.remark(args, f"run {stored.name} is {status}; waiting for more. Ctrl-C stops.")
        before = status
        time.sleep(POLL_SECONDS)
        stored.refresh()


class StepValues(NamedTuple):
    """The values that one rank logged at one step so far."""

    step: int | None
    time: float
    values: dict[str, Any]


@dataclass
class Reader:
    """Reads the journals of one rank, each time from the byte where it stopped."""

    stored: StoredRun
    rank: int
    patterns: list[str] | None
    keys: list[str] = field(default_factory=list)
    heading: list[str] = field(default_factory=list)  # the keys printed last
    _read: dict[str, int] = field(default_factory=dict)  # journal id: the byte to continue from

    def begin(self, count: int) -> list[StepValues]:
        """Return the last `count` steps, reading only the ends of the journals."""
        self._choose()
        for journal in self._journals():
            self._read[journal.id] = journal.back(self.keys, count)
        rows = list(self.more())
        return rows[-count:] if count else []

    def more(self) -> Iterator[StepValues]:
        """Yield the rows written since the last call."""
        self._choose()
        for journal in self._journals():
            since = self._read.get(journal.id, 0)
            if journal.verified > since:
                self._read[journal.id] = journal.verified
                yield from _rows(journal, self.keys, since)

    def _journals(self) -> list[Journal]:
        return [journal for journal in self.stored.journals if journal.header.rank == self.rank]

    def _choose(self) -> None:
        """Choose the keys to show: those asked for, else the first few that appear."""
        if self.patterns:
            self.keys = self.keys or choose.keys_of([self.stored], self.patterns)
        else:
            room = max(1, min(FIRST_KEYS, (output.width() - MARGIN) // (CELL + 2))) - len(self.keys)
            known = curve_order(self.stored.keys()) if room > 0 else []
            self.keys += [key for key in known if key not in self.keys][: max(room, 0)]


def _rows(journal: Journal, keys: list[str], since: int) -> list[StepValues]:
    """Return the keys' rows after a byte; consecutive rows of the same step are joined."""
    rows: list[StepValues] = []
    for found in journal.walk_rows(since):
        values = {key: found.values[key] for key in keys if key in found.values}
        if not values:
            continue
        if rows and found.step is not None and rows[-1].step == found.step and not rows[-1].values.keys() & values.keys():
            rows[-1].values.update(values)
        else:
            rows.append(StepValues(found.step, found.time / 1e9, values))
    return rows


def _print(args: argparse.Namespace, reader: Reader, rows: Iterable[StepValues]) -> None:
    """Print rows under a heading that is repeated when the keys change."""
    for row in rows:
        if args.json:
            output.print_json({"step": row.step, "time": row.time, "rank": args.rank, "values": row.values}, line=True)
            continue
        if reader.keys != reader.heading:
            reader.heading = list(reader.keys)
            _print_line("step", [key if len(key) <= CELL else "…" + key[1 - CELL :] for key in map(clean, reader.keys)])
        step = time.strftime("%H:%M:%S", time.localtime(row.time)) if row.step is None else str(row.step)
        _print_line(step, [number(row.values[key]) if key in row.values else "" for key in reader.keys])
    sys.stdout.flush()


def _print_line(step: str, cells: list[str]) -> None:
    print("  ".join([f"{step:>{MARGIN}}", *(f"{cell:>{CELL}}" for cell in cells)]).rstrip())
