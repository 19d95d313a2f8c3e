"""Show or change the tags of runs."""

from __future__ import annotations

import argparse

from ..tools.answers import tagged
from . import choose, edit

EXAMPLE = """examples:
  fanfold tag quick-otter-42 --add baseline
  fanfold tag a b c --add paper --remove draft"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--add", action="append", default=[], metavar="TAG", help="add a tag (repeatable)")
    parser.add_argument("--remove", action="append", default=[], metavar="TAG", help="remove a tag (repeatable)")


def run(args: argparse.Namespace) -> int:
    words = {"add": args.add, "remove": args.remove}
    return edit.apply(args, args.runs, lambda one: tagged(one, **words), "tag", **words)
