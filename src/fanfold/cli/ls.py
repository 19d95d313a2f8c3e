"""List the runs, newest first.

A terminal shows the newest 50 (change it with --limit); a pipe or --json gets all of them.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from ..drawing.numbers import duration, plural
from ..errors import SettingError
from ..store import StoredRun
from . import choose, output
from .text import age, short

EXAMPLE = """examples:
  fanfold ls --status running
  fanfold ls --filter 'lr<1e-3 and tag:baseline and loss.min<0.2'
  fanfold ls --config lr=0.001 --sort summary.loss --columns name,config.lr,summary.loss
  fanfold ls --since 2h --sort val/loss.min --columns name,val/loss.min
  fanfold ls --json | jq '.[0].id'"""

SHOWN = 50
Stats = Callable[[Any, str], Any]
Value = Callable[[StoredRun, str], Any]
# Low values are good if a word in a metric's name ends like this, or is one of these.
_LOW_ENDS = ("loss", "error", "perplexity", "ppl", "nll", "mse", "mae")
_LOW = frozenset({"err", "wer", "cer", "fid", "time", "seconds", "latency"})
DEFAULT = ("status", "name", "id", "project", "started", "duration", "ranks", "tags", "reason")


_COMPUTED: dict[str, Callable[[StoredRun], Any]] = {
    "ranks": lambda run: len(run.ranks),
    "reason": lambda run: run.verdict.get("reason"),
    "path": lambda run: str(run.path),
    "archived": lambda run: run.row().archived,
}
_FIELDS = ("id", "name", "project", "status", "started", "seen", "duration", "tags", "group", "notes", *_COMPUTED)
_OPTIONAL = ("tags", "ranks", "reason")  # default columns, left out if they are empty
_WHOLE = frozenset({"status", "id", "started", "duration", "ranks"})  # short, and copied or compared: never cut
_RIGHT = frozenset({"duration", "ranks"})


def arguments(parser: argparse.ArgumentParser) -> None:
    choose.add_filters(parser)
    parser.add_argument("--sort", metavar="COLUMN", default="started",
                        help="sort by a column or metric (loss, loss.min, acc.max), best or newest first; -COLUMN: highest "
                        "first, +COLUMN: lowest first")  # fmt: skip
    parser.add_argument("--since", type=_since, metavar="WHEN", help="only runs active since then: 2h, 3d, 2026-01-31")
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    parser.add_argument("--archived", action="store_true", help="include archived runs")
    parser.add_argument("--limit", type=choose.count, metavar="N", help="show at most N runs (0: all)")
    parser.add_argument(
        "--columns", metavar="A,B,…", help=f"of: {', '.join(_FIELDS)}, config.KEY, summary.KEY, or a metric: loss, loss.min"
    )


def run(args: argparse.Namespace) -> int:
    columns = [name.strip() for name in args.columns.split(",")] if args.columns else list(DEFAULT)
    everything = choose.everything(args)
    value = partial(value_of, stats=choose.store(args).statistics)
    for name in (*columns, args.sort.lstrip("+-")):
        _check(name, everything, value)
    found = choose.matching(args, everything)
    if not args.archived and "archived" not in args.filter:
        found = [one for one in found if not one.row().archived]
    if args.since is not None:
        found = [one for one in found if one.seen >= args.since]
    chosen = _sorted(found, args.sort, args.reverse, value)
    limit = args.limit if args.limit is not None else (SHOWN if output.is_terminal() and not args.json else 0)
    chosen = chosen[:limit] if limit > 0 else chosen
    now = time.time()
    if not args.columns:
        empty = [name for name in _OPTIONAL if all(value(one, name) in ([], 1, None, "") for one in chosen)]
        columns = [name for name in columns if name not in empty]
        if (sorted_by := args.sort.lstrip("+-")) not in columns:
            columns.insert(columns.index("name") + 1, sorted_by)
    output.listed(
        args,
        chosen,
        columns,
        lambda run: [_cell(name, value(run, name), now) for name in columns],
        facts=lambda run: _facts(run, columns if args.columns else None, value),
        right=[name for name in columns if name in _RIGHT or (name not in _FIELDS and not name.startswith("config."))],
        whole=[name for name in columns if name in _WHOLE],
    )
    if not args.json and 0 < len(chosen) < len(found):
        output.remark(args, f"{len(chosen)} of {plural(len(found), 'run')}; --limit 0 shows all.")
    if not found and not everything.unreadable:
        choose.report_none(args)
    return 0 if found and not everything.unreadable else 1


def _since(word: str) -> float:
    """Read the value of --since: a date, a time, or how long ago."""
    from ..store.filter import length, moment

    ago, span = length(word), moment(word)
    if ago is None and span is None:
        raise argparse.ArgumentTypeError(
            f"{word!r} is not a time. Write 2026-01-31, 2026-01-31T12:00, or how long ago: 90s, 3h, 2d."
        )
    return time.time() - ago if ago is not None else span[0] if span else 0.0


def _check(name: str, runs: list[StoredRun], value: Value) -> None:
    """Raise for a column that is neither a field nor a config value or metric of any run."""
    if name in _FIELDS or name.startswith(("config.", "summary.")) or not runs:
        return
    if any(value(one, name) is not None for one in runs):
        return
    raise SettingError(
        f"unknown column {name!r}. Known columns: {', '.join(_FIELDS)}, config.KEY, summary.KEY, and metrics: loss, loss.min."
    )


def value_of(run: StoredRun, name: str, *, stats: Stats = lambda *_: None) -> Any:
    """Return a run's value in a column, or None; `stats` returns the min, max, … of a metric."""
    if name in _FIELDS:
        return _COMPUTED[name](run) if name in _COMPUTED else getattr(run, name)
    kind, _, key = name.partition(".")
    if kind == "summary":
        return run.summary.get(key)
    if kind == "config":
        from ..plain import flat

        return flat(run.config).get(key)
    from ..store.filter import metric_value

    return metric_value(run.row(), name, stats)


def _sorted(found: list[StoredRun], column: str, reverse: bool, value: Value) -> list[StoredRun]:
    """Sort by a column: as its sign says, else best or newest first. Runs without a value always come last."""
    name = column.lstrip("+-")
    highest = column.startswith("-") or (not column.startswith("+") and _is_better_high(found, name))
    down = highest != reverse
    keyed = [(value(run, name), run) for run in found]
    have = [pair for pair in keyed if _sortable(pair[0])]
    numbers = [pair for pair in have if isinstance(pair[0], (int, float))]
    words = [pair for pair in have if not isinstance(pair[0], (int, float))]
    numbers.sort(key=lambda pair: pair[0], reverse=down)
    words.sort(key=lambda pair: str(pair[0]), reverse=down)
    return [run for _, run in (*numbers, *words)] + [run for missing, run in keyed if not _sortable(missing)]


def _is_better_high(found: list[StoredRun], name: str) -> bool:
    """Return whether the highest values of a column come first: the newest times, and metrics that should be high.

    define_metric(summary="min" or "max") decides for a metric; without it, losses, errors and times should be low.
    """
    kind, _, key = name.partition(".")
    if kind == "config" or name in _FIELDS:
        return name in ("started", "seen")
    key, which = key if kind == "summary" else name, ""
    if kind != "summary" and not any(name in run.summary for run in found):
        key, _, which = name.rpartition(".")
    rules = Counter(rule for run in found if (rule := run.rules.get(key)) in ("min", "max"))
    if rules:
        return rules.most_common(1)[0][0] == "max"
    return which != "min" and not any(word in _LOW or word.endswith(_LOW_ENDS) for word in re.findall("[a-z]+", key.lower()))


def _sortable(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _facts(run: StoredRun, columns: list[str] | None, value: Value) -> dict[str, Any]:
    if columns is not None:
        return {name: value(run, name) for name in columns}
    return {name: value(run, name) for name in _FIELDS} | {"config": run.config, "summary": run.summary}


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
    return short(value, 200)
