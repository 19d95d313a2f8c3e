"""Write a report of some runs to one HTML file: charts, config, metrics, latest media and a note.

The file is self-contained: it opens in any browser, offline and without a server.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..drawing.numbers import plural
from ..errors import RunNotFound, SettingError
from ..report import ReportOptions, page
from ..report.views import ReportView, saved
from ..store import StoredRun
from . import choose, output
from .text import size

EXAMPLE = """examples:
  fanfold report -                                the newest run, as report.html
  fanfold report run-a run-b -o compare.html --keys loss 'val/*' --smooth 0.5
  fanfold report --project llm --view best --view ablation
  fanfold report run-a --text NOTE.md --title 'What the warm-up does'"""

MOST_RUNS = 24  # of a view, if none are named


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help=f"{choose.RUN_HELP} (default, with --view: the runs it shows)")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="where to write (default: report.html)")
    parser.add_argument("--keys", nargs="+", action="extend", metavar="KEY", help="draw these keys (patterns such as 'val/*')")
    parser.add_argument("--text", metavar="FILE", help="a Markdown note to put above the charts")
    parser.add_argument("--title", metavar="TEXT", help="the report's title")
    parser.add_argument("--x", metavar="AXIS", help="step, time, relative, or a key (default: as define_metric says, else step)")
    parser.add_argument("--smooth", type=float, default=0.0, metavar="N", help="0 to 1; the raw values stay visible")
    parser.add_argument("--log", action="store_true", help="draw on a logarithmic scale")
    parser.add_argument(
        "--view", action="append", default=[], metavar="NAME", help="draw a saved view of the project (repeatable)"
    )


def run(args: argparse.Namespace) -> int:
    if not 0.0 <= args.smooth <= 1.0:
        raise SettingError(f"--smooth {args.smooth} is not between 0 and 1. Nothing was written. Try 0.6.")
    note = _note(args.text)
    if not args.runs and not args.view:
        raise SettingError(
            "fanfold report needs a run, or --view NAME. Nothing was written. `fanfold report -` takes the newest run."
        )
    stored = choose.several(args, args.runs)
    views = _views(args, stored) if args.view else []
    if not stored:
        shown = {run.id: run for _, some in views for run in some}
        stored = list(shown.values())[:MOST_RUNS]
        views = [(view, [run for run in some if run in stored]) for view, some in views]
        if not stored:
            raise RunNotFound(f"no run is shown in {', '.join(args.view)}. Nothing was written. Name runs.")
        if len(shown) > MOST_RUNS:
            output.remark(args, f"the newest {MOST_RUNS} of {len(shown)} runs are in the report. Name runs for others.")
    keys = choose.keys_of(stored, args.keys, undone="written") if args.keys else None
    options = ReportOptions(keys, args.title, note, args.x, args.smooth, args.log, views)
    text, found = page(stored, options)
    target = Path(args.output)
    replace_text(target, text)
    facts: dict[str, Any] = {"file": str(target), "bytes": target.stat().st_size, **found}
    if args.json:
        output.print_json(facts)
        return 0
    print(facts["file"])
    parts = [plural(len(facts["runs"]), "run"), plural(len(facts["keys"]), "chart"), plural(facts["pictures"], "picture")]
    parts += [plural(facts[f"{word}s"], word) for word in ("sound", "table", "histogram", "text", "page") if facts[f"{word}s"]]
    output.remark(args, f"{', '.join(parts)}, {size(facts['bytes'])}.")
    for line in facts["left_out"][:5]:
        output.remark(args, f"left out: {line}")
    return 0


def _views(args: argparse.Namespace, stored: list[StoredRun]) -> list[tuple[ReportView, list[StoredRun]]]:
    """Return the saved views, each with the runs it shows: of those named, or of the whole project."""
    projects = {run.project for run in stored} or {args.project} - {None}
    if len(projects) != 1:
        raise SettingError(
            "--view is about one project. Nothing was written. Name it with --project, or name runs of one project."
        )
    project = projects.pop()
    store = choose.store(args)
    runs = stored or [run.reopened() for run in store.listed(project) if not run.archived]
    return [(view, view.shown(store, runs)) for view in saved(store, project, args.view)]


def _note(path: str | None) -> str:
    if path is None:
        return ""
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is not UTF-8 text. Nothing was written. Save the note as UTF-8.") from error
