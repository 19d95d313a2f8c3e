"""Show which PyTorch operators the time went to, over all processes of one run or many.

  fanfold ops [RUN…]          the operators with the most time of their own (no RUN: the newest, or all of --project)
  fanfold ops diff A B        what got slower from A to B; A and B are runs, or parts of them: RUN@rank=1, RUN@node=gpu7
  fanfold ops trace RUN       record a trace of the next steps of a running job (chrome://tracing, Perfetto)

Times are host time. A profile observes some steps in full; calls and times shown are what they stand for.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from ..errors import FanfoldError, SettingError
from ..store import StoredRun
from ..store import ops as store
from . import output
from .choose import everything, one, several
from .ops_formats import FORMATS
from .text import plural

BY = ("label", "node", "rank", "thread", "role", "scope", "kind", "inputs", "run")
LOST = {
    "overflow": "calls found no row in a full table and are missing here. Use fewer labels, or ranges without numbers.",
    "device_lost": "calls could not be timed on the device: 1,024 were under way. Device means come from those that were.",
    "usage_lost": "API usage records found no room (64 kB a second) and are missing from fanfold usage.",
}
EXAMPLE = """examples:
  fanfold ops - --top 10
  fanfold ops --project llm --by label
  fanfold ops diff baseline candidate
  fanfold ops trace - --steps 5
  fanfold ops --project llm --format prometheus > /var/lib/node_exporter/fanfold.prom"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN", help="runs; or: diff A B; or: trace RUN")
    parser.add_argument("--by", action="append", choices=BY, help="split by this as well (repeatable)")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="how many rows (default: 20; 0: all)")
    parser.add_argument(
        "--format", choices=sorted(FORMATS), help="print for a monitoring system instead; nothing is sent anywhere"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="K", help="trace: how many steps (default: 5)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="trace: how long to wait (default: 120 s)")


def run(args: argparse.Namespace) -> int:
    command, rest = (args.words[0], args.words[1:]) if args.words else ("", [])
    if command == "diff":
        return _diff(args, rest)
    if command == "trace":
        return _trace(args, rest)
    chosen = _chosen(args)
    if args.format:
        sys.stdout.write(FORMATS[args.format](chosen))
        return 0
    return _top(args, chosen)


def _chosen(args: argparse.Namespace) -> list[StoredRun]:
    if args.words:
        return several(args, args.words)
    return everything(args) if args.project else [one(args, "-")]


def _with_run(runs: list[StoredRun]) -> list[dict[str, Any]]:
    return [{**row, "run": run.id, "project": run.project} for run in runs for row in run.ops()]


def _top(args: argparse.Namespace, runs: list[StoredRun]) -> int:
    by = tuple(dict.fromkeys(args.by or ()))
    rows = store.together(_with_run(runs), ("op", "scope", *(name for name in by if name != "scope")))
    if not rows:
        output.remark(
            args, "no operator profile was recorded. Nothing is shown. Start runs with fanfold.init(ops=True) or FANFOLD_OPS=1."
        )
        return 1
    whole = sum(row["self_ns"] for row in rows)
    shown = rows[: args.top] if args.top > 0 else rows
    if args.json:
        output.print_json([{name: value for name, value in row.items() if name != "hist"} for row in shown])
        return 0
    titles = ["op", "scope", *(name for name in by if name != "scope"), "calls", "self", "share", "total", "mean", "p99", "max"]
    device = any(row["device_count"] for row in rows)
    output.table(
        titles + ["device mean"] * device, [_cells(row, by, whole, device) for row in shown], right=titles[-7:], whole=titles[-7:]
    )
    _remarks(args, runs, len(rows) - len(shown))
    return 0


def _cells(row: dict[str, Any], by: tuple[str, ...], whole: float, device: bool) -> list[str]:
    cells = [row["op"], row["scope"], *(str(row[name]) for name in by if name != "scope"), f"{row['calls']:,.0f}",
             took(row["self_ns"]), f"{row['self_ns'] / whole:.1%}" if whole else "", took(row["total_ns"]), took(row["mean_ns"]),
             took(row["p99_ns"]), took(row["max_ns"])]  # fmt: skip
    return cells + ([took(row["device_ns"] / row["device_count"]) if row["device_count"] else ""] if device else [])


def _remarks(args: argparse.Namespace, runs: list[StoredRun], left: int) -> None:
    """Say what the figures rest on."""
    tables = [table.facts for run in runs for table in store.tables(run)]
    steps, observed = (sum(int(facts.get(name) or 0) for facts in tables) for name in ("steps", "observed"))
    text = f"{plural(len(runs), 'run')}, {plural(len(tables), 'table')}: {observed:,} of {plural(steps, 'step')} observed in full"
    output.remark(args, text + (f", {left} rows more (--top 0)" if left > 0 else ""))
    for name, meaning in LOST.items():
        if lost := sum(int(facts.get(name) or 0) for facts in tables):
            output.remark(args, f"{lost:,} {meaning}")
    if steps and not observed and not any(facts.get("sampling") for facts in tables):
        output.remark(
            args, "no step was observed: the run is too short for its profile. Pass ops={'every': 1} to observe all of them."
        )


def took(nanoseconds: float) -> str:
    """Return a duration in the unit it is read best in."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:,.0f} {unit}"
    return f"{nanoseconds:.0f} ns"


def _part(args: argparse.Namespace, word: str) -> tuple[StoredRun, list[dict[str, Any]], int]:
    """Open `RUN` or `RUN@rank=1` and return it, its rows, and the steps of the processes they come from, added up."""
    name, _, part = word.partition("@")
    field, equals, value = part.partition("=")
    if not part:
        stored = one(args, name)
        return stored, stored.ops(), _steps(stored, lambda _facts: True)
    if not equals or field not in ("rank", "node", "label", "role", "thread"):
        raise SettingError(
            f"{word!r} is no part of a run. Nothing was compared. Write RUN@rank=1; also node, label, role, thread."
        )
    stored = one(args, name)
    rows = [row for row in stored.ops() if str(row[field]) == value]
    # Labels, threads and workers are parts of processes, whose steps are all theirs.
    return stored, rows, _steps(stored, lambda facts: field not in ("rank", "node") or str(facts.get(field)) == value)


def _steps(stored: StoredRun, fits: Callable[[dict[str, Any]], bool]) -> int:
    return max(sum(int(table.facts.get("steps") or 0) for table in store.tables(stored) if fits(table.facts)), 1)


def _diff(args: argparse.Namespace, words: list[str]) -> int:
    if len(words) != 2:
        raise SettingError("diff compares two runs. Nothing was compared. Write: fanfold ops diff A B.")
    sides = []
    for word in words:
        stored, found, steps = _part(args, word)
        rows = {(row["op"], row["scope"]): row for row in store.together(found, ("op", "scope"))}
        if not rows:
            raise FanfoldError(f"{word} has no operator profile. Nothing was compared. Start runs with fanfold.init(ops=True).")
        sides.append((stored, rows, steps))
    changed = changes(sides[0][1], sides[1][1], sides[0][2], sides[1][2])
    shown = changed[: args.top] if args.top > 0 else changed
    if args.json:
        output.print_json(shown)
        return 0
    titles = ["op", "scope", "mean A", "mean B", "B/A", "calls/step A", "calls/step B", "own time/step"]
    output.table(titles, [_change_cells(row) for row in shown], right=titles[2:], whole=titles[2:])
    versions = [str((side[0].facts.get("packages") or {}).get("torch", "?")) for side in sides]
    output.remark(
        args, f"A {sides[0][0].name}, torch {versions[0]}; B {sides[1][0].name}, torch {versions[1]}. Slowest changes first."
    )
    return 0


def changes(a: dict[Any, Any], b: dict[Any, Any], steps_a: int, steps_b: int) -> list[dict[str, Any]]:
    """Compare two profiles row by row; first what costs the most time more per step."""
    nothing = {"mean_ns": 0.0, "calls": 0.0, "self_ns": 0.0}
    found = []
    for key in {**a, **b}:
        left, right = a.get(key, nothing), b.get(key, nothing)
        found.append({
            "op": key[0], "scope": key[1], "mean_a_ns": left["mean_ns"], "mean_b_ns": right["mean_ns"],
            "ratio": right["mean_ns"] / left["mean_ns"] if left["mean_ns"] else None,
            "calls_per_step_a": left["calls"] / steps_a, "calls_per_step_b": right["calls"] / steps_b,
            "self_per_step_ns": right["self_ns"] / steps_b - left["self_ns"] / steps_a,
        })  # fmt: skip
    return sorted(found, key=lambda row: -row["self_per_step_ns"])


def _change_cells(row: dict[str, Any]) -> list[str]:
    change = row["self_per_step_ns"]
    ratio = "new" if row["ratio"] is None else f"{row['ratio']:.2f}" if row["mean_b_ns"] else "gone"
    calls = [f"{row[name]:.1f}" for name in ("calls_per_step_a", "calls_per_step_b")]
    means = [took(row[name]) for name in ("mean_a_ns", "mean_b_ns")]
    return [row["op"], row["scope"], *means, ratio, *calls, ("+" if change >= 0 else "-") + took(abs(change))]


def _trace(args: argparse.Namespace, words: list[str]) -> int:
    from ..probes import trace

    if len(words) != 1 or not 1 <= args.steps <= trace.MAX_STEPS:
        raise SettingError(
            f"trace takes one run and 1 to {trace.MAX_STEPS} steps. Nothing was asked. Write: fanfold ops trace RUN --steps 5."
        )
    stored = one(args, words[0])
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
            f"{len(wanted) - len(there)} of {len(wanted)} traces have not come. They land in {folder} when the steps are taken; "
        )
        output.remark(args, late + "the run must have been started with ops=True.")
    return 0 if there else 1
