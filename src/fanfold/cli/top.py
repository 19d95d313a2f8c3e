"""Watch the runs live in the terminal: status, speed and loss as a sparkline; runs that need attention come first.

Shows running runs and those that ended within a day. Keys: j k or arrows move, enter shows a run, s sorts, / filters,
q quits. Without a terminal, or with --once, one table is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ..errors import SettingError
from ..store.filter import Filter, length
from ..stores import open_store
from . import output
from .text import number
from .watch import SORTS, Look, Watcher, spark

EXAMPLE = """examples:
  fanfold top
  fanfold top --filter 'tag:baseline' --key val/loss
  fanfold top --once --all
  fanfold top --json | jq '.[] | select(.status == "stalled") | .name'"""

LEAST_INTERVAL = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", default="", metavar="F", help="only runs that match: 'lr<1e-3 and tag:baseline'")
    parser.add_argument("--sort", default=SORTS[0], choices=SORTS, help=f"initial sort order (default: {SORTS[0]})")
    parser.add_argument("--key", metavar="KEY", help="metric for the sparkline (default: the one most like a loss)")
    parser.add_argument("--since", default="24h", metavar="TIME", help="show runs for this long after they ended (default: 24h)")
    parser.add_argument("--all", action="store_true", help="all runs, however long ago they ended")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one table and exit")


def run(args: argparse.Namespace) -> int:
    Filter(args.filter)  # a mistake in it is said before the screen is taken
    watcher = Watcher(open_store(args.dir), project=args.project, since=_since(args), key=args.key)
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


def _once(args: argparse.Namespace, watcher: Watcher) -> int:
    looks = [watcher.whole(look) for look in watcher.looks(args.filter, args.sort)]
    if args.json:
        output.print_json([look.facts() for look in looks])
    elif looks:
        right = ("step", "rate", "value", "seen")
        output.table(TITLES, map(cells, looks), right=right, whole=("status", *right), status=0)
    else:
        hint = "" if args.all else " --all shows those that ended earlier."
        output.remark(args, f"no runs to watch in {watcher.store.place}.{hint}")
    return 0 if looks else 1


TITLES = ("status", "name", "step", "rate", "key", "value", "curve", "seen", "load", "project", "id")


def cells(look: Look) -> list[str]:
    """Return a run as plain texts, uncut."""
    row = look.row
    return [
        output.mark(look.status), row.name, step_text(look), rate_text(look.rate), look.key, value_text(look.value),
        spark(look.curve, 16), age_text(look.facts()["age"]), load_text(look), row.project, row.id,
    ]  # fmt: skip


def step_text(look: Look) -> str:
    return "" if look.step is None else f"{look.step}" if look.step < 10_000_000 else f"{look.step:.1e}"


def rate_text(rate: float | None) -> str:
    """Return a speed in six letters: steps a second, a minute or an hour."""
    if not rate or rate < 0:
        return "" if rate is None else "0/s"
    for count, unit in ((rate, "s"), (rate * 60, "m"), (rate * 3600, "h")):  # noqa: B007 - the last is used
        if count >= 1:
            break
    shown = f"{count / 1000:.0f}k" if count >= 10_000 else f"{count:.0f}" if count >= 100 else f"{count:.1f}"
    return f"{shown}/{unit}"


def value_text(value: Any) -> str:
    return "" if value is None else number(float(value)) if isinstance(value, float) else str(value)


def age_text(seconds: float) -> str:
    """Return how long ago, in four letters."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def load_text(look: Look) -> str:
    """Return how busy the GPUs are, or without one the CPU: G98% or C12%."""
    if look.gpu is not None:
        return f"G{look.gpu:.0f}%"
    return "" if look.cpu is None else f"C{look.cpu:.0f}%"
