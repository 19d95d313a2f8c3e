"""Tables: CSV, JSON lines and Parquet, with a row per step or per point. What `fanfold export` wrote comes back exactly.

A wide table has a column per key and one for the step; a long one (`run, key, rank, step, time, value`) has a row per point. A
column `run` separates several runs in one file. Columns for the step and the time are known by their usual names.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from ..journal.files import open_regular
from ..plain import from_json, plain
from . import csv_logger
from .events import Event, Facts, Found, Start, Values
from .reading import UNREADABLE, Account, Gather, Number, at_rest, json_lines, number, number_in, reread, step_of

LONG = ("run", "key", "rank", "step", "time", "value")
STEPS = ("step", "_step", "global_step", "trainer/global_step", "iteration", "iter", "steps", "Step", "epoch")
TIMES = ("time", "timestamp", "_timestamp", "wall_time", "date", "datetime", "Wall time", "created_at")
FORMATS = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
BATCH = 1 << 14
EARLIEST = 10**17  # nanoseconds: smaller numbers in a column called time are not dates
MOST_RUNS = 1000  # in one file, which is read once for each
Row = dict[str, Any]


class TablesImporter:
    """CSV, JSON lines and Parquet files."""

    kind = "table"
    title = "CSV, JSON lines and Parquet"
    searched = False  # such files can be anything

    def find(self, path: Path) -> Iterator[Found]:
        if path.suffix.lower() not in FORMATS or not path.is_file() or path.is_symlink() or csv_logger.is_ours(path):
            return
        names, path = _columns(path), path.absolute()
        project = path.parent.name or "imported"
        runs = _runs(path)[:MOST_RUNS] if "run" in names else []
        if not runs:
            yield Found(kind=self.kind, id=str(path), paths=(path,), project=project, name=path.stem)
            return
        for run in runs:
            yield Found(kind=self.kind, id=f"{path}#{run}", paths=(path,), project=project, name=run)

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        path = found.paths[0]
        run = None if found.id == str(path) else found.id.removeprefix(f"{path}#")
        yield from reread(lambda: _events(path, run, found.name), position)


def _events(path: Path, run: str | None, name: str) -> Iterator[Event]:
    left, gather = Account(), Gather()
    names = _columns(path)
    if not names:
        left.leave("file", "it has no columns, or cannot be read", path)
        yield from left.events()
        return
    yield Start(time_ns=None)
    yield Facts(name=name)
    if run is not None and len(runs := _runs(path)) > MOST_RUNS and run == runs[0]:
        left.leave("run", f"a file gives up to {MOST_RUNS:,} runs", runs[MOST_RUNS], len(runs) - MOST_RUNS)
    take = _LongRows(gather, left) if _is_long(names) else _WideRows(names, gather, left)
    try:
        for row in _rows(path, left):
            if run is None or str(row.get("run")) == run:
                yield from take.row(row)
    except (*UNREADABLE, csv.Error) as error:
        left.leave("file", f"it cannot be read further ({error})", path)
    yield from gather.flush()
    yield from left.events()


class _LongRows:
    """A row per point."""

    def __init__(self, gather: Gather, left: Account) -> None:
        self.gather, self.left = gather, left

    def row(self, row: Row) -> Iterator[Event]:
        key, rank, value = row.get("key"), step_of(row.get("rank")), row.get("value")
        if not isinstance(key, str) or not key:
            self.left.leave("row", "it has no key", str(row)[:80])
            return
        step, when = step_of(row.get("step")), time_of(row.get("time"))
        rank = rank if rank is not None and 0 <= rank < 1 << 31 else 0
        if isinstance(value, str) or value is None:
            if value is None:
                self.left.leave("row", "it has no value", key)
                return
            yield from self.gather.flush()
            yield Values(step=step, time_ns=when, values={key: value}, rank=rank)
            return
        system = step is None and key.startswith("system/")
        yield from self.gather.add(step, when, {key: value}, rank=rank, system=system)


class _WideRows:
    """A row per step, a column per key; an empty cell is a value that was not logged."""

    def __init__(self, names: list[str], gather: Gather, left: Account) -> None:
        self.gather, self.left, self.names = gather, left, names
        self.step = next((name for name in STEPS if name in names), None)
        self.number = -1  # of the row: its step if no column has one
        self.time = next((name for name in TIMES if name in names), None)
        taken = {"step", "run"} if "run" in names else {"step"}
        self.renamed = {f"_{name}": name for name in taken if self.step == "step"}  # an export's key of that name

    def row(self, row: Row) -> Iterator[Event]:
        self.number += 1
        given = row.pop(self.step, None) if self.step else self.number
        step = step_of(given)
        if step is None and given is not None:
            exact = number(given)
            if exact is None:
                self.left.leave("row", f"its {self.step} is not a number", given)
                return
            step, row = math.floor(exact) if math.isfinite(exact) else None, {str(self.step): exact, **row}
        when = time_of(row[self.time]) if self.time and self.time in row else None
        if when is not None and when >= EARLIEST:
            del row[str(self.time)]
        else:
            when = None  # seconds per step, perhaps: a metric like any other
        if "run" in self.names:
            row.pop("run", None)
        numbers: dict[str, Number] = {}
        texts: dict[str, Any] = {}
        for name, value in row.items():
            key = self.renamed.get(name, name)
            if isinstance(value, str):
                texts[key] = value
            elif value is not None:
                numbers[key] = value
        yield from self.gather.add(step, when, numbers)
        if texts:
            yield from self.gather.flush()
            yield Values(step=step, time_ns=when, values=texts)


# Reading the three formats: each row is a dict of numbers, texts and None


def _columns(path: Path) -> list[str]:
    """Return the names of a table's columns; of JSON lines, those of the first lines."""
    try:
        if FORMATS[path.suffix.lower()] == "parquet":
            return [str(name) for name in _parquet(path).schema_arrow.names]
        if FORMATS[path.suffix.lower()] == "csv":
            with open_regular(path) as file:
                line = file.readline(1 << 20).decode("utf-8-sig", "replace")
            return next(csv.reader([line], delimiter=_delimiter(path, line)), [])
        with open_regular(path) as file:
            some = [row for row, _ in zip(json_lines(file, Account(), ""), range(64), strict=False) if isinstance(row, dict)]
        return list(dict.fromkeys(str(name) for row in some for name in row))
    except (*UNREADABLE, csv.Error):
        return []


def _is_long(names: list[str]) -> bool:
    return {"key", "value"} <= set(names) and set(names) <= set(LONG)


def _runs(path: Path) -> list[str]:
    """Return the runs of a file, in order of first appearance."""
    found: dict[str, None] = {}
    try:
        if FORMATS[path.suffix.lower()] == "parquet":
            for batch in _parquet(path).iter_batches(BATCH, columns=["run"]):
                found.update(dict.fromkeys(str(name) for name in batch.column(0).unique().to_pylist()))
        else:
            for row in _rows(path, Account()):
                found[str(row.get("run"))] = None
    except (*UNREADABLE, csv.Error):
        pass  # read() gives an account of it
    return list(found)


def _rows(path: Path, left: Account) -> Iterator[Row]:
    kind = FORMATS[path.suffix.lower()]
    if kind == "parquet":
        yield from _parquet_rows(path, left)
        return
    with open_regular(path) as file:
        if kind == "csv":
            yield from _csv_rows(path, _whole_lines(path, file, left), left)
            return
        for row in json_lines(file, left, "line"):
            if isinstance(row, dict):
                yield {str(name): _from_json(value) for name, value in row.items()}
            else:
                left.leave("line", "it is not a JSON object", str(row)[:80])


def _whole_lines(path: Path, file: IO[bytes], left: Account) -> Iterator[str]:
    """Yield the lines of a table. A last line without an end is complete only if nobody writes to the file any more."""
    for line in file:
        if not line.endswith(b"\n") and not at_rest(path):
            left.leave("line", "the last line is incomplete, or was written just now", line[:80].decode("utf-8", "replace"))
            return
        yield line.decode("utf-8", "replace")


def _csv_rows(path: Path, lines: Iterator[str], left: Account) -> Iterator[Row]:
    first = next(lines, "").removeprefix("\ufeff")
    mark = _delimiter(path, first)
    names = next(csv.reader([first], delimiter=mark), [])
    for cells in csv.reader(lines, delimiter=mark):
        if len(cells) != len(names):
            if cells:
                left.leave("row", "it has another number of columns than the first", ",".join(cells)[:80])
            continue
        yield {name: _from_csv(name, cell) for name, cell in zip(names, cells, strict=True)}


def _delimiter(path: Path, line: str) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    return "," if "," in line else next((mark for mark in "\t;" if mark in line), ",")


def _from_csv(name: str, cell: str) -> Any:
    if cell == "" or name in ("key", "run"):
        return cell or None
    found = number_in(cell)
    return cell if found is None else found


def _from_json(value: Any) -> Any:
    """Return a cell of JSON: NaN and infinities may be texts, as our export writes them; anything nested becomes a text."""
    found = number(value)
    if found is not None or value is None:
        return found
    return from_json(value) if isinstance(value, str) else json.dumps(plain(value))


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ValueError("reading Parquet needs pyarrow: pip install 'fanfold[arrow]'") from error
    return pq.ParquetFile(path)


def _parquet_rows(path: Path, left: Account) -> Iterator[Row]:
    file = _parquet(path)
    for batch in file.iter_batches(BATCH):
        columns = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            columns[str(name)] = [_from_arrow(value) for value in column.to_pylist()]
        for n in range(batch.num_rows):
            yield {name: column[n] for name, column in columns.items()}
    del left


def _from_arrow(value: Any) -> Any:
    if isinstance(value, (str, datetime)) or value is None:
        return value
    found = number(value)
    return found if found is not None else json.dumps(plain(value))


def time_of(value: Any) -> int | None:
    """Return a time in nanoseconds: seconds, milliseconds, micro- or nanoseconds since 1970, a datetime, or an ISO text."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip().replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(value, datetime):
        try:
            return round(value.timestamp() * 1e6) * 1000
        except (OverflowError, OSError, ValueError):
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value < 9.2e18:
        return None
    power = 9 if value < 1e11 else 6 if value < 1e14 else 3 if value < 1e17 else 0
    whole, parts = value.as_integer_ratio()
    return int((whole * 10**power + parts // 2) // parts)
