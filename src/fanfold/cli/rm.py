"""Delete runs, with their journals, media and artifacts. There is no way back.

It asks first, refuses a run that is still being written, and deletes nothing outside the runs' directory.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
from pathlib import Path

from ..errors import RunError
from ..settings import find_directory
from ..store import StoredRun
from ..store.catalogue import forget
from . import choose, output
from .text import clean, plural, size

EXAMPLE = """examples:
  fanfold rm quick-otter-42
  fanfold ls --status failed --json | jq -r '.[].id' | xargs fanfold rm --yes"""

ASIDE = ".deleted-"  # hidden from every listing; what an interrupted rm leaves, prune removes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="also runs that are still being written")


def run(args: argparse.Namespace) -> int:
    root = find_directory(args.dir)
    stored = choose.several(args, args.runs)
    for one in stored:
        check_place(one.path, root)
        _check_idle(one, args.force)
    if not args.yes and not _confirmed(stored):
        output.remark(args, "nothing was deleted.")
        return 1
    done = [_delete(one) for one in stored]
    if args.json:
        output.print_json(
            [{"id": one.id, "path": str(one.path), "bytes": freed} for one, freed in zip(stored, done, strict=True)]
        )
    else:
        output.remark(args, f"deleted {plural(len(stored), 'run')}, {size(sum(done))}.")
    return 0


def check_place(path: Path, root: Path) -> None:
    """Refuse a directory that is not exactly `root/project/run`, or is reached through a link."""
    inside = path.parent.parent == root or path.parent.parent.resolve() == root.resolve()
    linked = path.is_symlink() or path.parent.is_symlink()
    if not inside or linked or path.resolve().parent.parent != root.resolve():
        why = "is a link" if linked else f"is not in {root}"
        raise RunError(f"{path} {why}. Nothing was deleted. Name the runs' directory with --dir, or delete it by hand.")


def _check_idle(run: StoredRun, force: bool) -> None:
    if run.status in ("running", "lost") and not force:
        word = "is still being written" if run.status == "running" else "may still be written on another node"
        raise RunError(f"run {run.name} ({run.id}) {word}. Nothing was deleted. Stop it first, or pass --force.")


def _confirmed(stored: list[StoredRun]) -> bool:
    if not sys.stdin.isatty():
        raise RunError("rm asks before it deletes, and there is no terminal to ask on. Nothing was deleted. Pass --yes.")
    for one in stored:
        print(f"  {output.mark(one.status)}  {clean(one.name)}  {clean(one.id)}  {clean(one.project)}  {size(weight(one.path))}")
    answer = input(f"Delete {plural(len(stored), 'run')} for good? [y/N] ")
    return answer.strip().lower() in ("y", "yes")


def weight(path: Path) -> int:
    """Return how many bytes a directory holds; links are not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - os.walk gives strings, by the thousand
    return total


def _delete(run: StoredRun) -> int:
    """Take a run out of sight at once, then delete it: an interruption leaves no half run behind."""
    freed = weight(run.path)
    aside = run.path.with_name(f"{ASIDE}{secrets.token_hex(6)}")
    run.path.rename(aside)
    forget(run.path)
    shutil.rmtree(aside)
    return freed
