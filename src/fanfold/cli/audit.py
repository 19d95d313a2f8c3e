"""Print a store's audit log: runs deleted, tokens created and revoked, logins and refused logins; newest last."""

from __future__ import annotations

import argparse
import time
from typing import Any

import msgspec

from . import output, places

EXAMPLE = """examples:
  fanfold server audit --store /data/runs
  fanfold server audit --json --limit 100000 | jq 'select(.action == "run deleted")'"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="DIR", help="the gateway's store (default: as --dir)")
    parser.add_argument("--limit", type=int, default=1000, metavar="N", help="show the newest N entries (default: 1000)")


def run(args: argparse.Namespace) -> int:
    _, audit = places.books(args)
    found = [entry for entry in audit.read(args.limit) if args.project in (None, entry.project)]
    if not args.json:
        return output.listed(args, found, ("TIME", "WHAT", "BY", "FROM", "RUN", "DETAIL"), _cells, empty="no entries.")
    for entry in found:
        output.print_json(msgspec.to_builtins(entry), line=True)
    return 0 if found else 1


def _cells(entry: Any) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
    run = f"{entry.project}/{entry.run}" if entry.run else ""
    return when, entry.action, entry.by, entry.peer, run, ", ".join(f"{name} {value}" for name, value in entry.detail.items())
