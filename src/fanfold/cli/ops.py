"""Show which PyTorch operators the time went to, over all processes of one run or many.

  fanfold ops [RUN…]       the operators with the most self time (no RUN: the newest run, all of --project, or --all)
  fanfold ops diff A B     what got slower from A to B. Each is a run, a part of one (RUN@rank=1, RUN@node=gpu7), or all runs
                           with a version, tag, commit or node: diff @torch=2.12 @torch=2.13
  fanfold ops trace RUN    record a trace of the next steps of a running job (chrome://tracing, Perfetto)

Times are host time. A profile observes some steps in full; calls and times are scaled up to all steps.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..drawing.numbers import plural
from ..errors import FanfoldError, SettingError
from ..journal.directory import check_folders
from ..probes.op_table import OpTable
from ..store import StoredRun
from ..store import ops as store
from ..store.ops_formats import FORMATS, Found
from . import choose, ops_diff, output
from .text import took

BY = ("label", "node", "rank", "thread", "role", "scope", "overload", "kind", "inputs", "run", "project", "torch")
LOST = {
    "overflow": "calls are missing here, because the table was full. Use fewer labels, or ranges without numbers.",
    "device_lost": "calls could not be timed on the device: 1,024 were pending. Device means come from the others.",
    "usage_lost": "API usage records exceeded 64 kB per second and are missing from fanfold usage.",
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
    by = [name for name in _split("--by", args.by, BY) if name != "scope"]
    kinds = _split("--kind", args.kind, store.KINDS)
    if args.format:
        _check_format(args, command)
    if command == "diff":
        return ops_diff.run(args, rest, by, kinds)
    if command == "trace":
        return _trace(args, rest)
    found = [(run, run.ops()) for run in _chosen(args)]
    kept = [(run, [row for row in rows if not kinds or row["kind"] in kinds]) for run, rows in found]
    if not any(rows for _, rows in kept):
        _report_nothing(args, found)
    if args.format:
        sys.stdout.write(FORMATS[args.format](kept))
        # No running run is normal for a collector; no run at all may be a typing mistake.
        return 0 if any(rows for _, rows in kept) or (choose.filtered(args) and choose.everything(args)) else 1
    return _top(args, kept, by)


def _check_format(args: argparse.Namespace, command: str) -> None:
    """Raise for options that do not go with --format."""
    if command in ("diff", "trace"):
        raise SettingError(f"{command} has no --format {args.format}. Nothing was printed. Use --json.")
    given = [f"--{name}" for name in ("by", "top", "json") if getattr(args, name)]
    if given:
        raise SettingError(
            f"--format {args.format} prints every row in full detail, so it takes no {' and no '.join(given)}. Nothing was "
            "printed. Leave that out; fewer runs or a --kind make it shorter."
        )


def _split(option: str, words: list[str] | None, known: Sequence[str]) -> list[str]:
    """Return the values of a repeatable option, each once; each word may be a comma-separated list."""
    found = list(dict.fromkeys(name.strip() for word in words or () for name in word.split(",")))
    for name in found:
        choose.check_known(option, name, known)
    return found


def _chosen(args: argparse.Namespace) -> list[StoredRun]:
    if args.words:
        return choose.matching(args, choose.several(args, args.words))
    if args.all or args.project or choose.filtered(args):
        return choose.matching(args, choose.everything(args))
    return [choose.one(args, "-")]


def _report_nothing(args: argparse.Namespace, found: Found) -> None:
    there = plural(len(found), "run")
    tables = [table for run, _ in found for table in store.tables(run)]
    if not found:
        choose.report_none(args)
        return
    if any(rows for _, rows in found):
        text = f"nothing of that kind was observed in {there}. Nothing is shown. Leave --kind out."
    elif tables:
        text = (f"no operator was observed in {there}, though a profile was kept: {_basis(tables)}. Nothing is shown. "
                "Runs shorter than their first window have none; ops={'every': 1} observes every step.")  # fmt: skip
    elif any(any((run.path / "ops").glob("*.ops")) for run, _ in found):
        text = (f"the operator profile of {there} cannot be read: its file is damaged or of another version. Nothing is shown. "
                "Other data of the run is not affected.")  # fmt: skip
    else:
        text = f"no operator profile was recorded in {there}. Nothing is shown. {ops_diff.HOW}"
    output.remark(args, text)


def _basis(tables: Sequence[OpTable]) -> str:
    """Return how much was observed: steps, or time if there were none."""
    mains = [table for table in tables if not table.facts.get("worker")]
    steps, seen = _sum(mains, "steps"), _sum(mains, "seen_ns")
    if steps:
        return f"{_sum(mains, 'observed'):,} of {plural(steps, 'step')} observed in full"
    spent = _sum(mains, "now") - _sum(mains, "started")
    return "no optimizer steps" + (f", {took(seen)} of {took(spent)} observed" if 0 < seen < 0.95 * spent else "")


def _sum(tables: Sequence[OpTable], name: str) -> int:
    return sum(int(table.facts.get(name) or 0) for table in tables)


def _top(args: argparse.Namespace, found: Found, by: list[str]) -> int:
    added = store.together(ops_diff.described(found), ("op", "scope", *by))
    rows = sorted(
        ({**row, "self_ns": row["self_ns"] or None} for row in added), key=lambda row: -(row["self_ns"] or row["total_ns"])
    )
    shown, runs = ops_diff.first(args, rows), [run for run, _ in found]
    names = Counter(run.name for run in runs)
    unique = {run.id: run.name if names[run.name] == 1 else f"{run.name} {run.id}" for run in runs}
    whole = sum(row["self_ns"] or 0 for row in rows)
    device = any(row["device_count"] for row in rows)
    numbers = ["calls", "self", "share", "total", "mean", "p99", "max"] + ["device mean"] * device

    def cells(row: dict[str, Any]) -> list[str]:
        groups = (unique.get(row[name], row[name]) if name == "run" else str(row[name]) for name in by)
        own = [took(row["self_ns"]), f"{row['self_ns'] / whole:.1%}"] if row["self_ns"] else ["", ""]
        times = [took(row[name]) for name in ("total_ns", "mean_ns", "p99_ns", "max_ns")]
        timed = took(row["device_ns"] / row["device_count"]) if row["device_count"] else ""
        return [row["op"], row["scope"], *groups, f"{row['calls']:,.0f}", *own, *times, *[timed] * device]

    def facts(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name != "hist"}

    code = output.listed(args, shown, ["op", "scope", *by, *numbers], cells, facts=facts, right=numbers, whole=numbers)
    if rows and not args.json:
        _remarks(args, runs, len(rows) - len(shown), any(row["self_ns"] is None for row in shown))
    return code


def _remarks(args: argparse.Namespace, runs: list[StoredRun], left: int, blank: bool) -> None:
    """Print how much was observed, and what is missing."""
    tables = [table for run in runs for table in store.tables(run)]
    mains = [table for table in tables if not table.facts.get("worker")]
    text = f"{plural(len(runs), 'run')}, {plural(len(mains), 'process')}: {_basis(mains)}"
    output.remark(args, text + (f", {left} more rows (--top 0)" if left > 0 else ""))
    if blank:
        output.remark(args, ops_diff.BLANK)
    for name, meaning in LOST.items():
        if lost := _sum(tables, name):
            output.remark(args, f"{lost:,} {meaning}")
    if _sum(mains, "steps") and not _sum(mains, "observed") and not any(table.facts.get("sampling") for table in mains):
        output.remark(args, "no step was observed: the run is too short for its profile. ops={'every': 1} observes all steps.")


def _trace(args: argparse.Namespace, words: list[str]) -> int:
    from ..probes import trace

    if len(words) != 1 or not 1 <= args.steps <= trace.MAX_STEPS or not args.timeout >= 0:
        raise SettingError(
            f"trace needs one run, 1 to {trace.MAX_STEPS} steps and a --timeout in seconds. Nothing was traced. "
            "Write: fanfold ops trace RUN --steps 5."
        )
    stored = choose.one(args, words[0])
    if stored.status != "running":
        raise FanfoldError(f"run {stored.id} is {stored.status}: it takes no more steps. Name a running run.")
    token, folder = secrets.token_hex(4), stored.path / "ops"
    check_folders(stored.path)
    if not folder.is_dir():
        raise FanfoldError(f"run {stored.id} records no operator profile, so it cannot be traced. {ops_diff.HOW}")
    trace.request(folder, args.steps, token)
    wanted = {folder / trace.file_name(token, rank) for rank in stored.ranks}
    output.remark(args, f"waiting for {plural(len(wanted), 'process')} of {stored.name} to trace {plural(args.steps, 'step')} …")
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
        output.remark(
            args,
            f"{len(wanted) - len(there)} of {len(wanted)} traces are not written yet. They appear in {folder} after the steps, "
            "which needs a run started with ops=True, optimizer steps, and no other active profiler.",
        )
    return 0 if there else 1
