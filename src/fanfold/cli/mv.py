"""Move runs to another project. Journals, media and artifacts go with them; trackers keep their remote run.

A run that is still being written or delivered is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..errors import SettingError
from ..store import StoredRun
from ..store.move import move
from . import choose, output
from .text import plural

EXAMPLE = """examples:
  fanfold mv quick-otter-42 --project baselines
  fanfold ls --filter 'tag:old' --json | jq -r '.[].id' | xargs fanfold mv --project archive"""


PROJECT = "the project to move the runs to"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--force", action="store_true", help="also runs that may still be written or delivered")


def run(args: argparse.Namespace) -> int:
    return to_project(args, "mv", "moved", move)


def to_project(args: argparse.Namespace, command: str, done: str, act: Callable[..., list[Path]]) -> int:
    """Move or copy the named runs to --project, which here is where they go, not where they are looked for."""
    target, args.project = args.project, None
    if not target:
        raise SettingError(f"`fanfold {command}` needs the project to go to. Nothing was {done}. Add --project NAME.")
    root = choose.folder(args, command)
    stored: list[StoredRun] = choose.several(args, args.runs)
    places = act(stored, root, target, force=args.force)
    if args.json:
        runs = zip(stored, places, strict=True)
        output.print_json([{"id": one.id, "project": target, "path": str(place)} for one, place in runs])
    else:
        away = sum(one.path != place for one, place in zip(stored, places, strict=True))
        there = f"; {len(stored) - away} there already" if away < len(stored) else ""
        output.remark(args, f"{done} {plural(away, 'run')} to {target}{there}.")
    return 0
