"""Move runs to another project. Journals, media and artifacts go with them; deliveries to trackers continue.

A run that is still being written is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..errors import SettingError
from ..store import StoredRun
from ..store.move import check, move
from . import choose, output
from .text import plural

EXAMPLE = """examples:
  fanfold mv quick-otter-42 --project baselines
  fanfold ls --filter 'tag:old' --json | jq -r '.[].id' | xargs fanfold mv --project archive"""


PROJECT = "the project to move the runs to"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--force", action="store_true", help="also runs that may still be written")


def run(args: argparse.Namespace) -> int:
    return to_project(args, "mv", "moved", move)


def to_project(args: argparse.Namespace, command: str, done: str, act: Callable[..., Path]) -> int:
    """Move or copy the named runs to --project, which here is where they go, not where they are looked for."""
    target, args.project = args.project, None
    if not target:
        raise SettingError(f"`fanfold {command}` needs the project to go to. Nothing was {done}. Add --project NAME.")
    root = choose.folder(args, command)
    stored: list[StoredRun] = choose.several(args, args.runs)
    for one in stored:
        check(one, root, target, force=args.force, done=done)  # all of them first: either every run goes, or none
    places = {one.id: act(one, root, target, force=args.force) for one in stored}
    if args.json:
        output.print_json([{"id": id, "project": target, "path": str(place)} for id, place in places.items()])
    else:
        output.remark(args, f"{done} {plural(len(stored), 'run')} to {target}.")
    return 0
