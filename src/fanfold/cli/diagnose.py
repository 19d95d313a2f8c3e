"""Find out what went wrong in a run, or what slows it down, with evidence.

exit codes: 0 nothing is wrong (notes may be printed), 3 something is.
"""

from __future__ import annotations

import argparse

from ..tools.answers import diagnosis
from . import choose, output, remote
from .text import clean

EXAMPLE = """examples:
  fanfold diagnose -
  fanfold diagnose quick-otter-42 --json | jq -r '.findings[].text'"""

SYMBOLS = {"error": "✗", "warning": "!", "info": "·"}
WRONG = 3


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=choose.RUN_HELP)


def run(args: argparse.Namespace) -> int:
    if remote.is_gateway(args):
        answer = remote.ask(args, "diagnose", run=remote.named(args, args.run))
    else:
        answer = diagnosis(choose.store(args), choose.one(args, args.run))
    found, findings = answer["run"], answer["findings"]
    if args.json:
        output.print_json(answer)
    else:
        print(f"{output.mark(found['status'])}  {clean(found['name'])}  {clean(found['id'])}")
        for one in findings:
            print(f"{SYMBOLS[one['severity']]} {clean(one['text'])}")
        if not findings:
            print("Nothing unusual was found.")
    return WRONG if any(one["severity"] != "info" for one in findings) else 0
