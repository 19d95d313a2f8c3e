"""Show one run: status and cause, config, metrics and their curves."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..store import StoredRun
from ..store.rows import cause
from . import choose, output, show_sections

EXAMPLE = """examples:
  fanfold show -                       the newest run
  fanfold show quick-otter-42 --key loss 'val/*' --log
  fanfold show we7cg --json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("--key", nargs="+", action="extend", metavar="KEY", help="draw these keys (patterns such as 'val/*')")
    parser.add_argument("--all", action="store_true", help="show all keys, config values, alerts and artifacts")
    parser.add_argument("--log", action="store_true", help="draw on a logarithmic scale")
    parser.add_argument("--rank", type=int, metavar="N", help="metrics of this rank (default: the mean over ranks)")


def run(args: argparse.Namespace) -> int:
    stored = choose.one(args, args.run)
    keys = choose.keys_of([stored], args.key) if args.key else None
    if args.json:
        output.print_json(facts(stored, keys, args.rank))
    else:
        show_sections.RunPrinter(stored, keys=keys, everything=args.all, log=args.log, rank=args.rank).print()
    return 0


def facts(run: StoredRun, keys: list[str] | None = None, rank: int | None = None) -> dict[str, Any]:
    """Return everything about a run except its points."""
    chosen = run.keys() + run.keys("system") if keys is None else keys
    names = ("id", "name", "project", "status", "started", "seen", "duration", "ranks", "group", "tags", "notes", "config",
             "summary", "facts", "metrics", "alerts", "requests", "artifacts", "files", "dropped", "damaged")  # fmt: skip
    return {
        **{name: getattr(run, name) for name in names},
        "cause": cause(run.verdict),
        "path": str(run.path),
        "now": time.time(),
        "fork": None if run.fork is None else {"project": run.fork.project, "run": run.fork.run, "step": run.fork.step},
        "attempts": [_attempt(number, attempt) for number, attempt in enumerate(run.attempts, 1)],
        "keys": {key: show_sections.statistics(show_sections.series_of(run, key, rank)) for key in chosen},
        "texts": run.keys("text"),
        "media": {key: len(run.media(key)) for key in run.keys("media")},
        "lost": run.lost_values,
        "delivery": list(show_sections.deliveries(run)),
    }


def _attempt(number: int, attempt: Any) -> dict[str, Any]:
    verdict = attempt.verdict()
    return {
        "attempt": number,
        "key": attempt.key,
        "status": verdict["status"],
        "cause": cause(verdict),
        "started": attempt.started / 1e9,
        "seen": attempt.seen / 1e9,
        "ranks": sorted(journal.header.rank for journal in attempt.mains),
        "nodes": sorted({str(journal.header.node) for journal in attempt.mains}),
    }
