"""Rename a run. Its id stays the same."""

from __future__ import annotations

import argparse

from . import choose, edit

EXAMPLE = """example:
  fanfold rename quick-otter-42 baseline"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)
    parser.add_argument("name", metavar="NAME", help="the new name")


def run(args: argparse.Namespace) -> int:
    return edit.apply(args, [args.run], lambda _: {"name": args.name}, "rename", name=args.name)
