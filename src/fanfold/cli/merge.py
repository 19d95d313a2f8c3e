"""Turn finished or long journals into column segments, which are faster to read and a third of the size.

Segments are a cache in the user's cache folder. Journals do not change, and runs can be written and read meanwhile.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Iterator

from ..journal import directory
from ..store.merge import Merged, merge
from . import choose, output
from .text import plural, size

EXAMPLE = """examples:
  fanfold merge
  fanfold merge my-run
  fanfold merge --follow"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{choose.RUN_HELP} (default: all)")
    parser.add_argument("--follow", action="store_true", help="keep running and merge again every minute, until stdin is closed")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="seconds between merges with --follow")


def run(args: argparse.Namespace) -> int:
    if args.follow:
        os.nice(10)  # readers and training come first
    began, done = time.monotonic(), list(_merged(args))
    while args.follow and not _closed(args.every):
        done += _merged(args)
    _report(args, done, time.monotonic() - began)
    return 0


def _merged(args: argparse.Namespace) -> Iterator[Merged]:
    if args.runs:
        folders = [one.path for one in choose.several(args, args.runs)]
    else:
        folders = list(directory.run_directories(choose.folder(args, "merge"), args.project))
    for folder in output.progress(args, folders, len(folders), "Merging"):
        for journal in directory.journal_files(folder):
            yield from merge(journal)


def _closed(seconds: float) -> bool:
    """Wait; tell whether whoever started this is gone, which its end of our stdin tells."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


def _report(args: argparse.Namespace, done: list[Merged], seconds: float) -> None:
    points, read, written = sum(m.points for m in done), sum(m.read for m in done), sum(m.written for m in done)
    if args.json:
        output.print_json({"segments": len(done), "points": points, "read": read, "written": written, "seconds": seconds})
    else:
        shown = f"{plural(points, 'point')}: {size(read)} of journals to {size(written)} of segments in {seconds:.1f} s"
        output.remark(args, shown if done else "nothing to merge.")
