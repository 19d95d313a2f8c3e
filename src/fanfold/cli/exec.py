"""Record any command as a run: its console output, exit code, time and resources.

The command sees the same terminal, input and signals as without fanfold, and its exit code is passed on. If programs inside use
fanfold themselves, the first one records into this run, with all its ranks; the others get runs of their own.

With --json, everything that the command prints goes to stderr, and stdout has one JSON document with the outcome.

exit codes: the command's own; 125 no run could be started; 126 the command cannot be executed; 127 it was not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import FanfoldError
from ..settings import find_directory, read_file, resolve
from . import output

EXAMPLE = """examples:
  fanfold exec -- python train.py --lr 0.1
  fanfold exec --project mnist --name baseline --tag paper -- torchrun --nproc-per-node 4 train.py
  fanfold exec --json -q -- make train | jq -r .status"""

PROJECT = "the project of the run (default: FANFOLD_PROJECT, else default)"
NEEDS_DASHES = "the command comes after --. Nothing was run. Write for example: fanfold exec -- python train.py --lr 0.1"
REFUSED, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", metavar="CMD", nargs="+", help="the command and its arguments, after --")
    parser.add_argument("--name", metavar="NAME", help="the run's name (default: two words and a number)")
    parser.add_argument("--group", metavar="GROUP", help="the run's group")
    parser.add_argument("--tag", action="append", metavar="TAG", help="a tag of the run (repeatable)")
    parser.add_argument("--notes", metavar="TEXT", help="notes about the run")


def run(args: argparse.Namespace) -> int:
    from ..recording.command import execute, leave_like

    _open_standard_streams()
    words = [str(word) for word in args.command]
    missing = _check(words[0])
    if missing:
        return missing
    root = find_directory(args.dir, writing=True)
    if resolve("mode", file=read_file(root)) == "disabled":
        return leave_like(execute(words, {}))
    return _recorded(args, words)


def _open_standard_streams() -> None:
    """Open streams that were closed before we started: else a file of ours would take their place, also for the command."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free descriptor: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - for as long as this process lives


def _check(program: str) -> int:
    """Return the exit code for a program that cannot be started, after a message; 0 if it can."""
    if shutil.which(program):
        return 0
    there = os.path.exists(program) and os.sep in program  # noqa: PTH110 - it may not be a path at all
    why = "cannot be executed. Check its permissions" if there else "was not found. Check its spelling and PATH"
    print(f"fanfold: {program!r} {why}. Nothing was run.", file=sys.stderr)
    return NOT_EXECUTABLE if there else NOT_FOUND


def _recorded(args: argparse.Namespace, words: list[str]) -> int:
    from ..recording.command import config_of, leave_like, record
    from ..recording.options import read_options

    quiet = True if args.quiet else None
    given = {
        "project": args.project, "name": args.name, "group": args.group, "tags": args.tag, "notes": args.notes,
        "config": config_of(words), "console": True, "quiet": quiet,
    }  # fmt: skip
    try:
        options = read_options(find_directory(args.dir, writing=True), given)
        with _stdout_on_stderr() if args.json else _as_it_is():
            made, ended = record(words, options)
    except FanfoldError as error:
        print(f"fanfold: {error}", file=sys.stderr)
        return REFUSED
    if args.json:
        from ..store import open_run
        from ..tools.answers import became

        used = {name.rpartition("/")[2]: value for name, value in ended.used.items()}
        output.print_json({**became(open_run(made.path)), "exit_code": ended.code, "used": used, "path": str(made.path)})
    return leave_like(ended.code)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what this process and the command print to stderr, so that stdout has only our JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
