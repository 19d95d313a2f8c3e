"""Bring the run index and the segments (journals as columns, faster to read) up to date now.

Both are caches in the user's cache folder. They are rebuilt by themselves when they are missing or damaged, and the dashboard
and gateways merge in the background, so this is rarely needed. Journals do not change; runs can be written and read meanwhile.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..drawing.numbers import plural
from ..journal import directory
from ..store import catalogue
from ..store.merge import Merged, merge
from . import choose, output
from .text import size

EXAMPLE = """examples:
  fanfold merge
  fanfold merge my-run
  fanfold merge --follow"""

EVERY_SECONDS = 60.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{choose.RUN_HELP} (default: all)")
    parser.add_argument("--follow", action="store_true", help="keep running and merge again every minute, until stdin is closed")


def run(args: argparse.Namespace) -> int:
    root, began = choose.folder(args, "merge"), time.monotonic()
    if args.follow:
        os.nice(10)  # readers and training come first
        runs, gone = 0, 0
    else:
        runs, gone = catalogue.reindex(root, progress=lambda found, total: output.progress(args, found, total, "Reading runs"))
    done = list(_merged(args, root))
    while args.follow and not _stdin_closed(EVERY_SECONDS):
        done += _merged(args, root)
    points, read, written = (sum(getattr(one, name) for one in done) for name in ("points", "read", "written"))
    if args.json:
        facts = {"dir": str(root), "runs": runs, "gone": gone, "segments": len(done)}
        output.print_json({**facts, "points": points, "read": read, "written": written, "seconds": time.monotonic() - began})
    else:
        output.remark(args, f"{plural(runs, 'run')} in {root}; {plural(gone, 'run')} gone.")
        output.remark(args, f"merged {plural(points, 'point')}: {size(read)} of journals to {size(written)} of segments.")
    return 0


def _merged(args: argparse.Namespace, root: Path) -> Iterator[Merged]:
    named = [one.path for one in choose.several(args, args.runs)]
    folders: Iterable[Path] = named or list(directory.run_directories(root, args.project))
    for folder in folders:
        for journal in directory.journal_files(folder):
            yield from merge(journal)


def _stdin_closed(seconds: float) -> bool:
    """Wait; return whether the process that started this one has exited or closed our stdin."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)
