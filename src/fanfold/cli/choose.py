"""Which runs a command is about: one by its word, or many by their facts."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Iterable
from pathlib import Path

from ..errors import FanfoldError, SettingError, suggestion
from ..plain import flat
from ..settings import find_directory, is_address, store_address
from ..store import StoredRun, catalogue
from ..store.filter import FIELDS, Filter, same
from ..store.query import Store
from ..store.run import Runs
from ..stores import open as open_stored
from ..stores import open_store
from .output import progress, remark
from .text import STATUS

RUN_HELP = "an id, the beginning of one, a name, a run's directory, or - for the newest run"


def store(args: argparse.Namespace) -> Store:
    """Open the store that a command is about."""
    return open_store(args.dir)


def one(args: argparse.Namespace, word: str) -> StoredRun:
    """Open the run a word names."""
    return open_stored(word, dir=args.dir, project=args.project)


def folder(args: argparse.Namespace, command: str) -> Path:
    """Return the directory of runs, for a command that works on files and not on a server's store."""
    if is_address(store_address(args.dir)):
        raise SettingError(
            f"`fanfold {command}` works on a directory of runs, and this is the address of a server. Nothing was done. "
            "Name a directory with --dir."
        )
    return find_directory(args.dir)


def several(args: argparse.Namespace, words: Iterable[str]) -> list[StoredRun]:
    """Open the runs that words name, each once."""
    found = {run.path: run for run in (one(args, word) for word in words)}
    return list(found.values())


def everything(args: argparse.Namespace) -> Runs:
    """Return all runs, newest first, with a bar while the catalogue is being made; report those that cannot be read."""

    def watch(folders: Iterable[Path], total: int) -> Iterable[Path]:
        return progress(args, folders, total, "Reading runs")

    found = store(args).listed(args.project, progress=watch)
    report_unreadable(args, found.unreadable)
    return found


def report_unreadable(args: argparse.Namespace, unreadable: list[dict[str, str]]) -> None:
    """Report the runs that could not be read, if any, and why."""
    if unreadable:
        remark(args, catalogue.unreadable_text(unreadable, shown=10))


def count(word: str) -> int:
    """Read the value of --limit."""
    if word.isdecimal():
        return int(word)
    raise argparse.ArgumentTypeError(f"{word!r} is not a number of runs. Write 0 for all, or a positive number.")


def add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", default="", metavar="F",
                        help="only runs that match: 'lr<1e-3 and tag:baseline and loss.min<0.2' (see docs/query.md)")  # fmt: skip
    parser.add_argument(
        "--status", action="append", metavar="S", help=f"only runs that are {', '.join(STATUS)} (a list, or repeatable)"
    )
    parser.add_argument("--tag", action="append", metavar="T", help="only runs with this tag (repeatable: runs that have all)")
    parser.add_argument("--name", metavar="GLOB", help="only runs whose name matches, such as 'base-*'")
    parser.add_argument("--config", nargs="+", action="extend", metavar="KEY=VALUE",
                        help="only runs with these config values, such as lr=0.001 model.dim=64")  # fmt: skip


def filtered(args: argparse.Namespace) -> bool:
    """Tell whether any of the options of add_filters() was given."""
    return any((args.filter, args.status, args.tag, args.name, args.config))


def say_none(args: argparse.Namespace) -> None:
    """Say that there are no runs, and where they were looked for; matching() has spoken of --filter."""
    where = f"{f'project {args.project} in ' if args.project else ''}{store(args).place}"
    given = [f"--{name}" for name in ("status", "tag", "name", "config") if getattr(args, name)]
    if given and not args.filter:
        remark(args, f"no run in {where} matches {' and '.join(given)}. `fanfold ls` lists all runs.")
    elif not args.filter:
        remark(args, f"no runs yet in {where}. Start one with fanfold.init(), or name another directory with --dir.")


def matching(args: argparse.Namespace, found: list[StoredRun]) -> list[StoredRun]:
    """Keep the runs that pass every filter."""
    statuses = [status.strip() for some in args.status or () for status in some.split(",")]
    for status in statuses:
        if status not in STATUS:
            raise SettingError(f"--status {status} is not known.{suggestion(status, STATUS)}")
    wanted = dict(_pair(word) for word in args.config or ())
    fits = Filter(args.filter)
    kept = [run for run in found if _passes(run, args, statuses, wanted)]
    if not args.filter:
        return kept
    rows, statistics = [run.row() for run in kept], store(args).statistics
    chosen = [run for run, row in zip(kept, rows, strict=True) if fits.matches(row, stats=statistics)]
    if not chosen:
        unknown = fits.unknown(rows) if rows else []
        fields = f"Fields: {', '.join(FIELDS)}, config and metric names."
        why = f"no run has {', '.join(unknown)}, so none matches the filter. {fields}"
        remark(args, why if unknown else "no run matches the filter.")
    return chosen


def _passes(run: StoredRun, args: argparse.Namespace, statuses: list[str], wanted: dict[str, str]) -> bool:
    if statuses and run.status not in statuses:
        return False
    if args.name and not fnmatch.fnmatchcase(run.name, args.name):
        return False
    if args.tag and not set(args.tag) <= set(run.tags):
        return False
    config = flat(run.config) if wanted else {}
    return all(name in config and same(config[name], text) for name, text in wanted.items())


def _pair(word: str) -> tuple[str, str]:
    name, equals, text = word.partition("=")
    if not equals or not name:
        raise SettingError(f"--config {word!r} is not KEY=VALUE. Write for example --config lr=0.001.")
    return name, text


def keys_of(run: StoredRun, patterns: Iterable[str], *, system: bool = True, undone: str = "shown") -> list[str]:
    """Return the numeric keys that patterns name (`val/*`); a pattern that names none is an error that lists some."""
    known = run.keys() + (run.keys("system") if system else [])
    found: list[str] = []
    for pattern in patterns:
        hits = [key for key in known if key == pattern] or [key for key in known if fnmatch.fnmatchcase(key, pattern)]
        if not hits:
            close = [key for key in known if pattern.strip("*").lower() in key.lower()][:8] or known[:8]
            raise FanfoldError(
                f"run {run.id} has no numbers under {pattern!r}. Nothing was {undone}. "
                f"It has {len(known)} keys, among them: {', '.join(close) or 'none'}."
            )
        found += hits
    return list(dict.fromkeys(found))
