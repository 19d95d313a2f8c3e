"""Compare two runs: config, metrics, code, packages and environment. Only what differs is shown; the rest is counted."""

from __future__ import annotations

import argparse
from typing import Any

from ..drawing.numbers import plural
from ..tools.answers import compared
from . import choose, output, remote
from .text import clean, number, short

EXAMPLE = """examples:
  fanfold compare quick-otter-42 calm-heron-17
  fanfold compare a b --json | jq '.config.differ'"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help=choose.RUN_HELP)
    parser.add_argument("b", metavar="B", help="the other run")


def run(args: argparse.Namespace) -> int:
    if remote.is_gateway(args):
        found = remote.ask(args, "compare", a=remote.named(args, args.a), b=remote.named(args, args.b))
    else:
        found = compared(choose.one(args, args.a), choose.one(args, args.b))
    if args.json:
        output.print_json(found)
        return 0
    a, b = (clean(one["name"]) for one in found.pop("runs"))
    for section, part in found.items():
        differ = part["differ"]
        print(f"{section}: {plural(len(differ), 'difference')}, {part['same']} the same")
        if differ:
            rows = [[name, _cell(one), _cell(other)] for name, (one, other) in differ.items()]
            output.table([section, a, b], rows)
            print()
    return 0


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else short(value, 60)
