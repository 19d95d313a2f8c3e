"""Write runs as CSV, JSON lines or Parquet.

One row per step with a column per key; --long instead gives one row per point: run, key, rank, step, time, value. Every
number comes back exactly. A step without a value is an empty cell (CSV), an absent key (JSON lines) or a null (Parquet);
NaN stays NaN ("NaN" as a string in JSON lines). With --long, Parquet has one type for all values: the widest of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..errors import SettingError, suggestion
from ..fold import FOLDS
from ..journal.directory import encode_name
from ..store import StoredRun
from . import choose, output
from .text import plural, size

if TYPE_CHECKING:
    from .tables import Chunk

EXAMPLE = """examples:
  fanfold export - > run.csv
  fanfold export - -o run.parquet --keys loss 'val/*' --fold mean
  fanfold export run-a run-b --long -o both.jsonl
  fanfold export run-a run-b -o folder/ --format parquet     one file per run"""

FORMATS = ("csv", "jsonl", "parquet")
SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help=choose.RUN_HELP)
    parser.add_argument("--format", metavar="{csv,jsonl,parquet}", help="default: by the extension of -o, else csv")
    parser.add_argument(
        "-o", "--output", metavar="FILE|DIR", help="where to write (default: stdout); a folder gets one file per run"
    )
    parser.add_argument("--keys", nargs="+", action="extend", metavar="KEY", help="only these keys (patterns such as 'val/*')")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="N", help="only this rank (default: rank 0; with --long: all ranks)")
    which.add_argument("--fold", metavar="HOW", help="combine all ranks: mean, min, max, sum, std or last")
    parser.add_argument("--long", action="store_true", help="one row per point")


def run(args: argparse.Namespace) -> int:
    args.output = None if args.output == "-" else args.output
    kind = _format(args)
    _check_fold(args.fold)
    stored = choose.several(args, args.runs)
    if args.output and _is_folder(args.output, stored):
        folder = Path(args.output)
        folder.mkdir(parents=True, exist_ok=True)
        files = [(folder / f"{encode_name(one.project)}-{encode_name(one.id)}.{kind}", [one]) for one in stored]
    else:
        files = [(Path(args.output) if args.output else None, stored)]  # type: ignore[list-item]
    written = [_write(args, kind, path, runs) for path, runs in files]
    _report(args, kind, [(path, rows) for (path, _), rows in zip(files, written, strict=True) if path])
    return 0


def _format(args: argparse.Namespace) -> str:
    if args.format and args.format not in FORMATS:
        raise SettingError(f"--format {args.format} is not known. Nothing was written.{suggestion(args.format, FORMATS)}")
    kind = args.format or (SUFFIXES.get(Path(args.output).suffix.lower()) if args.output else None)
    kind = kind or ("jsonl" if args.json else "csv")
    if kind == "parquet" and not args.output:
        raise SettingError("Parquet is binary and is not printed. Nothing was written. Name a file: -o run.parquet.")
    return str(kind)


def _check_fold(how: str | None) -> None:
    """Refuse an unknown fold before the first row is written."""
    if how is not None and how not in FOLDS:
        raise SettingError(f"--fold {how} is not known. Nothing was written.{suggestion(how, FOLDS)}")


def _is_folder(target: str, stored: list[StoredRun]) -> bool:
    known = Path(target).suffix.lower() in SUFFIXES
    return Path(target).is_dir() or target.endswith(os.sep) or (len(stored) > 1 and not known)


def _write(args: argparse.Namespace, kind: str, path: Path | None, stored: list[StoredRun]) -> int:
    """Write runs into one file, aside first, so that a file is there whole or not at all."""
    from . import tables

    table = tables.Long(stored, args) if args.long else tables.Wide(stored, args)
    chunks = output.progress(args, table.chunks(), table.size(), "Exporting")
    if path is None:
        return tables.WRITERS[kind](sys.stdout.buffer, table, _binary_pipe(chunks))
    with _aside(path) as file:
        return tables.WRITERS[kind](file, table, chunks)


def _binary_pipe(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    sys.stdout.flush()  # text and bytes share one stream
    yield from chunks


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[IO[bytes]]:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("xb") as file:
            yield file
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _report(args: argparse.Namespace, kind: str, done: list[tuple[Path, int]]) -> None:
    if args.json:
        if done:
            output.print_json(
                [{"file": str(path), "format": kind, "rows": rows, "bytes": path.stat().st_size} for path, rows in done]
            )
        return
    for path, rows in done:
        output.remark(args, f"{path}: {plural(rows, 'row')}, {size(path.stat().st_size)}")
