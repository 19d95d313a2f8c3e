"""Watch the runs live in the terminal: status, speed and loss as a sparkline; runs that need attention come first.

Shows running runs and those that ended within a day. Keys: j k or arrows move, enter shows a run, s sorts, / filters,
q quits. Without a terminal, or with --once, one table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from ..drawing.order import curve_order
from ..errors import FanfoldError, SettingError
from ..store import StoredRun
from ..store.filter import Filter, length
from ..store.query import Name, Store
from ..store.rows import RunRow
from ..stores import open_store
from . import chart, output
from .text import STATUS, number

EXAMPLE = """examples:
  fanfold top
  fanfold top --filter 'tag:baseline' --key val/loss
  fanfold top --once --all
  fanfold top --json | jq '.[] | select(.status == "stalled") | .name'"""

LEAST_INTERVAL = 0.1
TITLES = ("status", "name", "step", "rate", "key", "value", "curve", "seen", "load", "project", "id")
RIGHT = ("step", "rate", "value", "seen")
SYMBOLS = {**STATUS, "stalled": ("!", "yellow")}
# Runs that need attention come first. A run whose processes are alive but have logged nothing for long is stalled.
ORDER = ("failed", "killed", "lost", "stalled", "preempted", "running", "finished")
LIVE = frozenset({"running", "lost", "stalled"})
STALLED_SECONDS = 60.0
STALLED_STEPS = 20  # and at least this many times its usual pause between two steps
PACE_ROWS = 200  # the last rows, from which a run's speed is computed
SPARK = 64  # buckets kept for a curve; a narrow screen shows fewer
PROBES = ("system/", "energy/")
SORTS = ("trouble", "newest", "name", "rate", "seen")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", default="", metavar="F", help="only runs that match: 'lr<1e-3 and tag:baseline'")
    parser.add_argument("--sort", default=SORTS[0], choices=SORTS, help=f"initial sort order (default: {SORTS[0]})")
    parser.add_argument("--key", metavar="KEY", help="metric for the sparkline (default: the one most like a loss)")
    parser.add_argument("--since", default="24h", metavar="TIME", help="show runs for this long after they ended (default: 24h)")
    parser.add_argument("--all", action="store_true", help="all runs, however long ago they ended")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one table and exit")


def run(args: argparse.Namespace) -> int:
    Filter(args.filter)  # raises for a mistake, before the screen is cleared
    watcher = LiveRuns(open_store(args.dir), project=args.project, since=_since(args), key=args.key)
    if args.json or args.once or not _interactive():
        return _once(args, watcher)
    from .screen import Screen

    Screen(watcher, filter=args.filter, sort=args.sort, interval=max(LEAST_INTERVAL, args.interval)).run()
    return 0


def _since(args: argparse.Namespace) -> float | None:
    if args.all:
        return None
    seconds = length(args.since)
    if seconds is None:
        raise SettingError(f"--since {args.since!r} is not a duration. Write 90s, 15m, 3h, 2d or 1w.")
    return seconds


def _interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def _once(args: argparse.Namespace, watcher: LiveRuns) -> int:
    looks = [watcher.whole(look) for look in watcher.looks(args.filter, args.sort)]
    hint = "" if args.all else " --all shows those that ended earlier."
    return output.listed(
        args,
        looks,
        TITLES,
        lambda look: [cells(look, 16)[name] for name in TITLES],
        facts=Look.facts,
        right=RIGHT,
        whole=("status", *RIGHT),
        empty=f"no runs to watch in {watcher.store.place}.{hint}",
    )


def cells(look: Look, curve: int) -> dict[str, str]:
    """Return a run's texts by column, with a curve of that many characters."""
    row, step = look.row, look.step
    load = f"G{look.gpu:.0f}%" if look.gpu is not None else f"C{look.cpu:.0f}%" if look.cpu is not None else ""
    return {
        "status": f"{SYMBOLS.get(look.status, ('?', ''))[0]} {look.status}",
        "name": row.name,
        "project": row.project,
        "id": row.id,
        "step": "" if step is None else f"{step}" if step < 10_000_000 else f"{step:.1e}",
        "rate": rate_text(look.rate),
        "key": look.key,
        "value": "" if look.value is None else number(look.value),
        "curve": chart.spark(look.curve, curve),
        "seen": age_text(look.facts()["age"]),
        "load": load,
    }


def rate_text(rate: float | None) -> str:
    """Return a speed in at most six characters: steps per second, minute or hour."""
    if not rate or rate < 0:
        return "" if rate is None else "0/s"
    count, unit = next((pair for pair in ((rate, "s"), (rate * 60, "m")) if pair[0] >= 1), (rate * 3600, "h"))
    return f"{f'{count / 1000:.0f}k' if count >= 10_000 else f'{count:.0f}' if count >= 100 else f'{count:.1f}'}/{unit}"


def age_text(seconds: float) -> str:
    """Return how long ago something was, in at most four characters."""
    size, unit = next((pair for pair in ((86400, "d"), (3600, "h"), (60, "m")) if seconds >= pair[0]), (1, "s"))
    return f"{int(seconds // size)}{unit}"


# Reading the runs


@dataclass
class Look:
    """One line of the table."""

    row: RunRow
    status: str
    step: int | None = None
    rate: float | None = None  # steps a second
    key: str = ""
    value: Any = None
    curve: list[float] = field(default_factory=list)
    cpu: float | None = None
    gpu: float | None = None
    whole: bool = False

    @property
    def name(self) -> Name:
        return self.row.project, self.row.id

    def facts(self) -> dict[str, Any]:
        """Return it as plain data."""
        row = self.row
        same = {name: row[name] for name in ("id", "name", "project", "seen", "created", "ranks", "path")}
        return {**same, "status": self.status, "step": self.step, "rate": self.rate, "key": self.key or None, "value": self.value,
                "age": max(0.0, time.time() - row.seen), "cpu": self.cpu, "gpu": self.gpu}  # fmt: skip


class LiveRuns:
    """Reads the runs repeatedly; runs that have not changed are not read again."""

    def __init__(self, store: Store, *, project: str | None, since: float | None, key: str | None) -> None:
        self.store = store
        self.project = project
        self.since = since
        self.key = key
        self._kept: dict[Name, tuple[tuple[Any, ...], Look]] = {}

    def looks(self, filter: str = "", sort: str = SORTS[0], *, now: float | None = None) -> list[Look]:
        """Return a line per run that is running or ended lately, those that need attention first.

        Live runs are read to their end; for the others the run index is enough until they are shown (see `whole`).
        """
        now = time.time() if now is None else now
        rows = [row for row in self.store.runs(self.project, filter) if not row.archived]
        kept = [row for row in rows if self.since is None or row.status in LIVE or now - row.seen < self.since]
        found = [self._look(row, now) for row in kept]
        return sorted(found, key=lambda look: place(look, sort))

    def _look(self, row: RunRow, now: float) -> Look:
        latest = row.latest
        look = Look(row, row.status)
        look.cpu, look.gpu = _load(latest)
        keys = [key for key, value in latest.items() if isinstance(value, (int, float)) and not key.startswith(PROBES)]
        look.key = self.key if self.key and self.key in keys else next(iter(curve_order(keys)), "")
        look.value = latest.get(look.key)
        return self.whole(look, now) if row.status in LIVE else look

    def whole(self, look: Look, now: float | None = None) -> Look:
        """Add what only the run's journals have: its step, speed and curve. A run that ended is read once."""
        if look.whole:
            return look
        look.whole = True
        signs = (look.row.status, look.row.seen, look.key)
        known = self._kept.get(look.name)
        if known is not None and known[0] == signs:
            look.step, look.curve, look.value = known[1].step, known[1].curve, known[1].value
            return look
        with contextlib.suppress(FanfoldError):  # deleted or damaged since it was listed: the row is all there is
            self._read(look, self.store.run(*look.name), time.time() if now is None else now)
        if look.row.status not in LIVE:
            self._kept[look.name] = (signs, look)
        return look

    def _read(self, look: Look, run: StoredRun, now: float) -> None:
        found = run.curve(look.key, buckets=SPARK)
        if found is None:
            return
        look.curve = found.last.tolist()
        if found.low is not None:
            # The last mean over ranks, including NaN, which a bucket of many points leaves out.
            look.value = float(found.last[-1] if found.raw else run.series(look.key, fold="mean").values[-1])
        look.step, rate, silent, pause = pace(run, look.key, now)
        if look.status == "running":
            stalled = silent > max(STALLED_SECONDS, STALLED_STEPS * pause)
            look.status, look.rate = ("stalled", 0.0) if stalled else ("running", rate)


def _load(latest: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return how busy CPU and GPUs are, in percent; several GPUs as their mean."""
    cpu = latest.get("system/cpu")
    gpus = [float(value) for key, value in latest.items() if key.startswith("system/gpu/") and key.endswith("/util")]
    return (float(cpu) if isinstance(cpu, (int, float)) else None), (sum(gpus) / len(gpus) if gpus else None)


def pace(run: StoredRun, key: str, now: float) -> tuple[int | None, float | None, float, float]:
    """Return a run's last step, steps per second, seconds since the last row, and the usual pause between rows."""
    journals = [journal for journal in run.attempts[-1].mains if journal.by_key.get(key)]
    if not journals:
        return None, None, 0.0, 0.0
    journal = min(journals, key=lambda one: one.header.rank)
    steps, times, _ = journal.column(key, since=journal.back([key], PACE_ROWS))
    if not len(steps):
        return None, None, 0.0, 0.0
    span = float(times[-1] - times[0])
    rate = float(steps[-1] - steps[0]) / span if span > 0 else None
    return int(steps[-1]), rate, now - float(times[-1]), span / max(1, len(times) - 1)


def place(look: Look, sort: str) -> tuple[Any, ...]:
    """Return the sort key of a line."""
    row = look.row
    keys: dict[str, Any] = {"name": str(row.name).lower(), "newest": -row.created, "rate": -(look.rate or 0.0), "seen": -row.seen}
    if sort in keys:
        return keys[sort], row.id
    return (ORDER.index(look.status) if look.status in ORDER else len(ORDER), -row.created, row.id)
