"""Move runs to another project. Journals, media and artifacts go with them; trackers keep their remote run.

A run that is still being written or delivered is refused. With `--dir https://gateway` or `--dir clickhouse://host/database`,
runs are moved there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..drawing.numbers import plural
from ..errors import SettingError
from ..settings import is_address, store_address
from ..store import StoredRun
from ..store.move import found, move
from ..store.query import find
from . import choose, output, remote

EXAMPLE = """examples:
  fanfold mv quick-otter-42 --project baselines
  fanfold ls --filter 'tag:old' --json | jq -r '.[].id' | xargs fanfold mv --project archive"""


PROJECT = "the project to move the runs to"
Place = tuple[str, str, bool]  # of a run: its id, where it is now, and whether it was elsewhere before


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--force", action="store_true", help="also runs that may still be written or delivered")


def run(args: argparse.Namespace) -> int:
    if not is_address(store_address(args.dir)):
        return to_project(args, "mv", "moved", move)
    target, args.project = _target(args, "mv", "moved"), None
    if args.force:
        raise SettingError(
            "--force is for a directory of runs. Nothing was moved. A gateway or a database moves only runs that have ended."
        )
    _report(args, "moved", target, _at_gateway(args, target) if remote.is_gateway(args) else _in_database(args, target))
    return 0


def _at_gateway(args: argparse.Namespace, target: str) -> list[Place]:
    place = str(store_address(args.dir)).rstrip("/")
    there = remote.ask(args, "move", runs=[remote.named(args, word) for word in args.runs], project=target)
    return [(one["id"], f"{place}/{target}/{one['id']}", one.get("moved", True)) for one in there]


def _in_database(args: argparse.Namespace, target: str) -> list[Place]:
    store = choose.store(args)
    named = [found(partial(find, store), word, target, store) for word in args.runs]
    runs = {(run.project, run.id): run for run in named}
    store.changes.move(list(runs.values()), target)
    return [(id, f"{store.place}/{target}/{id}", old != target) for old, id in runs]


def _target(args: argparse.Namespace, command: str, done: str) -> str:
    if not args.project:
        raise SettingError(f"`fanfold {command}` needs the project to go to. Nothing was {done}. Add --project NAME.")
    return str(args.project)


def to_project(args: argparse.Namespace, command: str, done: str, act: Callable[..., list[Path]]) -> int:
    """Move or copy the named runs to --project, which here is where they go, not where they are looked for."""
    target, args.project = _target(args, command, done), None
    root = choose.folder(args, command)
    open_one, store = partial(choose.one, args), choose.store(args)
    named = [found(open_one, word, target, store) if act is move else open_one(word) for word in args.runs]
    stored: list[StoredRun] = list({run.path: run for run in named}.values())
    places = act(stored, root, target, force=args.force)
    _report(args, done, target, [(run.id, str(place), run.path != place) for run, place in zip(stored, places, strict=True)])
    return 0


def _report(args: argparse.Namespace, done: str, target: str, runs: list[Place]) -> None:
    if args.json:
        output.print_json([{"id": id, "project": target, "path": place} for id, place, _ in runs])
        return
    away = sum(new for _, _, new in runs)
    there = f"; {len(runs) - away} there already" if away < len(runs) else ""
    output.remark(args, f"{done} {plural(away, 'run')} to {target}{there}.")
