"""Rebuild the run index from the journals, and drop entries of runs that no longer exist.

The index and the segments are caches: results are correct without this command, and it is safe at any time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from ..store import catalogue
from . import choose, output
from .text import plural

EXAMPLE = """example:
  fanfold reindex --dir /data/runs"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Take nothing of its own."""


def run(args: argparse.Namespace) -> int:
    def watch(folders: Iterable[Path], total: int) -> Iterable[Path]:
        return output.progress(args, folders, total, "Reading runs")

    root = choose.folder(args, "reindex")
    found, gone = catalogue.reindex(root, progress=watch)
    if args.json:
        output.print_json({"dir": str(root), "runs": found, "gone": gone})
    else:
        output.remark(args, f"{plural(found, 'run')} in {root}; {plural(gone, 'run')} gone.")
    return 0
