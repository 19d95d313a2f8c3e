"""List the runs, newest first.

On a terminal the newest 50 are shown; --limit changes that, and a pipe or --json gets all of them.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import SettingError
from ..plain import flat
from ..store import StoredRun
from . import choose, output
from .text import age, duration, number, plural, short

EXAMPLE = """examples:
  fanfold ls --status running
  fanfold ls --filter 'lr<1e-3 and tag:baseline and loss.min<0.2'
  fanfold ls --config lr=0.001 --sort summary.loss --columns name,config.lr,summary.loss
  fanfold ls --json | jq '.[0].id'"""

SHOWN = 50
# How the words in a metric's name end, or what they are, when low values are good.
_LOW_ENDS = ("loss", "error", "perplexity", "ppl", "nll", "mse", "mae")
_LOW = frozenset({"err", "wer", "cer", "fid", "time", "seconds", "latency"})
DEFAULT = ("status", "name", "id", "project", "started", "duration", "ranks", "tags", "reason")


_FIELDS: dict[str, Callable[[StoredRun], Any]] = {
    "id": lambda run: run.id,
    "name": lambda run: run.name,
    "project": lambda run: run.project,
    "status": lambda run: run.status,
    "started": lambda run: run.started,
    "seen": lambda run: run.seen,
    "duration": lambda run: run.duration,
    "ranks": lambda run: len(run.ranks),
    "tags": lambda run: run.tags,
    "group": lambda run: run.group,
    "notes": lambda run: run.notes,
    "reason": lambda run: run.verdict.get("reason"),
    "path": lambda run: str(run.path),
}
_WHOLE = frozenset({"status", "id", "started", "duration", "ranks"})  # never cut: they are short, and typed or compared
_RIGHT = frozenset({"duration", "ranks"})


def arguments(parser: argparse.ArgumentParser) -> None:
    choose.add_filters(parser)
    parser.add_argument("--sort", metavar="COLUMN", default="started",
                        help="sort by a column, best or newest first; -COLUMN: highest first, +COLUMN: lowest first")  # fmt: skip
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    parser.add_argument("--limit", type=choose.count, metavar="N", help="show at most N runs (0: all)")
    parser.add_argument("--columns", metavar="A,B,…", help=f"of: {', '.join(_FIELDS)}, config.KEY, summary.KEY")


def run(args: argparse.Namespace) -> int:
    columns = [name.strip() for name in args.columns.split(",")] if args.columns else list(DEFAULT)
    for name in (*columns, args.sort.lstrip("+-")):
        _check(name)
    everything = choose.everything(args)
    found = choose.matching(args, everything)
    chosen = _sorted(found, args.sort, args.reverse)
    limit = args.limit if args.limit is not None else (SHOWN if output.is_terminal() and not args.json else 0)
    chosen = chosen[:limit] if limit > 0 else chosen
    if not args.columns:
        columns = [name for name in columns if _says_something(name, chosen)]
    if args.json:
        output.print_json([_facts(one, columns if args.columns else None) for one in chosen])
    elif chosen:
        _print(args, columns, chosen, len(found))
    if not found and not everything.unreadable:
        choose.say_none(args)
    return 0 if found and not everything.unreadable else 1


def _says_something(name: str, chosen: list[StoredRun]) -> bool:
    """Leave out default columns that are empty for every run."""
    return {
        "tags": any(one.tags for one in chosen),
        "ranks": any(len(one.ranks) > 1 for one in chosen),
        "reason": any(one.verdict.get("reason") for one in chosen),
    }.get(name, True)


def _check(name: str) -> None:
    if name not in _FIELDS and not name.startswith(("config.", "summary.")):
        raise SettingError(f"unknown column {name!r}. Known columns: {', '.join(_FIELDS)}, config.KEY, summary.KEY.")


def value_of(run: StoredRun, name: str) -> Any:
    """Return what a column says of a run; None where it says nothing."""
    field = _FIELDS.get(name)
    if field is not None:
        return field(run)
    kind, _, key = name.partition(".")
    return flat(run.config).get(key) if kind == "config" else run.summary.get(key)


def _sorted(found: list[StoredRun], column: str, reverse: bool) -> list[StoredRun]:
    """Sort by a column: as its sign says, else best or newest first; runs without the value come last either way."""
    name = column.lstrip("+-")
    highest = column.startswith("-") or (not column.startswith("+") and _is_better_high(found, name))
    down = highest != reverse
    keyed = [(value_of(run, name), run) for run in found]
    have = [pair for pair in keyed if _sortable(pair[0])]
    numbers = [pair for pair in have if isinstance(pair[0], (int, float))]
    words = [pair for pair in have if not isinstance(pair[0], (int, float))]
    numbers.sort(key=lambda pair: pair[0], reverse=down)
    words.sort(key=lambda pair: str(pair[0]), reverse=down)
    return [run for _, run in (*numbers, *words)] + [run for value, run in keyed if not _sortable(value)]


def _is_better_high(found: list[StoredRun], name: str) -> bool:
    """Tell whether the highest values of a column come first: newest moments, and metrics that should be high.

    define_metric(summary="min" or "max") says so of a metric; else losses, errors and times should be low, anything else high.
    """
    kind, _, key = name.partition(".")
    if kind != "summary":
        return name in ("started", "seen")
    rules = Counter(rule for run in found if (rule := run.rules.get(key)) in ("min", "max"))
    if rules:
        return rules.most_common(1)[0][0] == "max"
    return not any(word in _LOW or word.endswith(_LOW_ENDS) for word in re.findall("[a-z]+", key.lower()))


def _sortable(value: Any) -> bool:
    return value is not None and value == value  # noqa: PLR0124 - NaN alone is not itself


def _facts(run: StoredRun, columns: list[str] | None) -> dict[str, Any]:
    if columns is not None:
        return {name: value_of(run, name) for name in columns}
    return {name: field(run) for name, field in _FIELDS.items()} | {"config": run.config, "summary": run.summary}


def _print(args: argparse.Namespace, columns: list[str], chosen: list[StoredRun], total: int) -> None:
    now = time.time()
    rows = [[_cell(name, value_of(run, name), now) for name in columns] for run in chosen]
    place = columns.index("status") if "status" in columns else None
    right = [name for name in columns if name in _RIGHT or name.startswith("summary.")]
    whole = [name for name in columns if name in _WHOLE]
    output.table(columns, rows, right=right, whole=whole, status=place)
    if len(chosen) < total:
        output.remark(args, f"{len(chosen)} of {plural(total, 'run')}; --limit 0 shows all.")


def _cell(name: str, value: Any, now: float) -> str:
    if value is None:
        return ""
    if name in ("started", "seen"):
        return age(value, now)
    if name == "duration":
        return duration(value)
    if name == "status":
        return output.mark(value)
    if name == "tags":
        return ", ".join(map(str, value))
    return number(value) if isinstance(value, float) else short(value, 200)
