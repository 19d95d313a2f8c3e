"""Show or change the tags of runs."""

from __future__ import annotations

import argparse

from ..store import StoredRun
from . import choose, edit

EXAMPLE = """examples:
  fanfold tag quick-otter-42 --add baseline
  fanfold tag a b c --add paper --remove draft"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--add", action="append", default=[], metavar="TAG", help="add a tag (repeatable)")
    parser.add_argument("--remove", action="append", default=[], metavar="TAG", help="remove a tag (repeatable)")


def run(args: argparse.Namespace) -> int:
    def change(one: StoredRun) -> dict[str, list[str]]:
        kept = [tag for tag in dict.fromkeys([*one.tags, *args.add]) if tag not in args.remove]
        return {"tags": kept} if kept != one.tags else {}

    return edit.apply(args, args.runs, change, "tag", add=args.add, remove=args.remove)
