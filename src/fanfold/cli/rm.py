"""Delete runs, with their journals, media and artifacts. This cannot be undone.

It asks first, refuses a run that is still being written, and deletes nothing outside the runs' directory.
"""

from __future__ import annotations

import argparse
import sys

from ..drawing.numbers import plural
from ..errors import RunError
from ..store import StoredRun
from ..store.changes import weight
from . import choose, output
from .text import clean, size

EXAMPLE = """examples:
  fanfold rm quick-otter-42
  fanfold ls --status failed --json | jq -r '.[].id' | xargs fanfold rm --yes"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="also runs that are still being written")


def run(args: argparse.Namespace) -> int:
    stored, changes = choose.several(args, args.runs), choose.store(args).changes
    for one in stored:
        changes.check_deletable(one, force=True)  # whether it is still being written is checked next, with a clearer message
        _check_idle(one, args.force)
    if not args.yes and not _confirmed(stored):
        output.remark(args, "nothing was deleted.")
        return 1
    done = [changes.delete(one) for one in stored]
    if args.json:
        output.print_json(
            [{"id": one.id, "path": str(one.path), "bytes": freed} for one, freed in zip(stored, done, strict=True)]
        )
    else:
        output.remark(args, f"deleted {plural(len(stored), 'run')}, {size(sum(done))}.")
    return 0


def _check_idle(run: StoredRun, force: bool) -> None:
    if run.status in ("running", "lost") and not force:
        word = "is still being written" if run.status == "running" else "may still be written on another node"
        raise RunError(f"run {run.name} ({run.id}) {word}. Nothing was deleted. Stop it first, or pass --force.")


def _confirmed(stored: list[StoredRun]) -> bool:
    if not sys.stdin.isatty():
        raise RunError("rm asks before it deletes, and there is no terminal to ask on. Nothing was deleted. Pass --yes.")
    for one in stored:
        print(f"  {output.heading(one)}  {clean(one.project)}  {size(weight(one.path))}")
    return output.confirmed(f"Delete {plural(len(stored), 'run')} for good?")
