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
from collections.abc import Sequence
from typing import Any

from ..errors import FanfoldError, SettingError, suggestion
from ..store import StoredRun
from ..store import ops as store
from . import choose, ops_diff, output
from .ops_formats import FORMATS, Found
from .text import plural, took

BY = ("label", "node", "rank", "thread", "role", "scope", "kind", "inputs", "run", "project", "torch")
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
    parser.add_argument("--by", action="append", metavar="A,B,…", help=f"split by these as well, of: {', '.join(BY)}")
    parser.add_argument("--kind", action="append", metavar="A,B,…", help=f"only these kinds, of: {', '.join(store.KINDS)}")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="how many rows (default: 20; 0: all)")
    parser.add_argument(
        "--format", choices=sorted(FORMATS), help="print for a monitoring system instead; nothing is sent anywhere"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="K", help="trace: how many steps (default: 5)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="trace: how long to wait (default: 120 s)")
    choose.add_filters(parser)


def run(args: argparse.Namespace) -> int:
    command, rest = (args.words[0], args.words[1:]) if args.words else ("", [])
    by = [name for name in _listed("--by", args.by, BY) if name != "scope"]
    kinds = _listed("--kind", args.kind, store.KINDS)
    if args.format and command in ("diff", "trace"):
        raise SettingError(f"{command} has no --format {args.format}. Nothing was printed. Use --json.")
    if command == "diff":
        return ops_diff.run(args, rest, by, kinds)
    if command == "trace":
        return _trace(args, rest)
    found = [(run, run.ops()) for run in _chosen(args)]
    kept = [(run, [row for row in rows if not kinds or row["kind"] in kinds]) for run, rows in found]
    if not any(rows for _, rows in kept):
        _say_nothing(args, len(found), any(rows for _, rows in found))
    if args.format:
        sys.stdout.write(FORMATS[args.format](kept))
        return 0  # that no run is running is no fault of whoever collects
    return _top(args, kept, by)


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


def _say_nothing(args: argparse.Namespace, runs: int, profiled: bool) -> None:
    if not runs:
        choose.say_none(args)
    elif profiled:
        output.remark(args, f"nothing of that kind was observed in {plural(runs, 'run')}. Nothing is shown. Leave --kind out.")
    else:
        text = f"no operator profile was recorded in {plural(runs, 'run')}. Nothing is shown. "
        output.remark(args, text + "Start runs with fanfold.init(ops=True) or FANFOLD_OPS=1.")


def _top(args: argparse.Namespace, found: Found, by: list[str]) -> int:
    rows = store.together([{**row, **_about(run)} for run, some in found for row in some], ("op", "scope", *by))
    shown = rows[: args.top] if args.top > 0 else rows
    if args.json:
        output.print_json([{name: value for name, value in row.items() if name != "hist"} for row in shown])
    elif rows:
        _print(rows, shown, by, {run.id: run.name for run, _ in found})
        _remarks(args, [run for run, _ in found], len(rows) - len(shown))
    return 0 if rows else 1


def _about(run: StoredRun) -> dict[str, str]:
    return {"run": run.id, "project": run.project, "torch": ", ".join(ops_diff.traits(run, "torch"))}


def _print(rows: list[dict[str, Any]], shown: list[dict[str, Any]], by: list[str], names: dict[str, str]) -> None:
    whole = sum(row["self_ns"] for row in rows)
    device = any(row["device_count"] for row in rows)
    numbers = ["calls", "self", "share", "total", "mean", "p99", "max"] + ["device mean"] * device
    cells = [[row["op"], row["scope"], *(names.get(row[name], row[name]) if name == "run" else str(row[name]) for name in by),
              *_cells(row, whole, device)] for row in shown]  # fmt: skip
    output.table(["op", "scope", *by, *numbers], cells, right=numbers, whole=numbers)


def _cells(row: dict[str, Any], whole: float, device: bool) -> list[str]:
    share = f"{row['self_ns'] / whole:.1%}" if whole else ""
    times = [took(row[name]) for name in ("total_ns", "mean_ns", "p99_ns", "max_ns")]
    timed = took(row["device_ns"] / row["device_count"]) if row["device_count"] else ""
    return [f"{row['calls']:,.0f}", took(row["self_ns"]) if whole else "", share, *times, *[timed] * device]


def _remarks(args: argparse.Namespace, runs: list[StoredRun], left: int) -> None:
    """Say what the figures rest on."""
    tables = [table.facts for run in runs for table in store.tables(run)]
    steps, observed = (sum(int(facts.get(name) or 0) for facts in tables) for name in ("steps", "observed"))
    processes = plural(sum(not facts.get("worker") for facts in tables), "process")
    text = f"{plural(len(runs), 'run')}, {processes}: {observed:,} of {plural(steps, 'step')} observed in full"
    output.remark(args, text + (f", {left} rows more (--top 0)" if left > 0 else ""))
    if any(facts.get("sampling") and not facts.get("worker") for facts in tables):
        output.remark(args, "calls were sampled at random: how much of their time is their own is not known.")
    for name, meaning in LOST.items():
        if lost := sum(int(facts.get(name) or 0) for facts in tables):
            output.remark(args, f"{lost:,} {meaning}")
    if steps and not observed and not any(facts.get("sampling") for facts in tables):
        output.remark(
            args, "no step was observed: the run is too short for its profile. Pass ops={'every': 1} to observe all of them."
        )


def _trace(args: argparse.Namespace, words: list[str]) -> int:
    from ..probes import trace

    if len(words) != 1 or not 1 <= args.steps <= trace.MAX_STEPS:
        raise SettingError(
            f"trace takes one run and 1 to {trace.MAX_STEPS} steps. Nothing was asked. Write: fanfold ops trace RUN --steps 5."
        )
    stored = choose.one(args, words[0])
    if stored.status != "running":
        raise FanfoldError(
            f"run {stored.id} is {stored.status}: it takes no more steps. Nothing was asked. Name a run that is running."
        )
    token, folder = secrets.token_hex(4), stored.path / "ops"
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
