"""The dashboards of five tools over the same data, in one run, and the budgets of our own.

python benchmarks/dashboard.py [--data FOLDER] [--quick] [--only fanfold,MLflow] [--rounds 3] [--soak 30] [--part data]

`make bench-dashboard` runs it. The data is written once and kept under --data (writing it takes a quarter of an hour, most of it Aim's);
then about a quarter of an hour, half an hour more with `--soak 30`. A full run writes its block of docs/benchmarks.md; `--quick` is a check
of a few minutes that writes nothing. `--part data` only writes the data, so that the timing can wait for a quiet machine, `--part growth`
only compares few runs with many, `--part heap` only watches the live page's heap, which load does not disturb.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rich.console import Console

import budgets
import page
from boards import BOARDS, HERE, Size, served, written
from browser import WINDOW, visit
from budgets import Budget, Plan
from report import Sheet, cpu, short, version, write_page

PAGE = HERE.parent / "docs" / "benchmarks.md"
MARKS = ("<!-- dashboard: written by `make bench-dashboard`, do not edit by hand -->", "<!-- dashboard: end -->")
Visits = dict[str, list[dict[str, Any]]]


def race(args: argparse.Namespace, bases: dict[str, str], size: Size, console: Console) -> Visits:
    """Open every board in turn, as often as asked, each time in a fresh browser; the last time with the pointer."""
    found: Visits = {name: [] for name in bases}
    for turn in range(args.rounds + 1):
        last = turn == args.rounds
        for name, base in bases.items():
            hover = (2 if args.quick else 5) if last else 0
            one = visit(
                BOARDS[name],
                base,
                size,
                limit=args.limit,
                hover=hover,
                picture=args.data / f"{name.lower()}.png" if last else None,
            )
            found[name] += [one] if turn else []  # the first visit only warms the servers up: some import half of themselves then
            console.print(f"  {'' if turn else 'warming up '}{name}: {one.get('failed') or _seconds(one['seconds'])}")
    return found


def median(visits: list[dict[str, Any]], figure: str) -> float | None:
    values = [one[figure] for one in visits if figure in one]
    return statistics.median(values) if values else None


def race_sheet(visits: Visits, seconds: dict[str, float], size: Size) -> Sheet:
    ours = median(visits.get("fanfold", []), "seconds")
    head = [
        "",
        "charts drawn",
        "to fanfold",
        "charts, what is drawn",
        "main thread",
        "heap",
        "downloaded",
        "of it JS",
        "hover: frame p95",
        "writing, CPU",
    ]
    rows = [[name, *_cells(name, ones, ours), _seconds(seconds.get(name))] for name, ones in visits.items()]
    note = (
        f"{size.points:,} points, a {WINDOW['width']} x {WINDOW['height']} window, fresh Chromium, servers that have read their data and been visited once: navigation "
        f"until at least four visible charts (fanfold: all of them) hold their data, plus one frame. Medians of {max(map(len, visits.values()))}, in turns; "
        "main thread as CPU time; hover once, the pointer moving over the first chart 30 times a second. Heap after a collection. Writing: once, through the tool's own calls "
        "(MLflow and Trackio: in bulk)."
    )
    return Sheet(f"{size.runs} runs x {size.metrics} metrics x {size.steps:,} steps, side by side", head, rows, note)


def _cells(name: str, ones: list[dict[str, Any]], ours: float | None) -> list[str]:
    took = median(ones, "seconds")
    if took is None:
        return [ones[-1]["failed"], *["-"] * 7]
    failed = sum("failed" in one for one in ones)
    hover = median(ones, "hover")
    return [
        _seconds(took) + (f" ({failed} of {len(ones)} failed)" if failed else ""),
        f"{short(took / ours)}x" if ours else "-",
        f"{median(ones, 'charts'):.0f}: {BOARDS[name].note}",
        _seconds(median(ones, "main")),
        f"{median(ones, 'heap'):,.0f} MB",
        f"{median(ones, 'mb'):,.2f} MB",
        f"{median(ones, 'js'):,.2f} MB",
        "-" if hover is None else f"{hover:,.0f} ms",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s" if value < 20 else f"{value:,.0f} s"


def promises(visits: Visits) -> list[Budget]:
    """Return the budgets that the race itself answers: how much sooner we draw, and how smooth the pointer is."""
    ours = median(visits["fanfold"], "seconds")
    others = {name: took for name, ones in visits.items() if name != "fanfold" and (took := median(ones, "seconds")) is not None}
    found = []
    if others:
        fastest = min(others, key=lambda name: others[name])
        part = ours / others[fastest] if ours else None
        found.append(
            Budget(f"time to charts, as a part of the fastest other's ({fastest})", part, 0.2, "", "a fifth is 5x sooner")
        )
    found.append(Budget("hover frame p95", median(visits["fanfold"], "hover"), 25, "ms"))
    found.append(Budget("hover: main thread", median(visits["fanfold"], "hover_main"), 30, "%", "CPU time, of a core"))
    return found


def asked(questions: dict[str, Callable[[], list[Budget]]], console: Console) -> list[Budget]:
    """Measure the budgets in turn; what does not get there is a row that says so."""
    from playwright.sync_api import Error

    found: list[Budget] = []
    for what, ask in questions.items():
        console.print(f"  {what}")
        try:
            found += ask()
        except (Error, OSError, HTTPException) as error:
            found.append(Budget(what, None, 0, "", str(error).splitlines()[0][:120]))
    return found


def own(plan: Plan, base: str, urls: dict[str, str], scratch: Path) -> dict[str, Callable[[], list[Budget]]]:
    """Return what we promise of our own dashboard, the long ones last."""
    return {
        "bytes": lambda: budgets.first_page(base, urls),
        "requests": lambda: budgets.series_request(base, plan),
        "extremes": lambda: budgets.extremes(base, plan),
        "a long series": lambda: budgets.long_series(plan),
        "pixels of a long series": lambda: page.pixels(plan),
        "latest values": lambda: budgets.latest_values(plan),
        "table": lambda: page.table(plan),
        "growth": lambda: page.grows(plan),
        "merging": lambda: budgets.merge_long(plan, scratch),
        "live": lambda: page.live(plan, scratch),
        "heap": lambda: page.heap(plan, scratch),
    }


def facts(names: list[str]) -> list[str]:
    packages = ", ".join(f"{BOARDS[name].package} {version(BOARDS[name].package)}" for name in names)
    return [f"{cpu()}, {os.cpu_count()} cores, no GPU (software raster), load {os.getloadavg()[0]:.1f} before", packages]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "scratch" / "dashboard", help="where written data is kept between runs"
    )
    parser.add_argument("--quick", action="store_true", help="10 runs x 5 metrics x 200 steps, one round; writes no page")
    parser.add_argument("--only", default=",".join(BOARDS), help="which boards")
    parser.add_argument("--rounds", type=int, help="how often each is opened (3, quick: 1)")
    parser.add_argument("--limit", type=float, default=120, help="seconds a board may take to draw")
    parser.add_argument("--soak", type=float, help="minutes of the live heap check (0.5, quick: 0.1)")
    parser.add_argument("--part", choices=("data", "heap", "growth"), help="only this, and no page is written")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.soak = args.soak or (0.1 if args.quick else 0.5)
    args.data = args.data.resolve()
    args.names = [name for name in BOARDS if name in {"fanfold", *args.only.split(",")}]
    return args


def write_data(args: argparse.Namespace, plan: Plan, console: Console) -> tuple[dict[str, Path], dict[str, float]]:
    """Write what is not there yet; return each board's folder, and the seconds its writing took."""
    folders, seconds = {}, {}
    for name in args.names:
        folders[name], seconds[name] = written(BOARDS[name], args.data, plan.size)
        console.print(f"{name}: data written in {seconds[name]:.0f} s of CPU")
    budgets.prepare(plan)
    return folders, seconds


def measure(args: argparse.Namespace, plan: Plan, scratch: Path, console: Console) -> tuple[list[Sheet], dict[str, Any]]:
    """Open all boards, then ask ours what we promise of it."""
    folders, seconds = write_data(args, plan, console)
    with contextlib.ExitStack() as servers:
        bases = {name: servers.enter_context(served(BOARDS[name], folders[name], plan.size)) for name in args.names}
        visits = race(args, bases, plan.size, console)
        sheet = race_sheet(visits, seconds, plan.size)
        sheet.print(console)  # now: the rest takes a while
        urls = next((one["urls"] for one in visits["fanfold"] if "urls" in one), {})
        kept = promises(visits) + asked(own(plan, bases["fanfold"], urls, scratch), console)
    return [sheet, budget_sheet(kept)], {"visits": visits, "budgets": [vars(one) for one in kept]}


def budget_sheet(kept: list[Budget]) -> Sheet:
    return Sheet("The dashboard's own budgets", ["", "measured", "at most", "kept", "how"], [one.row() for one in kept])


def main() -> None:
    args, console = arguments(), Console(width=200)
    before = facts(args.names)
    plan = Plan(args.data, Size(10, 5, 200) if args.quick else Size(), args.quick, args.soak * 60)
    args.data.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fanfold-dashboard-") as scratch:
        os.environ["FANFOLD_CACHE_DIR"] = f"{scratch}/cache"
        if args.part == "data":
            write_data(args, plan, console)
            return
        if args.part == "growth":
            budget_sheet(asked({"growth": lambda: page.grows(plan)}, console)).print(console)
            return
        if args.part == "heap":
            budget_sheet(asked({"heap": lambda: page.heap(plan, Path(scratch))}, console)).print(console)
            return
        sheets, found = measure(args, plan, Path(scratch), console)
    sheets[1].print(console)
    (args.data / "last.json").write_text(json.dumps(found, indent=1))
    if not args.quick and set(args.names) == set(BOARDS):
        write_page(PAGE, before, sheets, marks=MARKS)


if __name__ == "__main__":
    main()
