"""Train a small real model in two processes and show what was recorded.

It needs torch and about 15 seconds, and leaves one run in the runs' directory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from ..settings import find_directory
from . import choose, output, show, show_sections
from .text import clean, number

EXAMPLE = """examples:
  fanfold demo
  fanfold demo --dir /tmp/try --steps 50"""

PROJECT = "demo"
FOLDED = {"loss": "loss", "accuracy": "accuracy", "throughput": "characters/s", "step_seconds": "seconds/step"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=450, metavar="N", help="how long to train (default: 450 steps)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="how many processes (default: 2)")


def run(args: argparse.Namespace) -> int:
    from . import demo_training

    root = find_directory(args.dir)
    project = args.project or PROJECT
    args.project = project
    run_id = demo_training.train(root, project, ranks=args.ranks, steps=args.steps, quiet=args.quiet or args.json)
    stored = choose.one(args, run_id)
    if args.json:
        output.print_json(show.facts(stored))
        return 0
    printed = show_sections.Report(stored)
    printed.print()
    if len(stored.ranks) > 1:
        ranks(printed)
    hints(printed, args)
    return _stay(printed)


def ranks(printed: show_sections.Report) -> None:
    """Show what folding over ranks tells: the mean, and which rank was lowest and highest."""
    printed.line(("Over ranks", "bold"), (", at the last step", "dim"))
    known = set(printed.run.keys())
    for key in (key for key in FOLDED if key in known):
        fold = printed.run.series(key, fold="mean")
        low, high, low_rank, high_rank = fold.min, fold.max, fold.min_rank, fold.max_rank
        if low is None or high is None or low_rank is None or high_rank is None:
            continue
        printed.line((f"  {FOLDED[key]:<14}", "dim"), f"mean {number(float(fold.values[-1])):>8}",
                     (f"   lowest {number(float(low[-1])):>8} (rank {low_rank[-1]})", "green"),
                     (f"   highest {number(float(high[-1])):>8} (rank {high_rank[-1]})", "yellow"))  # fmt: skip
    printed.line()


def hints(printed: show_sections.Report, args: argparse.Namespace) -> None:
    """Say where the data is and what to try next."""
    run = printed.run
    place = f" --dir {args.dir}" if args.dir else ""
    where = f", dir={clean(args.dir)!r}" if args.dir else ""
    printed.line(("Next", "bold"))
    call = _callable_as()
    for command, what in (
        (f"{call} ls{place}", "all runs"),
        (f"{call} show -{place}", "the newest run, as above"),
        (f"{call} tail - -f{place}", "its metrics, live while it trains"),
        (f"{call} export - -o demo.csv{place}", "its metrics as a table"),
    ):
        printed.line("  ", (f"{clean(command):<{31 + len(call) + len(place)}}", "cyan"), (what, "dim"))
    printed.line("  ", ("python", "cyan"), (" >>> ", "dim"), f"fanfold.open({clean(run.id)!r}{where}).to_pandas()")
    printed.line()


def _callable_as() -> str:
    """Return how this fanfold is called from where the user stands: by name if that is it, else by its path."""
    script = Path(sys.executable).with_name("fanfold")
    found = shutil.which("fanfold")
    if found is not None and Path(found).resolve() == script.resolve():
        return "fanfold"
    if script.exists():
        return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    return f"{sys.executable} -m fanfold"


def _stay(printed: show_sections.Report) -> int:
    """Stay open on a terminal until Ctrl-C, unless DEMO_EXIT=1."""
    if os.environ.get("DEMO_EXIT") == "1" or not sys.stdin.isatty():
        return 0
    printed.line(("Try the commands above in another terminal. Ctrl-C ends the demo.", "dim"))
    try:
        sys.stdin.read()
    except KeyboardInterrupt:
        printed.line()
    return 0
