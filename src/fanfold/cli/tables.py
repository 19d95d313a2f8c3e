"""Runs as tables for export, in chunks: wide (a row per step) or long (a row per point). An empty cell is None, never NaN."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from ..errors import SettingError, needed
from ..store import StoredRun
from . import choose
from .output import as_json
from .text import clean

CHUNK_ROWS = 20_000
Chunk = dict[str, list[Any]]  # columns of equal length


class TableStream(NamedTuple):
    """Columns (name: str, int64, float64 or bool), the number of chunks, and the chunks."""

    schema: dict[str, str]
    size: int
    chunks: Iterator[Chunk]


def long(stored: list[StoredRun], args: argparse.Namespace) -> TableStream:
    """Return one row per point."""
    parts = [(run, key) for run in stored for key in _keys(run, args)]
    value = _common([_type(run, key, args.fold) for run, key in parts])
    schema = {"run": "str", "key": "str", "rank": "int64", "step": "int64", "time": "float64", "value": value}
    return TableStream(schema, sum(_chunk_count(run, [key]) for run, key in parts), _long_chunks(parts, args))


def _long_chunks(parts: list[tuple[StoredRun, str]], args: argparse.Namespace) -> Iterator[Chunk]:
    for run, key in parts:
        holders = {journal.header.rank for journal in run.journals if key in journal.by_key and journal.count(key)}
        ranks = [rank for rank in sorted(holders) if args.rank in (None, rank)]
        for rank in [None] if args.fold else ranks:  # a folded value belongs to no single rank
            series = run.series(key, rank=rank, fold=args.fold)
            for at in range(0, len(series), CHUNK_ROWS):
                part = slice(at, at + CHUNK_ROWS)
                steps = series.steps[part].tolist()
                same = {"run": run.id, "key": key, "rank": rank} | ({"step": None} if key.startswith("system/") else {})
                yield {
                    "step": steps,
                    **{name: [cell] * len(steps) for name, cell in same.items()},
                    "time": series.times[part].tolist(),
                    "value": series.values[part].tolist(),
                }


def wide(stored: list[StoredRun], args: argparse.Namespace) -> TableStream:
    """Return one row per step and one column per key; of a step logged twice the last value counts."""
    keys = [(run, _keys(run, args)) for run in stored]
    taken = ("run", "step") if len(stored) > 1 else ("step",)
    names = {key: f"_{key}" if key in taken else key for _, some in keys for key in some}
    probes = [key for key in names if key.startswith("system/")]
    if probes:
        raise SettingError(f"{probes[0]} has times but no steps. Nothing was written. Add --long, which has both.")
    kinds: dict[str, list[str]] = {}
    for run, some in keys:
        for key in some:
            kinds.setdefault(names[key], []).append(_type(run, key, args.fold))
    schema = {"run": "str", "step": "int64"} if len(stored) > 1 else {"step": "int64"}
    schema |= {name: _common(found) for name, found in kinds.items()}
    chunks = (chunk for run, some in keys for chunk in _wide_chunks(run, some, names, args))
    return TableStream(schema, sum(_chunk_count(run, some) for run, some in keys), chunks)


def _wide_chunks(run: StoredRun, keys: list[str], names: dict[str, str], args: argparse.Namespace) -> Iterator[Chunk]:
    import numpy as np

    series = {key: run.series(key, rank=args.rank, fold=args.fold) for key in keys}
    steps = np.unique(np.concatenate([one.steps for one in series.values()])) if series else np.empty(0, np.int64)
    columns = {"step": (steps, np.ones(len(steps), bool))}
    for key, one in series.items():
        place = np.searchsorted(steps, one.steps)
        values, known = np.zeros(len(steps), one.values.dtype), np.zeros(len(steps), bool)
        values[place], known[place] = one.values, True
        columns[names[key]] = (values, known)
    for at in range(0, len(steps), CHUNK_ROWS):
        part = slice(at, at + CHUNK_ROWS)
        yield {"run": [run.id] * len(steps[part])} | {
            name: [cell if there else None for cell, there in zip(values[part].tolist(), known[part].tolist(), strict=True)]
            for name, (values, known) in columns.items()
        }


def _keys(run: StoredRun, args: argparse.Namespace) -> list[str]:
    keys = choose.keys_of([run], args.keys, undone="written") if args.keys else run.keys()
    if args.rank is None:
        return keys
    choose.check_rank(run, args.rank, undone="written")
    has = {key for journal in run.journals if journal.header.rank == args.rank for key in journal.by_key}
    return [key for key in keys if key in has]


def _chunk_count(run: StoredRun, keys: list[str]) -> int:
    points = max((sum(journal.count(key) for journal in run.journals) for key in keys), default=0)
    return -(-points // CHUNK_ROWS)


def _type(run: StoredRun, key: str, fold: str | None) -> str:
    """Return the type a key was logged as; a fold is always a float."""
    if fold:
        return "float64"
    codes = {rows.shape.types[index] for journal in run.journals for rows, index in journal.by_key.get(key, ()) if rows.runs}
    return _common([{"d": "float64", "f": "float64", "q": "int64", "?": "bool"}[code] for code in codes])


def _common(kinds: list[str]) -> str:
    """Return the type that holds all of these."""
    return next((kind for kind in ("float64", "int64", "bool") if kind in kinds), "float64")


# Writers: each takes a binary file and a table, and returns the number of rows written.


def _csv(file: IO[bytes], table: TableStream) -> int:
    import csv

    shown = clean if file.isatty() else str  # a file gets names as they are; a terminal must not obey them
    exact: dict[type, Callable[[Any], Any]] = {float: repr, str: shown}  # floats as their shortest exact text
    text, total = io.TextIOWrapper(file, "utf-8", newline="", write_through=True), 0
    try:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(map(shown, table.schema))
        for chunk in table.chunks:
            for row in _rows(table, chunk):
                writer.writerow([exact[type(cell)](cell) if type(cell) in exact else cell for cell in row])
                total += 1
    finally:
        text.detach()  # the file is not ours to close
    return total


def _jsonl(file: IO[bytes], table: TableStream) -> int:
    total = 0
    for chunk in table.chunks:
        for row in _rows(table, chunk):
            found = {name: cell for name, cell in zip(table.schema, row, strict=True) if cell is not None}
            file.write(as_json(found, indent=None).encode() + b"\n")
            total += 1
    return total


def _rows(table: TableStream, chunk: Chunk) -> Iterator[tuple[Any, ...]]:
    empty = [None] * len(chunk["step"])
    return zip(*(chunk.get(name, empty) for name in table.schema), strict=True)


def _parquet(file: IO[bytes], table: TableStream) -> int:
    with needed("pyarrow", "arrow", "export --format parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    types = {"str": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in table.schema.items()])
    total = 0
    with pq.ParquetWriter(file, schema) as writer:
        for chunk in table.chunks:
            rows = len(chunk["step"])
            cells = (chunk.get(field.name, [None] * rows) for field in schema)
            arrays = [pa.array(column).cast(field.type, safe=False) for column, field in zip(cells, schema, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            total += rows
    return total


WRITERS: dict[str, Callable[[IO[bytes], TableStream], int]] = {"csv": _csv, "jsonl": _jsonl, "parquet": _parquet}
