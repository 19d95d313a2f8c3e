"""Hide runs from lists without deleting anything; --undo shows them again."""

from __future__ import annotations

import argparse

from . import choose, edit

EXAMPLE = """examples:
  fanfold archive old-run-1 old-run-2
  fanfold archive old-run-1 --undo"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--undo", action="store_true", help="show the runs again")


def run(args: argparse.Namespace) -> int:
    return edit.apply(args, args.runs, lambda _: {"archived": not args.undo}, "archive", archived=not args.undo)
