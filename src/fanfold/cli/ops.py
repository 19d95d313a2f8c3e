"""Show which PyTorch operators the time went to, over all processes of one run or many.

  fanfold ops [RUN…]       the operators with the most time of their own (no RUN: the newest run, all of --project, or --all)
  fanfold ops diff A B     what got slower from A to B. Each is a run, a part of one (RUN@rank=1, RUN@node=gpu7), or all runs
                           with a version, tag, commit or node: diff @torch=2.12 @torch=2.13
  fanfold ops trace RUN    record a trace of the next steps of a running job (chrome://tracing, Perfetto)

Times are host time. A profile observes some steps in full; calls and times shown are what they stand for.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..errors import FanfoldError, SettingError, suggestion
from ..journal.directory import check_folders
from ..probes.op_table import Table
from ..store import StoredRun
from ..store import ops as store
from . import choose, ops_diff, output
from .ops_formats import FORMATS, Found
from .text import plural, took

BY = ("label", "node", "rank", "thread", "role", "scope", "overload", "kind", "inputs", "run", "project", "torch")
LOST = {
    "overflow": "calls found no row in a full table and are missing here. Use fewer labels, or ranges without numbers.",
    "device_lost": "calls could not be timed on the device: 1,024 were under way. Device means come from those that were.",
    "usage_lost": "API usage records found no room (64 kB a second) and are missing from fanfold usage.",
}
EXAMPLE = """examples:
  fanfold ops - --top 10
  fanfold ops --project llm --by label
  fanfold ops --all --by project,node --kind operator
  fanfold ops diff baseline candidate
  fanfold ops diff @torch=2.12 @torch=2.13 --project llm
  fanfold ops trace - --steps 5
  fanfold ops --all --status running --format prometheus > fanfold.new && mv fanfold.new /var/lib/node_exporter/fanfold.prom"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN", help="runs; or: diff A B; or: trace RUN")
    parser.add_argument("--all", action="store_true", help="all runs of all projects")
    parser.add_argument("--by", action="append", metavar="A,B,…", help=f"also split by any of: {', '.join(BY)}")
    parser.add_argument("--kind", action="append", metavar="A,B,…", help=f"only these kinds: {', '.join(store.KINDS)}")
    parser.add_argument("--top", type=int, metavar="N", help=f"how many rows (default: {ops_diff.ROWS}, with --json all; 0: all)")
    parser.add_argument("--format", choices=sorted(FORMATS), help="print in a format for monitoring systems; nothing is sent")
    parser.add_argument("--steps", type=int, default=5, metavar="K", help="trace: number of steps (default: 5)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="trace: how long to wait (default: 120 s)")
    choose.add_filters(parser)


def run(args: argparse.Namespace) -> int:
    command, rest = (args.words[0], args.words[1:]) if args.words else ("", [])
    by = [name for name in _listed("--by", args.by, BY) if name != "scope"]
    kinds = _listed("--kind", args.kind, store.KINDS)
    if args.format:
        _refuse(args, command)
    if command == "diff":
        return ops_diff.run(args, rest, by, kinds)
    if command == "trace":
        return _trace(args, rest)
    found = [(run, run.ops()) for run in _chosen(args)]
    kept = [(run, [row for row in rows if not kinds or row["kind"] in kinds]) for run, rows in found]
    if not any(rows for _, rows in kept):
        _say_nothing(args, found)
    if args.format:
        sys.stdout.write(FORMATS[args.format](kept))
        # That no run is running is no fault of whoever collects; that there is none at all may be a typing mistake.
        return 0 if any(rows for _, rows in kept) or (choose.filtered(args) and choose.everything(args)) else 1
    return _top(args, kept, by)


def _refuse(args: argparse.Namespace, command: str) -> None:
    """Refuse what --format does not go with."""
    if command in ("diff", "trace"):
        raise SettingError(f"{command} has no --format {args.format}. Nothing was printed. Use --json.")
    given = [f"--{name}" for name in ("by", "top", "json") if getattr(args, name)]
    if given:
        raise SettingError(
            f"--format {args.format} prints every row, split by all that is known, so it takes no {' and no '.join(given)}. "
            "Nothing was printed. Leave that out; fewer runs or a --kind make it shorter."
        )


def _listed(option: str, words: list[str] | None, known: Sequence[str]) -> list[str]:
    """Return what a repeatable option names, each once; each word may be a list."""
    found = list(dict.fromkeys(name.strip() for word in words or () for name in word.split(",")))
    for name in found:
        if name not in known:
            raise SettingError(f"{option} {name} is not known. Nothing is shown.{suggestion(name, known)}")
    return found


def _chosen(args: argparse.Namespace) -> list[StoredRun]:
    if args.words:
        return choose.matching(args, choose.several(args, args.words))
    if args.all or args.project or choose.filtered(args):
        return choose.matching(args, choose.everything(args))
    return [choose.one(args, "-")]


def _say_nothing(args: argparse.Namespace, found: Found) -> None:
    there = plural(len(found), "run")
    tables = [table for run, _ in found for table in store.tables(run)]
    if not found:
        choose.say_none(args)
    elif any(rows for _, rows in found):
        output.remark(args, f"nothing of that kind was observed in {there}. Nothing is shown. Leave --kind out.")
    elif tables:
        text = f"no operator was observed in {there}, though a profile was kept: {_basis(tables)}. Nothing is shown. "
        output.remark(args, text + "Runs shorter than their first window have none; ops={'every': 1} observes every step.")
    elif any(any((run.path / "ops").glob("*.ops")) for run, _ in found):
        text = f"the operator profile of {there} cannot be read: its file is damaged or of another version. Nothing is shown. "
        output.remark(args, text + "What the run logged is not affected.")
    else:
        text = f"no operator profile was recorded in {there}. Nothing is shown. "
        output.remark(args, text + "Start runs with fanfold.init(ops=True) or FANFOLD_OPS=1.")


def _basis(tables: Sequence[Table]) -> str:
    """Say how much was observed: steps, or time where there were none."""
    mains = [table for table in tables if not table.facts.get("worker")]
    steps, seen = _sum(mains, "steps"), _sum(mains, "seen_ns")
    if steps:
        return f"{_sum(mains, 'observed'):,} of {plural(steps, 'step')} observed in full"
    spent = _sum(mains, "now") - _sum(mains, "started")
    return "no optimizer steps" + (f", {took(seen)} of {took(spent)} observed" if 0 < seen < 0.95 * spent else "")


def _sum(tables: Sequence[Table], name: str) -> int:
    return sum(int(table.facts.get(name) or 0) for table in tables)


def _top(args: argparse.Namespace, found: Found, by: list[str]) -> int:
    added = store.together(ops_diff.described(found), ("op", "scope", *by))
    rows = sorted(
        ({**row, "self_ns": row["self_ns"] or None} for row in added), key=lambda row: -(row["self_ns"] or row["total_ns"])
    )
    shown = ops_diff.first(args, rows)
    if args.json:
        output.print_json([{name: value for name, value in row.items() if name != "hist"} for row in shown])
    elif rows:
        _print(rows, shown, by, _names([run for run, _ in found]))
        _remarks(args, [run for run, _ in found], len(rows) - len(shown), any(row["self_ns"] is None for row in shown))
    return 0 if rows else 1


def _names(runs: Sequence[StoredRun]) -> dict[str, str]:
    """Return what to call each run, by its id: its name, and the id too where others have that name."""
    times = Counter(run.name for run in runs)
    return {run.id: run.name if times[run.name] == 1 else f"{run.name} {run.id}" for run in runs}


def _print(rows: list[dict[str, Any]], shown: list[dict[str, Any]], by: list[str], names: dict[str, str]) -> None:
    whole = sum(row["self_ns"] or 0 for row in rows)
    device = any(row["device_count"] for row in rows)
    numbers = ["calls", "self", "share", "total", "mean", "p99", "max"] + ["device mean"] * device
    cells = [[row["op"], row["scope"], *(names.get(row[name], row[name]) if name == "run" else str(row[name]) for name in by),
              *_cells(row, whole, device)] for row in shown]  # fmt: skip
    output.table(["op", "scope", *by, *numbers], cells, right=numbers, whole=numbers)


def _cells(row: dict[str, Any], whole: float, device: bool) -> list[str]:
    own = [took(row["self_ns"]), f"{row['self_ns'] / whole:.1%}"] if row["self_ns"] else ["", ""]
    times = [took(row[name]) for name in ("total_ns", "mean_ns", "p99_ns", "max_ns")]
    timed = took(row["device_ns"] / row["device_count"]) if row["device_count"] else ""
    return [f"{row['calls']:,.0f}", *own, *times, *[timed] * device]


def _remarks(args: argparse.Namespace, runs: list[StoredRun], left: int, blank: bool) -> None:
    """Say what the figures rest on."""
    tables = [table for run in runs for table in store.tables(run)]
    mains = [table for table in tables if not table.facts.get("worker")]
    text = f"{plural(len(runs), 'run')}, {plural(len(mains), 'process')}: {_basis(mains)}"
    output.remark(args, text + (f", {left} rows more (--top 0)" if left > 0 else ""))
    if blank:
        output.remark(args, ops_diff.BLANK)
    for name, meaning in LOST.items():
        if lost := _sum(tables, name):
            output.remark(args, f"{lost:,} {meaning}")
    if _sum(mains, "steps") and not _sum(mains, "observed") and not any(table.facts.get("sampling") for table in mains):
        output.remark(
            args, "no step was observed: the run is too short for its profile. Pass ops={'every': 1} to observe all of them."
        )


def _trace(args: argparse.Namespace, words: list[str]) -> int:
    from ..probes import trace

    if len(words) != 1 or not 1 <= args.steps <= trace.MAX_STEPS or not args.timeout >= 0:
        raise SettingError(
            f"trace needs one run, 1 to {trace.MAX_STEPS} steps and a --timeout in seconds. Nothing was asked. "
            "Write: fanfold ops trace RUN --steps 5."
        )
    stored = choose.one(args, words[0])
    if stored.status != "running":
        raise FanfoldError(f"run {stored.id} is {stored.status}: it takes no more steps. Name a run that is running.")
    token, folder = secrets.token_hex(4), stored.path / "ops"
    check_folders(stored.path)
    if not folder.is_dir():
        raise FanfoldError(
            f"run {stored.id} records no operator profile, so it cannot be traced. Start runs with fanfold.init(ops=True)."
        )
    trace.request(folder, args.steps, token)
    wanted = {folder / trace.file_name(token, rank) for rank in stored.ranks}
    output.remark(args, f"asked {plural(len(wanted), 'process')} of {stored.name} for {plural(args.steps, 'step')} …")
    end = time.monotonic() + args.timeout
    while not all(path.exists() for path in wanted) and time.monotonic() < end:
        time.sleep(0.1)
    there = sorted(str(path) for path in wanted if path.exists())
    if args.json:
        output.print_json({"traces": there, "asked": len(wanted)})
    else:
        for path in there:
            print(path)
    if len(there) < len(wanted):
        late = (
            f"{len(wanted) - len(there)} of {len(wanted)} traces have not come. They land in {folder} when the steps are taken. "
        )
        output.remark(
            args, late + "That needs a run started with ops=True, optimizer steps, and no other profiler at work in it."
        )
    return 0 if there else 1
