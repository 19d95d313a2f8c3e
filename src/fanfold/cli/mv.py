"""Move runs to another project. Journals, media and artifacts go with them; trackers keep their remote run.

A run that is still being written or delivered is refused. With `--dir https://gateway`, runs of the gateway are moved there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..errors import SettingError
from ..settings import resolve
from ..store import StoredRun
from ..store.move import move
from . import choose, output, remote
from .text import plural

EXAMPLE = """examples:
  fanfold mv quick-otter-42 --project baselines
  fanfold ls --filter 'tag:old' --json | jq -r '.[].id' | xargs fanfold mv --project archive"""


PROJECT = "the project to move the runs to"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--force", action="store_true", help="also runs that may still be written or delivered")


def run(args: argparse.Namespace) -> int:
    return _at_gateway(args) if remote.is_gateway(args) else to_project(args, "mv", "moved", move)


def _at_gateway(args: argparse.Namespace) -> int:
    target, args.project = _target(args, "mv", "moved"), None
    if args.force:
        raise SettingError("--force is for a directory of runs. Nothing was moved. A gateway moves only runs that have ended.")
    found = remote.ask(args, "move", runs=[remote.named(args, word) for word in args.runs], project=target)
    if args.json:
        place = str(args.dir or resolve("dir")).rstrip("/")
        output.print_json([{"id": one["id"], "project": target, "path": f"{place}/{target}/{one['id']}"} for one in found])
    else:
        output.remark(args, f"moved {plural(len(found), 'run')} to {target}.")
    return 0


def _target(args: argparse.Namespace, command: str, done: str) -> str:
    if not args.project:
        raise SettingError(f"`fanfold {command}` needs the project to go to. Nothing was {done}. Add --project NAME.")
    return str(args.project)


def to_project(args: argparse.Namespace, command: str, done: str, act: Callable[..., list[Path]]) -> int:
    """Move or copy the named runs to --project, which here is where they go, not where they are looked for."""
    target, args.project = _target(args, command, done), None
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
