"""Write runs as CSV, JSON lines or Parquet, or a whole project as a bundle.

One row per step with a column per key; with --long one row per point: run, key, rank, step, time, value. Numbers are
exact. A step without a value is an empty cell (CSV), an absent key (JSON lines) or a null (Parquet);
NaN stays NaN ("NaN" as a string in JSON lines). With --long, Parquet has one type for all values: the widest of them.

Without RUN, all runs of --project are written to a new folder with everything in them: points, texts, media, artifacts, console
output and facts, as Parquet, JSON and files. --whole does the same for named runs. `fanfold import` reads it back.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..atomic import replacing
from ..drawing.numbers import plural
from ..errors import RunNotFound, SettingError
from ..fold import FOLDS
from ..journal.directory import encode_name
from ..store import StoredRun
from . import choose, output
from .text import size

EXAMPLE = """examples:
  fanfold export - > run.csv
  fanfold export - -o run.parquet --keys loss 'val/*' --fold mean
  fanfold export run-a run-b --long -o both.jsonl
  fanfold export run-a run-b -o folder/ --format parquet     one file per run
  fanfold export --project mnist -o mnist-bundle            a whole project, with media and files"""

FORMATS = ("csv", "jsonl", "parquet")
SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help=f"{choose.RUN_HELP} (default: the whole --project)")
    parser.add_argument("--whole", action="store_true", help="whole runs, in a folder that `fanfold import` reads back")
    parser.add_argument("--format", metavar="{csv,jsonl,parquet}", help="default: by the extension of -o, else csv")
    parser.add_argument("-o", "--output", metavar="FILE|DIR", help="default: stdout; a folder gets one file per run")
    parser.add_argument("--keys", nargs="+", action="extend", metavar="KEY", help="only these keys (patterns such as 'val/*')")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="only this rank (default: rank 0; with --long: all ranks)")
    which.add_argument("--fold", metavar="HOW", help="combine all ranks: mean, min, max, sum, std or last")
    parser.add_argument("--long", action="store_true", help="one row per point")


def run(args: argparse.Namespace) -> int:
    from . import tables

    args.output = None if args.output == "-" else args.output
    if args.whole or not args.runs:
        return _bundle(args)
    kind = _format(args)
    choose.check_known("--fold", args.fold, FOLDS, undone="written")
    stored = choose.several(args, args.runs)
    as_table = tables.long if args.long else tables.wide
    done: list[tuple[Path, int]] = []
    for path, runs in _files(args.output, stored, kind):
        table = as_table(runs, args)
        table = table._replace(chunks=output.progress(args, table.chunks, table.size, "Exporting"))
        with _target(path) as file:
            rows = tables.WRITERS[kind](file, table)
        if path is not None:
            done.append((path, rows))
    if args.json and done:
        output.print_json(
            [{"file": str(path), "format": kind, "rows": rows, "bytes": path.stat().st_size} for path, rows in done]
        )
    for path, rows in [] if args.json else done:
        output.remark(args, f"{path}: {plural(rows, 'row')}, {size(path.stat().st_size)}")
    return 0


def _bundle(args: argparse.Namespace) -> int:
    """Write whole runs to a new folder."""
    from ..transfer.bundle_write import write_bundle

    if not args.runs and not args.project:
        raise SettingError("no run was named. Nothing was written. Name runs, or a whole project with --project.")
    if not args.output:
        raise SettingError("a bundle is a folder. Nothing was written. Name a new one with -o.")
    given = [name for name in ("format", "keys", "fold", "long") if getattr(args, name)] + ["rank"] * (args.rank is not None)
    if given:
        raise SettingError(f"a bundle has everything, and takes no --{given[0]}. Nothing was written. Leave it out.")
    stored = choose.several(args, args.runs) if args.runs else list(choose.everything(args))
    if not stored:
        raise RunNotFound(f"project {args.project} has no runs. Nothing was written. `fanfold ls` lists them.")
    done = write_bundle(Path(args.output), output.progress(args, stored, len(stored), "Exporting"))
    if args.json:
        output.print_json(done)
        return 0
    points = sum(one.get("points", 0) for one in done)
    output.remark(args, f"{args.output}: {plural(len(done), 'run')}, {plural(points, 'point')}")
    for what in dict.fromkeys(what for one in done for what in one["left_out"]):
        count = sum(one["left_out"].get(what, 0) for one in done)
        output.remark(args, f"  not in the bundle: {plural(count, what)}")
    return 0


def _format(args: argparse.Namespace) -> str:
    choose.check_known("--format", args.format, FORMATS, undone="written")
    by_name = SUFFIXES.get(Path(args.output or "").suffix.lower())
    kind = str(args.format or by_name or ("jsonl" if args.json else "csv"))
    if kind == "parquet" and not args.output:
        raise SettingError("Parquet is binary and is not printed. Nothing was written. Name a file: -o run.parquet.")
    if kind != "jsonl" and args.json and not args.output:
        raise SettingError("--json prints JSON lines, and --format csv asks for CSV. Nothing was written. Leave one of them out.")
    return kind


def _files(target: str | None, stored: list[StoredRun], kind: str) -> list[tuple[Path | None, list[StoredRun]]]:
    """Return the files to write (None: stdout) and the runs in each: all in one file, or one file per run in a folder."""
    if not target:
        return [(None, stored)]
    path = Path(target)
    named = path.suffix.lower() in SUFFIXES
    if not (path.is_dir() or target.endswith(os.sep) or (len(stored) > 1 and not named)):
        return [(path, stored)]
    path.mkdir(parents=True, exist_ok=True)
    return [(path / f"{encode_name(one.project)}-{encode_name(one.id)}.{kind}", [one]) for one in stored]


@contextlib.contextmanager
def _target(path: Path | None) -> Iterator[IO[bytes]]:
    """Open stdout, or a temporary file that replaces `path` once it is complete."""
    if path is None:
        sys.stdout.flush()  # text and bytes share one stream
        yield sys.stdout.buffer
        return
    with replacing(path) as file:
        yield file
