"""Set the notes of a run, or add a line to them."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from ..tools.answers import noted
from . import choose, edit

EXAMPLE = """examples:
  fanfold note quick-otter-42 "diverged after the data change"
  fanfold note - --append "lower lr next time"
  git log -1 | fanfold note - -"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("text", metavar="TEXT", help='the notes; "" removes them, - reads them from stdin')
    parser.add_argument("--append", action="store_true", help="add to the notes instead of replacing them")


def run(args: argparse.Namespace) -> int:
    text = sys.stdin.read().rstrip("\n") if args.text == "-" else args.text
    change = partial(noted, text=text, append=args.append)
    return edit.apply(args, [args.run], change, "note", text=text, append=args.append)
