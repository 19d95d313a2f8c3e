"""Which runs a command works on: one by name, or all that match the filter options."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import SettingError, suggestion
from ..journal.directory import REPORTS, run_directories
from ..journal.files import is_folder
from ..settings import find_directory, is_address, store_address
from ..store import StoredRun, catalogue
from ..store.query import Store
from ..store.run import Runs
from ..stores import open as open_stored
from ..stores import open_store
from .output import progress, remark
from .text import STATUS

RUN_HELP = "an id, the beginning of one, a name, a run's directory, or - for the newest run"


def store(args: argparse.Namespace) -> Store:
    """Open the store that --dir names."""
    return open_store(args.dir)


def one(args: argparse.Namespace, word: str) -> StoredRun:
    """Open a run by id, name, directory or `-`."""
    return open_stored(word, dir=args.dir, project=args.project)


def folder(args: argparse.Namespace, command: str) -> Path:
    """Return the directory of runs, for commands that work on files and not on a database."""
    if is_address(store_address(args.dir)):
        raise SettingError(
            f"`fanfold {command}` works on a directory of runs, and this is the address of a server. "
            "Nothing was done. Run it where the runs are recorded, with --dir."
        )
    return find_directory(args.dir)


def several(args: argparse.Namespace, words: Iterable[str]) -> list[StoredRun]:
    """Open runs by id, name or directory, each once."""
    found = {run.path: run for run in (one(args, word) for word in words)}
    return list(found.values())


def reports(run: Path) -> list[Path]:
    """Return the runs inside a run in which reporting callbacks keep what they send to one tracker each."""
    return list(run_directories(run / REPORTS)) if is_folder(run / REPORTS) else []


def everything(args: argparse.Namespace) -> Runs:
    """Return all runs, newest first, with a progress bar while they are read; report those that cannot be read."""
    found = store(args).listed(args.project, progress=lambda runs, total: progress(args, runs, total, "Reading runs"))
    report_unreadable(args, found.unreadable)
    return found


def chosen(args: argparse.Namespace) -> list[StoredRun]:
    """Return the runs that are named, or all, if they pass the filters."""
    return matching(args, several(args, args.runs) if args.runs else everything(args))


def report_unreadable(args: argparse.Namespace, unreadable: list[dict[str, str]]) -> None:
    """Report runs that cannot be read, and why."""
    if unreadable:
        remark(args, catalogue.unreadable_text(unreadable, shown=10))


def count(word: str) -> int:
    """Read the value of --limit."""
    if word.isdecimal():
        return int(word)
    raise argparse.ArgumentTypeError(f"{word!r} is not a number of runs. Write 0 for all, or a positive number.")


def add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", default="", metavar="F", help="only runs that match: 'lr<1e-3 and tag:base and loss.min<0.2'")
    parser.add_argument("--status", action="append", metavar="S", help=f"only runs with these statuses: {', '.join(STATUS)}")
    parser.add_argument("--tag", action="append", metavar="T", help="only runs with this tag (repeatable: all of them)")
    parser.add_argument("--name", metavar="GLOB", help="only runs whose name matches, such as 'base-*'")
    parser.add_argument("--config", nargs="+", action="extend", metavar="KEY=VALUE", help="only runs with these config values")


def filtered(args: argparse.Namespace) -> bool:
    """Return whether any of the options of add_filters() was given."""
    return any((args.filter, args.status, args.tag, args.name, args.config))


def report_none(args: argparse.Namespace) -> None:
    """Report that there are no runs, or none that match; matching() has already reported this for --filter."""
    where = f"{f'project {args.project} in ' if args.project else ''}{store(args).place}"
    given = [f"--{name}" for name in ("status", "tag", "name", "config", "since") if getattr(args, name, None)]
    if given and not args.filter:
        remark(args, f"no run in {where} matches {' and '.join(given)}. `fanfold ls` lists all runs.")
    elif not args.filter:
        remark(args, f"no runs yet in {where}. Start one with fanfold.init(), or name another directory with --dir.")


def matching(args: argparse.Namespace, found: list[StoredRun]) -> list[StoredRun]:
    """Keep the runs that pass every filter."""
    statuses = [status.strip() for some in args.status or () for status in some.split(",")]
    for status in statuses:
        check_known("--status", status, STATUS)
    wanted = dict(_pair(word) for word in args.config or ())
    kept = [run for run in found if _passes(run, args, statuses, wanted)]
    if not args.filter:
        return kept
    from ..store.filter import FIELDS, Filter

    fits = Filter(args.filter)
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
    if not wanted:
        return True
    from ..plain import flat
    from ..store.filter import same

    config = flat(run.config)
    return all(name in config and same(config[name], text) for name, text in wanted.items())


def _pair(word: str) -> tuple[str, str]:
    name, equals, text = word.partition("=")
    if not equals or not name:
        raise SettingError(f"--config {word!r} is not KEY=VALUE. Write for example --config lr=0.001.")
    return name, text


def check_known(option: str, word: str | None, known: Iterable[str], undone: str = "shown") -> None:
    """Raise if the value of an option is not one of the known ones."""
    if word is not None and word not in (names := list(known)):
        raise SettingError(f"{option} {word} is not known. Nothing was {undone}.{suggestion(word, names)}")


def check_rank(run: StoredRun, rank: int, undone: str = "shown") -> None:
    """Raise if a run has no such rank."""
    if rank not in run.ranks:
        ranks = ", ".join(map(str, run.ranks))
        raise SettingError(f"run {run.id} has no rank {rank}. Nothing was {undone}. Its ranks: {ranks}.")


def keys_of(runs: Sequence[StoredRun], patterns: Iterable[str], *, undone: str = "shown") -> list[str]:
    """Return the numeric keys of any of the runs that match a pattern (`val/*`); raise for a pattern that matches none."""
    known = list(dict.fromkeys(key for run in runs for key in (*run.keys("number"), *run.keys("system"))))
    found: list[str] = []
    for pattern in patterns:
        hits = [key for key in known if key == pattern] or [key for key in known if fnmatch.fnmatchcase(key, pattern)]
        if not hits:
            from ..store.series import no_metric

            raise no_metric(runs, pattern, known, undone)
        found += hits
    return list(dict.fromkeys(found))
