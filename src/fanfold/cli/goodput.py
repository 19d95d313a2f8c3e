"""Show where the time of a run went: steps, repeated steps, restarts, start-up, checkpoints, evaluation, waiting, idle.

  fanfold goodput RUN             one run: its wall time, as the mean over its ranks
  fanfold goodput --project P     all runs of a project, in rank hours (add --by node, gpu, user, week, project or run)

The parts add up to the wall time exactly. Time that nothing recorded explains is called unknown.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from ..drawing.numbers import plural
from ..errors import FanfoldError, SettingError
from ..store import StoredRun
from ..store.goodput import PARTS, Goodput, Timeline, goodput, timelines
from ..tools.answers import named
from . import choose, output
from .text import clean

EXAMPLE = """examples:
  fanfold goodput -
  fanfold goodput --project llm
  fanfold goodput --project llm --by user,week --json"""

BY = ("node", "gpu", "user", "week", "project", "run")
BAR = 60
# The bar's characters, which also mark the rows below it, and their colors.
SIGNS = {
    "productive": ("█", "green"), "repeated": ("▓", "red"), "restart": ("x", "red"), "startup": ("▒", "yellow"),
    "checkpoint": ("c", "blue"), "evaluation": ("e", "cyan"), "data": ("d", "magenta"), "ranks": ("w", "magenta"),
    "idle": ("·", "white"), "unknown": ("?", "white"),
}  # fmt: skip
HINTS = {
    "checkpoint": "saving",
    "evaluation": "evaluations",
    "data": "waits for data",
    "ranks": "waits for other ranks (add StragglerCallback)",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("--by", metavar="A,B,…", help=f"a row for each: {', '.join(BY)}")
    choose.add_filters(parser)


def run(args: argparse.Namespace) -> int:
    by = [word.strip() for word in (args.by or "").split(",") if word.strip()]
    for word in by:
        choose.check_known("--by", word, BY)
    if not args.runs and not args.project and not choose.filtered(args):
        raise SettingError("goodput needs a run, or --project. Nothing was computed. `fanfold goodput -` is the newest run.")
    if len(args.runs) == 1 and not by:
        return _one(args, choose.one(args, args.runs[0]))
    return _several(args, choose.chosen(args), by)


def _one(args: argparse.Namespace, found: StoredRun) -> int:
    measured = goodput(found)
    if args.json:
        output.print_json({"run": named(found), **measured.facts()})
        return 0
    console = output.console()
    console.print(output.heading(found))
    more = f", {plural(measured.attempts, 'attempt')}" if measured.attempts > 1 else ""
    more += f", mean of {measured.ranks} ranks" if measured.ranks > 1 else ""
    console.print(f"goodput {measured.share:.1%} of {_hours(measured.wall_ns)}{more}")
    _bar(console, measured)
    rows = [part for part, ns in measured.ns.items() if ns]
    output.table(["", "part", "time", "share"], ([SIGNS[part][0], PARTS[part], _hours(measured.ns[part]),
                 f"{measured.ns[part] / (measured.wall_ns or 1):.1%}"] for part in rows), right=["time", "share"])  # fmt: skip
    _remark(args, measured.unmeasured)
    return 0


def _bar(console: Any, measured: Goodput) -> None:
    from rich.text import Text

    line, done, total = Text(), 0, 0
    for part, (sign, color) in SIGNS.items():
        total += measured.ns[part]
        upto = round(BAR * total / (measured.wall_ns or 1))
        line.append(sign * (upto - done), style=color)
        done = upto
    console.print(line)


def _remark(args: argparse.Namespace, unmeasured: list[str]) -> None:
    if unmeasured:
        names = ", ".join(HINTS[kind] for kind in unmeasured)
        output.remark(args, f"Nothing was recorded about {names}: if they took time, it is counted as steps or unknown.")


def _several(args: argparse.Namespace, runs: list[StoredRun], by: list[str]) -> int:
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    unreadable = 0
    for found in runs:
        try:
            lives = timelines(found)
        except (FanfoldError, OSError):
            unreadable += 1
            continue
        for one in lives:
            key = tuple(_group(word, found, one) for word in by)
            into = groups.setdefault(key, {"runs": set(), "steps": 0, "ns": dict.fromkeys(PARTS, 0)})
            into["runs"].add((found.project, found.id))
            into["steps"] += one.steps
            for part, ns in one.ns.items():
                into["ns"][part] += ns
    rows = [_row(dict(zip(by, key, strict=True)), into) for key, into in groups.items()]
    rows.sort(key=lambda row: -row["rank_hours"])
    shown = [part for part in PARTS if any(row["shares"][part] for row in rows)]
    numbers = ["runs", "rank hours", "goodput", *shown]

    def cells(row: dict[str, Any]) -> list[str]:
        shares = [f"{row['shares'][part]:.1%}" if row["shares"][part] else "" for part in shown]
        names = [clean(str(row[word])) for word in by]
        return [*names, str(row["runs"]), f"{row['rank_hours']:,.2f}", f"{row['goodput']:.1%}", *shares]

    if unreadable:
        output.remark(args, f"{plural(unreadable, 'run')} could not be read and {'is' if unreadable == 1 else 'are'} left out.")
    if not rows and not unreadable:
        choose.report_none(args)
    return output.listed(args, rows, [*by, *numbers], cells, right=numbers, whole=numbers)


def _group(word: str, run: StoredRun, one: Timeline) -> str:
    if word == "week":
        year, week, _ = datetime.datetime.fromtimestamp(one.since / 1e9, datetime.timezone.utc).isocalendar()
        return f"{year}-W{week:02}"
    return str({
        "node": one.node, "gpu": f"{one.node}:{one.gpu}", "user": run.facts.get("user") or "unknown", "project": run.project,
        "run": run.id,
    }[word])  # fmt: skip


def _row(names: dict[str, str], into: dict[str, Any]) -> dict[str, Any]:
    total = sum(into["ns"].values())
    shares = {part: ns / total if total else 0.0 for part, ns in into["ns"].items()}
    seconds = {part: ns / 1e9 for part, ns in into["ns"].items()}
    return {**names, "runs": len(into["runs"]), "rank_hours": total / 3.6e12, "goodput": shares["productive"],
            "rank_steps": into["steps"], "seconds": seconds, "shares": shares}  # fmt: skip


def _hours(ns: int) -> str:
    seconds = ns / 1e9
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
