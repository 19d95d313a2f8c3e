"""One column of a table: numbers as raw bytes with their type, anything else as a list of cells."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fanfold.media import cells as cell_types
from fanfold.media.arrays import Landing, is_array, is_numeric
from fanfold.media.base import Media, broken, refused

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

TYPED = {frozenset({bool}): "|b1", frozenset({int}): "<i8", frozenset({float}): "<f8"}


@dataclass
class Column:
    """One column in one of three forms: `values` (numbers), `cells` (anything), `landing` (still on a device)."""

    values: Array | None = None
    valid: Array | None = None  # mask of the values that are not missing; None: none are missing
    zone: str | None = None  # the time zone of `values`, which are in UTC
    cells: list[Any] | None = None
    landing: Landing | None = None

    def first(self, rows: int) -> Column:
        """Return the first `rows` rows in one of the first two forms."""
        if self.landing is not None:
            return Column(values=cell_types.little(self.landing.value())[:rows])
        if self.cells is not None:
            return Column(cells=self.cells[:rows])
        valid = None if self.valid is None else self.valid[:rows]
        return replace(self, values=None if self.values is None else self.values[:rows], valid=valid)

    def waiting(self) -> list[Media]:
        """Return the parts that are still on a device."""
        return self.landing.waiting() if self.landing is not None else cell_types.pending_in(self.cells)

    def __len__(self) -> int:
        if self.landing is not None:
            return int(self.landing.shape[0])
        return len(self.cells if self.cells is not None else self.values)  # type: ignore[arg-type] # one of the two is set


def column_of(values: Any, name: str) -> Column:
    """Copy the user's values as a column."""
    if is_array(values) and is_numeric(values):
        if len(values.shape) != 1:
            raise refused(ValueError, f"Column {name!r} has shape {tuple(values.shape)}", "Give one axis, or a list of arrays")
        return Column(landing=Landing(values))
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise refused(TypeError, f"Column {name!r} is a {type(values).__name__}", "Give a list or an array of cells")
    return Column(cells=cleaned(values))


def cleaned(values: Iterable[Any]) -> list[Any]:
    """Copy cells, inspecting each only if some are not plain."""
    cells = list(values)
    return cells if set(map(type, cells)) <= cell_types.PLAIN else [cell_types.clean(cell) for cell in cells]


def narrowed(column: Column) -> Column:
    """Convert a list whose cells are all floats, all ints or all bools to numbers."""
    dtype = TYPED.get(frozenset(map(type, column.cells))) if column.cells else None
    if dtype is None:
        return column
    import numpy as np

    try:
        return Column(values=np.array(column.cells, dtype))
    except OverflowError:  # an int beyond 64 bits stays a cell
        return column


def pack(name: str, column: Column) -> dict[str, Any]:
    """Return a column without device values in a form that msgpack can store."""
    column = narrowed(column)
    if column.values is None:
        return {"name": name, "cells": cell_types.pack(column.cells or [])}
    import numpy as np

    values = cell_types.little(column.values)
    packed = {"name": name, "dtype": values.dtype.str, "data": values.view(np.uint8).data}
    if column.valid is not None:
        packed["valid"] = np.packbits(column.valid).tobytes()
    if column.zone is not None:
        packed["zone"] = column.zone
    return packed


def unpack(record: Any, rows: int) -> Column:
    """Decode a column, checking everything it declares."""
    if record.cells is not None:
        column = Column(cells=record.cells)
    elif record.data is not None:
        valid = None if record.valid is None else _bits(record.valid, rows)
        column = Column(cell_types.from_bytes(record.dtype, record.data), valid, record.zone)
    else:
        raise broken("table", f"column {record.name[:80]!r} has no content")
    if len(column) != rows:
        raise broken("table", f"column {record.name[:80]!r} has {len(column)} rows of {rows}")
    return column


def _bits(data: bytearray, rows: int) -> Array:
    import numpy as np

    if len(data) != -(-rows // 8):
        raise broken("table", f"{len(data)} bytes cannot mark {rows} rows")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=rows).astype(np.bool_)


def listed(column: Column) -> list[Any]:
    """Return a column without device values as Python values; missing ones are None, times have microsecond precision."""
    if column.values is None:
        return [cell_types.landed(cell) if isinstance(cell, Landing) else cell for cell in column.cells or []]
    values = column.values
    cells = _times(values, column.zone) if values.dtype.kind in "Mm" else values.tolist()
    if column.valid is not None:
        cells = [cell if there else None for cell, there in zip(cells, column.valid.tolist(), strict=True)]
    return cells


def _times(values: Array, zone: str | None) -> list[Any]:
    import numpy as np

    dates = values.dtype.str.endswith("[D]")
    cells: list[Any] = (values if dates else values.astype(f"{values.dtype.kind}8[us]")).tolist()
    if zone is not None:
        cells = [_at_home(cell, zone_of(zone)) for cell in cells]
    gone = np.isnat(values)
    for index in np.flatnonzero(gone).tolist():
        cells[index] = None
    return cells


def _at_home(cell: Any, home: dt.tzinfo) -> Any:
    """Return a time in its zone; one at the very edge of the calendar stays in UTC."""
    if not isinstance(cell, dt.datetime):
        return cell
    moment = cell.replace(tzinfo=dt.timezone.utc)
    try:
        return moment.astimezone(home)
    except OverflowError:
        return moment


def zone_of(name: str) -> dt.tzinfo:
    """Return a time zone by name. An unknown one is read as UTC, which leaves the moment correct."""
    import zoneinfo

    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return dt.timezone.utc
