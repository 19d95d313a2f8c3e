"""Runs as rows for export: wide (a row per step) or long (a row per point), in chunks, with holes told from NaN."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol

from ..errors import SettingError, missing_extra
from ..store import Series, StoredRun
from . import choose
from .output import as_json
from .text import clean

CHUNK_ROWS = 20_000


@dataclass(frozen=True)
class Chunk:
    """Some rows, column by column: values, and for each whether it is there (None: all are)."""

    columns: dict[str, tuple[Any, Any]]
    rows: int

    def lists(self) -> dict[str, list[Any]]:
        """Return plain values; None where there is none."""
        found = {}
        for name, (values, there) in self.columns.items():
            items = values.tolist() if hasattr(values, "tolist") else list(values)
            found[name] = (
                items if there is None else [item if ok else None for item, ok in zip(items, there.tolist(), strict=True)]
            )
        return found


class Table(Protocol):
    """What a writer needs: the columns' names and types (numpy's; "str" for text), and the rows."""

    def schema(self) -> dict[str, str]: ...
    def size(self) -> int: ...
    def chunks(self) -> Iterator[Chunk]: ...


class Long:
    """One row per point."""

    def __init__(self, stored: list[StoredRun], args: argparse.Namespace) -> None:
        self.args = args
        self.parts = [(run, key) for run in stored for key in _keys(run, args)]

    def schema(self) -> dict[str, str]:
        value = _common([_type(run, key, self.args.fold) for run, key in self.parts])
        return {"run": "str", "key": "str", "rank": "int64", "step": "int64", "time": "float64", "value": value}

    def size(self) -> int:
        return sum(-(-_points(run, key) // CHUNK_ROWS) for run, key in self.parts)

    def chunks(self) -> Iterator[Chunk]:
        for run, key in self.parts:
            for rank in self._ranks(run, key):
                series = run.series(key, rank=rank, fold=self.args.fold)
                for at in range(0, len(series), CHUNK_ROWS):
                    yield _piece(run.id, series, rank, slice(at, at + CHUNK_ROWS))

    def _ranks(self, run: StoredRun, key: str) -> list[int | None]:
        if self.args.fold:
            return [None]
        holders = {j.header.rank for j in run.journals if key in j.by_key and j.count(key)}
        return [rank for rank in sorted(holders) if self.args.rank in (None, rank)]


def _piece(run_id: str, series: Series, rank: int | None, part: slice) -> Chunk:
    """Return some points of a series as rows. A fold is of no one rank, and a probe's point has no step."""
    import numpy as np

    steps = series.steps[part]
    count = len(steps)
    return Chunk(
        {
            "run": ([run_id] * count, None),
            "key": ([series.key] * count, None),
            "rank": (np.full(count, rank or 0), None if rank is not None else np.zeros(count, bool)),
            "step": (steps, np.zeros(count, bool) if series.key.startswith("system/") else None),
            "time": (series.times[part], None),
            "value": (series.values[part], None),
        },
        count,
    )


class Wide:
    """One row per step, one column per key; of a step logged twice the last value counts."""

    def __init__(self, stored: list[StoredRun], args: argparse.Namespace) -> None:
        self.args = args
        self.stored = stored
        self.keys = {run.path: _keys(run, args) for run in stored}
        for run in stored:
            self._refuse_probes(self.keys[run.path])
        self.names = {key: self._name(key) for keys in self.keys.values() for key in keys}

    def _refuse_probes(self, keys: list[str]) -> None:
        probes = [key for key in keys if key.startswith("system/")]
        if probes:
            raise SettingError(f"{probes[0]} has times but no steps. Nothing was written. Add --long, which has both.")

    def _name(self, key: str) -> str:
        taken = ("step", "run") if len(self.stored) > 1 else ("step",)
        return f"_{key}" if key in taken else key

    def schema(self) -> dict[str, str]:
        kinds: dict[str, list[str]] = {}
        for run in self.stored:
            for key in self.keys[run.path]:
                kinds.setdefault(self.names[key], []).append(_type(run, key, self.args.fold))
        first = {"run": "str"} if len(self.stored) > 1 else {}
        return {**first, "step": "int64", **{name: _common(found) for name, found in kinds.items()}}

    def size(self) -> int:
        points = [max((_points(run, key) for key in self.keys[run.path]), default=0) for run in self.stored]
        return sum(-(-count // CHUNK_ROWS) for count in points)

    def chunks(self) -> Iterator[Chunk]:
        for run in self.stored:
            yield from self._of(run)

    def _of(self, run: StoredRun) -> Iterator[Chunk]:
        import numpy as np

        keys = self.keys[run.path]
        series = {key: run.series(key, rank=self.args.rank, fold=self.args.fold) for key in keys}
        steps = np.unique(np.concatenate([one.steps for one in series.values()])) if series else np.empty(0, np.int64)
        columns: dict[str, tuple[Any, Any]] = {"step": (steps, None)}
        for key, one in series.items():
            place = np.searchsorted(steps, one.steps)
            values, there = np.zeros(len(steps), one.values.dtype), np.zeros(len(steps), bool)
            values[place], there[place] = one.values, True
            columns[self.names[key]] = (values, None if there.all() else there)
        for at in range(0, len(steps), CHUNK_ROWS):
            part = {n: (v[at : at + CHUNK_ROWS], t if t is None else t[at : at + CHUNK_ROWS]) for n, (v, t) in columns.items()}
            count = len(part["step"][0])
            yield Chunk({"run": ([run.id] * count, None), **part} if len(self.stored) > 1 else part, count)


def _keys(run: StoredRun, args: argparse.Namespace) -> list[str]:
    keys = choose.keys_of(run, args.keys, undone="written") if args.keys else run.keys()
    if args.rank is None:
        return keys
    has = {key for journal in run.journals if journal.header.rank == args.rank for key in journal.by_key}
    if not has:
        raise SettingError(
            f"run {run.id} has no rank {args.rank}. Nothing was written. Its ranks: {', '.join(map(str, run.ranks))}."
        )
    return [key for key in keys if key in has]


def _points(run: StoredRun, key: str) -> int:
    return sum(journal.count(key) for journal in run.journals)


def _type(run: StoredRun, key: str, fold: str | None) -> str:
    """Return the type a key was logged as; a fold is always a float."""
    if fold:
        return "float64"
    codes = {rows.shape.types[index] for journal in run.journals for rows, index in journal.by_key.get(key, ()) if rows.runs}
    return _common([{"d": "float64", "q": "int64", "?": "bool"}[code] for code in codes])


def _common(kinds: list[str]) -> str:
    """Return the type that holds all of these."""
    return next((kind for kind in ("float64", "int64", "bool") if kind in kinds), "float64")


# Writers: each takes a binary file, the table and its chunks, and returns how many rows it wrote.


def write_csv(file: IO[bytes], table: Table, chunks: Iterator[Chunk]) -> int:
    import csv

    names, total = list(table.schema()), 0
    shown = clean if file.isatty() else str  # a file gets names as they are; a terminal must not obey them
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    try:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([shown(name) for name in names])
        for chunk in chunks:
            columns = chunk.lists()
            empty = [None] * chunk.rows
            writer.writerows(zip(*(_exact(columns.get(name, empty), shown) for name in names), strict=True))
            total += chunk.rows
    finally:
        text.detach()  # the file is not ours to close
    return total


def _exact(values: list[Any], shown: Callable[[str], str]) -> list[Any]:
    """Return floats as their shortest exact text; csv leaves None empty."""
    how: dict[type, Callable[[Any], Any]] = {float: repr, str: shown}
    return [how[type(value)](value) if type(value) in how else value for value in values]


def write_jsonl(file: IO[bytes], table: Table, chunks: Iterator[Chunk]) -> int:
    del table
    total = 0
    for chunk in chunks:
        columns = chunk.lists()
        for row in zip(*columns.values(), strict=True):
            found = {name: value for name, value in zip(columns, row, strict=True) if value is not None}
            file.write(as_json(found, indent=None).encode() + b"\n")
        total += chunk.rows
    return total


def write_parquet(file: IO[bytes], table: Table, chunks: Iterator[Chunk]) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise missing_extra("pyarrow", "arrow", "export --format parquet") from error
    types = {"str": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
    schema = pa.schema([(name, types.get(kind, pa.float64())) for name, kind in table.schema().items()])
    total = 0
    with pq.ParquetWriter(file, schema) as writer:
        for chunk in chunks:
            arrays = [_array(pa, chunk, field) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            total += chunk.rows
    return total


def _array(pa: Any, chunk: Chunk, field: Any) -> Any:
    if field.name not in chunk.columns:
        return pa.nulls(chunk.rows, field.type)
    values, there = chunk.columns[field.name]
    if isinstance(values, list):
        return pa.array(values, field.type)
    array = pa.array(values, mask=None if there is None else ~there, from_pandas=False)
    return array.cast(field.type, safe=False)


WRITERS: dict[str, Callable[[IO[bytes], Table, Iterator[Chunk]], int]] = {
    "csv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}
