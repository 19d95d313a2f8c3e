"""Write a report of some runs to one HTML file: charts, config, metrics, latest media and a note.

The file is self-contained: it opens in any browser, offline and without a server.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import FanfoldError, SettingError
from ..journal.files import replace_text
from ..report import Options, page
from ..store import StoredRun
from . import choose, output
from .text import plural, size

EXAMPLE = """examples:
  fanfold report -                                the newest run, as report.html
  fanfold report run-a run-b -o compare.html --keys loss 'val/*' --smooth 0.5
  fanfold report run-a --text NOTE.md --title 'What the warm-up does'"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="where to write (default: report.html)")
    parser.add_argument("--keys", nargs="+", action="extend", metavar="KEY",
                        help="draw these keys (patterns such as 'val/*'; default: the first two dozen)")  # fmt: skip
    parser.add_argument("--text", metavar="FILE", help="a Markdown note to put above the charts")
    parser.add_argument("--title", metavar="TEXT", help="the report's title")
    parser.add_argument("--x", metavar="AXIS", help="step, time, relative, or a key (default: as define_metric says, else step)")
    parser.add_argument("--smooth", type=float, default=0.0, metavar="N", help="0 to 1; the raw values stay visible")
    parser.add_argument("--log", action="store_true", help="draw on a logarithmic scale")


def run(args: argparse.Namespace) -> int:
    if not 0.0 <= args.smooth <= 1.0:
        raise SettingError(f"--smooth {args.smooth} is not between 0 and 1. Nothing was written. Try 0.6.")
    note = _note(args.text)
    stored = choose.several(args, args.runs)
    options = Options(_keys(stored, args.keys), args.title, note, args.x, args.smooth, args.log)
    text, found = page(stored, options)
    target = Path(args.output)
    replace_text(target, text)
    facts = {"file": str(target), "bytes": target.stat().st_size, **found}
    if args.json:
        output.print_json(facts)
    else:
        _say(args, facts)
    return 0


def _note(path: str | None) -> str:
    if path is None:
        return ""
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is not UTF-8 text. Nothing was written. Save the note as UTF-8.") from error


def _keys(stored: list[StoredRun], patterns: list[str] | None) -> list[str] | None:
    """Return the keys that patterns name in any of the runs; one that names none is an error."""
    if patterns is None:
        return None
    found: dict[str, None] = {}
    for pattern in patterns:
        missing: FanfoldError | None = None
        hits: list[str] = []
        for one in stored:
            try:
                hits += choose.keys_of(one, [pattern], undone="written")
            except FanfoldError as error:
                missing = error
        if not hits and missing is not None:
            raise missing
        found.update(dict.fromkeys(hits))
    return list(found)


def _say(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    print(facts["file"])
    parts = [plural(len(facts["runs"]), "run"), plural(len(facts["keys"]), "chart"), plural(facts["pictures"], "picture")]
    parts += [plural(facts[f"{word}s"], word) for word in ("table", "histogram", "text") if facts[f"{word}s"]]
    output.remark(args, f"{', '.join(parts)}, {size(facts['bytes'])}.")
    for line in facts["left_out"][:5]:
        output.remark(args, f"left out: {line}")
