"""Logged tables: searched, filtered and sorted rows, media in their cells, and the same row at other steps and in other runs."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import FanfoldError, RunNotFound, SettingError
from ..media.table import Table, memory_needed
from ..plain import json_safe
from ..store import deadline
from ..store.query import Store
from ..store.run import MediaPoint, StoredRun
from . import data

MOST_ROWS = 1_000  # in one response
MOST_TABLES = 200  # in which a row is looked for at once
KEPT = 4  # decoded tables, the most recently used ones
MOST_BLOB = 512 << 20  # bytes of a table's file; numbers take as much memory as they do there
MOST_MEMORY = 1 << 30  # that decoding a table may take; lists and dicts take many times their bytes in the file
KEPT_MEMORY = 256 << 20  # of a decoded table; a larger one is decoded for each request, one at a time
LONG = 20_000  # characters of a cell; the rest is cut
EVERY = 4_096  # rows between two looks at the clock

Column = Any  # a numpy array or a list


class Condition(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """A condition on a column: =, !=, <, <=, >, >= or ~ (contains)."""

    column: str
    op: str
    value: str


class SampleQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which row of the tables under a key, in which runs: the one with `value` in `column`, or else row number `row`."""

    project: str
    runs: list[str]
    key: str
    row: int = 0
    column: str | None = None
    value: str | None = None


class _Tables:
    """The tables decoded last, by run and blob. Threads share them; nobody changes them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[list[str], list[Column]]] = OrderedDict()
        self._lock, self._large = threading.Lock(), threading.Lock()

    def of(self, point: MediaPoint) -> tuple[list[str], list[Column]]:
        """Return the names and the columns of a logged table."""
        place = (str(point.run.path), str(point.entry.get("blob")))
        with self._lock:
            if place in self._kept:  # a blob's name is the hash of its content
                self._kept.move_to_end(place)
                return self._kept[place]
        if point.kind != "table":
            raise FanfoldError(f"{point.key!r} is a {point.kind}, not a table. Nothing was read.")
        data, memory = _checked(point)
        if memory > KEPT_MEMORY:
            with self._large:
                return _decoded(point, data)
        found = _decoded(point, data)
        with self._lock:
            self._kept[place] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found


def _checked(point: MediaPoint) -> tuple[bytes, int]:
    """Return a table's blob, and the memory that decoding it takes; raise if that is too much for a server with many readers."""
    name = str(point.entry.get("blob"))
    size = point.run.artifact_file(name).stat().st_size
    if size <= MOST_BLOB:
        data = point.run.blob(name)
        memory = memory_needed(data)
        if memory <= MOST_MEMORY:
            return data, memory
    raise FanfoldError(
        f"the table {point.key!r} is too large to be shown here ({size / 1e6:,.0f} MB). Nothing was read. "
        f"Read it in Python: fanfold.open({point.run.id!r}).table({point.key!r}, step={point.step})"
    )


def _decoded(point: MediaPoint, data: bytes) -> tuple[list[str], list[Column]]:
    table = Table.decode(point.entry, data)
    return table.columns, [table.column(name) for name in table.columns]


_tables = _Tables()


def table(
    store: Store, project: str, id: str, key: str, n: int, start: int, count: int, search: str, sort: str, where: str
) -> dict[str, Any]:
    """Return some rows of a logged table: those that match, in the order asked for."""
    names, columns = _tables.of(data.media_point(store, project, id, key, n))
    size = len(columns[0]) if columns else 0
    rows: Sequence[int] = range(size)
    for condition in _conditions(where):
        rows = _passing(rows, columns[_place(names, condition.column)], condition)
    if search.strip():
        rows = _containing(rows, columns, search.strip().lower())
    if sort:
        rows = _sorted(rows, columns[_place(names, sort.removeprefix("-"))], down=sort.startswith("-"))
    start = max(0, start)
    shown = rows[start : start + max(0, min(count, MOST_ROWS))]
    cells, media = _cells(columns, shown)
    return {"columns": names, "rows": cells, "numbers": list(shown), "media": media, "found": len(rows), "total": size}


def _conditions(where: str) -> list[Condition]:
    try:
        return msgspec.json.decode(where, type=list[Condition]) if where else []
    except msgspec.MsgspecError as error:
        raise SettingError(f"the conditions are malformed: {error}. Nothing was read. Pass [[column, op, value], …].") from error


def _place(names: Sequence[str], name: str) -> int:
    if name not in names:
        raise SettingError(f"the table has no column {name[:100]!r}. Nothing was read. It has {', '.join(names)[:500]}.")
    return names.index(name)


def _cells(columns: Sequence[Column], rows: Sequence[int]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return cells as JSON, and where there are media: row in this answer, column, kind, and the facts of the media."""
    cells: list[list[Any]] = []
    media: list[list[Any]] = []
    for at, row in enumerate(rows):
        line = [_item(column, row) for column in columns]
        for place, cell in enumerate(line):
            kind = getattr(cell, "kind", None)
            if isinstance(kind, str):
                line[place] = f"({kind})"
                media.append([at, place, kind, _facts(cell)])
        cells.append([_cut(json_safe(cell)) for cell in line])
    return cells, media


def _facts(cell: Any) -> dict[str, Any]:
    found = {name: getattr(cell, name, None) for name in ("caption", "boxes", "masks")}
    return {name: json_safe(value) for name, value in found.items() if value is not None}


def _cut(cell: Any) -> Any:
    return f"{cell[:LONG]}…" if isinstance(cell, str) and len(cell) > LONG else cell


def _item(column: Column, row: int) -> Any:
    cell = column[row]
    return cell.item() if hasattr(cell, "item") and getattr(cell, "ndim", None) == 0 else cell


def _text(cell: Any) -> str:
    if isinstance(cell, str):
        return cell
    if cell is None or isinstance(getattr(cell, "kind", None), str):
        return ""
    return str(cell) if isinstance(cell, (int, float)) else msgspec.json.encode(json_safe(cell)).decode()


def _containing(rows: Sequence[int], columns: Sequence[Column], word: str) -> list[int]:
    found = []
    for at, row in enumerate(rows):
        if at % EVERY == 0:
            deadline.check()
        if any(word in _text(_item(column, row)).lower() for column in columns):
            found.append(row)
    return found


def _passing(rows: Sequence[int], column: Column, condition: Condition) -> list[int]:
    fits = _test(condition)
    found = []
    for at, row in enumerate(rows):
        if at % EVERY == 0:
            deadline.check()
        if fits(_item(column, row)):
            found.append(row)
    return found


def _test(condition: Condition) -> Callable[[Any], bool]:
    op, text, small = condition.op, condition.value, condition.value.lower()
    if op == "~":
        return lambda cell: small in _text(cell).lower()
    if op in ("=", "!="):
        return lambda cell: _equal(cell, text) == (op == "=")
    order = {"<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b}.get(op)
    if order is None:
        raise SettingError(f"the condition {op[:20]!r} is not known. Nothing was read. Use one of = != < <= > >= ~.")
    bound = _number(text)
    if bound is None:
        raise SettingError(f"{text[:40]!r} is not a number. Nothing was read. {op} compares numbers.")
    return lambda cell: isinstance(cell, (int, float)) and bool(order(cell, bound))


def _equal(cell: Any, text: str) -> bool:
    if isinstance(cell, (int, float)) and not isinstance(cell, bool):
        return _number(text) == cell
    return _text(cell) == text or (isinstance(cell, bool) and str(cell).lower() == text.lower())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _sorted(rows: Sequence[int], column: Column, *, down: bool) -> list[int]:
    """Sort rows by a column: numbers, then texts; rows without a value are always last."""
    numbers: list[tuple[float, int]] = []
    words: list[tuple[str, int]] = []
    rest: list[int] = []
    for at, row in enumerate(rows):
        if at % EVERY == 0:
            deadline.check()
        cell = _item(column, row)
        if isinstance(cell, (int, float)) and not math.isnan(cell):
            numbers.append((cell, row))
        elif text := _text(cell):
            words.append((text, row))
        else:
            rest.append(row)
    numbers.sort(key=lambda pair: pair[0], reverse=down)
    words.sort(key=lambda pair: pair[0], reverse=down)
    return [row for _, row in numbers] + [row for _, row in words] + rest


def sample(store: Store, query: SampleQuery) -> dict[str, Any]:
    """Return the same row of every table logged under a key, by run and step; the newest tables if there are too many."""
    runs = store.several(query.project, list(dict.fromkeys(query.runs)))  # one question: there may be thousands of names
    points = [(id, n, point) for id, run in runs.items() for n, point in _points(run, query.key)]
    points.sort(key=lambda found: found[2].step)
    found = []
    for id, n, point in points[-MOST_TABLES:]:
        deadline.check()
        names, columns = _tables.of(point)
        row = _same(names, columns, query)
        if row is not None:
            cells, media = _cells(columns, [row])
            found.append({"run": id, "step": point.step, "rank": point.rank, "n": n, "row": row, "columns": names,
                          "cells": cells[0], "media": [one[1:] for one in media]})  # fmt: skip
    return {"found": found, "tables": len(points)}


def _points(run: StoredRun, key: str) -> list[tuple[int, MediaPoint]]:
    deadline.check()
    return [(n, point) for n, point in enumerate(run.media(key)) if point.kind == "table"]


def _same(names: Sequence[str], columns: Sequence[Column], query: SampleQuery) -> int | None:
    size = len(columns[0]) if columns else 0
    if query.column is None:
        return query.row if 0 <= query.row < size else None
    if query.column not in names:
        return None
    column, value = columns[names.index(query.column)], query.value or ""
    if query.row < size and _equal(_item(column, query.row), value):  # usually it has not moved
        return query.row
    return next((row for row in range(size) if _equal(_item(column, row), value)), None)


def cell(store: Store, project: str, id: str, key: str, n: int, row: int, column: int) -> tuple[bytes, str]:
    """Return the bytes of the media in a cell, and their extension."""
    _, columns = _tables.of(data.media_point(store, project, id, key, n))
    if not 0 <= column < len(columns) or not 0 <= row < len(columns[column]):
        raise RunNotFound("the table has no such cell. Nothing was read.")
    held = _item(columns[column], row)
    if not hasattr(held, "encode") or not isinstance(getattr(held, "kind", None), str):
        raise RunNotFound("the cell holds no media. Nothing was read.")
    encoded = held.encode()
    return bytes(encoded.data), str(encoded.ext)
